"""Exercises of notebook 07: padding, the topology of the blocks, and products that visit stored blocks alone."""

from moeblaze_ref.backends.numba_cuda import block_sparse, dispatch
from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises.exercise import Asked, Exercise, KernelExercise, Prediction
from moeblaze_ref.course.exercises.kernels import Kernel, numba_kernel, numba_source
from moeblaze_ref.memory.accounting import tiles
from moeblaze_ref.memory.rows import megablocks_rows
from moeblaze_ref.memory.waste import step_flops_per_row

WHOLE_BLOCKS = f"""\
from numba import int32

from moeblaze_ref.backends.numba_cuda.runtime import THREADS, cuda


{numba_source(dispatch.exclusive_scan)}


@cuda.jit
def pad_offsets(expert_token_offsets, padded_offsets, side):
    \"\"\"Say where each expert's rows begin once its group fills whole blocks, and how many rows there are in all.

    Grid          1 block of THREADS threads, which scans THREADS experts at a time
    Shared bytes  4 THREADS
    \"\"\"
    scratch = cuda.shared.array(0, int32)
    thread = cuda.threadIdx.x
    num_experts = expert_token_offsets.shape[0] - 1
    start = 0
    for first in range(0, num_experts, THREADS):
        expert = first + thread
        padded = 0
        if expert < num_experts:
            rows = expert_token_offsets[expert + 1] - expert_token_offsets[expert]
            padded = (rows + side - 1) // side * side
        before, total = exclusive_scan(padded, scratch)
        if expert < num_experts:
            padded_offsets[expert] = start + before
        start += total
    if thread == 0:
        padded_offsets[num_experts] = start
"""

STORED_ONLY = """\
from moeblaze_ref.backends.numba_cuda.runtime import ZERO, cuda


@cuda.jit
def dsd(values, w3, row_offsets, column_indices, padded_y):
    \"\"\"Multiply each row of the block-sparse matrix (P, E h) by each column of w3 as one matrix (E h, d).

    Grid          ceil(P d / THREADS) blocks of THREADS threads, a thread for each element
    \"\"\"
    rows, d = padded_y.shape
    side, h = values.shape[1], w3.shape[1]
    element = cuda.grid(1)
    row, column = element // d, element % d
    if row < rows:
        line, i = row // side, row % side  # the block row, and the row in its blocks
        total = ZERO
        for number in range(row_offsets[line], row_offsets[line + 1]):
            first = column_indices[number] * side  # the row of (E h, d) that meets the block's first column
            for j in range(side):
                total += values[number, i, j] * w3[(first + j) // h, (first + j) % h, column]
        padded_y[row, column] = total
"""

BLOCK_COLUMN = """\
// The gradient (d, E h) in parts of h columns. A thread has an element, whose column lies in one block column.
extern "C" __global__ void dds(const float* padded_x, const float* values, const int* column_offsets,
                               const int* row_indices, const int* transpose_indices, float* d_w, int d, int h, int E,
                               int side) {
    const int index = blockIdx.x * THREADS + threadIdx.x;
    if (index >= E * d * h) return;
    const int expert = index / (d * h), p = index / h % d;
    const int column = expert * h + index % h;
    const int end = column_offsets[column / side + 1];
    float sum = 0.0f;
    for (int place = column_offsets[column / side]; place < end; ++place) {
        const int number = transpose_indices[place];
        const float* const x_rows = padded_x + row_indices[number] * side * d;
        const float* const value = values + number * side * side;
        for (int i = 0; i < side; ++i) sum += x_rows[i * d + p] * value[i * side + column % side];
    }
    d_w[index] = sum;
}
"""


