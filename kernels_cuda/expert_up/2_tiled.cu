// expert_up, version 2: tiles in shared memory.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row, and the gradients
//              of x, w1 and w2.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5 (Algorithm 1).
// Idea         A block computes 64 x 64 results from tiles that its threads share: an element
//              of x or of a weight is read once for 64 results, not once for each. A block's
//              rows belong to one expert; the device finds which (no padding, no host).
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage of s bytes, ACTIVATION, THREADS = 256 per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel     grid                              block    shared bytes
//            bytes read                                      bytes written
// expert_up  R / 64 + min(E, R), ceil(h / 64)  THREADS  268 + 4352 (1 + G)
//            8 E blocks + 4 R C + s R d C + s d h G tiles    s R h (G P + Y)
// d_x_rows   R / 64 + min(E, R), ceil(d / 64)  THREADS  12 + 8704 G
//            8 E blocks + s R h G D + s d h G tiles          s R d
// d_w        ceil(d / 64), ceil(h / 64), E     THREADS  8704
//            8 THREADS blocks + 4 R d C + s R d C + s R h D  s E d h
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out.
// G is 2 with a gated activation, else 1; C = ceil(h / 64), D = ceil(d / 64); tiles is the sum
// over the experts of ceil(rows / 64); blocks is the whole grid. 2 R d h G FLOPs a GEMM, in d_w 2 R d h.
// Bound: shared memory: a thread reads 8 floats for 16 products.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "tiled_matmul.cuh"

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const Scalar* x, const Scalar* w1, const Scalar* w2, const int* expert_token_indices,
              const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi, int d, int h, int E) {
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    __shared__ int tokens[TILE];
    if (threadIdx.x < tile.rows) tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];
    __syncthreads();
    const int first_column = blockIdx.y * TILE;
    const Scalar* const weights[2] = {w1 + (long long)tile.expert * d * h, w2 + (long long)tile.expert * d * h};
    Corners<GATED ? 2 : 1> sums;
    tiled_matmul<Along::DEPTH, Along::SIDE>(
        sums, d, [&](int row, int p) { return row < tile.rows ? to_float(x[(long long)tokens[row] * d + p]) : 0.0f; },
        [&](int result, int column, int p) {
            const int j = first_column + column;
            return j < h ? to_float(weights[result][(long long)p * h + j]) : 0.0f;
        });
    sums.each([&](int row, int column, float a_sum, float b_sum) {
        const int j = first_column + column;
        if (row < tile.rows && j < h) store_hidden(a, b, y_swi, (long long)(tile.first + row) * h + j, a_sum, b_sum);
    });
}

// Section 5: d_a w1^T + d_b w2^T for every routed row, all products with w1 before those with w2.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_x_rows(const Scalar* d_a, const Scalar* d_b, const Scalar* w1, const Scalar* w2, const int* expert_token_offsets,
             Scalar* rows, int d, int h, int E) {
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    const int first_column = blockIdx.y * TILE;
    Corners<1> sums;
    auto add = [&](const Scalar* gradient, const Scalar* weights) {
        tiled_matmul<Along::DEPTH, Along::DEPTH>(
            sums, h,
            [&](int row, int p) {
                return row < tile.rows ? to_float(gradient[(long long)(tile.first + row) * h + p]) : 0.0f;
            },
            [&](int, int column, int p) {
                const int i = first_column + column;
                return i < d ? to_float(weights[((long long)tile.expert * d + i) * h + p]) : 0.0f;
            });
    };
    add(d_a, w1);
    if (GATED) add(d_b, w2);
    sums.each([&](int row, int column, float sum, float) {
        const int i = first_column + column;
        if (row < tile.rows && i < d) rows[(long long)(tile.first + row) * d + i] = from_float<Scalar>(sum);
    });
}

// Section 5: d_w1 = X^T d_a, or d_w2 = X^T d_b, over the expert's rows, x gathered again.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w(const Scalar* d_hidden, const Scalar* x, const int* expert_token_indices, const int* expert_token_offsets,
        Scalar* d_w, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.z], rows = expert_token_offsets[blockIdx.z + 1] - begin;
    const int first_row = blockIdx.x * TILE, first_column = blockIdx.y * TILE;
    Corners<1> sums;
    tiled_matmul<Along::SIDE, Along::SIDE>(
        sums, rows,
        [&](int row, int p) {
            const int i = first_row + row;
            return i < d ? to_float(x[(long long)expert_token_indices[begin + p] * d + i]) : 0.0f;
        },
        [&](int, int column, int p) {
            const int j = first_column + column;
            return j < h ? to_float(d_hidden[(long long)(begin + p) * h + j]) : 0.0f;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int i = first_row + row, j = first_column + column;
        if (i < d && j < h) d_w[((long long)blockIdx.z * d + i) * h + j] = from_float<Scalar>(sum);
    });
}
