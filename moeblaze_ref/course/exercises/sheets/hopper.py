"""Exercises of notebook 06: the parts of a Hopper kernel one by one, and what limits whole stages."""

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.bench import roofline
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel
from moeblaze_ref.course.exercises.roofline import GPU, LIMITS, limit
from moeblaze_ref.runtime.ceilings import Cost
from moeblaze_ref.runtime.source import MAX_SHARED_BYTES

ROWS, COLUMNS, DEPTH, ITEMSIZE = gemm.ROWS_BOX[1], gemm.HOPPER_COLUMNS, gemm.ROWS_BOX[0], 2

TWO_BUFFERS = """\
from numba import float32

from moeblaze_ref.backends.numba_cuda.runtime import THREADS, ZERO, cuda


@cuda.jit
def expert_down(y_swi, w3, token_expert_indices, token_index_map, y):
    \"\"\"Multiply a hidden row by its expert's w3; the row comes through shared memory, THREADS elements at a time.

    Grid          R ceil(d / THREADS) blocks of THREADS threads, a block for each row and THREADS columns
    Shared bytes  8 THREADS
    \"\"\"
    buffers = cuda.shared.array(0, float32)  # two of THREADS elements, one after the other
    thread = cuda.threadIdx.x
    h, d = w3.shape[1], w3.shape[2]
    parts = (d + THREADS - 1) // THREADS
    slot, column = cuda.blockIdx.x // parts, cuda.blockIdx.x % parts * THREADS + thread
    expert, position = token_expert_indices[slot], token_index_map[slot]
    total = ZERO
    for first in range(0, h, THREADS):
        count = min(THREADS, h - first)
        buffer = first // THREADS % 2 * THREADS
        if thread < count:
            buffers[buffer + thread] = y_swi[position, first + thread]
        cuda.syncthreads()
        if column < d:
            for i in range(count):
                total += buffers[buffer + i] * w3[expert, first + i, column]
    if column < d:
        y[position, column] = total
"""

COPIES = """\
#include "common.cuh"
#include "pack.cuh"
#include "ptx.cuh"
#include "scalar.cuh"

constexpr int STAGES = 4, PACK = 8;  // eight elements of bfloat16 are 16 bytes

// A block has a slot's row of y_swi. A thread has eight neighbouring columns of y. Step p of its sums needs the same
// columns of row p of w3.
extern "C" __global__ void expert_down(const Scalar* y_swi, const Scalar* w3, const int* token_expert_indices,
                                       const int* token_index_map, Scalar* y, int d, int h) {
    __shared__ Pack<Scalar, PACK> stages[STAGES][THREADS];
    const int column = (blockIdx.y * THREADS + threadIdx.x) * PACK;
    if (column >= d) return;
    const int row = token_index_map[blockIdx.x];
    const Scalar* const weights = w3 + token_expert_indices[blockIdx.x] * h * d + column;
    float sums[PACK] = {};
    // Asks for a step's 16 bytes, and makes a group of them. Beyond the last step the group is empty.
    auto copy = [&](int step) {
        if (step < h) cp_async_or_zero(&stages[step % STAGES][threadIdx.x], weights + step * d, true);
        cp_async_commit();
    };
    auto multiply = [&](int step) {
        const Pack<Scalar, PACK> pack = stages[step % STAGES][threadIdx.x];
        const float left = to_float(y_swi[row * h + step]);
        for (int i = 0; i < PACK; ++i) sums[i] += left * to_float(pack.elements[i]);
    };
    for (int step = 0; step < STAGES - 1; ++step) copy(step);
    for (int step = 0; step < h; ++step) {
        copy(step + STAGES - 1);
        cp_async_wait<STAGES - 1>();
        multiply(step);
    }
    Pack<Scalar, PACK> result;
    for (int i = 0; i < PACK; ++i) result.elements[i] = from_float<Scalar>(sums[i]);
    store_pack(y + row * d + column, result);
}
"""