def _padding(counts, h, block):
    rows = megablocks_rows(counts, block)
    stored = sum(rows.stored)
    return {"padding": sum(rows.padding), "blocks": stored // block * tiles(h, block)}


def _wasted(layer, padding):
    return {"flops": padding * step_flops_per_row(layer)}


EXERCISES: tuple[Exercise, ...] = (
    Prediction(
        name="padding-rows",
        title="Rows that fill up blocks",
        difficulty=1,
        question="""MegaBlocks drops nothing. It pads each expert's group to whole blocks of `block` rows. With
            `counts[e]` rows for expert `e`, how many rows are padding? The hidden tensor is block-sparse, with `h`
            columns for each expert: how many blocks of `block` by `block` does it store?""",
        given={"counts": [300, 128, 0, 5, 1], "h": 512, "block": 128},
        asked={
            "padding": Asked("rows", "sum(-n % block for n in counts)"),
            "blocks": Asked("blocks", "sum(-(-n // block) for n in counts) * (h // block)"),
        },
        truth=_padding,
        computed_by="moeblaze_ref.memory.rows.megablocks_rows",
        hints=(
            "`ceil(n / block)` blocks of rows for an expert with `n` rows; none for an expert without rows.",
            "An expert has `block * ceil(n / block) - n` rows of padding. A block of rows stores `h / block` blocks.",
        ),
        why="""Padding is at most `block - 1` rows for each expert, whatever the skew. It hurts where experts have few
            rows each: many experts, few tokens.""",
    ),
    Prediction(
        name="wasted-work",
        title="What padding costs",
        difficulty=1,
        question="""Each row of padding goes through the products of a whole step, forward and backward. How many FLOPs
            do `padding` rows waste in a SwiGLU layer?""",
        given={"layer": preset("olmoe").config, "padding": 4000},
        asked={"flops": Asked("FLOPs", "padding * 18 * layer.d * layer.h")},
        truth=_wasted,
        computed_by="moeblaze_ref.memory.waste.step_flops_per_row",
        hints=(
            "Count the products of a step, as in notebook 00.",
            "A step has nine products, each with `2 * d * h` FLOPs for a row.",
        ),
        why="""A product with zeros takes as long as any other. MoEBlaze stores no padding, but its last tiles compute
            on empty rows as well.""",
    ),
    KernelExercise(
        name="whole-blocks",
        title="Round up, then add up",
        difficulty=1,
        kind="numba",
        question="""Expert `e` has the rows from `expert_token_offsets[e]` to the next offset. MegaBlocks gives it whole
            blocks of `side` rows. Compute `padded`, the rows of the thread's expert with their padding. The scan below
            adds up what the threads of a block have.""",
        task="block_sparse.pad_offsets",
        kernel=Kernel("pad_offsets", WHOLE_BLOCKS),
        change=(
            "            rows = expert_token_offsets[expert + 1] - expert_token_offsets[expert]\n...\n"
            "            padded = (rows + side - 1) // side * side\n",
            "            pass  # Your part: the expert's rows, rounded up to whole blocks.\n",
        ),
        budgets=("read <= 8 E", "written <= 4 E + 4"),
        division=(
            "accesses <= (3 log2(THREADS) + 6) ceil(E / THREADS) + 1",
            "barriers <= (2 log2(THREADS) + 2) ceil(E / THREADS)",
            "threads >= THREADS",
        ),
        hints=(
            "`n // block` rounds down. What must be added to `n` before, so that it rounds up?",
            "`(rows + side - 1) // side` is the number of blocks. An expert without rows has none.",
        ),
        why="""Each group is rounded before the sum, so every group begins at a whole block. If the sum were rounded,
            a block could hold rows of two experts.""",
    ),
    KernelExercise(
        name="transposed-blocks",
        title="The same blocks, column by column",
        difficulty=2,
        kind="numba",
        question="""An expert's blocks are a rectangle of `rows` block rows and `wide` block columns. They are stored
            row by row, and `first` is the number of its first block. A thread has the block `here` of the rectangle.
            Write `row_indices` and `column_indices` of this block: the block row in the matrix, and the block column,
            where expert `e` begins at `e * wide`. Then write the block's number to its place in `transpose_indices`,
            which lists the same blocks column by column.""",
        task="block_sparse.blocks",
        kernel=numba_kernel(
            block_sparse.topology_blocks_kernel,
            "from moeblaze_ref.backends.numba_cuda.runtime import THREADS, cuda",
            block="side",
        ),
        change=(
            "        row, column = here // wide, here % wide\n...\n"
            "        transpose_indices[first + column * rows + row] = first + here\n",
            "        pass  # Your part: the block's row and column, and its place in the other order.\n",
        ),
        budgets=("written <= 12 nnz",),
        division=(
            "accesses <= 3 ceil(ceil(L / side) wide / THREADS) + 2",
            "barriers <= 0",
            "threads >= nnz / max(1, ceil(ceil(L / side) wide / THREADS))",
        ),
        hints=(
            "In the rectangle, `here` is `row * wide + column`. What is it if the columns come first?",
            """The block row is `first_row + row`, the block column `expert * wide + column`. Column by column, the
            block comes after `column` whole columns of `rows` blocks, and after `row` blocks of its own.""",
        ),
        why="""The backward needs the transposed matrix. The kernel moves no block: a second list of numbers says in
            which order to visit them. MegaBlocks calls it transpose indices.""",
    ),
    KernelExercise(
        name="stored-only",
        title="A product that skips what is not stored",
        difficulty=2,
        kind="numba",
        question="""A thread has one element of `padded_y`, which is the block-sparse matrix times `w3` of all experts,
            as one matrix of `E * h` rows. Most blocks of the thread's row are not stored, since a row has one expert.
            Visit the stored ones. The numbers of block row `line` are those from `row_offsets[line]` to the next
            offset. Block `number` has the block column `column_indices[number]`. Row `r` of the one matrix is
            `w3[r // h, r % h]`.""",
        task="block_sparse.dsd",
        kernel=Kernel("dsd", STORED_ONLY),
        change=(
            "        for number in range(row_offsets[line], row_offsets[line + 1]):\n...\n"
            "                total += values[number, i, j] * w3[(first + j) // h, (first + j) % h, column]\n",
            "        # Your part: over the stored blocks of the block row, add row i of the block times w3.\n",
        ),
        budgets=("read of values <= 4 P h d", "read of w3 <= 4 P h d", "written <= 4 P d"),
        division=("accesses <= wide (3 side + 1) + 3", "barriers <= 0", "threads >= P d"),
        hints=(
            "There are two loops: over the numbers of the block row, and over the columns `j` of a block.",
            """Column `j` of block `number` is column `column_indices[number] * side + j` of the matrix, so it meets
            this row of `w3`. The left factor is `values[number, i, j]`.""",
        ),
        why="""The kernel reads `h` columns of a row, not `E * h`: the product costs as much as a dense one of a single
            expert. And the kernel knows nothing of experts, so it fits every pattern of blocks.""",
    ),
    KernelExercise(
        name="block-column",
        title="Down a block column",
        difficulty=2,
        kind="cuda",
        question="""A thread has one element of `d_w`: column `p` of `padded_x` times a column of the block-sparse
            matrix. The column lies in block column `column / side`, and its blocks are anywhere among the stored
            ones. The places of the block column in `transpose_indices` go from `column_offsets[column / side]` to
            `end`. Each place has the number of a block, and `row_indices[number]` its block row. Write the loop over
            the places.""",
        task="block_sparse.dds",
        kernel=Kernel("dds", BLOCK_COLUMN, grid="ceil(E d h / THREADS)"),
        change=(
            "    for (int place = column_offsets[column / side]; place < end; ++place) {\n...\n    }\n",
            "    // Your part: visit the blocks of the block column, and add over the rows of each.\n",
        ),
        budgets=("read of padded_x <= 4 P d h", "read of values <= 4 P d h", "written <= 4 E d h"),
        division=(
            "accesses <= ceil(L / side) (2 side + 2) + 3",
            "barriers <= 0",
            "threads >= E d h",
        ),
        hints=(
            "From a place to the block's number, and from the number to its block row: two lookups for each block.",
            """Row `i` of block `number` is row `row_indices[number] * side + i` of `padded_x`. Its value in the column
            is `values[number * side * side + i * side + column % side]`.""",
        ),
        why="""The transposed product reads the blocks where they lie. Without the list of numbers, the kernel would
            search all blocks, or the backward would copy them into another order.""",
    ),
)
