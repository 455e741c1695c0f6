"""Exercises of notebook 03: gather, multiply, activate, and the sum at the end."""

from moeblaze_ref.backends.numba_cuda import combine, expert_down
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, cuda_kernel, numba_kernel
from moeblaze_ref.course.exercises.roofline import GPU, LIMITS, limit

UP, DOWN = "expert_up/1_naive.cu", "expert_down/1_naive.cu"

SHARED_ROW = """\
#include "common.cuh"
#include "hidden.cuh"

// A block has one slot: a row of x, times the w1 and w2 of one expert. The row comes into shared memory once, and all
// threads take it from there.
extern "C" __global__ void expert_up(const float* x, const float* w1, const float* w2,
                                     const int* token_expert_indices, const int* token_index_map, float* a, float* b,
                                     float* y_swi, int d, int h, int k) {
    DYNAMIC_SHARED(float, x_row);
    const int slot = blockIdx.x, token = slot / k;
    const int expert = token_expert_indices[slot], row = token_index_map[slot];
    for (int p = threadIdx.x; p < d; p += THREADS) x_row[p] = x[token * d + p];
    __syncthreads();
    for (int column = threadIdx.x; column < h; column += THREADS) {
        float a_sum = 0.0f, b_sum = 0.0f;
        for (int p = 0; p < d; ++p) {
            const int weight = (expert * d + p) * h + column;
            a_sum += x_row[p] * w1[weight];
            b_sum += x_row[p] * w2[weight];
        }
        store_hidden(a, b, y_swi, row * h + column, a_sum, b_sum);
    }
}
"""


