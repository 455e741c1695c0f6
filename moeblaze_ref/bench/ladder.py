"""The up-projection's forward on every version, and on the last one idea by idea: what each is worth.

The steps within the last version are all made from its one file: by its constants, and by how many blocks are launched.
They are timed like whole layers, launch by launch, interleaved: each takes milliseconds, so the host is always ahead.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from moeblaze_ref.backends.raw_cuda import activation, expert_up, gemm
from moeblaze_ref.bench import roofline
from moeblaze_ref.bench.accuracy import Error, worst
from moeblaze_ref.bench.expected import expert_up as expert_up_by_torch
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.bench.rows import TimedRow
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.structures import HIDDEN
from moeblaze_ref.runtime import Executor, ceil_div
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.clock import interleave
from moeblaze_ref.runtime.device import Device
from moeblaze_ref.runtime.source import Module
from moeblaze_ref.runtime.torch_bridge import Bridge

PRESETS = ("conf3", "qwen3")
ABOVE, WHOLE = "the row above", "the whole"  # what a step is compared with
BELOW = "the version below"

Constants = tuple[tuple[str, int], ...]  # of a kernel file: names and values
# Those of expert_up/7_persistent.cu and hopper/scheduler.cuh, in place of their own choice; what is not named stays.
ONE_STAGE: Constants = (("RING_STAGES", 1),)
TWO_STAGES: Constants = (("RING_STAGES", 2),)
NO_BANDS: Constants = (("BAND", 1),)


@dataclass(frozen=True)
class Step:
    """One way to make a, b and y_swi."""

    version: str  #: of ``expert_up.FORWARD_VERSIONS``
    idea: str  #: what is different from the step before, or from the whole
    constants: Constants = ()  #: with which the version's file is compiled, beside its usual ones
    #: A block for each multiprocessor, which takes tile after tile; otherwise a block for each tile. Of the last
    #: version; the others always have a block for each tile.
    persistent: bool = True
    #: True if the kernel applies the activation. Otherwise activation/1_elementwise.cu makes act(a) from a behind it,
    #: and torch multiplies that by b.
    fused: bool = True
    against: str = ABOVE  #: what it is compared with: this, ``WHOLE`` or ``BELOW``; the whole with the last, too
    most_tokens: int | None = None  #: a layer with more is timed with this many

    def config(self, config: MoEConfig) -> MoEConfig:
        """The layer with no more tokens than the step takes."""
        return config if self.most_tokens is None else config.replace(L=min(config.L, self.most_tokens))

    def executor(self, executor: Executor, config: MoEConfig) -> Executor:
        """Return the executor that runs the step: with its constants, and for its number of blocks that stay."""

        def load(file: str, text: str | None = None, **constants: Any) -> Module:
            return executor.load(file, text, **constants | dict(self.constants))

        altered: Any = copy.copy(executor)  # of any class: its method and its number may be set
        altered.load = load
        if not self.persistent:
            altered.multiprocessors = most_tiles(config)
        return altered


HOPPER = gemm.HOPPER
LADDER = (
    Step("1_naive", "a thread an element", most_tokens=2048),
    Step("2_tiled", "tiles in shared memory"),
    Step("3_mma", "tensor cores by mma.sync"),
    Step("4_wgmma", "wgmma on the stages of 3_mma", against=BELOW),
    Step("5_tma", "weights by TMA, two mbarriers a stage", against=BELOW),
    Step("6_specialized", "producer and consumer warps", against=BELOW),
    Step(HOPPER, "wgmma and TMA, one stage", ONE_STAGE + NO_BANDS, persistent=False, fused=False),
    Step(HOPPER, "two stages", TWO_STAGES + NO_BANDS, persistent=False, fused=False),
    Step(HOPPER, "all stages", NO_BANDS, persistent=False, fused=False),
    Step(HOPPER, "persistent blocks", NO_BANDS, fused=False),
    Step(HOPPER, "bands of tiles", fused=False),
    Step(HOPPER, "activation in the epilogue"),
    Step(HOPPER, "one stage, the rest as it is", ONE_STAGE, against=WHOLE),
    Step(HOPPER, "two stages, the rest as it is", TWO_STAGES, against=WHOLE),
    Step(HOPPER, "a block a tile, the rest as it is", persistent=False, against=WHOLE),
    Step(HOPPER, "no bands, the rest as it is", NO_BANDS, against=WHOLE),
    Step(HOPPER, "activation behind, the rest as it is", fused=False, against=WHOLE),
)

TOP = next(step for step in reversed(LADDER) if step.against == ABOVE)
# The series from 3_mma on, a step for each kernel file; those before are compared with the row above.
VERSIONS = [step for step in LADDER if step.version == "3_mma" or step.against == BELOW] + [TOP]


def most_tiles(config: MoEConfig) -> int:
    """The most tiles of the last version that R rows in E groups can fill: a block for each."""
    columns = gemm.HOPPER_COLUMNS // (1 + config.gated)
    rows = gemm.ROWS_BOX[1]
    return (config.R // rows + min(config.E, config.R)) * ceil_div(config.h, columns)


@dataclass(frozen=True, kw_only=True)
class Row(TimedRow):
    """One step of one layer, its version and idea as in `Step`.

    Its ratios are of rates and not of times, since the first step may have fewer tokens: {"the row above": 2.0}, {"the
    version below": 1.3} or {"the whole": 0.9}. Its errors are the largest of a, b and y_swi against plain torch.
    """

    version: str
    idea: str
    tflops: float  #: 1e12 FLOPs of both products in a second
    pct_of_cublas: float  #: that in percent of the dense product's rate


def steps_of(config: MoEConfig, versions: Sequence[str] = ()) -> list[Step]:
    """The steps of these versions, or of all, that compute in the layer's dtype."""
    able = [step for step in LADDER if config.dtype in expert_up.FORWARD_VERSIONS[step.version]]
    return [step for step in able if step.version in (versions or expert_up.FORWARD_VERSIONS)]


def time_ladder(
    preset: str, config: MoEConfig, steps: Sequence[Step], repetitions: int, device: Device
) -> list[dict[str, Any]]:
    """Time all steps interleaved, each result compared with plain torch: a `Row` as dict for each, in their order.

    ``preset`` is the layer's name in the rows.
    """
    trials = trials_of(config, steps, device)
    errors = _errors(trials)
    ceilings = device.rested
    contenders = {trial.step: lambda number, lap, trial=trial: trial.run() for trial in trials}
    samples = interleave(device.ceilings() | contenders, repetitions, device)
    seen = roofline.columns(ceilings, device.rates(samples))
    rates = {
        step: roofline.cost_of("expert_up", step.config(config)).flops / samples[step].median / 1e9 for step in steps
    }  # TFLOP/s
    return [
        asdict(
            Row(
                kind="ladder",
                preset=preset,
                shape=step.config(config).sizes,
                dtype=config.dtype,
                version=step.version,
                idea=step.idea,
                step_ms=samples[step].median,
                quartiles_ms=samples[step].quartiles,
                tflops=rates[step],
                pct_of_cublas=100 * rates[step] / seen["cublas_tflops"],
                ratio_to=_ratio(rates, step),
                **errors[step].columns,
                **seen,
            )
        )
        for step in steps
    ]


def _ratio(rates: Mapping[Step, float], step: Step) -> dict[str, float]:
    """Return a step's rate over that of each step it is compared with, if that one was timed."""
    if step.against == WHOLE:
        return {WHOLE: rates[step] / rates[TOP]} if TOP in rates else {}
    above = _before(step, [other for other in rates if other.against == ABOVE])
    below = _before(step, [other for other in VERSIONS if other in rates])
    return {name: rates[step] / rates[other] for name, other in ((ABOVE, above), (BELOW, below)) if other}


def _before(step: Step, steps: Sequence[Step]) -> Step | None:
    """The step before this one among these, if it is one of them and not the first."""
    return steps[steps.index(step) - 1] if step in steps[1:] else None


# The work -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """A step on inputs of its size."""

    step: Step
    inputs: Inputs
    bridge: Bridge

    def run(self) -> tuple[Tensor, ...]:
        """a, b if there is a gate, and y_swi."""
        i, kind = self.inputs, self.inputs.config.activation
        executor, stores = self.step.executor(self.bridge.executor, i.config), HIDDEN if self.step.fused else ("a",)
        with self.bridge.running():
            a, b, y_swi = expert_up.forward.unchecked(
                i.x, i.w1, i.w2, i.dispatch, kind, stores, executor, self.step.version
            )
            act_a = None if self.step.fused or a is None else activation.act.unchecked(a, kind, executor)
        a, b, y_swi, act_a = self.bridge.tensors((a, b, y_swi, act_a))
        if act_a is not None:
            y_swi = act_a if b is None else act_a * b
        return tuple(made for made in (a, b, y_swi) if made is not None)


def trials_of(config: MoEConfig, steps: Sequence[Step], device: Device) -> list[Trial]:
    """One for each step; those of one size share their inputs."""
    bridge = bridge_to(device.torch_device)
    inputs = {
        sized: Inputs(sized, bridge, device.torch_device)
        for sized in dict.fromkeys(step.config(config) for step in steps)
    }
    return [Trial(step, inputs[step.config(config)], bridge) for step in steps]


def _errors(trials: Sequence[Trial]) -> dict[Step, Error]:
    """Each trial's largest relative error against plain torch."""
    expected = {inputs: expert_up_by_torch(inputs) for inputs in dict.fromkeys(trial.inputs for trial in trials)}
    return {trial.step: worst(trial.run(), expected[trial.inputs]) for trial in trials}
