// combine, version 2: a warp a token, 16 bytes a lane.
//
// Purpose      out = sum over j of gates[token, j] * y[row of (token, j)].
// Source       MoEBlaze (arXiv 2601.05296), section 3.1; gather-and-sum: SonicMoE (arXiv 2512.14080).
// Idea         What bounds a sum of rows is how many bytes are under way. A lane asks for PACK columns of
//              IN_FLIGHT rows before it awaits the first, and where a token's rows lie is read once a
//              token, not once a column. y may be some columns of the expert outputs alone, so that they need
//              not all exist at one time.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; THREADS per block (whole warps); PACK, which divides d, pitch and first.
// Determinism  Same input, same bits: sums run in the order of the slots.
//
// kernel   grid                  block    shared bytes  bytes read   bytes written
// combine  ceil(32 L / THREADS)  THREADS  0             8 R + s R d  s L d
// d columns of y, which are those of out from first on; a row of out has pitch.
// Bound: memory. At L = 65,536, d = 1024, k = 4 in bf16: 673 MB, 160 us at 4.2 TB/s.
#include "gather_sum.cuh"

// Section 3.1.
extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const Scalar* y, const float* gates, const int* token_index_map, Scalar* out, int L, int d, int k,
            int pitch, int first) {
    const long long token = blockIdx.x * (THREADS / WARP) + warp_id();
    if (token >= L) return;
    Scalar* out_of_token = out + token * pitch + first;
    sum_rows_of_token(y, token_index_map, out_of_token, token, d, k, [&](long long slot) { return gates[slot]; });
}
