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

FOUR_COLUMNS = """\
import math

import numpy as np
from numba import float32

from moeblaze_ref.backends.numba_cuda.runtime import ZERO, cuda

COLUMNS = 4
ONE = np.float32(1.0)


@cuda.jit
def expert_up(x, w1, w2, token_expert_indices, token_index_map, a, b, y_swi):
    \"\"\"Compute COLUMNS neighbours of a row of a, b and y_swi, or as many as there are, in each thread.

    Grid          ceil(R ceil(h / COLUMNS) / THREADS) blocks of THREADS threads
    \"\"\"
    num_routed, h = a.shape
    groups = (h + COLUMNS - 1) // COLUMNS
    group = cuda.grid(1)
    slot, first = group // groups, group % groups * COLUMNS
    if slot < num_routed:
        token = slot // (num_routed // x.shape[0])
        expert, position = token_expert_indices[slot], token_index_map[slot]
        columns = min(COLUMNS, h - first)
        a_sums, b_sums = cuda.local.array(COLUMNS, float32), cuda.local.array(COLUMNS, float32)
        for c in range(COLUMNS):
            a_sums[c] = b_sums[c] = ZERO
        for p in range(x.shape[1]):
            x_p = x[token, p]
            for c in range(columns):
                a_sums[c] += x_p * w1[expert, p, first + c]
                b_sums[c] += x_p * w2[expert, p, first + c]
        for c in range(columns):
            a[position, first + c] = a_sums[c]
            b[position, first + c] = b_sums[c]
            y_swi[position, first + c] = a_sums[c] / (ONE + math.exp(-a_sums[c])) * b_sums[c]
"""

TILES = """\
from numba import float32

from moeblaze_ref.backends.numba_cuda.runtime import ZERO, cuda

TILE = 4


@cuda.jit
def expert_down(y_swi, w3, expert_token_offsets, y):
    \"\"\"Multiply the hidden rows of one expert by its w3, TILE rows and TILE columns at a time.

    Grid          E ceil(d / TILE) blocks of TILE TILE threads, a block for each expert and TILE columns
    Shared bytes  8 TILE TILE
    \"\"\"
    tiles = cuda.shared.array(0, float32)
    rows, weights = tiles[: TILE * TILE], tiles[TILE * TILE :]
    here = cuda.threadIdx.x  # the thread's place in both tiles
    row, column = here // TILE, here % TILE
    h, d = w3.shape[1], w3.shape[2]
    column_tiles = (d + TILE - 1) // TILE
    expert, i = cuda.blockIdx.x // column_tiles, cuda.blockIdx.x % column_tiles * TILE + column
    end = expert_token_offsets[expert + 1]
    for first in range(expert_token_offsets[expert], end, TILE):
        position = first + row
        total = ZERO
        for step in range(0, h, TILE):
            rows[here] = y_swi[position, step + column] if position < end and step + column < h else ZERO
            weights[here] = w3[expert, step + row, i] if step + row < h and i < d else ZERO
            cuda.syncthreads()
            for p in range(TILE):
                total += rows[row * TILE + p] * weights[p * TILE + column]
            cuda.syncthreads()
        if position < end and i < d:
            y[position, i] = total
"""

CORNERS = """\
#include "expert_rows.cuh"

constexpr int TILE = 32;
constexpr int DEPTH = 8;
constexpr int CORNER = 4;

// A block has 32 rows of an expert and 32 columns of y. A thread has a corner of them, 4 rows and 4 columns.
extern "C" __global__ void expert_down(const float* y_swi, const float* w3, const int* expert_token_offsets, float* y,
                                       int d, int h, int E) {
    __shared__ float rows[DEPTH][TILE], weights[DEPTH][TILE];
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    const int first_column = blockIdx.y * TILE;
    const int row = threadIdx.x / (TILE / CORNER) * CORNER, column = threadIdx.x % (TILE / CORNER) * CORNER;
    if (tile.rows == 0) return;
    float sums[CORNER][CORNER] = {};
    for (int first = 0; first < h; first += DEPTH) {
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            const int side = i / DEPTH, p = i % DEPTH;
            const bool inside = side < tile.rows && first + p < h;
            rows[p][side] = inside ? y_swi[(tile.first + side) * h + first + p] : 0.0f;
        }
        for (int i = threadIdx.x; i < TILE * DEPTH; i += THREADS) {
            const int p = i / TILE, side = i % TILE;
            const bool inside = first_column + side < d && first + p < h;
            weights[p][side] = inside ? w3[(tile.expert * h + first + p) * d + first_column + side] : 0.0f;
        }
        __syncthreads();
        for (int p = 0; p < DEPTH; ++p) {
            float left[CORNER], right[CORNER];
            for (int i = 0; i < CORNER; ++i) left[i] = rows[p][row + i];
            for (int j = 0; j < CORNER; ++j) right[j] = weights[p][column + j];
            for (int i = 0; i < CORNER; ++i)
                for (int j = 0; j < CORNER; ++j) sums[i][j] += left[i] * right[j];
        }
        __syncthreads();
    }
    for (int i = 0; i < CORNER; ++i)
        for (int j = 0; j < CORNER; ++j)
            if (row + i < tile.rows && first_column + column + j < d)
                y[(tile.first + row + i) * d + first_column + column + j] = sums[i][j];
}
"""


