// block_sparse, version 1: one thread an element, straight from global memory.
//
// Purpose      The three products of block-sparse (S) and dense (D) matrices, the result first: SDD, DSD, DDS.
// Source       MegaBlocks (arXiv 2211.15841), sections 5.1, 5.1.3 and 5.1.4.
// Idea         A result of SDD knows its block row and column by the explicit indices (COO); one of DSD walks its block
//              row by the offsets (CSR); one of DDS, or of DSD with S transposed, walks its block column by the
//              transpose indices, and no value moves.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; BLOCK; TRANSPOSE_LHS and TRANSPOSE_RHS; THREADS per block of threads.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel  grid                    block    shared bytes  bytes read                       bytes written
// sdd     ceil(V / THREADS)       THREADS  0             8 V + 2 s V K                    s V
// dsd     ceil(rows K / THREADS)  THREADS  0             8 rows K + 4 I H K + 2 s V K     s rows K
// dds     ceil(N K / THREADS)     THREADS  0             8 N K + 8 H K + 2 s V K          s N K
// S is a matrix (M, N) of n blocks, which have H = n BLOCK lines and V = H BLOCK values. SDD has a depth K, the others
// a dense width K. Of dsd, rows are M, or N with TRANSPOSE_LHS; I = 1 + TRANSPOSE_LHS indices lead to a block. 2 V K
// FLOPs each. Bound: memory.
#include "sparse.cuh"

// Sections 5.1 and 5.1.3: lhs (M, K), rhs (K, N) or, transposed, (N, K).
extern "C" __global__ void __launch_bounds__(THREADS)
    sdd(const Scalar* lhs, const Scalar* rhs, const int* row_indices, const int* column_indices, Scalar* values,
        int nnz, int K, int rhs_rows, int rhs_width) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)nnz * BLOCK * BLOCK) return;
    const int number = index / (BLOCK * BLOCK), inside = index % (BLOCK * BLOCK);
    const long long row = row_indices[number] * BLOCK + inside / BLOCK;
    const int column = column_indices[number] * BLOCK + inside % BLOCK;
    const Dense right = {rhs, rhs_rows, rhs_width};
    float sum = 0.0f;
    for (int p = 0; p < K; ++p)
        sum += to_float(lhs[row * K + p]) * (TRANSPOSE_RHS ? right(column, p) : right(p, column));
    values[index] = from_float<Scalar>(sum);
}

// Sections 5.1 and 5.1.4: result (rows, K) of S (rows, ...), or of S transposed.
extern "C" __global__ void __launch_bounds__(THREADS)
    dsd(const Scalar* values, const Scalar* rhs, const int* offsets, const int* others, const int* transpose_indices,
        Scalar* result, int rows, int K, int rhs_rows, int rhs_width) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)rows * K) return;
    const int row = index / K, column = index % K, line = row % BLOCK;
    const auto blocks = blocks_of<TRANSPOSE_LHS>(offsets, others, transpose_indices, row / BLOCK);
    const Dense right = {rhs, rhs_rows, rhs_width};
    float sum = 0.0f;
    for (int i = 0; i < blocks.count; ++i) {
        const int number = blocks.number(i), first = others[number] * BLOCK;
        const Scalar* const block = values + (long long)number * BLOCK * BLOCK;
        for (int p = 0; p < BLOCK; ++p)
            sum += to_float(block[TRANSPOSE_LHS ? p * BLOCK + line : line * BLOCK + p]) *
                   (TRANSPOSE_RHS ? right(column, first + p) : right(first + p, column));
    }
    result[index] = from_float<Scalar>(sum);
}

// Sections 5.1 and 5.1.4: result (K, N) in parts of `width` columns; lhs (K, M) or, transposed, (M, K).
extern "C" __global__ void __launch_bounds__(THREADS)
    dds(const Scalar* lhs, const Scalar* values, const int* column_offsets, const int* row_indices,
        const int* transpose_indices, Scalar* result, int M, int K, int N, int width) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)K * N) return;
    const int row = index / N, column = index % N;
    const auto blocks = blocks_of<true>(column_offsets, row_indices, transpose_indices, column / BLOCK);
    const Dense left = {lhs, TRANSPOSE_LHS ? M : K, TRANSPOSE_LHS ? K : M};
    float sum = 0.0f;
    for (int i = 0; i < blocks.count; ++i) {
        const int number = blocks.number(i), first = row_indices[number] * BLOCK;
        const Scalar* const block = values + (long long)number * BLOCK * BLOCK + column % BLOCK;
        for (int p = 0; p < BLOCK; ++p)
            sum += (TRANSPOSE_LHS ? left(first + p, row) : left(row, first + p)) * to_float(block[p * BLOCK]);
    }
    result[Dense{nullptr, K, width}.at(row, column)] = from_float<Scalar>(sum);
}
