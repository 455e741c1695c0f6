"""Time how the cost of a step grows with each size of a layer, and with the skew of its routing.

Each axis changes one size of a base layer. At each point our layer is timed interleaved with the same layer in plain
torch under torch.compile, and with the two ceilings of the hardware. torch.compile compiles for each shape anew, so it
is timed at every second value and at the last, on an axis that changes a shape.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from moeblaze_ref.bench import accuracy, layer, roofline
from moeblaze_ref.bench.layer import Scene, Subject
from moeblaze_ref.bench.timed_systems import OURS
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime.clock import WARM_UP, Contender, Samples, interleave
from moeblaze_ref.runtime.device import Device

COMPILED = "gather_sum_compiled"  # the strongest baseline in plain torch
SKEW = "skew"
PRESET, TOKENS = "olmoe", 16_384  # the base: all of its points fit into 80 GB, but perhaps the largest L
SECONDS = 180.0  # of all axes, for what is timed; compiling comes before
LEAST_REPETITIONS = 3
TRIAL = 1  # repetitions from which the time of a round is known


class Axis(NamedTuple):
    """One size that changes, while the others stay."""

    what: str  #: what it is, for a reader
    values: tuple[float, ...]
    most: Mapping[str, int] = {}  #: upper bounds of other sizes of the base along this axis


AXES = {
    "L": Axis("tokens L", tuple(4**power for power in range(10))),
    "E": Axis("experts E", tuple(2**power for power in range(1, 10)), {"k": 2}),
    "h": Axis("expert width h", tuple(2**power for power in range(7, 14))),
    "k": Axis("experts per token k", (1, 2, 3, 4, 6, 8, 16, 32)),
    SKEW: Axis("Zipf exponent of the experts' popularity", (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)),
}


class Point(NamedTuple):
    """One layer and routing to time."""

    preset: str  #: the base's name
    axis: str
    value: float
    config: MoEConfig
    routing: str
    systems: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system at one point of an axis, forward and backward."""

    kind: str  #: "growth"
    preset: str  #: the base's name
    axis: str  #: of ``AXES``
    value: float  #: along the axis: a size, or a Zipf exponent
    shape: dict[str, int]  #: {L, d, h, E, k}
    dtype: str
    routing: str  #: as of `routing.exponent_of`
    system: str
    policy: str | None  #: of ours
    step_ms: float | None  #: median; None if the step does not fit into the memory
    quartiles_ms: tuple[float, float] | None
    graph_ms: float | None  #: the same step replayed as a CUDA graph, without the host; None as of `layer.Row`
    repetitions: int  #: that the median is of
    experts: int  #: that have tokens: the fewest of all inputs
    roofline_ms: float  #: of `roofline.layer_roofline_ms`, for so many experts
    cublas_tflops: float  #: this and the next two as `roofline.columns`
    copy_gb_s: float
    hot_cublas_tflops: float
    error: float | None  #: this and the next as `accuracy.Error`; None without a time
    row_error: float | None
    problem: str = ""  #: why there is no time


def points(preset: str, config: MoEConfig, axis: str) -> list[Point]:
    """Return the points of one of ``AXES`` around a base layer, with the values that a layer may have.

    The router of a point can give any logits, so E is at most d.
    """
    along = AXES[axis]
    base = config.replace(**{name: min(getattr(config, name), most) for name, most in along.most.items()})
    if axis == SKEW:
        return [Point(preset, axis, value, base, f"zipf:{value:g}", (OURS, COMPILED)) for value in along.values]
    values = [int(value) for value in along.values if _possible(base, axis, int(value))]
    compiled = {*values[::2], *values[-1:]}
    return [
        Point(
            preset,
            axis,
            value,
            base.replace(**{axis: value}),
            "uniform",
            (OURS, COMPILED) if value in compiled else (OURS,),
        )
        for value in values
    ]


def _possible(base: MoEConfig, axis: str, value: int) -> bool:
    if axis == "k":
        return value <= base.E
    return axis != "E" or base.k <= value <= base.d


def time_point(point: Point, seconds: float, repetitions: int, device: Device) -> list[dict[str, Any]]:
    """Time our layer, under policy `minimal`, and the baseline at one point: a `Row` as dict for each.

    Parameters
    ----------
    point : Point
    seconds : float
        For the timed rounds; there are at least ``LEAST_REPETITIONS``.
    repetitions : int
        The most rounds.
    device : Device

    Returns
    -------
    list of dict
        A system that does not fit into the memory has a row without a time.
    """
    if point.axis != SKEW:  # along which no shape changes, so that what is compiled stays
        torch.compiler.reset()
    choice = layer.Choice(systems=point.systems, routing=point.routing)
    scene = Scene(point.config, choice, device)
    subjects = [subject for subject in scene.subjects() if subject.routing == point.routing]
    tried = {subject: _tried(scene, subject) for subject in subjects}
    able = [subject for subject in subjects if isinstance(tried[subject], accuracy.Error)]
    ceilings = device.rested
    contenders: dict[Any, Contender] = {subject: partial(scene.step, subject) for subject in able}
    count, samples = _interleaved(device.ceilings() | contenders, seconds, repetitions, device)
    graphs = layer.graph_times(scene, able, point.config, count, device)
    experts = _experts_with_tokens(scene, able)
    head = {
        "kind": "growth",
        **{name: getattr(point, name) for name in ("preset", "axis", "value")},
        "shape": point.config.sizes,
        "dtype": point.config.dtype,
        "experts": experts,
        "roofline_ms": roofline.layer_roofline_ms(point.config, ceilings, experts),
        **roofline.columns(ceilings, device.rates(samples)),
    }
    return [
        asdict(
            Row(
                **head,
                **subject._asdict(),
                **_found(tried[subject]),
                **_times(samples.get(subject), count),
                graph_ms=graphs.get(subject),
            )
        )
        for subject in subjects
    ]


def _tried(scene: Scene, subject: Subject) -> accuracy.Error | str:
    """The error of the first step, or why there is none."""
    try:
        return layer.error_of(scene, subject)
    except torch.OutOfMemoryError:
        return "a step does not fit into the device's memory"


def _found(tried: accuracy.Error | str) -> dict[str, Any]:
    return accuracy.NOT_COMPARED | {"problem": tried} if isinstance(tried, str) else tried.columns


def _interleaved(
    contenders: Mapping[Any, Contender], seconds: float, repetitions: int, device: Device
) -> tuple[int, dict[Any, Samples]]:
    """Return the samples, and how many repetitions they have: as many as fit into the seconds."""
    device.settle()
    start = time.perf_counter()
    interleave(contenders, TRIAL, device)
    device.settle()
    rounds = seconds / (time.perf_counter() - start) * (WARM_UP + TRIAL)
    count = min(repetitions, max(LEAST_REPETITIONS, int(rounds) - 2 * WARM_UP - TRIAL))
    return count, interleave(contenders, count, device)


def _times(samples: Samples | None, count: int) -> dict[str, Any]:
    if samples is None:
        return {"step_ms": None, "quartiles_ms": None, "repetitions": 0}
    return {"step_ms": samples.median, "quartiles_ms": samples.quartiles, "repetitions": count}


@torch.no_grad()
def _experts_with_tokens(scene: Scene, able: Sequence[Subject]) -> int:
    """The fewest experts that any of the inputs chooses; all, if no layer runs that could tell."""
    chosen = (scene.run(subject, scene.tokens(subject, n))[1] for subject in able[:1] for n in range(layer.INPUTS))
    return min((len(experts.unique()) for experts in chosen), default=scene.layer.wg.shape[1])
