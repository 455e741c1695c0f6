"""Exercises of notebook 04: gradients."""

from moeblaze_ref.backends.numba_cuda import combine, expert_up
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_kernel, numba_kernel

UP, DOWN = "expert_up/1_naive.cu", "expert_down/1_naive.cu"

GRID_STRIDE = """\
from moeblaze_ref.backends.numba_cuda.runtime import cuda

BLOCKS = 4


@cuda.jit
def d_y(d_out, gates, token_index_map, d_y):
    \"\"\"Send gate * d_out to each of a token's rows. The grid has BLOCKS blocks, whatever R d is.

    Grid          BLOCKS blocks of THREADS threads
    \"\"\"
    num_routed, d = d_y.shape
    k = gates.shape[1]
    for element in range(cuda.grid(1), num_routed * d, cuda.gridsize(1)):
        slot, column = element // d, element % d
        token, j = slot // k, slot % k
        d_y[token_index_map[slot], column] = gates[token, j] * d_out[token, column]
"""

SIXTEEN_BYTES = """\
#include "pack.cuh"
#include "scalar.cuh"

constexpr int PACK = 8;

// A thread has eight neighbouring columns of a slot's row: 16 bytes of bfloat16.
extern "C" __global__ void d_y(const Scalar* d_out, const float* gates, const int* token_index_map, Scalar* d_y, int R,
                               int d, int k) {
    const int at = (blockIdx.x * THREADS + threadIdx.x) * PACK;
    if (at >= R * d) return;
    const int slot = at / d, column = at % d;
    const float gate = gates[slot];
    const int from = slot / k * d + column, to = token_index_map[slot] * d + column;
    Pack<Scalar, PACK> pack = load_pack<PACK>(d_out + from);
    for (int i = 0; i < PACK; ++i) pack.elements[i] = from_float<Scalar>(gate * to_float(pack.elements[i]));
    store_pack(d_y + to, pack);
}
"""

WARP_A_ROW = """\
#include "common.cuh"

// A warp has a slot.
extern "C" __global__ void d_gates(const float* d_out, const float* y, const int* token_index_map, float* d_gates,
                                   int R, int d, int k) {
    const int slot = blockIdx.x * (THREADS / WARP) + warp_id();
    if (slot >= R) return;
    const float* const left = d_out + slot / k * d;
    const float* const right = y + token_index_map[slot] * d;
    float sum = 0.0f;
    for (int p = lane_id(); p < d; p += WARP) sum += left[p] * right[p];
    sum = warp_sum(sum);
    if (lane_id() == 0) d_gates[slot] = sum;
}
"""

PADDED_TILE = """\
#include "common.cuh"
#include "hidden.cuh"

// A block is one warp. It has a slot and 32 hidden columns, a lane for each: d_ungated is <d_out, row of w3>.
extern "C" __global__ void d_hidden(const float* d_out, const float* gates, const float* a, const float* b,
                                    const float* w3, const int* token_expert_indices, const int* token_index_map,
                                    float* d_a, float* d_b, float* gated_y, int d, int h, int k) {
    __shared__ float tile[WARP * (WARP + 1)];
    const int slot = blockIdx.x, lane = threadIdx.x;
    const int rows = min(WARP, h - int(blockIdx.y) * WARP);  // of w3, in this block
    const float* const w3_rows = w3 + (token_expert_indices[slot] * h + blockIdx.y * WARP) * d;
    const float* const d_out_row = d_out + slot / k * d;
    float d_ungated = 0.0f;
    for (int first = 0; first < d; first += WARP) {
        const int columns = min(WARP, d - first);
        for (int i = 0; i < rows; ++i)
            if (lane < columns) tile[i * (WARP + 1) + lane] = w3_rows[i * d + first + lane];
        __syncthreads();
        for (int p = 0; p < columns && lane < rows; ++p)
            d_ungated += d_out_row[first + p] * tile[lane * (WARP + 1) + p];
        __syncthreads();
    }
    if (lane >= rows) return;
    const int at = token_index_map[slot] * h + blockIdx.y * WARP + lane;
    store_hidden_gradients(a, b, d_a, d_b, gated_y, at, d_ungated, gates[slot]);
}
"""


