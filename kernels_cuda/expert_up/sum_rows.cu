// expert_up, shared by the tiled versions: the gradient of x from those of its rows.
//
// Purpose      d_x = sum over j of rows[row of (token, j)].
// Source       MoEBlaze (arXiv 2601.05296), section 3.2; gather-and-sum: SonicMoE (arXiv 2512.14080).
// Idea         The combine without gates: a token gathers what its k experts left. The rows may be some columns of
//              d_x alone, so that they need not all exist at one time.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; THREADS per block (whole warps); PACK, which divides d, pitch and first.
// Determinism  Same input, same bits: sums run in the order of the slots.
//
// kernel    grid                  block    shared bytes  bytes read   bytes written
// sum_rows  ceil(32 L / THREADS)  THREADS  0             4 R + s R d  s L d
// d columns of the rows, which are those of d_x from first on; a row of d_x has pitch. Bound: memory.
#include "gather_sum.cuh"

// Section 3.2.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_rows(const Scalar* rows, const int* token_index_map, Scalar* d_x, int L, int d, int k, int pitch, int first) {
    const long long token = blockIdx.x * (THREADS / WARP) + warp_id();
    if (token >= L) return;
    Scalar* d_x_of_token = d_x + token * pitch + first;
    sum_rows_of_token(rows, token_index_map, d_x_of_token, token, d, k, [](long long) { return 1.0f; });
}
