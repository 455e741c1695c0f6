// expert_down, version 1: one thread an element, straight from global memory.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without
//              any kept expert output: SonicMoE (arXiv 2512.14080).
// Idea         The (L, d) output gradient is gathered by index, never expanded to (R, d).
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, ACTIVATION, THREADS per block.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel       grid                    block    shared bytes
//              bytes read                                      bytes written
// expert_down  ceil(L d / THREADS), E  THREADS  0
//              8 THREADS blocks + 2 s R d h                    s R d
// d_hidden     ceil(L h / THREADS), E  THREADS  0
//              8 THREADS blocks + 8 R h + 2 s R d h + s R h G  s R h (1 + G) + 4 R h
// d_w3         ceil(h d / THREADS), E  THREADS  0
//              8 THREADS blocks + 4 R d h + 2 s R d h          s E h d
// G is 2 with a gated activation, else 1; blocks is the whole grid. 2 R d h FLOPs a GEMM.
// Bound: memory, as in expert_up.
#include "expert_rows.cuh"
#include "hidden.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_down(const Scalar* y_swi, const Scalar* w3, const int* expert_token_offsets, Scalar* y, int d, int h) {
    const GroupElement at = group_element<THREADS>(expert_token_offsets, d);
    if (!at.inside) return;
    const long long weight = (long long)blockIdx.y * h * d + at.column;
    float sum = 0.0f;
    for (int p = 0; p < h; ++p)
        sum += to_float(y_swi[(long long)at.row * h + p]) * to_float(w3[weight + (long long)p * d]);
    y[(long long)at.row * d + at.column] = from_float<Scalar>(sum);
}

// Sections 3.2 and 5: <d_out, w3> of one hidden element, then everything that hangs on it.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_hidden(const Scalar* d_out, const float* gate_of_row, const Scalar* a, const Scalar* b, const Scalar* w3,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a, Scalar* d_b,
             Scalar* gated_y, float* gate_terms, int d, int h) {
    const GroupElement at = group_element<THREADS>(expert_token_offsets, h);
    if (!at.inside) return;
    const long long token = (long long)expert_token_indices[at.row] * d;
    const long long weight = ((long long)blockIdx.y * h + at.column) * d;
    float sum = 0.0f;
    for (int p = 0; p < d; ++p) sum += to_float(d_out[token + p]) * to_float(w3[weight + p]);
    const long long index = (long long)at.row * h + at.column;
    gate_terms[index] = store_hidden_gradients(a, b, d_a, d_b, gated_y, index, sum, gate_of_row[at.row]);
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w3(const Scalar* gated_y, const Scalar* d_out, const int* expert_token_indices, const int* expert_token_offsets,
         Scalar* d_w3, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.y], end = expert_token_offsets[blockIdx.y + 1];
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)h * d) return;
    const int i = index / d, j = index % d;
    float sum = 0.0f;
    for (int row = begin; row < end; ++row)
        sum +=
            to_float(gated_y[(long long)row * h + i]) * to_float(d_out[(long long)expert_token_indices[row] * d + j]);
    d_w3[(long long)blockIdx.y * h * d + index] = from_float<Scalar>(sum);
}
