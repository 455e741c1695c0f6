"""Exercises of notebook 00: bytes and FLOPs of one layer."""

from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, Prediction
from moeblaze_ref.memory.accounting import account


def _kept(layer):
    """Bytes of each tensor that plain torch keeps."""
    return {tensor.name: tensor.bytes for tensor in account(layer, "conventional").tensors if tensor.kept}


def _second_wall(layer):
    kept = _kept(layer)
    hidden = sum(kept[name] for name in ("a", "act_a", "b", "y_swi"))
    return {"hidden": hidden, "larger": "routed_x" if kept["routed_x"] > hidden else "hidden"}


def _step_flops(layer):
    forward = sum(roofline.cost_of(stage, layer).flops for stage in ("expert_up", "expert_down"))
    return {"forward": forward, "step": roofline.layer_flops(layer)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="first-wall",
        title="The first wall",
        difficulty=1,
        question="""A conventional layer copies its input into expert order, each token once for each of its experts.
            How many bytes does the input `x` take in one layer of Qwen3, and how many does the copy `routed_x`
            take?""",
        given={"layer": preset("qwen3").config},
        asked={
            "x": Asked("bytes", "layer.L * layer.d * layer.itemsize"),
            "routed_x": Asked("bytes", "layer.R * layer.d * layer.itemsize"),
        },
        truth=_kept,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            """Bytes are rows times columns times `layer.itemsize`. `x` has a row for each token. For what does
            `routed_x` have a row?""",
            "`routed_x` has a row for each choice of an expert: `R = L * k` rows, `k` times as many as `x`.",
        ),
        why="The copy is `k` times as large as the input, but holds no number that the input does not hold.",
    ),
    Prediction(
        name="second-wall",
        title="Which wall is larger?",
        difficulty=1,
        question="""A SwiGLU expert leaves `a`, `act_a = silu(a)`, `b` and `y_swi` between its matrix products, and
            plain torch keeps all four. How many bytes do they take together, in a layer of many narrow experts? And
            which is larger there: the first wall, `routed_x`, or the second, these four?""",
        given={"layer": preset("fine-grained").config},
        asked={
            "hidden": Asked("bytes", "4 * layer.R * layer.h * layer.itemsize"),
            "larger": Asked("'routed_x' or 'hidden'", '"routed_x"'),
        },
        truth=_second_wall,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "Count the rows and the columns of each tensor first.",
            "All four are `(R, h)`; `routed_x` is `(R, d)`. So compare `4 * h` with `d`.",
        ),
        why="""With wide experts the second wall is larger, with narrow experts the first. In models with many narrow
            experts, the routed copy costs most.""",
    ),
    Prediction(
        name="step-flops",
        title="Work of a step",
        difficulty=2,
        question="""A matrix product of `(R, d)` by `(d, h)` takes `2 * R * d * h` FLOPs. How many FLOPs do the experts'
            products take in the forward of a SwiGLU layer, and how many in a whole step, forward and backward?""",
        given={"layer": preset("conf4").config},
        asked={
            "forward": Asked("FLOPs", "3 * 2 * layer.R * layer.d * layer.h"),
            "step": Asked("FLOPs", "9 * 2 * layer.R * layer.d * layer.h"),
        },
        truth=_step_flops,
        computed_by="moeblaze_ref.bench.roofline.layer_flops",
        hints=(
            "Count products, not FLOPs: how many has the forward, and how many gradients has each of them?",
            """The forward multiplies by `w1`, `w2` and `w3`. In the backward each of these products has two gradients,
            that of its input and that of its weights. Each of them is a product of the same size.""",
        ),
        why="""A step has three products forward and six backward. Their number does not depend on what is kept, unless
            the layer computes again something that it did not keep.""",
    ),
)