def _weight_gradient(layer):
    cost = roofline.cost_of("d_w1", layer)
    return {"flops": cost.flops, "written": layer.E * layer.d * layer.h * layer.itemsize}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="weight-gradient",
        title="The gradient of w1",
        difficulty=2,
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
        hints=(
            "One number depends on the rows, the other does not.",
            "Each routed row adds one product to every element of its expert's `(d, h)` matrix.",
        ),
        why="""The FLOPs grow with the rows, the bytes with the experts. With few tokens for each expert the gradient
            costs more to write than to compute.""",
    ),
    KernelExercise(
        name="gate-gradient",
        title="The textbook gradient of a gate",
        difficulty=1,
        kind="numba",
        question="""`out = sum of gates[token, j] * y[row]`, so the gradient of a gate is the scalar product of
            `d_out[token]` and its row of `y`. A thread has one slot, whose row is `token_index_map[slot]`. Compute the
            gradient of its gate.""",
        task="combine.d_gates",
        kernel=numba_kernel(combine.d_gates_kernel),
        change=(
            "        token, position = slot // k, token_index_map[slot]\n...\n"
            "        d_gates[token, slot % k] = total\n",
            "        pass  # Your part: <d_out, y> of the slot, into d_gates[token, slot % k].\n",
        ),
        budgets=("read of y <= 4 R d", "read of d_out <= 4 R d", "written <= 4 R"),
        division=("accesses <= 3 d + 1", "barriers <= 0", "threads >= R"),
        hints=(
            "Find the token and the row of `y` that belong to the slot. Then sum over the columns.",
            "The token of a slot is `slot // k`, and its row is `token_index_map[slot]`. Begin the sum at `ZERO`.",
        ),
        why="""This gradient needs `y`, an `(R, d)` tensor that must be kept until the backward. The exercises of
            notebook 05 compute the same number from tensors that the layer has anyway.""",
    ),
    KernelExercise(
        name="expert-sums",
        title="A weight's gradient, expert by expert",
        difficulty=2,
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
        hints=(
            "The loop runs over positions in expert order. Only `x` needs a lookup.",
            """The token of a position is `expert_token_indices[position]`. An expert without rows has an empty range,
            and gets zeros.""",
        ),
        why="""An expert without rows still has a gradient, all zeros. A kernel that skips these writes leaves the old
            contents of the memory.""",
    ),
    KernelExercise(
        name="sum-on-the-fly",
        title="The gradient of x without routed rows",
        difficulty=2,
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
        hints=(
            "Two products are added in each turn of the loop, both at the same `p`.",
            """`d_a[row + p] * w1[weight + p]` for `p` from 0 to `h - 1`, and the same of `d_b` and `w2`. `to_float`
            changes nothing in float32.""",
        ),
        why="""The `(R, d)` gradients of the routed rows never exist: a thread sums a token's slots in a register, in
            their order.""",
    ),
    KernelExercise(
        name="whose-gate",
        title="A gate in the wrong order",
        difficulty=1,
        kind="bug",
        question="""`gate_of_row[row]` is the gate of a row in expert order. The kernel uses it to scale the gradients
            of `a` and `b`; one index is wrong. All shapes fit, and no access is out of bounds.""",
        task="expert_down.d_hidden",
        kernel=cuda_kernel(DOWN, "d_hidden"),
        change=("gate_of_row[at.row]", "gate_of_row[expert_token_indices[at.row]]"),
        budgets=("read of w3 <= 4 R d h", "written <= 16 R h"),
        division=("accesses <= 2 d + 10", "barriers <= 0", "threads >= R h"),
        hints=(
            "The report names the first wrong row. Which gate did the kernel take for it?",
            "`expert_token_indices[row]` is a token. Is `gate_of_row` indexed by tokens?",
        ),
        why="""If all tokens go to one expert, row and token are the same number, and the bug changes nothing. A test
            with one routing is not enough.""",
    ),
    KernelExercise(
        name="grid-stride",
        title="A grid of fixed size",
        difficulty=1,
        kind="numba",
        question="""The launch has four blocks, whatever the sizes are. So a thread has several elements of `d_y`. The
            first is the element with the thread's number, `cuda.grid(1)`. The next ones follow in steps of
            `cuda.gridsize(1)`, the number of all threads. `d_y` of a slot is `gates[token, j] * d_out[token, column]`,
            at the slot's row, `token_index_map[slot]`. Write the loop.""",
        task="combine.d_y",
        kernel=Kernel("d_y", GRID_STRIDE),
        change=(
            "    for element in range(cuda.grid(1), num_routed * d, cuda.gridsize(1)):\n...\n"
            "        d_y[token_index_map[slot], column] = gates[token, j] * d_out[token, column]\n",
            "    # Your part: the loop over the thread's elements of d_y, slot by slot.\n",
        ),
        budgets=("read of d_out <= 4 R d", "written <= 4 R d"),
        division=(
            "accesses <= 4 ceil(R d / (BLOCKS THREADS))",
            "barriers <= 0",
            "threads >= min(R d, BLOCKS THREADS)",
        ),
        hints=(
            "Python's `range` takes a first number, an end and a step.",
            "The slot of an element is `element // d`. The token of a slot is `slot // k`, and `j` is `slot % k`.",
        ),
        why="""A launch with fixed blocks fits every size, and a block that stays can keep something for its next
            element. Neighbouring threads still have neighbouring elements. The persistent kernels of notebook 06 are
            this loop over tiles.""",
    ),
    KernelExercise(
        name="sixteen-bytes",
        title="Sixteen bytes at a time",
        difficulty=1,
        kind="cuda",
        question="""`Scalar` is bfloat16, and a thread has eight neighbours: 16 bytes, the most that one instruction
            moves. Load the eight elements of `d_out` at `from` as one `Pack`, multiply each by `gate` in float32, and
            store them at `to` of `d_y`. Only the products are rounded to bfloat16, the gate is not: each product has
            one right result, and the check compares its bits. The numbers of a pack are `pack.elements[i]`: `to_float`
            makes a float of one, and `from_float<Scalar>` rounds a float.""",
        task="combine.d_y",
        kernel=Kernel("d_y", SIXTEEN_BYTES, grid="ceil(R d / 8 / THREADS)", dtype="bfloat16"),
        change=(
            "    Pack<Scalar, PACK> pack = load_pack<PACK>(d_out + from);\n...\n    store_pack(d_y + to, pack);\n",
            "    // Your part: one load, eight products, one store.\n",
        ),
        rounded_once=True,
        budgets=("read of d_out <= 2 R d", "written <= 2 R d"),
        division=("accesses <= 4", "barriers <= 0", "threads >= R d / 8"),
        hints=(
            "`load_pack` and `store_pack` are among the code above, with the struct that they move.",
            "`to_float(pack.elements[i])` is a float; `from_float<Scalar>(...)` rounds a float to bfloat16.",
        ),
        why="""A thread makes two accesses to rows in place of sixteen. The bytes are the same, but a warp asks for 512
            of them at once, so fewer instructions wait for memory. The address must be a multiple of 16 bytes, so `d`
            must be a multiple of eight. A gate that is rounded too changes the last bit of some products.""",
    ),
    KernelExercise(
        name="warp-a-row",
        title="A warp for each row",
        difficulty=2,
        kind="cuda",
        question="""The kernel of the gate's gradient above has a thread for each slot. Its 32 lanes read from 32 rows
            at once, which are 32 sectors. Here a warp has a slot. Compute `<left, right>` so that neighbouring lanes
            read neighbouring elements.""",
        task="combine.d_gates",
        kernel=Kernel("d_gates", WARP_A_ROW, grid="ceil(32 R / THREADS)"),
        change=(
            "    for (int p = lane_id(); p < d; p += WARP) sum += left[p] * right[p];\n    sum = warp_sum(sum);\n",
            "    // Your part: a sum of each lane, then the sum of all lanes.\n",
        ),
        budgets=(
            "sectors of y <= R (d / 8 + 2)",
            "sectors of d_out <= R (d / 8 + 2)",
            "written <= 4 R",
            "exchanges <= 5",
        ),
        division=("accesses <= 2 ceil(d / 32) + 2", "barriers <= 0", "threads >= R"),
        hints=(
            "Lane `l` has the elements `l`, `l + 32`, `l + 64`, ...",
            "`lane_id()` is the number of the lane, `WARP` is 32, and `warp_sum` adds over the lanes.",
        ),
        why="""A row of `d` floats is `d / 8` sectors, and now each is asked for once. With a thread for each slot
            every element costs a sector of its own, unless a cache keeps the sector.""",
    ),
    KernelExercise(
        name="padded-tile",
        title="A tile without bank conflicts",
        difficulty=3,
        kind="cuda",
        question="""Lane `l` needs row `l` of `w3_rows`. Reading along it, the lanes would read `4 * d` bytes apart. So
            the warp takes 32 columns of `w3_rows` at a time through shared memory. It copies each of the `rows` rows
            with neighbouring lanes. Then lane `l` reads row `l` of the tile, and adds its products with `d_out_row` to
            `d_y`. The array `tile` has 33 * 32 floats: choose where each row begins, so that no two lanes read the same
            bank.""",
        task="expert_down.d_hidden",
        kernel=Kernel("d_hidden", PADDED_TILE, grid="R, ceil(h / 32)", block="32"),
        change=(
            "        for (int i = 0; i < rows; ++i)\n...\n        __syncthreads();\n    }\n",
            "        // Your part: copy rows of w3_rows, wait, read them the other way, wait.\n    }\n",
        ),
        budgets=("sectors of w3 <= R h (d / 8 + 2)", "conflicts <= 0", "written <= 12 R h"),
        division=(
            "accesses <= 2 min(h, 32) ceil(d / 32) + 2 d + 8",
            "barriers <= 2 ceil(d / 32)",
            "threads >= R h",
        ),
        hints=(
            "Element `n` of the array lies in bank `n % 32`. If a row has 32 elements, a column lies in one bank.",
            """Let row `i` begin at `33 * i`. Then lane `l` reads element `33 * l + p`, in bank `(l + p) % 32`, which is
            another one for each lane.""",
        ),
        why="""One float of padding for each row removes all conflicts, while a tile of 32 columns has 31 extra passes
            for every read. The products on tensor cores permute the chunks of a row instead, which costs no memory.""",
    ),
)
