"""Right and wrong layers, tests that are weak, and the errors that the check finds: notebook 12."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from IPython.display import Markdown
from matplotlib.figure import Figure
from torch import Tensor

from moeblaze_ref.core.drawing import board, cell, centered, heading, panels
from moeblaze_ref.course.notebook.markdown import table
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, SKY, VERMILLION, dotted, filled
from moeblaze_ref.verify.layers import cases, deviations, diagnosis, reference
from moeblaze_ref.verify.layers.adapter import Adapter, Factory, leaves
from moeblaze_ref.verify.layers.adapters import ours, plain, wrong
from moeblaze_ref.verify.layers.check import Finding, Verdict, check_layer, evidence_of
from moeblaze_ref.verify.layers.diagnosis import Evidence
from moeblaze_ref.verify.layers.layer import CheckedLayer
from moeblaze_ref.verify.layers.reference import Case, Results

PATTERNS = {pattern.name: pattern for pattern in cases.PATTERNS}
RANDOM = cases.PATTERNS[0].name
RIGHT = "right"
WRONG = tuple(wrong.KINDS)
LAYERS: dict[str, Factory] = {RIGHT: plain.experts}
LAYERS |= {name: partial(plain.experts, kind=kind) for name, kind in wrong.KINDS.items()}

# A layer of the notebook's own ---------------------------------------------------------------------------------------


def expert(rows: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """One expert's output (n, d) for rows (n, d); its weights are (2h, d) and (d, h)."""
    gate, up = (rows @ gate_up.mT).chunk(2, -1)
    return (F.silu(gate) * up) @ down.mT


