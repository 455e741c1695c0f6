// combine, a lesson: every row adds itself to its token.
//
// Purpose      out += gates[token, j] * y[row of (token, j)] for every routed row; out starts as zeros.
// Source       The scatter that MoEBlaze (arXiv 2601.05296), section 3.1, does without.
// Idea         None to keep: k writers share an output element, so they need atomics, out must be
//              zeroed first, and each addition reads and writes out again.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block. float32 only.
// Determinism  None: float sums depend on their order, and the order on which thread comes first.
//
// kernel   grid                 block    shared bytes  bytes read           bytes written
// scatter  ceil(R d / THREADS)  THREADS  0             12 R d + 4 R d       4 R d
// An atomic addition reads and writes its 4 bytes. Bound: memory.
extern "C" __global__ void __launch_bounds__(THREADS)
    scatter(const float* y, const float* gates, const int* token_index_map, float* out, int R, int d, int k) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index >= (long long)R * d) return;
    const long long slot = index / d, column = index % d;
    atomicAdd(&out[slot / k * d + column], gates[slot] * y[token_index_map[slot] * (long long)d + column]);
}
