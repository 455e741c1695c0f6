// packed, version 2: tiles in shared memory.
//
// Purpose      Of weights as models store them, the two kernels that those of expert_up and expert_down cannot stand
//              for: ab = x gate_up and y_swi; and d_ab, gate * y_swi and the gates' gradients from d_out down^T.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept expert
//              output: SonicMoE (arXiv 2512.14080).
// Idea         The kernels expert_up and d_hidden of version 2, with their operands where LAYOUT says. The other
//              four products are theirs as they are: d_ab is a matrix, and gate_up another.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage of s bytes, ACTIVATION, LAYOUT, BIASED, THREADS = 256 per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order, d_gates tile by tile.
//
// kernel     grid                              block    shared bytes
//            bytes read                                                bytes written
// expert_up  R / 64 + min(E, R), ceil(h / 64)  THREADS  268 + 4352 (1 + G)
//            8 E blocks + 4 R C + s R d C + s d h G tiles + s R h G U  s R h (G P + Y)
// d_hidden   R / 64 + min(E, R), ceil(h / 64)  THREADS  25612
//            8 E blocks + 8 R C + s R d C + s d h tiles + s R h G      s R h (1 + G) + 4 R C
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; U is BIASED. G is 2 with a
// gated activation, else 1; C = ceil(h / 64); tiles is the sum over the experts of ceil(rows / 64); blocks is the
// whole grid. 2 R d h G FLOPs in expert_up, 2 R d h in d_hidden. Bound: shared memory.
#include "expert_rows.cuh"
#include "packed.cuh"
#include "tiled_matmul.cuh"

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const Scalar* x, const Scalar* gate_up, const int* expert_token_indices, const int* expert_token_offsets,
              Scalar* ab, Scalar* y_swi, int d, int h, int E, const Scalar* bias) {
    const RowTile tile = find_row_tile<TILE>(expert_token_offsets, E, blockIdx.x);
    if (tile.rows == 0) return;
    __shared__ int tokens[TILE];
    if (threadIdx.x < tile.rows) tokens[threadIdx.x] = expert_token_indices[tile.first + threadIdx.x];
    __syncthreads();
    const int first_column = blockIdx.y * TILE;
    Corners<PROJECTIONS> sums;
    tiled_matmul<Along::DEPTH, LAYOUT::TRANSPOSED ? Along::DEPTH : Along::SIDE>(
        sums, d, [&](int row, int p) { return row < tile.rows ? to_float(x[(long long)tokens[row] * d + p]) : 0.0f; },
        [&](int projection, int side, int p) {
            const int j = first_column + side, column = packed_column(projection, j, h);
            return j < h ? to_float(gate_up[up_weight_at(tile.expert, p, column, d, h)]) : 0.0f;
        });
    const Scalar* const biases = bias + packed_at(tile.expert, 0, 0, h);
    sums.each([&](int row, int column, float a_sum, float b_sum) {
        const int j = first_column + column, routed = tile.first + row;
        if (row < tile.rows && j < h)
            store_hidden(ab + packed_at(routed, 0, j, h), ab + packed_at(routed, PROJECTIONS - 1, j, h),
                         y_swi + (long long)routed * h + j, 0, with_bias(a_sum, biases, 0, j, h),
                         GATED ? with_bias(b_sum, biases, 1, j, h) : 0.0f);
    });
}

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_hidden(const Scalar* d_out, const float* gate_of_row, const Scalar* ab, const Scalar* down,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_ab, Scalar* gated_y,
             float* gate_terms, int d, int h, int E) {
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
    tiled_matmul<Along::DEPTH, LAYOUT::TRANSPOSED ? Along::SIDE : Along::DEPTH>(
        sums, d,
        [&](int row, int p) { return row < tile.rows ? to_float(d_out[(long long)tokens[row] * d + p]) : 0.0f; },
        [&](int, int side, int p) {
            const int j = first_column + side;
            return j < h ? to_float(down[down_weight_at(tile.expert, j, p, d, h)]) : 0.0f;
        });
    sums.each([&](int row, int column, float sum, float) {
        const int j = first_column + column, routed = tile.first + row;
        const long long a_at = packed_at(routed, 0, j, h), b_at = packed_at(routed, PROJECTIONS - 1, j, h);
        float* const term = &terms[row][column];
        *term = 0.0f;
        if (row < tile.rows && j < h)
            *term = store_hidden_gradients(ab + a_at, ab + b_at, d_ab + a_at, d_ab + b_at,
                                           gated_y + (long long)routed * h + j, 0, sum, gates[row]);
    });
    __syncthreads();
    if (threadIdx.x < tile.rows) {
        float term = 0.0f;
        for (int column = 0; column < TILE; ++column) term += terms[threadIdx.x][column];
        gate_terms[(long long)(tile.first + threadIdx.x) * gridDim.y + blockIdx.y] = term;
    }
}
