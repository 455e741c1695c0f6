// block_sparse, version 2: tiles in shared memory.
//
// Purpose      The three products of block-sparse (S) and dense (D) matrices, the result first: SDD, DSD, DDS.
// Source       MegaBlocks (arXiv 2211.15841), sections 5.1, 5.1.3 and 5.1.4.
// Idea         A block of threads computes 64 x 64 results inside one block row or column of S, so that all of them
//              walk the same blocks: one of the matrix after another goes through shared memory.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; BLOCK; TRANSPOSE_LHS and TRANSPOSE_RHS; THREADS = 256 threads
//              per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel  grid                          block    shared bytes
//         bytes read                                              bytes written
// sdd     n, T T                        THREADS  8704
//         8 THREADS blocks + 2 s H K T                            s V
// dsd     rows T / BLOCK, ceil(K / 64)  THREADS  8704
//         8 THREADS blocks + 4 I THREADS n T C + s V C + s H K T  s rows K
// dds     ceil(K / 64), N T / BLOCK     THREADS  8704
//         8 THREADS blocks + 8 THREADS n T C + s V C + s H K T    s N K
// S is a matrix (M, N) of n blocks, which have H = n BLOCK lines and V = H BLOCK values. SDD has a depth K, the others
// a dense width K. Of dsd, rows are M, or N with TRANSPOSE_LHS; I = 1 + TRANSPOSE_LHS indices lead to a block. Tiles:
// T = ceil(BLOCK / 64) along a block's side, C = ceil(K / 64) along K; blocks is the whole grid. 2 V K FLOPs each.
// Bound: shared memory: a thread reads 8 floats for 16 products.
#include "sparse.cuh"
#include "tiled_matmul.cuh"

constexpr int PARTS = (BLOCK + TILE - 1) / TILE;  // tiles along a block's side
constexpr Along RHS = TRANSPOSE_RHS ? Along::DEPTH : Along::SIDE;

// Sections 5.1 and 5.1.3.
extern "C" __global__ void __launch_bounds__(THREADS)
    sdd(const Scalar* lhs, const Scalar* rhs, const int* row_indices, const int* column_indices, Scalar* values,
        int nnz, int K, int rhs_rows, int rhs_width) {
    const int first_line = blockIdx.y / PARTS * TILE, first_column = blockIdx.y % PARTS * TILE;
    const long long row = row_indices[blockIdx.x] * BLOCK + first_line;
    const int column = column_indices[blockIdx.x] * BLOCK + first_column;
    const Dense right = {rhs, rhs_rows, rhs_width};
    Corners<1> sums;
    tiled_matmul<Along::DEPTH, RHS>(
        sums, K, [&](int i, int p) { return first_line + i < BLOCK ? to_float(lhs[(row + i) * K + p]) : 0.0f; },
        [&](int, int j, int p) {
            if (first_column + j >= BLOCK) return 0.0f;
            return TRANSPOSE_RHS ? right(column + j, p) : right(p, column + j);
        });
    Scalar* const block = values + (long long)blockIdx.x * BLOCK * BLOCK;
    sums.each([&](int i, int j, float sum, float) {
        i += first_line, j += first_column;
        if (i < BLOCK && j < BLOCK) block[i * BLOCK + j] = from_float<Scalar>(sum);
    });
}

// Sections 5.1 and 5.1.4. Without the second bound ptxas spills a register to fit one more block.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    dsd(const Scalar* values, const Scalar* rhs, const int* offsets, const int* others, const int* transpose_indices,
        Scalar* result, int rows, int K, int rhs_rows, int rhs_width) {
    const int first_line = blockIdx.x % PARTS * TILE, first_column = blockIdx.y * TILE;
    const auto blocks = blocks_of<TRANSPOSE_LHS>(offsets, others, transpose_indices, blockIdx.x / PARTS);
    const Dense right = {rhs, rhs_rows, rhs_width};
    Corners<1> sums;
    for (int n = 0; n < blocks.count; ++n) {
        const int number = blocks.number(n), first = others[number] * BLOCK;
        const Scalar* const block = values + (long long)number * BLOCK * BLOCK;
        tiled_matmul<TRANSPOSE_LHS ? Along::SIDE : Along::DEPTH, RHS>(
            sums, BLOCK,
            [&](int i, int p) {
                const int line = first_line + i;
                return line < BLOCK ? to_float(block[TRANSPOSE_LHS ? p * BLOCK + line : line * BLOCK + p]) : 0.0f;
            },
            [&](int, int j, int p) {
                const int column = first_column + j;
                if (column >= K) return 0.0f;
                return TRANSPOSE_RHS ? right(column, first + p) : to_float(rhs[(long long)(first + p) * K + column]);
            });
    }
    const long long row = blockIdx.x / PARTS * BLOCK;
    sums.each([&](int i, int j, float sum, float) {
        i += first_line, j += first_column;
        if (i < BLOCK && j < K) result[(row + i) * K + j] = from_float<Scalar>(sum);
    });
}

// Sections 5.1 and 5.1.4.
extern "C" __global__ void __launch_bounds__(THREADS)
    dds(const Scalar* lhs, const Scalar* values, const int* column_offsets, const int* row_indices,
        const int* transpose_indices, Scalar* result, int M, int K, int N, int width) {
    const int first_row = blockIdx.x * TILE, first_column = blockIdx.y % PARTS * TILE;
    const auto blocks = blocks_of<true>(column_offsets, row_indices, transpose_indices, blockIdx.y / PARTS);
    const Dense left = {lhs, TRANSPOSE_LHS ? M : K, TRANSPOSE_LHS ? K : M};
    Corners<1> sums;
    for (int n = 0; n < blocks.count; ++n) {
        const int number = blocks.number(n), first = row_indices[number] * BLOCK;
        const Scalar* const block = values + (long long)number * BLOCK * BLOCK;
        tiled_matmul<TRANSPOSE_LHS ? Along::SIDE : Along::DEPTH, Along::SIDE>(
            sums, BLOCK,
            [&](int i, int p) {
                const int row = first_row + i;
                if (row >= K) return 0.0f;
                return TRANSPOSE_LHS ? left(first + p, row) : left(row, first + p);
            },
            [&](int, int j, int p) {
                const int column = first_column + j;
                return column < BLOCK ? to_float(block[p * BLOCK + column]) : 0.0f;
            });
    }
    const Dense target = {nullptr, K, width};
    const int column = blockIdx.y / PARTS * BLOCK;
    sums.each([&](int i, int j, float sum, float) {
        i += first_row, j += first_column;
        if (i < K && j < BLOCK) result[target.at(i, column + j)] = from_float<Scalar>(sum);
    });
}
