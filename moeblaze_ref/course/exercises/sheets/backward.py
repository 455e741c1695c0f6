"""Exercises of notebook 04: gradients."""

from moeblaze_ref.backends.numba_cuda import combine, expert_up
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import cuda_kernel, numba_kernel

UP, DOWN = "expert_up/1_naive.cu", "expert_down/1_naive.cu"


def _weight_gradient(layer):
    cost = roofline.cost_of("d_w1", layer)
    return {"flops": cost.flops, "written": layer.E * layer.d * layer.h * layer.itemsize}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="weight-gradient",
        title="The gradient of w1",
        question="""For each expert, `d_w1` is the product of its rows of `x`, transposed, and its rows of `d_a` `(R,
            h)`. How many FLOPs do these products take over all experts, and how many bytes does the result take, in the
            layer's dtype?""",
        given={"layer": preset("qwen3").config},
        asked={
            "flops": Asked("FLOPs", "2 * layer.R * layer.d * layer.h"),
            "written": Asked("bytes", "layer.E * layer.d * layer.h * layer.itemsize"),
        },
        truth=_weight_gradient,
        computed_by="moeblaze_ref.bench.roofline.cost_of",
        hint="Each routed row adds one product to every element of its expert's `(d, h)` matrix.",
        why="""The FLOPs grow with the rows, the bytes with the experts. With few tokens for each expert the gradient
            costs more to write than to compute.""",
    ),
    KernelExercise(
        name="gate-gradient",
        title="The textbook gradient of a gate",
        kind="numba",
        question="""`out = sum of gates[token, j] * y[row]`, so the gradient of a gate is the scalar product of
            `d_out[token]` and its row of `y`. A thread has one slot. Compute the gradient of its gate.""",
        task="combine.d_gates",
        kernel=numba_kernel(combine.d_gates_kernel),
        change=(
            "        token, position = slot // k, token_index_map[slot]\n...\n"
            "        d_gates[token, slot % k] = total\n",
            "        pass  # Your part: <d_out, y> of the slot, into d_gates[token, slot % k].\n",
        ),
        budgets=("read of y <= 4 R d", "read of d_out <= 4 R d", "written <= 4 R"),
        division=("accesses <= 2 d + 2", "barriers <= 0", "threads >= R"),
        hint="The token of a slot is `slot // k`, and its row is `token_index_map[slot]`. Begin the sum at `ZERO`.",
        why="""This gradient needs `y`, an `(R, d)` tensor that must be kept until the backward. The exercises of
            notebook 05 compute the same number from tensors that the layer has anyway.""",
    ),
    KernelExercise(
        name="expert-sums",
        title="A weight's gradient, expert by expert",
        kind="numba",
        question="""A thread has one element of `d_w` `(E, d, h)`. Sum `x * d_hidden` over the rows of its expert, which
            are neighbours in expert order: from `expert_token_offsets[expert]` to the next offset. `d_hidden` is in
            expert order, `x` is not.""",
        task="expert_up.d_w",
        kernel=numba_kernel(expert_up.d_w_kernel),
        change=(
            "        for position in range(expert_token_offsets[expert], expert_token_offsets[expert + 1]):\n"
            "            total += x[expert_token_indices[position], row] * d_hidden[position, column]\n",
            "        # Your part: the sum over the expert's positions; x is gathered.\n",
        ),
        budgets=("read of x <= 4 R d h", "read of d_hidden <= 4 R d h", "written <= 4 E d h"),
        division=("accesses <= 3 L + 3", "barriers <= 0", "threads >= E d h"),
        hint="""The token of a position is `expert_token_indices[position]`. An expert without rows has an empty range,
            and gets zeros.""",
        why="""An expert without rows still has a gradient, all zeros. A kernel that skips these writes leaves the old
            contents of the memory.""",
    ),
    KernelExercise(
        name="sum-on-the-fly",
        title="The gradient of x without routed rows",
        kind="cuda",
        question="""A thread has one element of `d_x` `(L, d)`. Each of the token's `k` slots adds `<d_a, w1> + <d_b,
            w2>`. The left factors are the slot's row of `d_a` and `d_b`, which begins at `row`. The right factors are
            the element's row of the expert's `w1` and `w2`, which begins at `weight`. Both are read along `h`. Write
            the inner loop.""",
        task="expert_up.d_x",
        kernel=cuda_kernel(UP, "d_x"),
        change=(
            "        for (int p = 0; p < h; ++p) {\n...\n        }\n",
            "        // Your part: add both scalar products over h to the sum.\n",
        ),
        budgets=("written <= 4 L d", "read of d_a <= 4 R d h", "read of w1 <= 4 R d h"),
        division=("accesses <= (4 h + 2) k + 1", "barriers <= 0", "threads >= L d"),
        hint="""`d_a[row + p] * w1[weight + p]` for `p` from 0 to `h - 1`, and the same of `d_b` and `w2`. `to_float`
            changes nothing in float32.""",
        why="""The `(R, d)` gradients of the routed rows never exist: a thread sums a token's slots in a register, in
            their order.""",
    ),
    KernelExercise(
        name="whose-gate",
        title="A gate in the wrong order",
        kind="bug",
        question="""`gate_of_row[row]` is the gate of a row in expert order. The kernel uses it to scale the gradients
            of `a` and `b`; one index is wrong. All shapes fit, and no access is out of bounds.""",
        task="expert_down.d_hidden",
        kernel=cuda_kernel(DOWN, "d_hidden"),
        change=("gate_of_row[at.row]", "gate_of_row[expert_token_indices[at.row]]"),
        budgets=("read of w3 <= 4 R d h", "written <= 16 R h"),
        division=("accesses <= 2 d + 10", "barriers <= 0", "threads >= R h"),
        hint="`expert_token_indices[row]` is a token. Is `gate_of_row` indexed by tokens?",
        why="""If all tokens go to one expert, row and token are the same number, and the bug changes nothing. A test
            with one routing is not enough.""",
    ),
)
