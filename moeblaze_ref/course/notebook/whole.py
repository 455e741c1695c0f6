"""A whole training step: recorded on a small model, and planned for large ones."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from IPython.display import Markdown
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.drawing import cell, heading, panels
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.core.units import GB
from moeblaze_ref.course.notebook.gemm import HBM_BYTES_PER_SECOND, PEAK_FLOPS
from moeblaze_ref.lm.train import language_loss, router_loss
from moeblaze_ref.memory.measure import LiveStorages
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, VERMILLION, dotted, drawn, filled
from moeblaze_ref.plan import configs
from moeblaze_ref.plan.checkpoints import CHECKPOINTS
from moeblaze_ref.plan.experts import GroupedExperts, Router
from moeblaze_ref.plan.flops import forward_flops, part_flops
from moeblaze_ref.plan.parts import Step
from moeblaze_ref.plan.plots import COLORS, over_time
from moeblaze_ref.plan.recipes import RECIPES, master_bytes, weight_bytes
from moeblaze_ref.plan.recipes import state_bytes as optimizer_bytes
from moeblaze_ref.plan.run import MASTER, STATES, WEIGHTS, Run, Stage
from moeblaze_ref.plan.shares import ZERO, Parallel
from moeblaze_ref.plan.timeline import GRADIENTS, PHASES, Instant
from moeblaze_ref.runtime.ceilings import Ceilings, Cost

T = TypeVar("T")
ACTIVATIONS = "activations"
RECORD = DOCS / "results" / "plan_h200.json"
H200 = Ceilings(PEAK_FLOPS["bf16 tensor cores"] / 1e3, HBM_BYTES_PER_SECOND / 1e3)  # by its data sheet

# A recorded step -----------------------------------------------------------------------------------------------------


class Recorder(LiveStorages):
    """Context manager that notes after each operator of a step what is alive, by kind.

    Weights and optimizer states count as their tensors stand. Everything else that is alive is an activation, except
    gradients.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._weights = list(model.parameters())
        states = [tensor for state in optimizer.state.values() for tensor in state.values()]
        super().__init__([*self._weights, *states])
        self._standing = Counter({WEIGHTS: _bytes(self._weights), STATES: _bytes(states)})
        self.phase = PHASES[0]
        self.moments: list[Instant] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operator, types, args, kwargs)
        self.note(str(operator))
        return result

    def note(self, where: str) -> None:
        """Add a moment."""
        gradients = _bytes(weight.grad for weight in self._weights if weight.grad is not None)
        others = Counter({GRADIENTS: gradients, ACTIVATIONS: sum(self.sizes) - gradients})
        self.moments.append(Instant(self.phase, where, self._standing + others))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def recorded_step(model: nn.Module, tokens: Tensor) -> list[Instant]:
    """Record what is alive after each operator of a model's second step with AdamW, whose moments exist by then.

    Parameters
    ----------
    model : MoETransformer
    tokens : Tensor (batch, length + 1) int64

    Returns
    -------
    list of Instant
        With the operators' names. The forward ends with what the backward needs.
    """
    optimizer = torch.optim.AdamW(model.parameters())
    step_loss(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    with Recorder(model, optimizer) as recorder:
        loss = step_loss(model, tokens)
        recorder.note("the loss alone")
        recorder.phase = "backward"
        loss.backward()
        del loss
        recorder.phase = "optimizer"
        optimizer.step()
    return recorder.moments


def step_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss that a step of the small language model minimises, for tokens (batch, length + 1)."""
    output = model(tokens[:, :-1])
    return language_loss(output, tokens[:, 1:]) + router_loss(output)


def last_of(moments: Sequence[Instant], phase: str) -> Instant:
    """The last moment of a phase."""
    return [moment for moment in moments if moment.phase == phase][-1]


def planned_picture(name: str, sequence: int, checkpoint: str) -> Figure:
    """`plan.plots.over_time` of one sequence of a carried model on one GPU."""
    return over_time(planned(name, sequence, checkpoint=checkpoint).run)


# The share of the experts --------------------------------------------------------------------------------------------

GROUPS = {"router": "experts", "experts": "experts", "attention": "attention", "logits and loss": "logits and loss"}
REST = "norms, dense MLPs, rest"
SHARES = {"experts": VERMILLION, "attention": ORANGE, "logits and loss": GREEN, REST: GREY}


def planned(name: str, sequence: int, attention: str = "flash", checkpoint: str = "none") -> Stage:
    """One GPU with all of a carried model and one sequence, in mixed precision."""
    (stage,) = Run(configs.find(name), Step(1, sequence, attention=attention), checkpoint=checkpoint).stages
    return stage


def kept_groups(stage: Stage) -> dict[str, int]:
    """Bytes kept for the backward, by the names of ``SHARES``; the router belongs to the experts."""
    found = dict.fromkeys(SHARES, 0)
    for kind, number in stage.kept.items():
        found[GROUPS.get(kind, REST)] += number
    return found


def share_of_experts(stage: Stage) -> float:
    """Return the share of the experts, with their router, of what is kept."""
    return kept_groups(stage)["experts"] / stage.kept.total()


def policies_of(name: str, sequence: int) -> tuple[Stage, Stage]:
    """One GPU with all of a carried model: its experts in plain torch, and under `minimal`."""
    plain = planned(name, sequence)
    (ours,) = _under_policy(plain.run.model, plain.run.step, "moeblaze/minimal").stages
    return plain, ours


def state_bytes(stage: Stage) -> int:
    """Bytes of weights, gradients, float32 weights and optimizer states."""
    return sum(stage.resident[kind] for kind in (WEIGHTS, MASTER, STATES)) + sum(one.gradients for one in stage.work)


def part_of_a_step(name: str, sequence: int) -> Markdown:
    """Say what the MoE layers of a carried model keep, beside all kept bytes and the peak of a step."""
    stage = planned(name, sequence)
    kept, peak = kept_groups(stage)["experts"], stage.peak.bytes
    return Markdown(
        f"In a step of {name} on one GPU, with {sequence:,} tokens, the MoE layers keep {kept / GB:.1f} GB. That is "
        f"{share_of_experts(stage):.0%} of what all layers keep for the backward, and {kept / peak:.0%} of the "
        f"{peak / GB:.0f} GB that the step holds at its peak."
    )


def shares_picture(sequence: int, attention: str) -> Figure:
    """A bar for each carried model: whose bytes a forward keeps; beside it their sum and the states, in GB."""
    names = configs.carried()
    stages = [planned(name, sequence, attention) for name in names]
    figure, (shares, sums) = panels(11, 5, 1, 2, sharey=True, width_ratios=(3, 2))
    left = np.zeros(len(names))
    groups = [kept_groups(stage) for stage in stages]
    for group, color in SHARES.items():
        widths = np.array([100 * of_one[group] / sum(of_one.values()) for of_one in groups])
        shares.barh(range(len(names)), widths, left=left, label=group, **filled(color))
        left += widths
    shares.set_yticks(range(len(names)), names)
    shares.invert_yaxis()
    shares.set(xlabel="% of what the forward keeps", xlim=(0, 100))
    for label, color, of_stage in (
        (ACTIVATIONS, VERMILLION, lambda stage: stage.kept.total()),
        ("weights, gradients, optimizer", BLUE, state_bytes),
    ):
        sums.plot([of_stage(stage) / GB for stage in stages], range(len(names)), label=label, **dotted(color))
    sums.set(xscale="log", xlabel="GB on one GPU that holds everything")
    heading(shares, f"one sequence of {sequence:,} tokens, attention: {attention}")
    for axes, columns in ((shares, 2), (sums, 1)):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=columns, frameon=False)
    return figure


# Long sequences ------------------------------------------------------------------------------------------------------

SEQUENCES = tuple(2**power for power in range(9, 18))


def sequence_lines(name: str) -> Figure:
    """Draw what one sequence of a carried model keeps, by length: experts, attention with two kernels, and logits."""
    lines: dict[str, list[float]] = {}
    for sequence in SEQUENCES:
        flash, math = (kept_groups(planned(name, sequence, kernel)) for kernel in ("flash", "math"))
        of_length = {"experts": flash["experts"], "attention, flash": flash["attention"]}
        of_length |= {"attention, math": math["attention"], "logits and loss": flash["logits and loss"]}
        for label, number in of_length.items():
            lines.setdefault(label, []).append(number / GB)
    figure, axes = panels(8, 4.2)
    for (label, numbers), color in zip(lines.items(), (VERMILLION, ORANGE, BLACK, GREEN), strict=True):
        axes.plot(SEQUENCES, numbers, label=label, **drawn(color))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SEQUENCES, [f"{length:,}" for length in SEQUENCES])
    axes.minorticks_off()
    axes.set(xlabel="tokens of one sequence", ylabel="GB kept for the backward")
    heading(axes, f"{name}: all layers, bfloat16")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


# Bytes of one of several GPUs ----------------------------------------------------------------------------------------

COLUMNS = {WEIGHTS: 2, GRADIENTS: 2, MASTER: 4, STATES: 8}  # bytes of a parameter in mixed precision
HALVES = ("everything else", "experts")  # expert parallelism divides the second


def held_by_half(name: str, parallel: Parallel) -> Counter[tuple[str, str]]:
    """Bytes of a carried model that one GPU holds, by half of the model and by kind, of ``HALVES`` and ``COLUMNS``."""
    stage = Run(configs.find(name), Step(1, 1), parallel=parallel).worst
    recipe = RECIPES[stage.run.recipe]
    found: Counter[tuple[str, str]] = Counter()
    for weight in stage.weights:
        half, divided = HALVES[weight.of_experts], partial(parallel.held, weight)
        found[half, WEIGHTS] += weight_bytes(recipe, divided(from_zero=3))
        if weight.trained:
            found[half, GRADIENTS] += weight_bytes(recipe, divided(from_zero=2))
            found[half, MASTER] += master_bytes(recipe, divided(from_zero=1))
            found[half, STATES] += optimizer_bytes(recipe, weight, divided(from_zero=1))
    return found


def gpu_to_scale(name: str, gpus: int, expert: int) -> Figure:
    """A panel for each stage of ZeRO: the model's states as rectangles, and filled what one of the GPUs holds.

    Height is parameters and width is bytes a parameter, so area is bytes.
    """
    whole = held_by_half(name, Parallel())
    figure, shown = panels(11, 4, 1, len(ZERO), sharey=True)
    for zero, axes in zip(ZERO, shown, strict=True):
        held = held_by_half(name, Parallel(data=gpus, expert=expert, zero=zero))
        _draw_states(axes, whole, held)
        heading(axes, f"ZeRO {zero}: {sum(held.values()) / GB:,.1f} GB")
    shown[0].set_ylabel("parameters, 1e9; experts above the line")
    marks = [Patch(label=kind, **filled(COLORS[kind])) for kind in COLUMNS]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False)
    title = f"{name} on {gpus} GPUs, of which {expert} divide the experts. One GPU's part of "
    figure.suptitle(f"{title}{sum(whole.values()) / GB:,.1f} GB, filled", x=0.01, ha="left", fontsize="medium")
    return figure


def _draw_states(axes: Axes, whole: Mapping[tuple[str, str], int], held: Mapping[tuple[str, str], int]) -> None:
    """Outline what there is of each half and kind, and fill what is held."""
    bottom = 0.0
    for half in HALVES:
        left = 0
        for kind, width in COLUMNS.items():
            outline, height = ((found[half, kind] / width / GB) for found in (whole, held))
            cell(axes, (left, bottom), (width, outline), {"facecolor": "none", "edgecolor": GREY, "linestyle": ":"})
            cell(axes, (left, bottom), (width, height), filled(COLORS[kind]) | {"linewidth": 0})
            left += width
        bottom += whole[half, WEIGHTS] / COLUMNS[WEIGHTS] / GB
        axes.axhline(bottom, color=BLACK, linewidth=0.8)
    axes.set(xlim=(0, sum(COLUMNS.values())), ylim=(0, bottom), xlabel="bytes a parameter")


# Checkpointing -------------------------------------------------------------------------------------------------------


class Trade(NamedTuple):
    """A way to keep less, and its price."""

    way: str
    kept: int  #: bytes from forward to backward
    most: int  #: bytes of activations at their peak: what is kept, and what lives for a while
    repeated: float  #: FLOPs that the backward repeats, as a share of the step's


def trades(name: str, sequence: int) -> list[Trade]:
    """Return a trade for each checkpoint of ``plan`` and two save policies, where the model allows them."""
    step = Step(1, sequence)
    step_flops = 3 * forward_flops(configs.find(name), step)
    found = []
    for way, run_of, repeated in _ways(configs.find(name), step):
        try:
            stage = run_of().worst
        except ValueError:  # the model does not allow it
            continue
        found.append(Trade(way, stage.kept.total(), most_activations(stage), repeated / step_flops))
    return found


def _ways(model: configs.Model, step: Step) -> Iterator[tuple[str, Callable[[], Run], float]]:
    """Yield each way, its run, and the FLOPs that its backward repeats."""
    layers = [part for layer in model.layers for part in layer]
    repeated = {"layer": sum(part_flops(part, step) for part in layers)}
    for how in CHECKPOINTS:
        yield f"checkpoint: {how}", partial(Run, model, step, checkpoint=how), repeated.get(how, 0.0)
    up = sum(part_flops(part, step) for part in layers if isinstance(part, GroupedExperts)) * 2 / 3  # two of 3 products
    for policy, flops in {"moeblaze/minimal": 0.0, "moeblaze/inputs": up}.items():
        yield policy, partial(_under_policy, model, step, policy), flops


def _under_policy(model: configs.Model, step: Step, policy: str) -> Run:
    return Run(configs.with_experts(model, policy), step)


def most_activations(stage: Stage) -> int:
    """The most bytes beside weights, gradients and the optimizer at any moment of forward and backward."""
    standing = stage.resident.total()
    moments = [moment for moment in stage.timeline if moment.phase != "optimizer"]
    return max(moment.bytes - standing - moment.held[GRADIENTS] for moment in moments)


TRADE_COLORS = (BLACK, ORANGE, VERMILLION, BLUE, GREEN)


def trade_picture(name: str, sequence: int) -> Figure:
    """Bytes of `trades` against repeated FLOPs; filled is what is kept, hollow the most at any moment."""
    figure, axes = panels(8, 4)
    found = trades(name, sequence)
    for trade, color in zip(found, TRADE_COLORS, strict=False):
        look, share = dotted(color) | {"markersize": 9, "clip_on": False}, 100 * trade.repeated
        axes.plot(share, trade.kept / GB, label=trade.way, zorder=3, **look)
        axes.plot(share, trade.most / GB, markerfacecolor="none", **look)
    axes.set(xlabel="FLOPs of products repeated, % of a step", ylabel="activations, GB", ylim=(0, None))
    axes.margins(x=0.1, y=0.1)
    heading(axes, f"{name}, one sequence of {sequence:,} tokens. Filled: kept. Hollow: the most at any moment")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


# The bandwidth wall --------------------------------------------------------------------------------------------------

ROWS = tuple(2**power for power in range(13))


def expert_cost(rows: int, d: int, h: int) -> Cost:
    """FLOPs and bytes of one expert's forward with so many rows, by `bench.roofline`."""
    layer = MoEConfig(rows, d, h, 1, 1)
    costs = [roofline.cost_of(stage, layer) for stage in ("expert_up", "expert_down")]
    return Cost(sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs))