def _intensity(layer, tflops, tb_per_s):
    cost = roofline.cost_of("expert_up", layer)
    return {"bytes": cost.bytes, "flops_per_byte": cost.flops / cost.bytes, "limit": limit(cost, tflops, tb_per_s)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="up-intensity",
        title="Which limit binds the up-projection?",
        question="""`expert_up` must at least read `x` `(L, d)`, both weights `(E, d, h)` and the `R` int32 of
            `expert_token_indices` once, and write `a`, `b` and `y_swi` `(R, h)`. How many bytes is that, and how many
            FLOPs of its two products does it do for each byte? A GPU does `tflops` 1e12 FLOPs and moves `tb_per_s` 1e12
            bytes in a second. Which of the two is the limit?""",
        given={"layer": preset("conf3").config, **GPU},
        steps=(
            "elements = layer.L * layer.d + 2 * layer.E * layer.d * layer.h + 3 * layer.R * layer.h",
            "moved = layer.itemsize * elements + 4 * layer.R",
        ),
        asked={
            "bytes": Asked("bytes", "moved"),
            "flops_per_byte": Asked("FLOPs for each byte", "4 * layer.R * layer.d * layer.h / moved"),
            "limit": Asked(LIMITS, '"flops"'),
        },
        truth=_intensity,
        computed_by="moeblaze_ref.bench.roofline.cost_of",
        hint="""The two products have `4 * R * d * h` FLOPs. The GPU needs `tflops / tb_per_s` FLOPs for each byte to
            compute without pause; with fewer, it waits for bytes.""",
        why="""With the fewest possible bytes, arithmetic is the limit. A kernel that reads operands again for every
            result, as the first version does, is limited by memory.""",
    ),
    KernelExercise(
        name="gather-rows",
        title="Gather, do not copy",
        kind="cuda",
        question="""A thread has one element of `a` and `b`: row `at.row` in expert order, column `at.column`. Find the
            row of `x` through `expert_token_indices`, and sum both products over `d`. The kernel copies nothing: it
            gathers by computing the address. `weight` is where the expert's column of `w1` (and of `w2`) begins; its
            next element lies `h` further.""",
        task="expert_up",
        kernel=cuda_kernel(UP, "expert_up"),
        change=(
            "    const Scalar* const x_row = x + (long long)expert_token_indices[at.row] * d;\n...\n    }\n",
            "    const long long weight = (long long)blockIdx.y * d * h + at.column;\n"
            "    float a_sum = 0.0f, b_sum = 0.0f;\n"
            "    // Your part: the row of x that belongs to at.row, and both sums over its d elements.\n",
        ),
        budgets=("read of x <= 4 R d h", "read of w1 <= 4 R d h", "written <= 12 R h"),
        division=("accesses <= 3 d + 6", "barriers <= 0", "threads >= R h"),
        hint="""The token is `expert_token_indices[at.row]`, and its row begins at `x + token * d`. Read each `x_row[p]`
            once and use it for both sums.""",
        why="One index for each thread replaces the routed copy of notebook 00.",
    ),
    KernelExercise(
        name="share-the-row",
        title="Read x once, not h times",
        kind="cuda",
        question="""In the kernel before, each of `h` threads reads the same row of `x`: `4 * R * d * h` bytes. Here a
            block has one slot, and its threads share the row. Load the row into `x_row`, in shared memory. Each thread
            loads some of the `d` elements, and each element is loaded once.""",
        task="expert_up",
        kernel=Kernel("expert_up", SHARED_ROW, grid="R", shared_bytes="4 d"),
        change=(
            "    for (int p = threadIdx.x; p < d; p += THREADS) x_row[p] = x[token * d + p];\n    __syncthreads();\n",
            "    // Your part: the token's row of x into x_row, each thread a part; then wait for all.\n",
        ),
        budgets=("read of x <= 4 R d", "written <= 12 R h"),
        division=(
            "accesses <= 2 ceil(d / THREADS) + (3 d + 3) ceil(h / THREADS) + 2",
            "barriers <= 1",
            "threads >= R min(h, THREADS)",
        ),
        hint="""Thread `t` copies the elements `t`, `t + THREADS`, ... Then `__syncthreads()`: no thread may read what
            another has not written yet.""",
        why="""The kernel reads `h` times fewer bytes of `x`. It still reads the weights for every row; the tiled
            version shares those, too.""",
    ),
    KernelExercise(
        name="whose-weights",
        title="Right for the first expert only",
        kind="bug",
        question="""The down-projection is right for the rows of expert 0, and wrong for all others, as the report says.
            Find the bug and correct it.""",
        task="expert_down",
        kernel=cuda_kernel(DOWN, "expert_down"),
        change=("(long long)blockIdx.y * h * d + at.column", "at.column"),
        budgets=("read of w3 <= 4 R d h", "written <= 4 R d"),
        division=("accesses <= 2 h + 3", "barriers <= 0", "threads >= R d"),
        hint="`w3` is `(E, h, d)`, and `blockIdx.y` is the expert. Where does that expert's matrix begin?",
        why="""A test with one expert, or with every token at expert 0, would not find the bug. Test with skewed routing
            and with even routing.""",
    ),
    KernelExercise(
        name="combine",
        title="Sum a token's rows",
        kind="numba",
        question="""A thread has one element of `out`. Sum the token's `k` rows of `y`, each times its gate. `y` is in
            expert order: the row of slot `j` is `token_index_map[token * k + j]`.""",
        task="combine",
        kernel=numba_kernel(combine.combine_kernel),
        change=(
            "        for j in range(k):\n"
            "            total += gates[token, j] * y[token_index_map[token * k + j], column]\n",
            "        # Your part: add up gate times y over the token's k slots.\n",
        ),
        budgets=("read of y <= 4 R d", "read of gates <= 4 R d", "written <= 4 L d"),
        division=("accesses <= 3 k + 1", "barriers <= 0", "threads >= L d"),
        hint="Loop over `j` in `range(k)`: the gate is `gates[token, j]`, and `token_index_map` holds its row of `y`.",
        why="""Each element of `out` has one writer, so the kernel needs no atomics and gives the same bits in every
            run.""",
    ),
    KernelExercise(
        name="slot-order",
        title="Two orders of the same rows",
        kind="bug",
        question="""Rows have two orders: slot by slot, as tokens chose, and expert order, as they are stored. This
            kernel confuses the two once. It computes every number correctly, but stores nearly all of them in the wrong
            place.""",
        task="expert_down",
        kernel=numba_kernel(expert_down.expert_down_kernel),
        change=("y[position, column] = total", "y[slot, column] = total"),
        budgets=("read of w3 <= 4 R d h", "written <= 4 R d"),
        division=("accesses <= 2 h + 3", "barriers <= 0", "threads >= R d"),
        hint="`y` is in expert order. Which of `slot` and `position` is a row in expert order?",
        why="""Both orders have `R` rows, so no access is out of bounds. Only a comparison element by element finds the
            bug.""",
    ),
)
