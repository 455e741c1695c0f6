"""Time each stage alone with the device's clock, beside its roofline and, where torch has the stage, beside torch."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from moeblaze_ref.backends.raw_cuda import combine, dispatch, expert_down, expert_up, gating, layer, router
from moeblaze_ref.bench import roofline
from moeblaze_ref.bench.accuracy import NOT_COMPARED, worst
from moeblaze_ref.bench.expected import EXPECTED, results_of
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.bench.rows import TimedRow
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime import Executor, ceil_div
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.clock import interleave, replayed
from moeblaze_ref.runtime.device import Device
from moeblaze_ref.runtime.torch_bridge import Bridge

OURS, TORCH = "moeblaze", "torch"
Subject = tuple[str, str | None]  # system and version
MOST_SETS = 256  # of inputs in one graph

# The function of each stage without its checks, as ``run(inputs, **options)``, and the module whose versions it has.
RUN: dict[str, Callable[..., Any]] = {
    "router": lambda i, **o: router.forward.unchecked(i.x, i.wg, **o),
    "gating": lambda i, **o: gating.forward.unchecked(i.logits, i.config.k, **o),
    "dispatch": lambda i, **o: dispatch.build.unchecked(i.topk_experts, i.config.E, **o),
    "expert_up": lambda i, **o: expert_up.forward.unchecked(i.x, i.w1, i.w2, i.dispatch, i.config.activation, **o),
    "expert_down": lambda i, **o: expert_down.forward.unchecked(i.y_swi, i.w3, i.dispatch, **o),
    "combine": lambda i, **o: combine.forward.unchecked(i.y, i.gates, i.dispatch, **o),
    "d_hidden": lambda i, **o: expert_down.hidden_gradients.unchecked(
        i.d_out, i.gates, i.a, i.b, i.w3, i.dispatch, i.config.activation, **o
    ),
    "d_w3": lambda i, **o: expert_down.weight_gradient.unchecked(i.y_swi, i.d_out, i.dispatch, **o),
    "d_x": lambda i, **o: expert_up.input_gradient.unchecked(i.a, i.b, i.w1, i.w2, i.dispatch, **o),
    "d_w1": lambda i, **o: expert_up.weight_gradient.unchecked(i.a, i.x, i.dispatch, **o),
    "d_w2": lambda i, **o: expert_up.weight_gradient.unchecked(i.b, i.x, i.dispatch, **o),
    "gating_backward": lambda i, **o: gating.backward.unchecked(i.gates, i.logits, i.topk_experts, **o),
    "router_backward": lambda i, **o: (
        router.input_gradient.unchecked(i.logits, i.wg, **o),
        router.weight_gradient.unchecked(i.logits, i.x, **o),
    ),
}
MODULES = {
    "gating": gating,
    "dispatch": dispatch,
    "expert_up": expert_up,
    "expert_down": expert_down,
    "combine": combine,
    "d_hidden": expert_down,
    "d_w3": expert_down,
    "d_x": expert_up,
    "d_w1": expert_up,
    "d_w2": expert_up,
    "gating_backward": gating,
}
assert RUN.keys() == EXPECTED.keys()
WITH_TORCH = ("gating", "dispatch", "combine")  # stages that plain torch has too: it is timed beside them


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """One stage of one layer, on the device's own time. Its ratio and its errors are to plain torch."""

    stage: str  #: one of `roofline.stages_of`
    system: str  #: "moeblaze" or "torch"
    version: str | None  #: None of a stage with one version
    flops: int  #: as `ceilings.Cost`, like the bytes
    bytes: int
    bound: str  #: which of both is the roofline
    roofline_ms: float
    pct_of_roofline: float  #: the roofline over the median


def versions_of(stage: str, dtype: str) -> list[str | None]:
    """The versions of a stage that compute in this dtype; None if it has but one."""
    if stage not in MODULES:
        return [None]
    versions = MODULES[stage].VERSIONS
    sees_activations = any(dtype in dtypes for dtypes in versions.values())
    return [version for version, dtypes in versions.items() if dtype in dtypes or not sees_activations]


