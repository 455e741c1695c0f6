"""Time steps of small layers as launched, with launch plans and without, beside the same steps by CUDA graphs.

All are interleaved on the same weights and inputs. `nn.graphed` is the least that the host can cost a step: its forward
and its backward are one launch each.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from moeblaze_ref.bench import layer
from moeblaze_ref.bench.layer import Scene, Subject
from moeblaze_ref.bench.timed_systems import GRAPHED, OURS
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.launch_plans import launch_plan_counts, use_launch_plans, without_launch_plans
from moeblaze_ref.runtime.clock import Contender, Lap, interleave
from moeblaze_ref.runtime.device import Device

# Layers whose graphs fit (`layer.is_small`), some with another L, down to steps that the host fills.
PRESETS = (
    *(("conf1", tokens) for tokens in (None, 16_384, 8192, 4096)),
    *(("conf5", tokens) for tokens in (None, 8192, 2048)),
    *((name, None) for name in ("conf6", "conf7", "qwen3", "fine-grained", "olmoe")),
    ("fine-grained", 4096),
)
LAUNCHED, PLANNED, AS_GRAPHS = "launched", "launched, plans", "graphed"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A step of one small layer, forward and backward, launched in one way."""

    kind: str  #: "launched"
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k}
    dtype: str
    way: str  #: "launched", "launched, plans" or "graphed"
    step_ms: float  #: median of the device's time
    quartiles_ms: tuple[float, float]  #: first and third
    over_graphed: float  #: step_ms over that of "graphed"
    plan_calls: int  #: how many of the step's two calls, forward and backward, replayed a launch plan
    error: float  #: this and the next as `accuracy.Error`
    row_error: float


def time_launched(preset: str, config: MoEConfig, repetitions: int, device: Device) -> list[dict[str, Any]]:
    """Time a small layer's step in each way, interleaved: a `Row` as dict for each.

    ``preset`` is the layer's name in the rows.
    """
    scene = Scene(config, layer.Choice(systems=(OURS, GRAPHED)), device)
    launched, graphs = (Subject(system, "minimal", "uniform") for system in (OURS, GRAPHED))
    subjects = {LAUNCHED: launched, PLANNED: launched, AS_GRAPHS: graphs}
    before = use_launch_plans()
    try:
        steps = {way: _allowing(way, partial(scene.step, subject)) for way, subject in subjects.items()}
        samples = interleave(steps, repetitions, device)
        calls = {way: _plan_calls(step) for way, step in steps.items()}
        errors = {way: _allowing(way, partial(layer.error_of, scene))(subject) for way, subject in subjects.items()}
    finally:
        use_launch_plans(before)
    return [
        asdict(
            Row(
                kind="launched",
                preset=preset,
                shape=config.sizes,
                dtype=config.dtype,
                way=way,
                step_ms=samples[way].median,
                quartiles_ms=samples[way].quartiles,
                over_graphed=samples[way].median / samples[AS_GRAPHS].median,
                plan_calls=calls[way],
                **errors[way].columns,
            )
        )
        for way in subjects
    ]


def _allowing(way: str, work: Callable[..., Any]) -> Callable[..., Any]:
    """The work with launch plans if the way has them, else without."""
    if way == PLANNED:
        return work

    def without(*arguments: Any) -> Any:
        with without_launch_plans():
            return work(*arguments)

    return without


def _plan_calls(step: Contender) -> int:
    """How many calls of one more step replay a plan."""
    nothing: Lap = lambda: None
    before = launch_plan_counts().replayed
    step(0, nothing)
    return launch_plan_counts().replayed - before
