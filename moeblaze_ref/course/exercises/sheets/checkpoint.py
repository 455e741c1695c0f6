"""Exercises of notebook 05: what is kept, what is computed again."""

from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_grid
from moeblaze_ref.memory.accounting import account, largest_tokens

D_HIDDEN = """\
#include "activation.cuh"
#include "expert_rows.cuh"

// A thread has one hidden element of a row: d_ungated is <d_out, w3>, the gradient of its y_swi before the gate.
extern "C" __global__ void d_hidden(const float* d_out, const float* gate_of_row, const float* a, const float* b,
                                    const float* w3, const int* expert_token_indices, const int* expert_token_offsets,
                                    float* d_a, float* d_b, float* gated_y, float* gate_terms, int d, int h) {
    const GroupElement at = group_element<THREADS>(expert_token_offsets, h);
    if (!at.inside) return;
    const float* const d_out_row = d_out + expert_token_indices[at.row] * d;
    const float* const w3_row = w3 + (blockIdx.y * h + at.column) * d;
    float d_ungated = 0.0f;
    for (int p = 0; p < d; ++p) d_ungated += d_out_row[p] * w3_row[p];

    const int index = at.row * h + at.column;
    const float gate = gate_of_row[at.row], a_value = a[index], b_value = b[index];
    const float act_a = ACTIVATION::act(a_value), slope = ACTIVATION::slope(a_value);
    d_a[index] = gate * d_ungated * b_value * slope;
    d_b[index] = gate * d_ungated * act_a;
    gated_y[index] = gate * act_a * b_value;
    gate_terms[index] = d_ungated * act_a * b_value;
}
"""


def _freed(layer):
    paper, minimal, inputs = (
        account(layer, "moeblaze", policy).kept_bytes for policy in ("paper", "minimal", "inputs")
    )
    return {"minimal": paper - minimal, "inputs": minimal - inputs}


def _price(layer):
    flops = roofline.cost_of("expert_up", layer).flops
    return {"repeated": flops, "flops_per_byte": flops / _freed(layer)["inputs"]}


def _largest(layer, capacity):
    tokens = {policy: largest_tokens(layer, "moeblaze", policy, capacity) for policy in ("paper", "inputs")}
    return {"times": tokens["inputs"] / tokens["paper"]}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="freed-bytes",
        title="What a policy frees",
        difficulty=1,
        question="""Between its products, policy `paper` keeps `a`, `b` and `y_swi`, `minimal` keeps `a` and `b`, and
            `inputs` keeps nothing. How many bytes does `minimal` free in comparison with `paper`, and how many does
            `inputs` free in comparison with `minimal`?""",
        given={"layer": preset("conf3").config},
        asked={
            "minimal": Asked("bytes", "layer.R * layer.h * layer.itemsize"),
            "inputs": Asked("bytes", "2 * layer.R * layer.h * layer.itemsize"),
        },
        truth=_freed,
        computed_by="moeblaze_ref.memory.accounting.account",
        hints=(
            "Each of the three is `(R, h)`.",
            "`minimal` frees one of the three, and `inputs` the other two.",
        ),
        why="""From `paper` to `minimal`, the kernels compute nothing more: their backward rebuilds `y_swi` under both.
            From `minimal` to `inputs`, the layer computes two matrix products more.""",
    ),
    Prediction(
        name="price-of-a-byte",
        title="FLOPs for a byte",
        difficulty=2,
        question="""Under `inputs` the backward computes `a` and `b` again. How many FLOPs does that take, and how many
            for each byte that `inputs` frees in comparison with `minimal`?""",
        given={"layer": preset("conf3").config},
        asked={
            "repeated": Asked("FLOPs", "4 * layer.R * layer.d * layer.h"),
            "flops_per_byte": Asked("FLOPs for each byte", "2 * layer.d / layer.itemsize"),
        },
        truth=_price,
        computed_by="moeblaze_ref.bench.roofline.cost_of",
        hints=(
            "Use the bytes of the exercise before.",
            "Two products of `2 * R * d * h` FLOPs, for two tensors of `R * h` elements: what cancels?",
        ),
        why="The number of rows and the expert width cancel, so the price of a byte grows with `d` alone.",
    ),
    Prediction(
        name="longer-steps",
        title="How many more tokens?",
        difficulty=3,
        question="""The activations of one layer's forward must fit into `capacity` bytes. How many times as many tokens
            does `inputs` allow as `paper`? Both need `y_swi` `(R, h)`, `y` `(R, d)`, `x` and `out` `(L, d)`, and
            `paper` keeps `a` and `b`. Under `inputs` the forward frees `y_swi` once `y` is there, and makes `out` after
            that. An answer within one percent is right.""",
        given={"layer": preset("conf4").config, "capacity": 80 * 10**9},
        steps=(
            "paper = layer.k * (3 * layer.h + layer.d) + 2 * layer.d  # elements of a token",
            "inputs = layer.k * (layer.h + layer.d) + layer.d",
        ),
        asked={"times": Asked("a ratio", "paper / inputs")},
        truth=_largest,
        computed_by="moeblaze_ref.memory.accounting.largest_tokens",
        hints=(
            "Count the elements that one token costs under each policy. The answer is their ratio.",
            """For one token, an `(R, h)` tensor has `k * h` elements, `y` has `k * d`, `x` and `out` have `d`. Add up,
            for each policy, what is alive at the worst moment: with `out` under `paper`, before `out` under
            `inputs`.""",
        ),
        why="""`inputs` keeps nothing between the products, but the ratio is far from what the kept bytes promise. The
            forward itself needs memory for `y_swi` and `y`.""",
    ),
    KernelExercise(
        name="rebuild-y",
        title="Rebuild what was not kept",
        difficulty=2,
        kind="cuda",
        question="""Policy `minimal` keeps `a` and `b`, not `y_swi = act(a) * b`. The backward has them in registers, so
            it rebuilds `y_swi` on the way. You have `d_ungated` (the element of `d_out w3^T`), `gate`, `a_value`,
            `b_value`, `act_a` and `slope`. Write the four results. `d_a` and `d_b` are the gradients of `a` and `b`,
            and `gated_y` is the gate times `y_swi`. `gate_terms` is the element's share of its gate's gradient,
            `d_ungated * y_swi`.""",
        task="expert_down.d_hidden",
        kernel=Kernel("d_hidden", D_HIDDEN, cuda_grid("expert_down/1_naive.cu", "d_hidden")),
        change=(
            "    d_a[index] = gate * d_ungated * b_value * slope;\n...\n"
            "    gate_terms[index] = d_ungated * act_a * b_value;\n",
            "    // Your part: d_a, d_b, gated_y and gate_terms at this index.\n",
        ),
        budgets=("read of a <= 4 R h", "read of b <= 4 R h", "written <= 16 R h"),
        division=("accesses <= 2 d + 10", "barriers <= 0", "threads >= R h"),
        hints=(
            "Write the formula of `y_swi` first, then differentiate it with respect to `a` and to `b`.",
            """Behind the gate the gradient of `y_swi` is `gate * d_ungated`. Then the product rule: `y_swi = act(a) *
            b`.""",
        ),
        why="""The gate's gradient needs neither `y` nor `y_swi` from memory: `<d_out, y> = <d_out w3^T, y_swi>`, and
            the right side lies in registers.""",
    ),
)