PHASES = """\
#include "common.cuh"
#include "hopper/barrier.cuh"

constexpr int STAGES = 2;

// A stage holds 32 elements of a row of y_swi. Step s uses stage s % STAGES, for the (s / STAGES)-th time.
struct Ring {
    float stages[STAGES][WARP];
    Barrier full[STAGES], empty[STAGES];

    __device__ void wait_until_full(int step) { barrier_wait(&full[step % STAGES], step / STAGES % 2); }
    __device__ void wait_until_empty(int step) { barrier_wait(&empty[step % STAGES], (step / STAGES + 1) % 2); }
};

// A block has a slot and 32 columns of y. Warp 1 fills the stages, and warp 0 multiplies.
extern "C" __global__ void expert_down(const float* y_swi, const float* w3, const int* token_expert_indices,
                                       const int* token_index_map, float* y, int d, int h) {
    __shared__ Ring ring;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            barrier_init(&ring.full[stage], WARP);
            barrier_init(&ring.empty[stage], WARP);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int row = token_index_map[blockIdx.x], column = blockIdx.y * WARP + lane_id();
    const int steps = (h + WARP - 1) / WARP;
    if (warp_id() == 1) {
        for (int step = 0; step < steps; ++step) {
            const int p = step * WARP + lane_id();
            ring.wait_until_empty(step);
            ring.stages[step % STAGES][lane_id()] = p < h ? y_swi[row * h + p] : 0.0f;
            barrier_arrive(&ring.full[step % STAGES]);
        }
        return;
    }
    const float* const weights = w3 + token_expert_indices[blockIdx.x] * h * d + column;
    float sum = 0.0f;
    for (int step = 0; step < steps; ++step) {
        ring.wait_until_full(step);
        for (int i = 0; i < min(WARP, h - step * WARP) && column < d; ++i)
            sum += ring.stages[step % STAGES][i] * weights[(step * WARP + i) * d];
        barrier_arrive(&ring.empty[step % STAGES]);
    }
    if (column < d) y[row * d + column] = sum;
}
"""

WARPGROUP = """\
#include "expert_rows.cuh"
#include "hopper/wgmma.cuh"
#include "scalar.cuh"

constexpr int ROWS = 64, COLUMNS = 128, DEPTH = 64, PANEL = 64, PANEL_BYTES = 64 * 128;

struct Operands {
    unsigned char a[PANEL_BYTES], b[COLUMNS / PANEL * PANEL_BYTES];
};

// 64 rows of 64 elements, 128 bytes each, where the 128-byte swizzle has them; zeros beyond the rows and columns.
__device__ void load_panel(unsigned char* panel, const Scalar* source, int pitch, int rows, int columns) {
    for (int i = threadIdx.x; i < 64 * 8; i += THREADS) {
        const int row = i / 8, chunk = i % 8;
        Chunk eight = {};
        if (row < rows && chunk * 8 < columns)
            eight = *reinterpret_cast<const Chunk*>(source + row * pitch + chunk * 8);
        *reinterpret_cast<Chunk*>(panel + row * 128 + (chunk ^ row % 8) * 16) = eight;
    }
}

// A warpgroup has 64 rows of an expert and 128 columns of y.
extern "C" __global__ void expert_down(const Scalar* y_swi, const Scalar* w3, const int* expert_token_offsets,
                                       Scalar* y, int d, int h, int E) {
    const RowTile tile = find_row_tile<ROWS>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    DYNAMIC_SHARED(unsigned char, memory);
    auto& operands = *reinterpret_cast<Operands*>(memory + (1024 - shared_address(memory) % 1024) % 1024);
    const int first_column = blockIdx.y * COLUMNS;
    float sums[64] = {};
    for (int p = 0; p < h; p += DEPTH) {
        const Scalar* const weights = w3 + (tile.expert * h + p) * d + first_column;
        load_panel(operands.a, y_swi + tile.first * h + p, h, tile.rows, h - p);
        load_panel(operands.b, weights, d, h - p, d - first_column);
        load_panel(operands.b + PANEL_BYTES, weights + PANEL, d, h - p, d - first_column - PANEL);
        const unsigned long long a = wgmma_operand(operands.a, PANEL_BYTES);
        const unsigned long long b = wgmma_operand(operands.b, PANEL_BYTES);
        fence_async_proxy();
        __syncthreads();
        wgmma_fence();
        for (int i = 0; i < DEPTH / 16; ++i)
            wgmma_m64n128k16<Scalar, false, true>(sums, wgmma_advance(a, i * 32), wgmma_advance(b, i * 16 * 128), true);
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();
    }
    wgmma_results(sums);
    for (int i = 0; i < 64; ++i) {  // where wgmma leaves the sums of a thread
        const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
        const int column = first_column + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
        if (row < tile.rows && column < d) y[(tile.first + row) * d + column] = from_float<Scalar>(sums[i]);
    }
}
"""

