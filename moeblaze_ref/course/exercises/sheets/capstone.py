"""A sheet of its own: the capstone, a fused up-projection with three budgets."""

from moeblaze_ref.course.exercises.exercise import LEVELS, Capstone, Exercise
from moeblaze_ref.verify.cases import Case, make_case, standard_cases, telling_cases

KERNEL = """\
// Yours to change: the sizes of a block's result, and the launch that the table states.
//
// kernel     grid                                block    shared bytes
// expert_up  R / {rows} + min(E, R), ceil(h / {columns})  THREADS  0
#include "expert_rows.cuh"
#include "hidden.cuh"

constexpr int THREADS = 256;
constexpr int ROWS = {rows};  // of a block's result
constexpr int COLUMNS = {columns};
constexpr int CORNER = {corner};  // rows and columns of a thread's part of it

extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const float* x, const float* w1, const float* w2, const int* expert_token_indices,
              const int* expert_token_offsets, float* a, float* b, float* y_swi, int d, int h, int E) {{
    const RowTile tile = find_row_tile<ROWS>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    const float* const w1_expert = w1 + (long long)tile.expert * d * h;  // (d, h)
    const float* const w2_expert = w2 + (long long)tile.expert * d * h;
    const int first_column = blockIdx.y * COLUMNS;
    const int row = threadIdx.x / (COLUMNS / CORNER) * CORNER;  // the thread's first, in the block's result
    const int column = threadIdx.x % (COLUMNS / CORNER) * CORNER;
    float a_sums[CORNER][CORNER] = {{}}, b_sums[CORNER][CORNER] = {{}};
{product}
    for (int i = 0; i < CORNER; ++i)
        for (int j = 0; j < CORNER; ++j)
            if (row + i < tile.rows && first_column + column + j < h)
                store_hidden(a, b, y_swi, (long long)(tile.first + row + i) * h + first_column + column + j,
                             a_sums[i][j], b_sums[i][j]);
}}
"""
HOLE = """\
    // Your part: x w1 and x w2 of the corner, into a_sums and b_sums. The token of the block's row i is
    // expert_token_indices[tile.first + i].
"""
FROM_GLOBAL_MEMORY = """\
    const int columns = min(CORNER, h - first_column - column);  // of the corner that exist
    for (int i = 0; i < CORNER && row + i < tile.rows && columns > 0; ++i) {
        const float* const x_row = x + (long long)expert_token_indices[tile.first + row + i] * d;
        for (int p = 0; p < d; ++p) {
            const float x_p = x_row[p];
            for (int j = 0; j < columns; ++j) {
                const long long at = (long long)p * h + first_column + column + j;
                a_sums[i][j] += x_p * w1_expert[at];
                b_sums[i][j] += x_p * w2_expert[at];
            }
        }
    }
"""
FROM_SHARED_MEMORY = """\
    constexpr int DEPTH = 16;  // of d in shared memory at a time
    __shared__ int tokens[ROWS];
    __shared__ float x_tile[DEPTH][ROWS + 4], w1_tile[DEPTH][COLUMNS], w2_tile[DEPTH][COLUMNS];  // 4: other banks
    if (threadIdx.x < tile.rows) tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];
    __syncthreads();
    for (int first = 0; first < d; first += DEPTH) {
        for (int index = threadIdx.x; index < ROWS * DEPTH; index += THREADS) {
            const int i = index / DEPTH, p = index % DEPTH;  // neighbours read a row of x
            const bool inside = i < tile.rows && first + p < d;
            x_tile[p][i] = inside ? x[(long long)tokens[i] * d + first + p] : 0.0f;
        }
        for (int index = threadIdx.x; index < DEPTH * COLUMNS; index += THREADS) {
            const int p = index / COLUMNS, j = index % COLUMNS;  // neighbours read a row of w1 and w2
            const bool inside = first + p < d && first_column + j < h;
            const long long at = (long long)(first + p) * h + first_column + j;
            w1_tile[p][j] = inside ? w1_expert[at] : 0.0f;
            w2_tile[p][j] = inside ? w2_expert[at] : 0.0f;
        }
        __syncthreads();
        for (int p = 0; p < DEPTH; ++p) {
            float w1_row[CORNER], w2_row[CORNER];
            for (int j = 0; j < CORNER; ++j) {
                w1_row[j] = w1_tile[p][column + j];
                w2_row[j] = w2_tile[p][column + j];
            }
            for (int i = 0; i < CORNER; ++i) {
                const float x_p = x_tile[p][row + i];
                for (int j = 0; j < CORNER; ++j) {
                    a_sums[i][j] += x_p * w1_row[j];
                    b_sums[i][j] += x_p * w2_row[j];
                }
            }
        }
        __syncthreads();  // all have read before the tiles are written again
    }
"""


