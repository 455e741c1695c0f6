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
        question="""A conventional layer copies its input into expert order, each token once for each of its experts.
            How many bytes has the input `x`, and how many the copy `routed_x`? One layer of Qwen3.""",
        given={"layer": preset("qwen3").config},
        asked={
            "x": Asked("bytes", "layer.L * layer.d * layer.itemsize"),
            "routed_x": Asked("bytes", "layer.R * layer.d * layer.itemsize"),
        },
        truth=_kept,
        computed_by="moeblaze_ref.memory.accounting.account",
        hint="""Bytes are rows times columns times `layer.itemsize`. `x` has a row for each token. What has a row of
            `routed_x`?""",
        why="The copy is `k` times the input, and holds no number that the input does not hold.",
    ),
    Prediction(
        name="second-wall",
        title="Which wall is the higher one?",
        question="""Between its matrix products a SwiGLU expert leaves `a`, `act_a = silu(a)`, `b` and `y_swi`, and
            plain torch keeps all four. How many bytes are they together, in a layer of many narrow experts? And which
            is larger there: `routed_x`, or these four?""",
        given={"layer": preset("fine-grained").config},
        asked={
            "hidden": Asked("bytes", "4 * layer.R * layer.h * layer.itemsize"),
            "larger": Asked("'routed_x' or 'hidden'", '"routed_x"'),
        },
        truth=_second_wall,
        computed_by="moeblaze_ref.memory.accounting.account",
        hint="All four are `(R, h)`; `routed_x` is `(R, d)`. So compare `4 * h` with `d`.",
        why="""With wide experts the second wall is the higher one, with narrow experts the first. Fine-grained models
            live where the routed copy costs most.""",
    ),
    Prediction(
        name="step-flops",
        title="Work of a step",
        question="""A matrix product of `(R, d)` by `(d, h)` takes `2 * R * d * h` FLOPs. How many FLOPs have the
            experts' products in the forward of a SwiGLU layer, and how many in a whole step, forward and backward?""",
        given={"layer": preset("conf4").config},
        asked={
            "forward": Asked("FLOPs", "3 * 2 * layer.R * layer.d * layer.h"),
            "step": Asked("FLOPs", "9 * 2 * layer.R * layer.d * layer.h"),
        },
        truth=_step_flops,
        computed_by="moeblaze_ref.bench.roofline.layer_flops",
        hint="""The forward multiplies by `w1`, `w2` and `w3`. In the backward each of these products has two gradients,
            that of its input and that of its weights, and each is a product of the same size.""",
        why="""Three products forward, six backward. None of it depends on what is kept, unless something that was not
            kept is computed again.""",
    ),
)