def expert_times(names: Sequence[str]) -> Figure:
    """The least time of one expert's forward against its rows, on an H200 by its data sheet."""
    figure, axes = panels(8, 4.2)
    for name, color in zip(names, (BLACK, VERMILLION, BLUE, GREEN), strict=False):
        d, h = expert_widths(name)
        times = [1e3 * H200.roofline_ms(expert_cost(rows, d, h)) for rows in ROWS]
        axes.plot(ROWS, times, label=f"{name}: d = {d:,}, h = {h:,}", **drawn(color))
        turn = next(place for place, rows in enumerate(ROWS) if H200.bound(expert_cost(rows, d, h)) == "flops")
        axes.plot(ROWS[turn], times[turn], "o", color=color)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ROWS, [f"{rows:,}" for rows in ROWS])
    axes.minorticks_off()
    axes.set(xlabel="rows of the expert", ylabel="microseconds, at least")
    heading(axes, "H200 by its data sheet, not a measurement; from the dot on, FLOPs are the limit")
    axes.legend(frameon=False)
    return figure


def expert_widths(name: str) -> tuple[int, int]:
    """d and h of the experts of a carried model."""
    experts = _first(name, GroupedExperts)
    return experts.d, experts.h


def router_of(name: str) -> Router:
    """The router of a carried model's MoE layers."""
    return _first(name, Router)


def _first(name: str, kind: type[T]) -> T:
    """The first part of a kind in a carried model."""
    return next(part for part in configs.find(name).parts if isinstance(part, kind))


# The proof -----------------------------------------------------------------------------------------------------------


def proof() -> dict[str, Any]:
    """The record of plans beside a GPU, of ``python -m moeblaze_ref.plan.measure``."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def errors_of(row: Mapping[str, Any]) -> dict[str, float]:
    """How far the planned peak of each phase is from the measured one, as a share of it."""
    return {phase: row["planned_peaks"][phase] / row["peaks"][phase] - 1 for phase in PHASES}