def _kernel(side: int, corner: int, product: str) -> str:
    return KERNEL.format(rows=side, columns=side, corner=corner, product=product.rstrip())


def cases() -> list[Case]:
    """Small cases, and one in which an expert has more rows, and a row more columns, than two tiles of 128."""
    few = [case for case in standard_cases() if case.L <= 13]
    return [*few, *telling_cases(), make_case(260, 24, 264, 2, 1, "hot", "several tiles")]


EXERCISES: tuple[Exercise, ...] = (
    Capstone(
        name="fused-expert",
        title="A fused forward of your own",
        difficulty=3,
        question="""Write the up-projection with SwiGLU in one kernel: `a = x w1`, `b = x w2` and `y_swi = silu(a) * b`
            for every routed row, the rows of `x` gathered by index. Below is the frame of the project's
            [`2_tiled`](../../kernels_cuda/expert_up/2_tiled.cu), without its product. A block has a tile of one
            expert's rows, and a thread a corner of it.

            Three designs reach the three levels. Bronze: each thread reads what it needs from global memory. Silver:
            the block's threads share tiles in shared memory, as in `2_tiled`. Gold: tiles of 128 rows and columns, for
            which a thread has a corner of 8 x 8. Other designs may reach them, too.

            With a GPU, `moeblaze check --kernel mine.cu:expert_up --task expert_up --backend cuda` runs the kernel
            there; the levels are counted without one.""",
        task="expert_up",
        entry="expert_up",
        cases=cases,
        levels={
            "bronze": (
                "read of x <= 4 R d h",
                "read of w1 <= 4 R d h",
                "read of w2 <= 4 R d h",
                "written <= 12 R h",
            ),
            "silver": (
                "read of x <= 4 R d ceil(h / 64)",
                "read of w1 <= 4 d h (R / 64 + min(E, R))",
                "read of w2 <= 4 d h (R / 64 + min(E, R))",
                "written <= 12 R h",
            ),
            "gold": (
                "read of x <= 4 R d ceil(h / 128)",
                "read of w1 <= 4 d h (R / 128 + min(E, R))",
                "read of w2 <= 4 d h (R / 128 + min(E, R))",
                "written <= 12 R h",
            ),
        },
        division=("accesses <= 48 (d + 16) + 300", "barriers <= 2 ceil(d / 8) + 3", "threads >= R h / 64"),
        unsolved=_kernel(64, 4, HOLE),
        solutions=dict(
            zip(
                LEVELS,
                (
                    _kernel(64, 4, FROM_GLOBAL_MEMORY),
                    _kernel(64, 4, FROM_SHARED_MEMORY),
                    _kernel(128, 8, FROM_SHARED_MEMORY),
                ),
                strict=True,
            )
        ),
        hints=(
            "Bronze: two loops over the corner around one over `p`. Skip rows from `tile.rows` on and columns from `h` "
            "on: they do not exist. A thread whose first row or column does not exist must read nothing.",
            "Silver: all threads load 16 columns of the tile's rows of `x` and 16 rows of `w1` and `w2` into shared "
            "memory, wait, multiply, and wait again.",
            "Gold: the same text with `ROWS = COLUMNS = 128` and `CORNER = 8`. Change the launch in the table, too.",
        ),
        why="""In silver and gold, an element of `x` is read once for every block that its row meets. One of `w1` is
            read once for every tile of its expert's rows. In bronze each thread that needs an element reads it.
            Doubling both sides of the tile halves both. With corners of 8 x 8 each thread holds 128 sums in
            registers. Larger tiles need more threads, or tensor cores, which the later versions of the kernel use.
            Fewer bytes need not be less time: with so many registers a block, fewer blocks run at once. Measure
            both on your GPU.""",
    ),
)
