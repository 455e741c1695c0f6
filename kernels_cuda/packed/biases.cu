// packed, shared by all versions: biases of the experts.
//
// Purpose      What a bias of the down-projection adds to the output and to the gates' gradients, and the gradients of
//              both biases. The bias of the up-projection is added by expert_up.
// Source       gpt-oss in transformers 5.23; the gates' gradients as in SonicMoE (arXiv 2512.14080).
// Idea         An expert's output y + bias is never stored. The sum of a token's rows gathers the rows of the bias as
//              it gathers those of y, and <d_out, y + bias> is <d_out, y>, which d_hidden finds, and <d_out, bias>.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes; THREADS per block (whole warps); PACK neighbouring columns that a lane
//              moves at once, which divides every width, pitch and first.
// Determinism  Same input, same bits. combine_biased adds a token's rows of y slot by slot, then their biases slot by
//              slot. d_up_bias and d_down_bias: warp w adds rows w, w + W, ... of an expert one by one, then the warps'
//              sums are added one by one; W is THREADS / 32. An expert without rows has a gradient of 0.
//
// kernel          grid                          block    shared bytes
//                 bytes read                                     bytes written
// combine_biased  ceil(32 L / THREADS)          THREADS  0
//                 12 R + 2 s R d                                 s L d
// add_to_d_gates  ceil(32 R / THREADS)          THREADS  0
//                 132 R + 2 s R d                                4 R
// d_up_bias       ceil(n / (32 PACK)), E        THREADS  4 THREADS PACK
//                 8 THREADS blocks + s R n                       s E n
// d_down_bias     ceil(d / (32 PACK)), E        THREADS  4 THREADS PACK
//                 8 THREADS blocks + 8 R ceil(d / PACK) + s R d  s E d
// In combine_biased d columns of y are those of out and bias from first on; a row of both has pitch. n is the width of
// the bias of the up-projection. blocks is the whole grid. Bound: memory.
#include "gather_sum.cuh"

// out = sum over j of gates[token, j] * (y[row of (token, j)] + bias[its expert]).
extern "C" __global__ void __launch_bounds__(THREADS)
    combine_biased(const Scalar* y, const Scalar* bias, const float* gates, const int* token_index_map,
                   const int* token_expert_indices, Scalar* out, int L, int d, int k, int pitch, int first) {
    const long long token = blockIdx.x * (THREADS / WARP) + warp_id();
    if (token >= L) return;
    const int expert_of_lane = lane_id() < k ? token_expert_indices[token * k + lane_id()] : EMPTY;
    sum_rows_of_token(
        y, token_index_map, out + token * pitch + first, token, d, k, [&](long long slot) { return gates[slot]; },
        [&](float gate, int column, float (&sums)[PACK]) {
            for (int slot = 0; slot < k; slot += IN_FLIGHT)
                add_rows(bias + first, expert_of_lane, gate, slot, column, d, pitch, sums);
        });
}

// d_gates += <d_out, bias> of each slot's token and expert. A warp a slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_to_d_gates(const Scalar* d_out, const Scalar* bias, const int* token_expert_indices, float* d_gates, int R,
                   int d, int k) {
    const long long slot = blockIdx.x * (THREADS / WARP) + warp_id();
    if (slot >= R) return;
    const long long expert = token_expert_indices[slot];
    if (expert == EMPTY) return;
    float term = 0.0f;
    for (int column = lane_id() * PACK; column < d; column += WARP * PACK) {
        const auto d_out_pack = load_pack<PACK>(d_out + slot / k * d + column);
        const auto bias_pack = load_pack<PACK>(bias + expert * d + column);
#pragma unroll
        for (int p = 0; p < PACK; ++p) term += to_float(d_out_pack.elements[p]) * to_float(bias_pack.elements[p]);
    }
    term = warp_sum(term);
    if (lane_id() == 0) d_gates[slot] += term;
}

// ---- gradients of the biases ---------------------------------------------------------------------

// sums (n,) of an expert = the sum over its rows of what add(row, column, sums) adds for PACK columns.
template <class Add>
__device__ __forceinline__ void sum_of_expert(const int* expert_token_offsets, Scalar* of_experts, int n, Add add) {
    constexpr int WARPS = THREADS / WARP, COLUMNS = WARP * PACK;
    __shared__ float parts[WARPS][COLUMNS];
    const int expert = blockIdx.y, first_column = blockIdx.x * COLUMNS, column = first_column + lane_id() * PACK;
    const int begin = expert_token_offsets[expert], end = expert_token_offsets[expert + 1];
    float sums[PACK] = {};
    if (column < n)
#pragma unroll 4
        for (int row = begin + warp_id(); row < end; row += WARPS) add(row, column, sums);
#pragma unroll
    for (int p = 0; p < PACK; ++p) parts[warp_id()][lane_id() * PACK + p] = sums[p];
    __syncthreads();  // every warp's part is there
    for (int i = threadIdx.x; i < min(COLUMNS, n - first_column); i += THREADS) {
        float sum = 0.0f;
        for (int warp = 0; warp < WARPS; ++warp) sum += parts[warp][i];
        of_experts[(long long)expert * n + first_column + i] = from_float<Scalar>(sum);
    }
}

// Sums of the rows of d_ab (R, n).
extern "C" __global__ void __launch_bounds__(THREADS)
    d_up_bias(const Scalar* d_ab, const int* expert_token_offsets, Scalar* d_bias, int n) {
    sum_of_expert(expert_token_offsets, d_bias, n, [&](int row, int column, float (&sums)[PACK]) {
        const auto pack = load_pack<PACK>(d_ab + (long long)row * n + column);
#pragma unroll
        for (int p = 0; p < PACK; ++p) sums[p] += to_float(pack.elements[p]);
    });
}

// Sums of gate * d_out over an expert's rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_down_bias(const Scalar* d_out, const float* gate_of_row, const int* expert_token_indices,
                const int* expert_token_offsets, Scalar* d_bias, int d) {
    sum_of_expert(expert_token_offsets, d_bias, d, [&](int row, int column, float (&sums)[PACK]) {
        const auto pack = load_pack<PACK>(d_out + (long long)expert_token_indices[row] * d + column);
        const float gate = gate_of_row[row];
#pragma unroll
        for (int p = 0; p < PACK; ++p) sums[p] += gate * to_float(pack.elements[p]);
    });
}