PERSISTENT = """\
constexpr int ROWS = 16;

// Row tiles of an expert.
__device__ int row_tiles_of(const int* expert_token_offsets, int expert) {
    return (expert_token_offsets[expert + 1] - expert_token_offsets[expert] + ROWS - 1) / ROWS;
}

// Row tile `row_tile` of an expert, THREADS columns of y: a thread has one of them.
__device__ void multiply(const float* y_swi, const float* w3, const int* expert_token_offsets, float* y, int expert,
                         int row_tile, int column_tile, int d, int h) {
    const int column = column_tile * THREADS + threadIdx.x;
    const int begin = expert_token_offsets[expert] + row_tile * ROWS;
    const int end = min(begin + ROWS, expert_token_offsets[expert + 1]);
    for (int row = begin; row < end && column < d; ++row) {
        float sum = 0.0f;
        for (int p = 0; p < h; ++p) sum += y_swi[row * h + p] * w3[(expert * h + p) * d + column];
        y[row * d + column] = sum;
    }
}

// Four blocks work on all tiles. Tiles are numbered expert after expert, the column tiles of a row tile one by one.
extern "C" __global__ void expert_down(const float* y_swi, const float* w3, const int* expert_token_offsets, float* y,
                                       int d, int h, int E) {
    const int column_tiles = (d + THREADS - 1) / THREADS;
    int expert = 0, first = 0;  // an expert, and the number of its first tile
    int tiles = row_tiles_of(expert_token_offsets, expert) * column_tiles;
    for (int number = blockIdx.x;; number += gridDim.x) {
        while (number >= first + tiles) {
            if (++expert == E) return;
            first += tiles;
            tiles = row_tiles_of(expert_token_offsets, expert) * column_tiles;
        }
        const int inside = number - first;
        multiply(y_swi, w3, expert_token_offsets, y, expert, inside / column_tiles, inside % column_tiles, d, h);
    }
}
"""


def _stage(rows, columns, depth, itemsize, shared_bytes):
    cost = Cost(flops=2 * rows * columns * depth, bytes=(rows + columns) * depth * itemsize)
    return {
        "stage": cost.bytes,
        "stages": shared_bytes // cost.bytes,
        "flops_per_byte": cost.flops / cost.bytes,
    }


