// expert_down, version 2: tiles in shared memory.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without
//              any kept expert output: SonicMoE (arXiv 2512.14080).
// Idea         64 x 64 results from shared tiles, as in expert_up; d_hidden's epilogue turns
//              one sum into d_a, d_b, gate * y_swi and the tile's share of the gate gradient.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage of s bytes, ACTIVATION, THREADS = 256 per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order, d_gates tile by tile.
//
// kernel       grid                              block    shared bytes
//              bytes read                                            bytes written
// expert_down  R / 64 + min(E, R), ceil(d / 64)  THREADS  8716
//              8 E blocks + s R h D + s d h tiles                    s R d
// d_hidden     R / 64 + min(E, R), ceil(h / 64)  THREADS  25612
//              8 E blocks + 8 R C + s R d C + s d h tiles + s R h G  s R h (1 + G) + 4 R C
// d_w3         ceil(h / 64), ceil(d / 64), E     THREADS  8704
//              8 THREADS blocks + s R h D + 4 R d C + s R d C        s E h d
// G is 2 with a gated activation, else 1; C = ceil(h / 64), D = ceil(d / 64); tiles is the sum
// over the experts of ceil(rows / 64); blocks is the whole grid. 2 R d h FLOPs a GEMM.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "tiled_matmul.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_down(const Scalar* y_swi, const Scalar* w3, const int* expert_token_offsets, Scalar* y, int d, int h,
                int E) {
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    const int first_column = blockIdx.y * TILE;
    Corners<1> sums;
    tiled_matmul<Along::DEPTH, Along::SIDE>(
        sums, h,
        [&](int row, int p) { return row < tile.rows ? to_float(y_swi[(long long)(tile.first + row) * h + p]) : 0.0f; },
        [&](int, int column, int p) {
            const int i = first_column + column;
            return i < d ? to_float(w3[((long long)tile.expert * h + p) * d + i]) : 0.0f;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int i = first_column + column;
        if (row < tile.rows && i < d) y[(long long)(tile.first + row) * d + i] = from_float<Scalar>(sum);
    });
}

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_hidden(const Scalar* d_out, const float* gate_of_row, const Scalar* a, const Scalar* b, const Scalar* w3,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a, Scalar* d_b,
             Scalar* gated_y, float* gate_terms, int d, int h, int E) {
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    __shared__ int tokens[TILE];
    __shared__ float gates[TILE];
    __shared__ float terms[TILE][TILE];
    if (threadIdx.x < tile.rows) {
        tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];
        gates[threadIdx.x] = gate_of_row[tile.first + threadIdx.x];
    }
    __syncthreads();
    const int first_column = blockIdx.y * TILE;
    Corners<1> sums;
    tiled_matmul<Along::DEPTH, Along::DEPTH>(
        sums, d,
        [&](int row, int p) { return row < tile.rows ? to_float(d_out[(long long)tokens[row] * d + p]) : 0.0f; },
        [&](int, int column, int p) {
            const int j = first_column + column;
            return j < h ? to_float(w3[((long long)tile.expert * h + j) * d + p]) : 0.0f;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int j = first_column + column;
        const bool inside = row < tile.rows && j < h;
        const long long index = (long long)(tile.first + row) * h + j;
        terms[row][column] = inside ? store_hidden_gradients(a, b, d_a, d_b, gated_y, index, sum, gates[row]) : 0.0f;
    });
    __syncthreads();
    if (threadIdx.x < tile.rows) {
        float term = 0.0f;
        for (int column = 0; column < TILE; ++column) term += terms[threadIdx.x][column];
        gate_terms[(long long)(tile.first + threadIdx.x) * gridDim.y + blockIdx.y] = term;
    }
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w3(const Scalar* gated_y, const Scalar* d_out, const int* expert_token_indices, const int* expert_token_offsets,
         Scalar* d_w3, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.z], rows = expert_token_offsets[blockIdx.z + 1] - begin;
    const int first_row = blockIdx.x * TILE, first_column = blockIdx.y * TILE;
    Corners<1> sums;
    tiled_matmul<Along::SIDE, Along::SIDE>(
        sums, rows,
        [&](int row, int p) {
            const int j = first_row + row;
            return j < h ? to_float(gated_y[(long long)(begin + p) * h + j]) : 0.0f;
        },
        [&](int, int column, int p) {
            const int i = first_column + column;
            return i < d ? to_float(d_out[(long long)expert_token_indices[begin + p] * d + i]) : 0.0f;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int j = first_row + row, i = first_column + column;
        if (j < h && i < d) d_w3[((long long)blockIdx.z * h + j) * d + i] = from_float<Scalar>(sum);
    });
}
