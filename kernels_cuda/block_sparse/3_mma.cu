// block_sparse, version 3: tensor cores.
//
// Purpose      The three products of block-sparse (S) and dense (D) matrices, the result first: SDD, DSD, DDS.
// Source       MegaBlocks (arXiv 2211.15841), sections 5.1, 5.1.3 and 5.1.4.
// Idea         The products of version 2 on mma_matmul. The depth of a result is that of all its blocks, one behind the
//              other: an operand's lines say in which block a place of it lies, so that copies never pause between two
//              blocks. A tile is as large as a block, of the usual ones.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar of s bytes: __half or __nv_bfloat16; BLOCK, a multiple of 8; TRANSPOSE_LHS and TRANSPOSE_RHS;
//              TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, STAGES, WARP_ROWS, WARP_COLUMNS and BAND, see mma_matmul.cuh;
//              THREADS, a warp for each of its parts of a tile. K is a multiple of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel  grid                                    block    shared bytes
//         bytes read                                                      bytes written
// sdd     n, Y X                                  THREADS  s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//         8 THREADS blocks + s H K (X + Y)                                s V
// dsd     rows Y / BLOCK, ceil(K / TILE_COLUMNS)  THREADS  s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//         8 THREADS blocks + s V C + s H K Y + 4 H (A Y C (I - 1) + G I)  s rows K
// dds     ceil(K / TILE_ROWS), N X / BLOCK        THREADS  s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//         8 THREADS blocks + s V R + s H K X + 4 H (B X R + 2 G)          s N K
// S is a matrix (M, N) of n blocks, which have H = n BLOCK lines and V = H BLOCK values. SDD has a depth K, the others
// a dense width K. Of dsd, rows are M, or N with TRANSPOSE_LHS; I = 1 + TRANSPOSE_LHS indices lead to a block. Tiles:
// Y = ceil(BLOCK / TILE_ROWS) and X = ceil(BLOCK / TILE_COLUMNS) along a block's sides, R = ceil(K / TILE_ROWS) and
// C = ceil(K / TILE_COLUMNS) along K; blocks is the whole grid. Indices are read for each 16 bytes that they lead to:
// A = s TILE_ROWS / 16 or B = s TILE_COLUMNS / 16 in a line across a tile. G such places meet a line of a block in the
// dense operand: of dsd B Y C, or s K Y / 16 with TRANSPOSE_RHS; of dds A X R with TRANSPOSE_LHS, else s K X / 16.
// 2 V K FLOPs each. Bound: tensor cores.
#include "mma_matmul.cuh"
#include "sparse.cuh"

constexpr int ROW_PARTS = (BLOCK + TILE_ROWS - 1) / TILE_ROWS;  // tiles along a block's side
constexpr int COLUMN_PARTS = (BLOCK + TILE_COLUMNS - 1) / TILE_COLUMNS;
constexpr Along RHS = TRANSPOSE_RHS ? Along::DEPTH : Along::SIDE;

// Places of the depth as lines: BLOCK of the matrix for each block, its own (values) or those that it meets (OTHER).
template <bool BY_COLUMN, bool OTHER>
struct LinesOfBlocks {
    const Scalar* matrix;
    int pitch, count, width;  // elements from line to line; lines, and elements of each
    Blocks<BY_COLUMN> blocks;

    __device__ __forceinline__ int number(int line) const {
        if (line >= count) return -1;
        const int i = line / BLOCK;
        return (OTHER ? blocks.other(i) : blocks.number(i)) * BLOCK + line % BLOCK;
    }
    __device__ __forceinline__ const Scalar* chunk(int number, int at) const {
        return number >= 0 && at < width ? matrix + (long long)number * pitch + at : nullptr;
    }
};

// Lines of a block row, whose blocks lie one behind the other: `values` is where the first one's first line begins.
struct LinesOfBlockRow {
    const Scalar* values;
    int count, depth;

    __device__ __forceinline__ int number(int line) const { return line < count ? line : -1; }
    __device__ __forceinline__ const Scalar* chunk(int number, int at) const {
        const bool inside = number >= 0 && at < depth;
        return inside ? values + ((long long)(at / BLOCK) * BLOCK + number) * BLOCK + at % BLOCK : nullptr;
    }
};

// Lines of a dense matrix from `first` on, of which the blocks meet BLOCK columns each.
template <bool BY_COLUMN>
struct LinesThroughBlocks {
    Dense dense;
    int first, count, depth;
    Blocks<BY_COLUMN> blocks;

    __device__ __forceinline__ int number(int line) const { return line < count ? first + line : -1; }
    __device__ __forceinline__ const Scalar* chunk(int number, int at) const {
        const bool inside = number >= 0 && at < depth;
        return inside ? dense.data + dense.at(number, blocks.other(at / BLOCK) * BLOCK + at % BLOCK) : nullptr;
    }
};