def of_function(function: Callable[..., Tensor]) -> Factory:
    """Return a factory of a layer that is a function of x, topk_index, topk_weights, gate_up and down."""

    def make(*, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
        weights = leaves(dtype, device, gate_up=(E, 2 * h, d), down=(E, d, h))
        return Adapter(partial(function, **weights), plain.LAYOUTS, tensors=weights)

    return make


# Verdicts ------------------------------------------------------------------------------------------------------------


@functools.cache
def checked(name: str) -> Verdict:
    """The verdict on one of ``LAYERS`` in float32."""
    (verdict,) = check_layer(LAYERS[name], [torch.float32])
    return verdict


def first_finding(verdict: Verdict) -> Markdown:
    """The class of a verdict, and a line for each wrong tensor of the first wrong case."""
    if verdict.first is None:
        return Markdown("Nothing is wrong.")
    rows: list[dict[str, Any]] = [
        {
            "tensor": "the output" if one.tensor == "out" else f"gradient of {one.tensor}",
            "first wrong part": one.part or "",
            "error": one.error,
            "bound": one.bound,
            "times the bound": round(one.units),
        }
        for one in verdict.first.wrong
    ]
    first = f"Class: **{verdict.bug_class}**. First in: {verdict.first.way}, {verdict.first.case}."
    return Markdown(f"{first}\n\n{table(rows).data}")


def classes(verdicts: Mapping[str, Verdict]) -> Markdown:
    """A line for each layer: its class of bug, and where it shows first."""
    rows = []
    for name, verdict in verdicts.items():
        first = verdict.first
        where = f"{first.way}, {first.case}" if first else "nowhere"
        rows.append({"wrong layer": name, "class": verdict.bug_class, "shows first in": where})
    return table(rows)


def public_bugs(names: Sequence[str]) -> Markdown:
    """A line for each of these classes of bugs: what such a layer does, and where the public can read of one."""
    found = {bug.name: bug for bug in diagnosis.CLASSES}
    return table(
        [
            {"class": name, "what such a layer does": found[name].sentence, "public reference": found[name].reference}
            for name in names
        ]
    )


# One case ------------------------------------------------------------------------------------------------------------


def compared(factory: Factory, routing: str = RANDOM, dtype: torch.dtype = torch.float32) -> Evidence:
    """Run a step of one of the check's cases."""
    return evidence_of(factory, PATTERNS[routing], dtype)


def plain_results(one: Evidence, dtype: torch.dtype) -> list[Results]:
    """Return plain torch's results of the same case, in its two ways."""
    return [reference.results(one.spec, one.case, dtype, torch.float32, way) for way in reference.PLAIN_WAYS]


def lost_rows(factory: Factory, tile: int) -> Figure:
    """The rows of each expert in the first case, tile by tile, and which tokens have a wrong output."""
    one = compared(factory)
    rows = np.bincount(one.case.topk_index.flatten(), minlength=one.case.sizes.E)
    figure, (bars, tokens) = panels(11, 3.2, 1, 2, width_ratios=(2, 3))
    whole = rows // tile * tile
    experts = range(len(rows))
    bars.bar(experts, whole, label=f"in full tiles of {tile}", **filled(BLUE))
    bars.bar(experts, rows - whole, bottom=whole, label="in the last tile", **filled(VERMILLION))
    bars.set(xlabel="expert", ylabel="routed rows", xticks=experts)
    heading(bars, "rows of each expert")
    _draw_tokens(tokens, one)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_tokens(axes: Any, one: Evidence) -> None:
    """The error of each token's output, beside the size of what is right."""
    off = (one.found["out"] - one.wanted.exact["out"]).norm(dim=1)
    size = one.wanted.exact["out"].norm(dim=1)
    bad = set(deviations.wrong_parts("out", one.found["out"], one.wanted))
    for label, color, chosen in (
        ("wrong token", VERMILLION, sorted(bad)),
        ("right token", GREEN, [token for token in range(len(off)) if token not in bad]),
    ):
        axes.plot(chosen, (off / size)[chosen].clamp(min=1e-8), label=label, **dotted(color))
    axes.set(yscale="log", xlabel="token", ylabel="relative error of its output")
    heading(axes, f"{len(bad)} of {len(off)} tokens are wrong")


# Weak tests ----------------------------------------------------------------------------------------------------------

INITIAL = 0.02  # standard deviation of weights when a model's training begins
SIZES = {"small": INITIAL, "large": None}  # as of `one_step`


class Step(NamedTuple):
    """A step of a test, and what is right."""

    found: Results
    right: Results

    @property
    def outputs(self) -> tuple[Tensor, Tensor]:
        """The output that was found, and the right one."""
        return self.found["out"], self.right["out"]


@functools.cache
def one_step(name: str, size: float | None = INITIAL, routing: str = RANDOM, steps: int = 1) -> Step:
    """Run one of ``LAYERS`` as a simple test does.

    Parameters
    ----------
    name : str
    size : float, optional
        The standard deviation of the weights; None leaves those of the check.
    routing : str
        The name of one of the check's cases.
    steps : int
        The last of so many steps of the same layer counts, each with other tokens.
    """
    pattern = PATTERNS[routing]
    layer = CheckedLayer.make(LAYERS[name], pattern.sizes, torch.float32, "cpu")
    for step in range(steps):
        case = _resized(cases.make(layer.adapter, pattern, torch.float32, step=step, weights_of=0), size)
        found = layer.step(case)
    return Step(found, reference.exact(cases.spec_of(layer.adapter, pattern.sizes.k), case))


def _resized(case: Case, size: float | None) -> Case:
    """The case with weights of this standard deviation."""
    if size is None:
        return case
    return case._replace(weights={role: (w * size / w.std()).float().double() for role, w in case.weights.items()})


OUTPUT, GRADIENTS = "the output", "the output and all gradients"


def largest_error(step: Step, looks_at: str = OUTPUT) -> float:
    """The largest absolute error of an element; infinite if one is NaN."""
    names = ["out"] if looks_at == OUTPUT else [*step.right]
    worst = max(float((step.found[name] - step.right[name]).abs().max()) for name in names)
    return math.inf if any(step.found[name].isnan().any() for name in names) else worst


def guessed(test: Callable[[Tensor, Tensor], bool], guess: set[str]) -> Markdown:
    """A line for each wrong layer: whether a test of the output passes it, and whether you said so.

    Raises
    ------
    ValueError
        If the guess has a name that is none of ``WRONG``.
    """
    if unknown := guess - {*WRONG}:
        raise ValueError(f"no wrong layer is called {sorted(unknown)[0]!r}: they are {', '.join(WRONG)}")
    return table([_guessed(name, bool(test(*one_step(name).outputs)), name in guess) for name in WRONG])


def _guessed(name: str, passes: bool, guess: bool) -> dict[str, Any]:
    says = "passes it" if passes else "finds it"
    return {"wrong layer": name, "your test": says, "your guess": "right" if passes == guess else "wrong"}


LEFT_EDGE = 1e-10  # where errors of zero are drawn
RIGHT_EDGE = 1e3  # and those that are infinite


def weak_test(tolerance: float, weights: str, routing: str, looks_at: str, steps: int) -> Figure:
    """The largest absolute error of each layer in one routing, beside a tolerance."""
    errors = {name: largest_error(one_step(name, SIZES[weights], routing, steps), looks_at) for name in LAYERS}
    missed = [name for name in WRONG if errors[name] <= tolerance]
    figure, axes = panels(9, 4.4)
    for label, color, chosen in (
        ("right", BLUE, [RIGHT]),
        ("wrong, and passes", VERMILLION, missed),
        ("wrong, and fails", GREEN, [name for name in WRONG if name not in missed]),
    ):
        shown = [min(max(errors[name], LEFT_EDGE), RIGHT_EDGE) for name in chosen]
        axes.plot(shown, [list(LAYERS).index(name) for name in chosen], label=label, **dotted(color))
    axes.axvline(tolerance, color=BLACK, linewidth=1, label="tolerance")
    axes.set_yticks(range(len(LAYERS)), LAYERS)
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=(LEFT_EDGE / 2, RIGHT_EDGE * 2), xlabel=f"largest absolute error of {looks_at}")
    heading(axes, f"{len(missed)} of {len(WRONG)} wrong layers pass: their errors are left of the tolerance")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    return figure