def executor_here() -> Executor:
    """Return the GPU's executor, or the CPU's without a GPU."""
    return bridge_to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).executor


def default_version(stage: str, config: MoEConfig) -> str | None:
    """The version that the layer runs this stage on."""
    if stage not in MODULES:
        return None
    if MODULES[stage] in (expert_up, expert_down):
        return layer.default_version(config.dtype, config.d, config.h, executor_here())
    return MODULES[stage].DEFAULT_VERSION


def time_stage(
    preset: str,
    config: MoEConfig,
    stage: str,
    versions: Sequence[str | None],
    repetitions: int,
    device: Device,
    beside_torch: bool = False,
) -> list[dict[str, Any]]:
    """Time several versions of one stage, interleaved, by replays of CUDA graphs, and compare each result with torch's.

    ``preset`` is the layer's name in the rows. ``stage`` is one of `roofline.stages_of`, ``versions`` are of
    `versions_of`; ``beside_torch`` times plain torch too, of ``WITH_TORCH`` alone. Returns a `Row` as dict for each.

    A graph holds one call for each of as many inputs as fill the L2 cache twice, and every call has outputs of its
    own, so that each finds its inputs in memory.
    """
    cost = roofline.cost_of(stage, config)
    bridge = bridge_to(device.torch_device)
    sets = [Inputs(config, bridge, device.torch_device) for _ in range(input_sets(cost.bytes, device.cache_bytes))]
    works: dict[Subject, Callable[[], Any]] = {
        (OURS, version): partial(run_ours, stage, version, sets, bridge) for version in versions
    }
    errors = _errors(stage, versions, sets[0], bridge)
    if beside_torch:
        works[TORCH, None] = lambda: [EXPECTED[stage](inputs) for inputs in sets]
        errors[TORCH, None] = NOT_COMPARED
    contenders = {subject: replayed(device.captured(work)) for subject, work in works.items()}
    ceilings = device.rested
    samples = interleave(device.ceilings() | contenders, repetitions, device)
    rates = roofline.columns(ceilings, device.rates(samples))
    times = {subject: samples[subject].shared_by(len(sets)) for subject in works}
    return [
        asdict(
            Row(
                kind=stage if beside_torch else "stage",
                preset=preset,
                shape=config.sizes,
                dtype=config.dtype,
                stage=stage,
                system=system,
                version=version,
                step_ms=took.median,
                quartiles_ms=took.quartiles,
                flops=cost.flops,
                bytes=cost.bytes,
                bound=ceilings.bound(cost),
                roofline_ms=ceilings.roofline_ms(cost),
                pct_of_roofline=100 * ceilings.roofline_ms(cost) / took.median,
                ratio_to={TORCH: times[TORCH, None].median / took.median} if beside_torch and system == OURS else {},
                **errors[system, version],
                **rates,
            )
        )
        for (system, version), took in times.items()
    ]


def input_sets(bytes_moved: int, cache_bytes: int) -> int:
    """Return how many inputs, used alternately, do not fit into the cache: twice its size together, within reason."""
    return min(MOST_SETS, max(1, ceil_div(2 * cache_bytes, bytes_moved)))


def run_ours(stage: str, version: str | None, sets: Sequence[Inputs], bridge: Bridge) -> list[Any]:
    """Our results of a stage on a version (None: its only one) for each of the inputs."""
    options = {"executor": bridge.executor} | ({} if version is None else {"version": version})
    with bridge.running():
        return [RUN[stage](inputs, **options) for inputs in sets]


def _errors(
    stage: str, versions: Sequence[str | None], inputs: Inputs, bridge: Bridge
) -> dict[Subject, dict[str, Any]]:
    """The columns of each version's error."""
    expected, errors = EXPECTED[stage](inputs), {}
    for version in versions:
        (result,) = run_ours(stage, version, [inputs], bridge)
        errors[OURS, version] = worst(results_of(stage, result, bridge), expected).columns
    return errors
