// expert_up, version 1: one thread an element, straight from global memory.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row, and the gradients
//              of x, w1 and w2.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5 (Algorithm 1).
// Idea         Rows of the unpermuted x are gathered by index inside the kernel: there is no
//              (R, d) buffer of routed tokens, forward or backward.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, ACTIVATION, THREADS per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel     grid                    block    shared bytes
//            bytes read                                  bytes written
// expert_up  ceil(L h / THREADS), E  THREADS  0
//            8 THREADS blocks + 4 R h + s R d h (1 + G)  s R h (G P + Y)
// d_x        ceil(L d / THREADS)     THREADS  0
//            8 R d + 2 s R d h G                         s L d
// d_w        ceil(d h / THREADS), E  THREADS  0
//            8 THREADS blocks + 4 R d h + 2 s R d h      s E d h
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out.
// G is 2 with a gated activation, else 1; blocks is the whole grid. 2 R d h G FLOPs a GEMM, in d_w 2 R d h.
// Bound: memory. Each element of x is read h times, each of the weights once for every row.
#include "expert_rows.cuh"
#include "hidden.cuh"

// Section 5, Algorithm 1: both projections from one reading of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const Scalar* x, const Scalar* w1, const Scalar* w2, const int* expert_token_indices,
              const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi, int d, int h) {
    const GroupElement at = group_element<THREADS>(expert_token_offsets, h);
    if (!at.inside) return;
    const Scalar* const x_row = x + (long long)expert_token_indices[at.row] * d;
    const long long weight = (long long)blockIdx.y * d * h + at.column;
    float a_sum = 0.0f, b_sum = 0.0f;
    for (int p = 0; p < d; ++p) {
        const float x_p = to_float(x_row[p]);
        a_sum += x_p * to_float(w1[weight + (long long)p * h]);
        if (GATED) b_sum += x_p * to_float(w2[weight + (long long)p * h]);
    }
    store_hidden(a, b, y_swi, (long long)at.row * h + at.column, a_sum, b_sum);
}

// Section 3.2: the gradients of a token's k rows are summed on the fly, in the order of its slots. A hidden element
// adds its product with w1, then that with w2.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_x(const Scalar* d_a, const Scalar* d_b, const Scalar* w1, const Scalar* w2, const int* token_expert_indices,
        const int* token_index_map, Scalar* d_x, int L, int d, int h, int k) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)L * d) return;
    const long long token = index / d;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j) {
        const long long row = (long long)token_index_map[token * k + j] * h;
        const long long weight = ((long long)token_expert_indices[token * k + j] * d + index % d) * h;
        for (int p = 0; p < h; ++p) {
            sum += to_float(d_a[row + p]) * to_float(w1[weight + p]);
            if (GATED) sum += to_float(d_b[row + p]) * to_float(w2[weight + p]);
        }
    }
    d_x[index] = from_float<Scalar>(sum);
}

// Section 5: d_w1 = X^T d_a, or d_w2 = X^T d_b, over the expert's rows, x gathered again.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w(const Scalar* d_hidden, const Scalar* x, const int* expert_token_indices, const int* expert_token_offsets,
        Scalar* d_w, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.y], end = expert_token_offsets[blockIdx.y + 1];
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)d * h) return;
    const int i = index / h, j = index % h;
    float sum = 0.0f;
    for (int row = begin; row < end; ++row)
        sum += to_float(x[(long long)expert_token_indices[row] * d + i]) * to_float(d_hidden[(long long)row * h + j]);
    d_w[(long long)blockIdx.y * d * h + index] = from_float<Scalar>(sum);
}
