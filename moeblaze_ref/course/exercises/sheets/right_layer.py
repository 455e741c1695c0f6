"""Exercises of notebook 12: tests that find wrong layers, and tests that do not."""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.course.exercises.exercise import Asked, Construction, Exercise, Prediction, TorchExercise
from moeblaze_ref.course.exercises.forms import whole_numbers
from moeblaze_ref.verify.cases import relative_error

MOST_TOKENS = 64  # of a routing that is run
HIDDEN = ("last tile lost", "stale gradient")
ONE_STEP = (  # wrong layers that one step can find
    "zeros",
    "gate and up exchanged",
    "last tile lost",
    "last expert skipped",
    "choices overwritten",
    "stale gradient",
    "NaN without tokens",
)


def _zeros(atol, rtol):
    """The largest number beside which a test with both tolerances passes a zero, and the error of zeros."""
    largest = atol
    for _ in range(64):
        largest = atol + rtol * largest
    return {"largest": largest, "error": relative_error(np.zeros(8), np.full(8, largest))}


def _bounds(bfloat16, layer, float32):
    import torch

    from moeblaze_ref.verify.layers.deviations import Deviation, bound_for

    bound = bound_for(max(bfloat16), 1464, torch.bfloat16)
    units = Deviation("out", None, layer, bound).units
    return {"bound": bound, "units": units, "float32_bound": bound_for(max(float32), 1464, torch.float32)}


def _passing(names, topk_experts, experts, most):
    """The routing that was said, and which wrong layers pass with it."""
    from moeblaze_ref.course.exercises.layer_runs import passing

    routing = whole_numbers("topk_experts", topk_experts, (None, 2))
    checks.check_choice("topk_experts", routing, experts)
    if len(routing) > most:
        raise ValueError(f"topk_experts has {len(routing)} tokens, but there may be {most} at most")
    return routing, passing(names, routing, experts)


def _hides(experts, tile, topk_experts):
    routing, passed = _passing(HIDDEN, topk_experts, experts, MOST_TOKENS)
    rows = np.bincount(routing.flatten(), minlength=experts).tolist()
    found = [name for name in HIDDEN if name not in passed]
    return f"the test finds '{found[0]}': the experts have {rows} rows, a tile has {tile}" if found else ""


def _finds(experts, most, topk_experts):
    _, passed = _passing(ONE_STEP, topk_experts, experts, most)
    return f"'{passed[0]}' passes, though it is wrong" if passed else ""


GROUPED = '''\
import torch


class Grouped(torch.autograd.Function):
    """Each expert's rows times its matrix: rows (R, d) in the order of their experts, w1 (E, d, h), lengths (E,)."""

    @staticmethod
    def forward(ctx, rows, w1, lengths):
        ctx.save_for_backward(rows, w1, lengths)
        groups = rows.split(lengths.tolist())
        return torch.cat([group @ w for group, w in zip(groups, w1)])

    @staticmethod
    def backward(ctx, d_y):
        rows, w1, lengths = ctx.saved_tensors
        groups, d_groups = rows.split(lengths.tolist()), d_y.split(lengths.tolist())
        d_rows = torch.cat([d @ w.T for d, w in zip(d_groups, w1)])
        d_w1 = torch.zeros_like(w1)
        for e, (group, d) in enumerate(zip(groups, d_groups)):
            if len(group) > 0:
                d_w1[e] = group.T @ d
        return d_rows, d_w1, None
'''
GROUPED_CHANGES = (
    ("import torch\n", "import torch\n\nBUFFERS = {}  # memory for gradients, by their shape\n"),
    (
        "        d_w1 = torch.zeros_like(w1)\n",
        "        d_w1 = BUFFERS.setdefault(w1.shape, torch.zeros_like(w1))\n",
    ),
)

EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="zeros-pass",
        title="When zeros pass",
        difficulty=1,
        question="""A test passes an element if `abs(found - right) <= atol + rtol * abs(right)`. A layer returns zeros.
            Up to which size of `right` does the test pass them? And what is the relative error of zeros, the norm of
            `found - right` divided by the norm of `right`?""",
        given={"atol": 0.05, "rtol": 0.1},
        asked={"largest": Asked("size of an element", "atol / (1 - rtol)"), "error": Asked("relative", "1")},
        truth=_zeros,
        computed_by="moeblaze_ref.verify.cases.relative_error",
        hints=(
            "Put `found = 0` into the test. Which size of `right` stands on both sides?",
            "Solve `right = atol + rtol * right`. For the second number, `found - right` is `-right`.",
        ),
        why="""Small weights make outputs that are smaller than many a tolerance, so zeros pass. The relative
            error of zeros is one, whatever the sizes are.""",
    ),
    Prediction(
        name="times-the-bound",
        title="In units of the bound",
        difficulty=1,
        question="""Plain torch computes a tensor of 1,464 elements in two ways. Its relative errors in bfloat16 are
            `bfloat16`, and in float32 they are `float32`. A layer's error in bfloat16 is `layer`. What is the bound in
            bfloat16, how many times the bound is the layer's error, and what is the bound in float32?""",
        given={"bfloat16": [0.0031, 0.0027], "layer": 0.0093, "float32": [2.1e-7, 1.6e-7]},
        asked={
            "bound": Asked("relative error", "2 * max(bfloat16)"),
            "units": Asked("times the bound", "layer / (2 * max(bfloat16))"),
            "float32_bound": Asked("relative error", "max(2 * max(float32), 1e-5)"),
        },
        truth=_bounds,
        computed_by="moeblaze_ref.verify.layers.deviations.bound_for",
        hints=(
            "The bound is twice the larger error of plain torch.",
            "In float32 there is a least bound. Notebook 12 says which.",
        ),
        why="""The bound moves with the dtype and with the numbers. In float32 plain torch loses so little that the
            least bound decides.""",
    ),
    Construction(
        name="full-tiles",
        title="A routing that hides two bugs",
        difficulty=2,
        question="""A test has one routing. One wrong layer loses the rows of an expert that fill no tile of `tile`
            rows. Another writes no gradient for an expert without tokens. Construct `topk_experts`, two different
            experts for each token, with which both layers pass the test.""",
        given={"experts": 4, "tile": 4},
        asked={"topk_experts": Asked("two experts a token", "[[0, 1]] * 4 + [[2, 3]] * 4")},
        check=_hides,
        checked_by="moeblaze_ref.course.exercises.layer_runs.passing",
        hints=(
            "How many rows must each expert have, so that nothing of a tile is left over?",
            "Each of the four experts needs at least one row, and a multiple of four. Eight tokens have 16 rows.",
        ),
        why="""Sizes that are multiples of everything are an easy choice for a test, and they hide such bugs. The cases
            of the check have odd sizes and idle experts on purpose.""",
    ),
    Construction(
        name="small-and-hard",
        title="A small routing that finds seven bugs",
        difficulty=2,
        question="""Seven wrong layers of notebook 12 can show in one step: `zeros`, `gate and up exchanged`,
            `last tile lost`, `last expert skipped`, `choices overwritten`, `stale gradient` and `NaN without tokens`.
            Construct `topk_experts` of at most `most` tokens, two different experts for each, with which none of the
            seven passes.""",
        given={"experts": 4, "most": 4},
        asked={"topk_experts": Asked("two experts a token", "[[0, 3]]")},
        check=_finds,
        checked_by="moeblaze_ref.course.exercises.layer_runs.passing",
        hints=(
            "Which experts must have a token, and which must have none?",
            "The last expert must be chosen, and some expert must not be. How many tokens does that take?",
        ),
        why="One token is enough, if it chooses the last expert. A hard case is worth more than a large one.",
    ),
    TorchExercise(
        name="earlier-step",
        title="Right in the first step",
        difficulty=2,
        question="""The function below is right in its first step, and saves no more than it may. Something of a step
            remains, and is wrong in a later one. Find it, and mend it. Forward and backward run in two processes, each
            with all cases one after another. The backward is by hand: autograd cannot do it for you.""",
        project="function.GROUPED",
        changes=GROUPED_CHANGES,
        solution=GROUPED,
        hints=(
            "Which case is wrong, and of which expert is the first wrong element? What did that expert have before?",
            "`d_w1` is memory of an earlier step. An expert without rows writes nothing into it.",
        ),
        why="""A test of one step cannot find this. For this reason the check runs a second step of the same shape with
            other tokens, and routings with idle experts. The last step has the lengths of the second again. Then the
            check looks at the gradients of all steps once more.""",
    ),
)