def _intensity(layer, tflops, tb_per_s):
    cost = roofline.cost_of("expert_up", layer)
    return {"bytes": cost.bytes, "flops_per_byte": cost.flops / cost.bytes, "limit": limit(cost, tflops, tb_per_s)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="up-intensity",
        title="Which limit binds the up-projection?",
        difficulty=2,
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
        hints=(
            "Write down every tensor with its shape, and add up the elements.",
            """The two products have `4 * R * d * h` FLOPs. The GPU needs `tflops / tb_per_s` FLOPs for each byte to
            compute without pause; with fewer, it waits for bytes.""",
        ),
        why="""With the fewest possible bytes, arithmetic is the limit. A kernel that reads operands again for every
            result, as the first version does, is limited by memory.""",
    ),
    KernelExercise(
        name="gather-rows",
        title="Gather, do not copy",
        difficulty=1,
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
        hints=(
            "Both sums run over `p`, with the same element of `x`.",
            """The token is `expert_token_indices[at.row]`, and its row begins at `x + token * d`. Read each `x_row[p]`
            once and use it for both sums.""",
        ),
        why="One index for each thread replaces the routed copy of notebook 00.",
    ),
    KernelExercise(
        name="share-the-row",
        title="Read x once, not h times",
        difficulty=2,
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
        hints=(
            "All threads together copy `d` elements. A thread that has copied its part must still wait.",
            """Thread `t` copies the elements `t`, `t + THREADS`, ... Then `__syncthreads()`: no thread may read what
            another has not written yet.""",
        ),
        why="""The kernel reads `h` times fewer bytes of `x`. It still reads the weights for every row; the tiled
            version shares those, too.""",
    ),
    KernelExercise(
        name="whose-weights",
        title="Right for the first expert only",
        difficulty=1,
        kind="bug",
        question="""The down-projection is right for the rows of expert 0, and wrong for all others, as the report says.
            Find the bug and correct it.""",
        task="expert_down",
        kernel=cuda_kernel(DOWN, "expert_down"),
        change=("(long long)blockIdx.y * h * d + at.column", "at.column"),
        budgets=("read of w3 <= 4 R d h", "written <= 4 R d"),
        division=("accesses <= 2 h + 3", "barriers <= 0", "threads >= R d"),
        hints=(
            "The kernel reads the same weights for every expert.",
            "`w3` is `(E, h, d)`, and `blockIdx.y` is the expert. Where does that expert's matrix begin?",
        ),
        why="""A test with one expert, or with every token at expert 0, would not find the bug. Test with skewed routing
            and with even routing.""",
    ),
    KernelExercise(
        name="combine",
        title="Sum a token's rows",
        difficulty=1,
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
        hints=(
            "The loop has `k` turns, one for each expert of the token.",
            "Loop over `j` in `range(k)`: the gate is `gates[token, j]`, and `token_index_map` holds its row of `y`.",
        ),
        why="""Each element of `out` has one writer, so the kernel needs no atomics and gives the same bits in every
            run.""",
    ),
    KernelExercise(
        name="slot-order",
        title="Two orders of the same rows",
        difficulty=1,
        kind="bug",
        question="""Rows have two orders: slot by slot, as tokens chose, and expert order, as they are stored. This
            kernel confuses the two once. It computes every number correctly, but stores nearly all of them in the wrong
            place.""",
        task="expert_down",
        kernel=numba_kernel(expert_down.expert_down_kernel),
        change=("y[position, column] = total", "y[slot, column] = total"),
        budgets=("read of w3 <= 4 R d h", "written <= 4 R d"),
        division=("accesses <= 2 h + 4", "barriers <= 0", "threads >= R d"),
        hints=(
            "List the arrays with `R` rows, and the order of each.",
            "`y` is in expert order. Which of `slot` and `position` is a row in expert order?",
        ),
        why="""Both orders have `R` rows, so no access is out of bounds. Only a comparison element by element finds the
            bug.""",
    ),
    KernelExercise(
        name="four-columns",
        title="More work for a thread, fewer reads",
        difficulty=2,
        kind="numba",
        question="""A thread has `columns` neighbours of a row of `a` and `b`, at most four, from column `first` on. Sum
            both products over `p` for all of its columns, into `a_sums[c]` and `b_sums[c]`, which are registers. Read
            each element of `x` once, and use it for all columns.""",
        task="expert_up",
        kernel=Kernel("expert_up", FOUR_COLUMNS),
        change=(
            "        for p in range(x.shape[1]):\n...\n                b_sums[c] += x_p * w2[expert, p, first + c]\n",
            "        # Your part: both sums of every column, with one read of x for each p.\n",
        ),
        budgets=("read of x <= 4 R d ceil(h / COLUMNS)", "read of w1 <= 4 R d h", "written <= 12 R h"),
        division=(
            "accesses <= (2 COLUMNS + 1) d + 3 COLUMNS + 2",
            "barriers <= 0",
            "threads >= R ceil(h / COLUMNS)",
        ),
        hints=(
            "There are two loops. Which of `p` and `c` must be the outer one?",
            """Outside, read `x_p = x[token, p]`. Inside, column `c` adds `x_p * w1[expert, p, first + c]`, and the same
            with `w2`.""",
        ),
        why="""A number that lies in a register costs no read. The price is fewer threads with more registers each. Too
            many columns leave too few threads to hide the latency of memory.""",
    ),
    KernelExercise(
        name="tile-by-tile",
        title="A product in tiles",
        difficulty=3,
        kind="numba",
        question="""A block multiplies `TILE` rows by `TILE` columns, and walks along `h` in steps of `TILE`. In each
            step its threads load a tile of `y_swi` into `rows` and a tile of `w3` into `weights`. A thread loads one
            element of each, to its place `here`. Then each thread adds the products of its row and its column to
            `total`. Write a step. Outside of the matrices a tile has zeros: rows end at `end`, the depth at `h`,
            columns at `d`.""",
        task="expert_down",
        kernel=Kernel("expert_down", TILES),
        change=(
            "            rows[here] = y_swi[position, step + column]"
            " if position < end and step + column < h else ZERO\n...\n            cuda.syncthreads()\n"
            "        if position < end and i < d:\n",
            "            pass  # Your part: load both tiles, wait, add TILE products, wait.\n"
            "        if position < end and i < d:\n",
        ),
        budgets=(
            "read of y_swi <= 4 R h ceil(d / TILE)",
            "read of w3 <= 4 d h (R / TILE + min(E, R))",
            "written <= 4 R d",
        ),
        division=(
            "accesses <= ceil(L / TILE) (ceil(h / TILE) (2 TILE + 4) + 1) + 2",
            "barriers <= 2 ceil(L / TILE) ceil(h / TILE)",
            "threads >= min(k, R) d TILE",
        ),
        hints=(
            "The thread loads `y_swi[position, step + column]` and `w3[expert, step + row, i]`, if they exist.",
            """After the first barrier, add `rows[row * TILE + p] * weights[p * TILE + column]` for `p` from 0 to `TILE
            - 1`. After the second one, the next step may replace the tiles.""",
        ),
        why="""Each element comes from global memory once, and `TILE` threads use it. So a tile that is twice as wide
            halves the bytes. All fast products of the project are this loop, with larger tiles.""",
    ),
    KernelExercise(
        name="corners",
        title="A corner of the tile in registers",
        difficulty=2,
        kind="cuda",
        question="""Both tiles are in shared memory, `rows[p][i]` and `weights[p][j]`. A thread has a corner of the
            result: four rows from `row` on, and four columns from `column` on. Add the products of all `DEPTH` values
            of `p` to `sums`. For each `p` read four numbers of `rows` and four of `weights`, and make 16 products.""",
        task="expert_down",
        kernel=Kernel("expert_down", CORNERS, grid="R / 32 + min(E, R), ceil(d / 32)"),
        change=(
            "        for (int p = 0; p < DEPTH; ++p) {\n...\n        }\n        __syncthreads();\n    }\n",
            "        // Your part: for each p, eight reads and 16 products.\n        __syncthreads();\n    }\n",
        ),
        budgets=(
            "read of y_swi <= 4 R h ceil(d / 32)",
            "read of w3 <= 4 d h (R / 32 + min(E, R))",
            "written <= 4 R d",
        ),
        division=(
            "accesses <= ceil(h / DEPTH) (16 + 8 DEPTH) + 36 + 4 ceil(E / 32)",
            "barriers <= 2 ceil(h / DEPTH) + 1",
            "threads >= 64 min(k, R) ceil(d / 32)",
        ),
        hints=(
            "Copy the eight numbers into two small arrays first. The compiler keeps such arrays in registers.",
            "With `left[i] = rows[p][row + i]` and `right[j] = weights[p][column + j]`, add `left[i] * right[j]`.",
        ),
        why="""With one result, a thread reads two numbers for each product. With a corner it reads half a number. The
            products of the project's version `2_tiled` have this corner.""",
    ),
)