// The operand S, from a line or a column of its blocks on: a block row as it lies, or a block column.
template <bool BY_COLUMN>
__device__ __forceinline__ auto sparse_lines(const Scalar* values, int first, const Blocks<BY_COLUMN>& blocks) {
    const int depth = blocks.count * BLOCK, count = BLOCK - first;
    if constexpr (BY_COLUMN)
        return LinesOfBlocks<true, false>{values + first, BLOCK, depth, count, blocks};
    else
        return LinesOfBlockRow{values + ((long long)blocks.first * BLOCK + first) * BLOCK, count, depth};
}

// The operand D, from a line or a column on, of which there are `count` more: the blocks meet columns of its lines, or
// whole lines.
template <bool COLUMNS, bool BY_COLUMN>
__device__ __forceinline__ auto dense_lines(const Dense& dense, int first, int count, const Blocks<BY_COLUMN>& blocks) {
    const int depth = blocks.count * BLOCK;
    if constexpr (COLUMNS)
        return LinesThroughBlocks<BY_COLUMN>{dense, first, count, depth, blocks};
    else
        return LinesOfBlocks<BY_COLUMN, true>{dense.data + first, dense.width, depth, count, blocks};
}

// Sections 5.1 and 5.1.3.
extern "C" __global__ void __launch_bounds__(THREADS)
    sdd(const Scalar* lhs, const Scalar* rhs, const int* row_indices, const int* column_indices, Scalar* values,
        int nnz, int K, int rhs_rows, int rhs_width) {
    const int first_line = blockIdx.y / COLUMN_PARTS * TILE_ROWS,
              first_column = blockIdx.y % COLUMN_PARTS * TILE_COLUMNS;
    const int lines = BLOCK - first_line, columns = BLOCK - first_column;
    const int row = row_indices[blockIdx.x] * BLOCK + first_line;
    const int column = column_indices[blockIdx.x] * BLOCK + first_column;
    const Lines<false> left = {lhs + (long long)row * K, K, lines, K};
    const long long begin = TRANSPOSE_RHS ? (long long)column * K : Dense{rhs, rhs_rows, rhs_width}.at(0, column);
    const Lines<false> right = {rhs + begin, TRANSPOSE_RHS ? K : rhs_width, TRANSPOSE_RHS ? columns : K,
                                TRANSPOSE_RHS ? K : columns};
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, RHS>(sums, K, left, &right);
    Scalar* const block = values + ((long long)blockIdx.x * BLOCK + first_line) * BLOCK;
    store_tile(sums, block + first_column, lines, columns, BLOCK);
}

// Sections 5.1 and 5.1.4.
extern "C" __global__ void __launch_bounds__(THREADS)
    dsd(const Scalar* values, const Scalar* rhs, const int* offsets, const int* others, const int* transpose_indices,
        Scalar* result, int rows, int K, int rhs_rows, int rhs_width) {
    const int first_line = blockIdx.x % ROW_PARTS * TILE_ROWS, first_column = blockIdx.y * TILE_COLUMNS;
    const auto blocks = blocks_of<TRANSPOSE_LHS>(offsets, others, transpose_indices, blockIdx.x / ROW_PARTS);
    const int lines = BLOCK - first_line, columns = K - first_column;
    const auto left = sparse_lines(values, first_line, blocks);
    const auto right = dense_lines<TRANSPOSE_RHS>(Dense{rhs, rhs_rows, rhs_width}, first_column, columns, blocks);
    WarpResults<1> sums;
    mma_matmul<TRANSPOSE_LHS ? Along::SIDE : Along::DEPTH, RHS>(sums, blocks.count * BLOCK, left, &right);
    const long long row = blockIdx.x / ROW_PARTS * BLOCK + first_line;
    store_tile(sums, result + row * K + first_column, lines, columns, K);
}

// Sections 5.1 and 5.1.4.
extern "C" __global__ void __launch_bounds__(THREADS)
    dds(const Scalar* lhs, const Scalar* values, const int* column_offsets, const int* row_indices,
        const int* transpose_indices, Scalar* result, int M, int K, int N, int width) {
    const int first_row = blockIdx.x * TILE_ROWS, first_column = blockIdx.y % COLUMN_PARTS * TILE_COLUMNS;
    const auto blocks = blocks_of<true>(column_offsets, row_indices, transpose_indices, blockIdx.y / COLUMN_PARTS);
    const int lines = K - first_row, columns = BLOCK - first_column;
    const Dense dense = {lhs, TRANSPOSE_LHS ? M : K, TRANSPOSE_LHS ? K : M};
    const auto left = dense_lines<!TRANSPOSE_LHS>(dense, first_row, lines, blocks);
    const auto right = sparse_lines(values, first_column, blocks);
    WarpResults<1> sums;
    mma_matmul<TRANSPOSE_LHS ? Along::SIDE : Along::DEPTH, Along::SIDE>(sums, blocks.count * BLOCK, left, &right);
    const int column = blockIdx.y / COLUMN_PARTS * BLOCK + first_column;
    Scalar* const target = result + Dense{nullptr, K, width}.at(first_row, column);
    store_tile(sums, target, lines, columns, width);
}
