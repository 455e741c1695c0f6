// expert_down, rung 3: tensor cores.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without
//              any kept expert output: SonicMoE (arXiv 2512.14080).
// Idea         The kernels of rung 2 on mma_matmul: tiles arrive by cp.async while others are
//              multiplied by mma.sync; gathered rows arrive like any other.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; THREADS = 256 per block. d and h are
//              multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel       grid                               block    shared bytes  bytes read                                            bytes written
// expert_down  R / 128 + min(E, R), ceil(d / 64)  THREADS  36864         8 E blocks + 2 R h D + 2 d h tiles                    2 R d
// d_hidden     R / 128 + min(E, R), ceil(h / 64)  THREADS  37888         8 E blocks + 8 R C + 2 R d C + 2 d h tiles + 2 R h G  2 R h (1 + G) + 4 R C
// d_w3         ceil(h / 128), ceil(d / 64), E     THREADS  36864         8 THREADS blocks + 2 R h D + 2 R d H + R d H / 2      2 E h d
// G is 2 with a gated activation, else 1; C = ceil(h / 64), D = ceil(d / 64), H = ceil(h / 128);
// tiles is the sum over the experts of ceil(rows / 128); blocks is the whole grid. 2 R d h FLOPs
// a GEMM. Bound: tensor cores.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "mma_matmul.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_down(const Scalar* y_swi, const Scalar* w3, const int* expert_token_offsets, Scalar* y, int d, int h, int E) {
    const RowTile tile = find_row_tile<ROWS>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    const int first_column = blockIdx.y * COLUMNS;
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, Along::SIDE>(
        sums, h,
        [&](int row, int p) { return row < tile.rows ? &y_swi[(long long)(tile.first + row) * h + p] : nullptr; },
        [&](int, int column, int p) {
            const int i = first_column + column;
            return i < d ? &w3[((long long)tile.expert * h + p) * d + i] : nullptr;
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
    const RowTile tile = find_row_tile<ROWS>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    __shared__ int tokens[ROWS];
    __shared__ float gates[ROWS];
    if (threadIdx.x < tile.rows) {
        tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];
        gates[threadIdx.x] = gate_of_row[tile.first + threadIdx.x];
    }
    __syncthreads();
    const int first_column = blockIdx.y * COLUMNS;
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, Along::DEPTH>(
        sums, d,
        [&](int row, int p) { return row < tile.rows ? &d_out[(long long)tokens[row] * d + p] : nullptr; },
        [&](int, int column, int p) {
            const long long j = first_column + column;
            return j < h ? &w3[((long long)tile.expert * h + j) * d + p] : nullptr;
        });
    constexpr int LINE = COLUMNS + 1;
    DYNAMIC_SHARED(float, terms);  // the stages' memory, ROWS lines
    sums.each([&](int row, int column, float sum, float) {
        const int j = first_column + column;
        const bool inside = row < tile.rows && j < h;
        const long long index = (long long)(tile.first + row) * h + j;
        terms[row * LINE + column] =
            inside ? store_hidden_gradients(a, b, d_a, d_b, gated_y, index, sum, gates[row]) : 0.0f;
    });
    __syncthreads();
    if (threadIdx.x < tile.rows) {
        float term = 0.0f;
        for (int column = 0; column < COLUMNS; ++column) term += terms[threadIdx.x * LINE + column];
        gate_terms[(long long)(tile.first + threadIdx.x) * gridDim.y + blockIdx.y] = term;
    }
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w3(const Scalar* gated_y, const Scalar* d_out, const int* expert_token_indices, const int* expert_token_offsets,
         Scalar* d_w3, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.z], rows = expert_token_offsets[blockIdx.z + 1] - begin;
    const int first_row = blockIdx.x * ROWS, first_column = blockIdx.y * COLUMNS;
    WarpResults<1> sums;
    mma_matmul<Along::SIDE, Along::SIDE>(
        sums, rows,
        [&](int row, int p) {
            const int j = first_row + row;
            return j < h ? &gated_y[(long long)(begin + p) * h + j] : nullptr;
        },
        [&](int, int column, int p) {
            const int i = first_column + column;
            return i < d ? &d_out[(long long)expert_token_indices[begin + p] * d + i] : nullptr;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int j = first_row + row, i = first_column + column;
        if (j < h && i < d) d_w3[((long long)blockIdx.z * h + j) * d + i] = from_float<Scalar>(sum);
    });
}
