// combine, version 1: each token gathers its k expert outputs and sums them.
//
// Purpose      out = sum over j of gates[token, j] * y[row of (token, j)]; and the textbook
//              gradients of y and the gates, which need y kept.
// Source       MoEBlaze (arXiv 2601.05296), section 3.1; gather-and-sum: SonicMoE (arXiv 2512.14080).
// Idea         Gathering gives every output element one writer: no atomics, no zeroing.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, THREADS per block.
// Determinism  Same input, same bits: sums run in the order of the slots, those of d_gates in the order of the columns.
//
// kernel   grid                 block    shared bytes  bytes read           bytes written
// combine  ceil(L d / THREADS)  THREADS  0             8 R d + s R d        s L d
// d_y      ceil(R d / THREADS)  THREADS  0             8 R d + s R d        s R d
// d_gates  ceil(R / THREADS)    THREADS  0             4 R + 2 s R d        4 R
// Bound: memory.
#include "common.cuh"
#include "scalar.cuh"

// Section 3.1.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const Scalar* y, const float* gates, const int* token_index_map, Scalar* out, int L, int d, int k) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)L * d) return;
    const long long token = index / d, column = index % d;
    float sum = 0.0f;
    for (int j = 0; j < k; ++j) {
        const long long slot = token * k + j;
        sum += gates[slot] * to_float(y[token_index_map[slot] * (long long)d + column]);
    }
    out[index] = from_float<Scalar>(sum);
}

// The textbook backward: gate * d_out for every routed row.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_y(const Scalar* d_out, const float* gates, const int* token_index_map, Scalar* d_y, int R, int d, int k) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)R * d) return;
    const long long slot = index / d, column = index % d;
    const float gradient = gates[slot] * to_float(d_out[slot / k * d + column]);
    d_y[token_index_map[slot] * (long long)d + column] = from_float<Scalar>(gradient);
}

// The textbook gate gradient: <d_out, y> of every slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_gates(const Scalar* d_out, const Scalar* y, const int* token_index_map, float* d_gates, int R, int d, int k) {
    const long long slot = blockIdx.x * THREADS + threadIdx.x;
    if (slot >= R) return;
    const long long token = slot / k * d, row = (long long)token_index_map[slot] * d;
    float sum = 0.0f;
    for (int p = 0; p < d; ++p) sum += to_float(d_out[token + p]) * to_float(y[row + p]);
    d_gates[slot] = sum;
}