def _limits(layer, tflops, tb_per_s):
    stages = ("expert_down", "combine", "d_w3")
    return {stage: limit(roofline.cost_of(stage, layer), tflops, tb_per_s) for stage in stages}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="ring-stages",
        title="Stages of the ring",
        difficulty=2,
        question="""A tile of the result has `rows` rows and `columns` columns. A stage of the ring holds `depth`
            columns of one operand of the tile and `depth` rows of the other. How many bytes is a stage? How many stages
            would fit into the shared memory of a block? How many FLOPs does the tile do for each byte that arrives?""",
        given={
            "rows": ROWS,
            "columns": COLUMNS,
            "depth": DEPTH,
            "itemsize": ITEMSIZE,
            "shared_bytes": MAX_SHARED_BYTES,
        },
        steps=("stage = (rows + columns) * depth * itemsize",),
        asked={
            "stage": Asked("bytes", "stage"),
            "stages": Asked("stages", "shared_bytes // stage"),
            "flops_per_byte": Asked("FLOPs for each byte", "2 * rows * columns * depth / stage"),
        },
        truth=_stage,
        computed_by="moeblaze_ref.backends.raw_cuda.gemm",
        hints=(
            "Compute the bytes of a stage first. The other two follow from it.",
            """One operand is `(rows, depth)`, the other `(depth, columns)`. A step of the tile has `2 * rows * columns
            * depth` FLOPs.""",
        ),
        why="""The depth cancels in the last number: a deeper stage makes fewer steps, not fewer bytes. Only a larger
            tile needs fewer bytes.""",
    ),
    Prediction(
        name="which-limit",
        title="Which limit binds?",
        difficulty=2,
        question="""Each stage reads every input once and writes every output once. Which limit binds then, the GPU's
            FLOPs or its bytes? The `combine` sums the `k` rows of each token; `d_w3` is the product that gives the
            gradient of `w3`.""",
        given={"layer": preset("mixtral").config, **GPU},
        asked={
            "expert_down": Asked(LIMITS, '"flops"'),
            "combine": Asked(LIMITS, '"bytes"'),
            "d_w3": Asked(LIMITS, '"flops"'),
        },
        truth=_limits,
        computed_by="moeblaze_ref.runtime.ceilings.Ceilings.bound",
        hints=(
            "Compare FLOPs for each byte with `tflops / tb_per_s`.",
            """A product does `2 * d * h` FLOPs for a row of `d + h` elements. A sum does one or two for each element
            that it reads.""",
        ),
        why="""Tensor cores speed up the products. The sums in between only ever wait for memory, so it is better to
            fuse them, or to have fewer.""",
    ),
    KernelExercise(
        name="two-buffers",
        title="Two buffers, one barrier",
        difficulty=2,
        kind="numba",
        question="""A block brings its row of `y_swi` into shared memory in chunks of `THREADS` elements, and each
            thread sums its column over a chunk. With one buffer a step needs two barriers: one before the sums, and one
            before the next chunk replaces this one. There are two buffers here, at `buffers[0]` and at
            `buffers[THREADS]`. Write a step with one barrier.""",
        task="expert_down",
        kernel=Kernel("expert_down", TWO_BUFFERS),
        change=(
            "        buffer = first // THREADS % 2 * THREADS\n...\n"
            "                total += buffers[buffer + i] * w3[expert, first + i, column]\n",
            "        # Your part: load `count` elements into one of the buffers, wait, add to the total.\n",
        ),
        budgets=("read of y_swi <= 4 R h ceil(d / THREADS)", "read of w3 <= 4 R d h", "written <= 4 R d"),
        division=(
            "accesses <= 2 h + 2 ceil(h / THREADS) + 3",
            "barriers <= ceil(h / THREADS)",
            "threads >= R d",
        ),
        hints=(
            "Use the buffers in turn. Which steps may be under way at the same time between two barriers?",
            """Step `s = first // THREADS` uses buffer `s % 2`. A thread that loads step `s + 2` has passed the barrier
            of step `s + 1`, so all threads are done with step `s`.""",
        ),
        why="""A second buffer saves a barrier, and lets fast threads load the next chunk while slow ones still sum.
            More buffers let loads run ahead further: that is the ring of this notebook.""",
    ),
    KernelExercise(
        name="async-copies",
        title="Copies under way",
        difficulty=2,
        kind="cuda",
        question="""`copy(step)` starts an asynchronous copy of what the step needs, and makes it a group.
            `multiply(step)` uses what has arrived. `cp_async_wait<N>()` waits until at most the thread's `N` newest
            groups are under way. Keep `STAGES - 1` copies under way while the thread multiplies. A thread reads only
            what it has copied itself, so no barrier is needed.""",
        task="expert_down",
        kernel=Kernel("expert_down", COPIES, grid="R, ceil(d / 8 / THREADS)", dtype="bfloat16"),
        change=(
            "    for (int step = 0; step < STAGES - 1; ++step) copy(step);\n...\n        multiply(step);\n    }\n",
            "    // Your part: start STAGES - 1 copies. Then each step starts one, waits, and multiplies.\n",
        ),
        budgets=("read of w3 <= 2 R d h", "written <= 2 R d", "copied >= 2 R d h", "under_way >= 2 R d (2 h - 3)"),
        division=("accesses <= 4 h + 4", "barriers <= 0", "threads >= R d / 8"),
        hints=(
            "When step `s` waits, the groups of the steps 0 to `s + STAGES - 1` exist. Which are newer than its own?",
            """`copy(step + STAGES - 1)`, then `cp_async_wait<STAGES - 1>()`, then `multiply(step)`. The new copy
            replaces the stage of the step before, which this thread has used.""",
        ),
        why="""The latency of a copy is hidden behind the products of three steps. With `cp_async_wait<0>()` the result
            is the same, but each step waits for its newest copy: the bytes under way after each wait show it.""",
    ),
    KernelExercise(
        name="phases",
        title="The parity of a phase",
        difficulty=3,
        kind="cuda",
        question="""Warp 1 fills stages of a ring, warp 0 empties them, and both arrive at mbarriers. All 32 lanes of a
            warp arrive, and that completes a phase of the barrier. The phases of a barrier are numbered 0, 1, 2, ...
            `barrier_wait(barrier, parity)` waits until the current phase has another parity than `parity`: until the
            phase of that parity is complete. Write both waits of a step. In the first round every stage is empty from
            the start.""",
        task="expert_down",
        kernel=Kernel("expert_down", PHASES, grid="R, ceil(d / 32)"),
        change=(
            "    __device__ void wait_until_full(int step) { barrier_wait(&full[step % STAGES], step / STAGES % 2); }\n"
            "    __device__ void wait_until_empty(int step) {"
            " barrier_wait(&empty[step % STAGES], (step / STAGES + 1) % 2); }\n",
            "    // Your part: wait for the right barrier of the step's stage, and for the right phase.\n"
            "    __device__ void wait_until_full(int step) {}\n"
            "    __device__ void wait_until_empty(int step) {}\n",
        ),
        budgets=(
            "read of y_swi <= 4 R h ceil(d / 32)",
            "read of w3 <= 4 R d h",
            "written <= 4 R d",
            "waits >= R ceil(d / 32) ceil(h / 32)",
        ),
        division=(
            "accesses <= 2 h + 3 ceil(h / 32) + 10",
            "barriers <= 1",
            "threads >= R d",
        ),
        hints=(
            "The stage is filled for the `step / STAGES`-th time: this is the number of the phase of `full`.",
            """The wait for `full` has the parity `step / STAGES % 2`. The wait for `empty` is for the phase before,
            with the other parity. A barrier that is new counts as if phase -1 were complete, so the first round does
            not wait.""",
        ),
        why="""One bit distinguishes two rounds. That is enough, since no role can be two rounds ahead. A wait with the
            wrong parity never ends, or does not wait and reads the round before.""",
    ),
    KernelExercise(
        name="warpgroup-product",
        title="A product by a warpgroup",
        difficulty=3,
        kind="cuda",
        question="""128 threads have put 64 rows of `y_swi` and 128 columns of `w3` into shared memory, 64 of the depth.
            Multiply them by four `wgmma` of depth 16, and wait for the results. A step of 16 is 32 bytes further on in
            `a`, and 16 rows of 128 bytes further on in `b`. The tensor cores do not see by themselves what threads have
            written: `fence_async_proxy()` orders that before them. The template arguments of `wgmma_m64n128k16` are
            the type, and for each operand `false` if its memory runs along the depth. That of `a` does, that of `b`
            does not. Write everything from the fence to the wait.""",
        task="expert_down",
        kernel=Kernel(
            "expert_down",
            WARPGROUP,
            grid="R / 64 + min(E, R), ceil(d / 128)",
            block="128",
            shared_bytes="25600",
            dtype="bfloat16",
        ),
        change=(
            "        fence_async_proxy();\n...\n        wgmma_wait<0>();\n",
            "        // Your part: fence, barrier, four products, wait.\n",
        ),
        budgets=(
            "read of y_swi <= 2 R h ceil(d / 128)",
            "read of w3 <= 2 d h (R / 64 + min(E, R))",
            "written <= 2 R d",
        ),
        division=(
            "accesses <= 24 ceil(h / 64) + 4 ceil(E / 32) + 80",
            "barriers <= 2 ceil(h / 64) + 1",
            "threads >= 2 R ceil(d / 128)",
        ),
        hints=(
            """The order is: proxy fence, `__syncthreads()`, `wgmma_fence()`, the products, `wgmma_commit()`,
            `wgmma_wait<0>()`.""",
            """Product `i` is `wgmma_m64n128k16<Scalar, false, true>(sums, wgmma_advance(a, i * 32), wgmma_advance(b, i
            * 16 * 128), true)`: `a` lies along its depth, `b` along its columns, and the sums are kept.""",
        ),
        why="""One instruction multiplies 64 by 128 by 16, from shared memory. The threads only name the operands. The
            project's version `4_wgmma` is this loop, with copies under way during the products. The executor does not
            find a missing `wgmma_fence()`. On a GPU the sums are undefined without it.""",
    ),
    KernelExercise(
        name="persistent-tiles",
        title="Blocks that stay",
        difficulty=2,
        kind="cuda",
        question="""Four blocks work on all tiles: block `b` takes the tiles with the numbers `b`, `b + 4`, `b + 8`, ...
            The tiles of expert 0 come first, then those of expert 1, and so on. An expert has `row_tiles_of(...)` row
            tiles, and each row tile has `column_tiles` tiles. Find the expert of each number, and call `multiply` with
            the row tile and the column tile. Experts without rows have no tile.""",
        task="expert_down",
        kernel=Kernel("expert_down", PERSISTENT, grid="4"),
        change=(
            "    int expert = 0, first = 0;  // an expert, and the number of its first tile\n...\n"
            "        const int inside = number - first;\n"
            "        multiply(y_swi, w3, expert_token_offsets, y, expert, inside / column_tiles, inside % column_tiles,"
            " d, h);\n    }\n",
            "    // Your part: a loop over the block's tiles; which expert has a tile, and which tile of it is it?\n",
        ),
        budgets=("read of y_swi <= 4 R d h", "read of w3 <= 4 R d h", "written <= 4 R d"),
        division=(
            "accesses <= ceil((R / ROWS + min(E, R)) ceil(d / THREADS) / 4) (ROWS (2 h + 1) + 4)"
            " + 4 (R / ROWS + min(E, R)) + 4 E",
            "barriers <= 0",
            "threads >= min(R / ROWS, 4) min(d, THREADS)",
        ),
        hints=(
            "Numbers only grow, so the search for the expert goes on where it stopped. Keep the expert's first number.",
            """While `number >= first + tiles`, go to the next expert: add `tiles` to `first`, and count the tiles of
            the new expert. If there is none, the block is done. Then `number - first` is the tile of the expert.""",
        ),
        why="""Blocks that stay start once. Skewed routing does not leave them idle, because the tiles of a busy expert
            go to all blocks. The version `7_persistent` has as many blocks as the GPU has multiprocessors.""",
    ),
)
