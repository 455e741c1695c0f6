"""The backward by hand: every tensor of one layer in reach of autograd, and pictures of where gradients flow."""

from dataclasses import dataclass

import numpy as np
import torch
from IPython.display import Markdown
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.drawing import board, cell, centered, heading, panels
from moeblaze_ref.course.notebook.markdown import table
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION, YELLOW, dotted, drawn
from moeblaze_ref.nn import oracle
from moeblaze_ref.systems.layer import intermediates
from moeblaze_ref.verify.cases import Case, relative_error
from moeblaze_ref.verify.comparisons import BOUNDS

# Autograd's side -----------------------------------------------------------------------------------------------------


class Tape:
    """One layer through the stages of the oracle, in float64, so that autograd can be asked at every step.

    What is differentiated is one number, S = <d_out, out> + d_balance * load-balancing loss + d_z * router z-loss:
    its gradient at a tensor is what the layer's backward computes there.

    Parameters
    ----------
    case : Case
        Its choice of experts is replayed; the activation must be gated.
    d_balance, d_z : float
        Gradients of the two losses.

    Attributes
    ----------
    S : Tensor
    tensors : dict of str to Tensor
        x, wg, w1, w2, w3 are leaves. x_experts and x_router are x as the experts and as the router see it.
    """

    def __init__(self, case: Case, d_balance: float = 0.0, d_z: float = 0.0):
        self.case, self.d_balance, self.d_z = case, d_balance, d_z
        self.choice = torch.from_numpy(case.topk_experts)  # (L, k)
        leaves = {"x": case.x, **case.weights._asdict()}
        self.leaves = {name: torch.tensor(array, dtype=torch.float64) for name, array in leaves.items()}
        self.S, self.tensors = self._run({name: leaf.requires_grad_() for name, leaf in self.leaves.items()})

    def _run(self, leaves: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """S, and every tensor that is born on the way to it."""
        x, wg, w1, w2, w3 = leaves.values()
        x_experts, x_router = x.clone(), x.clone()  # (L, d) each
        logits = x_router @ wg  # (L, E)
        routing = oracle.decide(logits, self.case.k, self.case.renormalize, self.choice)
        order = oracle.expert_order(routing.topk_experts, self.case.E)
        a, b = oracle.expert_up(x_experts, order, w1, w2)  # (R, h) each
        assert b is not None  # as the activation is gated
        y_swi = oracle.activate(a, b, self.case.activation)  # (R, h)
        y = oracle.expert_down(y_swi, order, w3)  # (R, d)
        out = oracle.combine(y, routing.gates, order)  # (L, d)
        S = (torch.tensor(self.case.d_out) * out).sum()
        S = S + self.d_balance * oracle.load_balancing_loss(routing) + self.d_z * oracle.router_z_loss(routing)
        born = {"x_experts": x_experts, "x_router": x_router, "logits": logits, "gates": routing.gates}
        return S, {**leaves, **born, "a": a, "b": b, "y_swi": y_swi, "y": y, "out": out}

    def gradient(self, name: str) -> np.ndarray:
        """dS / d tensor, by autograd."""
        checks.check_name("tensor", name, self.tensors)
        (gradient,) = torch.autograd.grad(self.S, self.tensors[name], retain_graph=True)
        return gradient.numpy()

    def moved(self, name: str, index: tuple[int, ...], step: float) -> float:
        """S after one element of a leaf was moved; the experts are chosen as before."""
        leaves = {leaf: tensor.detach().clone() for leaf, tensor in self.leaves.items()}
        leaves[name][index] += step
        return self._run(leaves)[0].item()

    def error(self, name: str, found: np.ndarray) -> float:
        """Relative error of the gradient ``d_<tensor>`` that was found by hand."""
        return relative_error(found, self.gradient(name.removeprefix("d_")))

    def check(self, **found: np.ndarray) -> Markdown:
        """A line for each gradient, named ``d_<tensor>``: its relative error against autograd.

        Raises
        ------
        AssertionError
            If an error is above 1e-12, or NaN.
        """
        rows, bound = [], BOUNDS["float64"]
        for name, array in found.items():
            error, shape = self.error(name, array), " x ".join(map(str, array.shape))
            assert error <= bound, f"{name} has a relative error of {error:.1e}, but the bound is {bound:.0e}"
            rows.append({"gradient": f"`{name}`", "shape": shape, "error against autograd": f"{error:.1e}"})
        return table(rows)


# Differences: is autograd itself right? ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Quotients:
    """Errors of difference quotients of one element against autograd, for steps from large to small."""

    index: tuple[int, ...]  #: the element
    slope: float  #: dS / d element by autograd
    steps: np.ndarray  #: (n,)
    central: np.ndarray  #: (n,) relative errors of (S(+step) - S(-step)) / (2 step)
    one_sided: np.ndarray  #: (n,) relative errors of (S(+step) - S) / step


def quotients(tape: Tape, name: str) -> Quotients:
    """Difference quotients of the element of a leaf (x, wg, w1, w2 or w3) that has the largest gradient."""
    gradient = tape.gradient(checks.check_name("leaf", name, tape.leaves))
    index = tuple(int(i) for i in np.unravel_index(np.abs(gradient).argmax(), gradient.shape))
    slope, steps = float(gradient[index]), 10.0 ** np.arange(-1, -12, -1)
    above, below = (np.array([tape.moved(name, index, sign * step) for step in steps]) for sign in (1, -1))
    central, one_sided = (above - below) / (2 * steps), (above - tape.S.item()) / steps
    return Quotients(index, slope, steps, *(np.abs(found / slope - 1) for found in (central, one_sided)))


def quotients_picture(tape: Tape, name: str) -> Figure:
    """The errors of `quotients` against the step: truncation on one side, rounding on the other."""
    found = quotients(tape, name)
    figure, axes = panels(8, 3.6)
    axes.loglog(found.steps, found.one_sided, "o-", color=ORANGE, label="one-sided: (S(+e) - S) / e")
    axes.loglog(found.steps, found.central, "o-", color=BLUE, label="central: (S(+e) - S(-e)) / 2e")
    axes.set(xlabel="step e", ylabel="relative distance from autograd")
    heading(axes, f"{name}[{', '.join(map(str, found.index))}]: autograd says {found.slope:.6f}")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure


def slope_picture(activation: str) -> Figure:
    """act(a), its slope as `activation.backward` has it, and central differences of the first as dots."""
    a = np.linspace(-5, 5, 401)[:, None]  # (401, 1)
    one = np.ones_like(a) if is_gated(activation) else None  # the gate b, so that the slope is act's own
    slope, _ = activation_stage.backward(np.ones_like(a), a, one, activation)
    dots, step = a[5::20], 1e-5
    rise = activation_stage.act(dots + step, activation) - activation_stage.act(dots - step, activation)
    figure, axes = panels(8, 3.2)
    axes.plot(a, activation_stage.act(a, activation), label="act(a)", **drawn(BLUE))
    axes.plot(a, slope, label="its slope, as the backward has it", **drawn(VERMILLION))
    axes.plot(dots, rise / (2 * step), "o", color=BLACK, markersize=4, label="central differences of act")
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.set(xlabel="a", ylabel="act(a) and its slope", ylim=(-1.2, 4))
    heading(axes, activation)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def gap_picture(right: dict[str, float], wrong: dict[str, float]) -> Figure:
    """Relative errors by name on one logarithmic axis: right gradients, mistakes, and the bound between them."""
    names = [*right, *wrong]
    figure, axes = panels(9, 0.9 + 0.27 * len(names))
    axes.plot([*right.values()], range(len(right)), label="derived here", **dotted(BLUE))
    axes.plot([*wrong.values()], range(len(right), len(names)), label="with a mistake", **dotted(VERMILLION))
    axes.axvline(BOUNDS["float64"], color=BLACK, linewidth=0.8, label=f"the bound, {BOUNDS['float64']:.0e}")
    axes.set(xscale="log", xlim=(1e-17, 10), xlabel="relative error against autograd")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", color=GREY, linewidth=0.3)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    return figure


# Where gradients flow ------------------------------------------------------------------------------------------------

KEPT, REBUILT, FREED = "kept by the forward", "rebuilt in the backward", "freed in the forward"
GIVEN, WRITTEN, REGISTERS, NEVER = "given", "written", "in a kernel's registers only", "never exists"
LOOKS = {  # what becomes of a tensor: fill, edge, line, letters
    GIVEN: (BLACK, BLACK, "-", "white"),
    KEPT: (BLUE, BLUE, "-", "white"),
    REBUILT: (ORANGE, BLACK, "--", "black"),
    FREED: ("white", GREY, "--", "black"),
    WRITTEN: (SKY, SKY, "-", "black"),
    REGISTERS: (YELLOW, YELLOW, "-", "black"),
    NEVER: ("white", VERMILLION, ":", VERMILLION),
}

PLACES = {  # tensor: (column, row from below, shape)
    "probs": (1, 4, "(L, E)"),
    "gates": (3, 4, "(L, k)"),
    "x": (0, 3, "(L, d)"),
    "a, b": (1, 3, "(R, h) each"),
    "y_swi": (2, 3, "(R, h)"),
    "y": (3, 3, "(R, d)"),
    "out": (4, 3, "(L, d)"),
    "d_w1, d_w2": (1, 2, "(E, d, h) each"),
    "gate * y_swi": (2, 2, "(R, h)"),
    "d_w3": (3, 2, "(E, h, d)"),
    "d_x": (0, 1, "(L, d)"),
    "d_a, d_b": (1, 1, "(R, h) each"),
    "d_out w3^T": (2, 1, "(R, h)"),
    "d_y": (3, 1, "(R, d)"),
    "d_out": (4, 1, "(L, d)"),
    "d_wg": (0, 0, "(d, E)"),
    "d_logits": (1, 0, "(L, E)"),
    "d_gates": (2, 0, "(L, k)"),
}
BY_INDEX = (  # arrows along which rows are gathered or summed by the dispatch's indices
    ("x", "a, b"),
    ("y", "out"),
    ("d_out", "d_out w3^T"),
    ("d_out", "d_w3"),
    ("x", "d_w1, d_w2"),
    ("d_a, d_b", "d_x"),
)
IN_PLACE = (
    ("x", "probs"),
    ("probs", "gates"),
    ("a, b", "y_swi"),
    ("y_swi", "y"),
    ("gates", "out"),
    ("gates", "gate * y_swi"),
    ("y_swi", "gate * y_swi"),
    ("gate * y_swi", "d_w3"),
    ("d_out w3^T", "d_a, d_b"),
    ("d_out w3^T", "d_gates"),
    ("d_a, d_b", "d_w1, d_w2"),
    ("d_gates", "d_logits"),
    ("d_logits", "d_wg"),
    ("d_logits", "d_x"),
)
READS = (("x", "d_wg"), ("a, b", "d_a, d_b"), ("y_swi", "d_gates"), ("probs", "d_logits"))  # down a column
BOX, TALL = 0.66, 0.5  # of a tensor, in columns and rows


def fates(policy: str) -> dict[str, str]:
    """Return, for every tensor of ``PLACES``, whether a save policy keeps it, rebuilds it, frees it, and so on.

    Raises
    ------
    ValueError
        If the policy is unknown.
    """
    kept = intermediates(policy, "swiglu")
    found = dict.fromkeys(PLACES, WRITTEN) | {"x": KEPT, "gates": KEPT, "probs": REBUILT}
    found |= {"a, b": KEPT if "a" in kept else REBUILT, "y_swi": KEPT if "y_swi" in kept else REBUILT}
    return found | {"y": KEPT if "y" in kept else FREED, "d_out w3^T": REGISTERS, "d_y": NEVER, "d_out": GIVEN}


def flow_picture(policy: str) -> Figure:
    """The forward from left to right, under it the backward from right to left; colours say what is kept.

    A tensor and its gradient share a column. Green arrows go by the indices of the dispatch.
    """
    figure, axes = board(11, 5.8, xlim=(-0.45, 4.45), ylim=(-0.35, 4.4))
    for start, end in IN_PLACE:
        _arrow(axes, start, end, GREY)
    for start, end in BY_INDEX:
        _arrow(axes, start, end, GREEN)
    for start, end in READS:
        _arc(axes, start, end)
    for name, fate in fates(policy).items():
        _box(axes, name, fate)
    swatches = [Patch(fc=fill, ec=edge, ls=line, label=fate) for fate, (fill, edge, line, _) in LOOKS.items()]
    lines = axes.plot([], [], color=GREEN, label="rows gathered or summed by index")
    lines += axes.plot([], [], color=BLACK, linestyle=":", label="read again")
    figure.legend(handles=[*swatches, *lines], loc="outside lower center", ncols=4, frameon=False)
    return figure


def _arrow(axes, start, end, color):
    (left, low, _), (right, high, _) = PLACES[start], PLACES[end]
    look = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0}
    across = BOX / 2 * ((right > left) - (right < left))
    along = TALL / 2 * ((high > low) - (high < low))
    axes.annotate("", (right - across, high - along), (left + across, low + along), arrowprops=look)


def _arc(axes, start, end):
    (column, low, _), (_, high, _) = PLACES[start], PLACES[end]
    look = {"arrowstyle": "-|>", "color": BLACK, "linestyle": ":", "connectionstyle": "arc3,rad=-0.25"}
    axes.annotate("", (column + BOX / 2, high), (column + BOX / 2, low), arrowprops=look | {"shrinkA": 0, "shrinkB": 0})


def _box(axes, name, fate):
    column, row, shape = PLACES[name]
    fill, edge, line, letters = LOOKS[fate]
    look = {"facecolor": fill, "edgecolor": edge, "linestyle": line, "zorder": 4}  # above the arrow past d_y
    cell(axes, (column - BOX / 2, row - TALL / 2), (BOX, TALL), look)
    centered(axes, column, row + 0.08, name, color=letters, weight="bold", zorder=5)
    centered(axes, column, row - 0.12, shape, color=letters, fontsize="small", zorder=5)