# From a weak test to the check ---------------------------------------------------------------------------------------

LOOSE = 0.02  # the tolerance of the tests before the last


def _exceeds(findings: Sequence[Finding], tensors: Callable[[str], bool] = lambda tensor: True) -> bool:
    """Return True if an error was raised, or the error of a chosen tensor is over the loose tolerance."""
    wrong = [deviation for finding in findings for deviation in finding.wrong if tensors(deviation.tensor)]
    return any(finding.raised for finding in findings) or any(not one.error <= LOOSE for one in wrong)


def _steps(verdict: Verdict) -> list[Finding]:
    return [finding for finding in verdict.findings if finding.way == "a step"]


#: whether a test finds one of ``LAYERS``; each does what the one before does, and one thing more
TESTS: Mapping[str, Callable[[str], bool]] = {
    "largest error of\nthe output": lambda name: largest_error(one_step(name)) > LOOSE,
    "relative error,\nlarge weights": lambda name: _exceeds(_steps(checked(name))[:1], lambda tensor: tensor == "out"),
    "and of all\ngradients": lambda name: _exceeds(_steps(checked(name))[:1]),
    "and hard\nroutings": lambda name: _exceeds(_steps(checked(name))),
    "and other ways\nof running": lambda name: _exceeds(checked(name).findings),
    "and twice the\nerror of torch": lambda name: not checked(name).ok,
}


def caught() -> dict[str, list[bool]]:
    """Which of ``TESTS`` find each wrong layer."""
    return {name: [test(name) for test in TESTS.values()] for name in WRONG}


def caught_picture() -> Figure:
    """A row for each wrong layer, and a column for each of ``TESTS``; a filled cell is a layer that is found."""
    found, width = caught(), 2.0
    figure, axes = board(10, 4.8, xlim=(-3.2, width * len(TESTS) + 0.1), ylim=(len(WRONG) + 0.1, -1.9))
    for column, title in enumerate(TESTS):
        centered(axes, width * (column + 0.5), -0.75, title, fontsize=8)
    for row, (name, tests) in enumerate(found.items()):
        axes.text(-0.15, row + 0.5, name, ha="right", va="center", fontsize=9)
        for column, finds in enumerate(tests):
            look = {"facecolor": SKY if finds else "white", "edgecolor": GREY}
            cell(axes, (width * column, row), (width, 1), look, "found" if finds else "passes", fontsize=8)
    heading(axes, "What each test finds; it does what the one on its left does, and more")
    return figure


# The bound -----------------------------------------------------------------------------------------------------------

SHOWN: dict[str, tuple[Factory, str]] = {
    "plain torch": (plain.experts, GREEN),
    "our kernels": (ours.factories()["moeblaze_ref/experts/linear"], BLUE),
    "bfloat16 inside": (LAYERS["bfloat16 inside"], VERMILLION),
}


@functools.cache
def units(name: str, dtype: torch.dtype) -> dict[str, float]:
    """The largest error of one of ``SHOWN`` in each case, in units of its bound."""
    return dict(_units(SHOWN[name][0], dtype))


def _units(factory: Factory, dtype: torch.dtype) -> Iterator[tuple[str, float]]:
    for pattern in cases.patterns_for(factory(d=16, h=16, E=4, k=2, dtype=dtype, device="cpu")):
        yield pattern.name, evidence_of(factory, pattern, dtype).units


def units_picture(dtype: str) -> Figure:
    """The largest error of three layers in each case, in units of its bound."""
    figure, axes = panels(10, 4.2)
    names = list(units(next(iter(SHOWN)), getattr(torch, dtype)))
    for beside, (label, (_, color)) in zip((-0.2, 0, 0.2), SHOWN.items(), strict=True):
        found = units(label, getattr(torch, dtype))
        axes.plot([names.index(name) + beside for name in found], found.values(), label=label, **dotted(color))
    axes.axhline(1, color=BLACK, linewidth=1)
    axes.text(-0.4, 1.2, "the bound", va="bottom")
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    axes.set(yscale="log", ylim=(3e-3, 3e3), ylabel="largest error in units of the bound")
    heading(axes, f"{dtype}: the largest error of any tensor, case by case")
    figure.legend(loc="outside lower center", ncols=len(SHOWN), frameon=False)
    return figure
