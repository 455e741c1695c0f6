// gating, version 2: one warp a token, which holds the token's row in its registers.
//
// Purpose      logits (L, E) -> probs (L, E), topk_experts and gates (L, k); gradients of the logits
//              from those of the gates and of both auxiliary losses; the terms of these losses.
// Source       MoEBlaze (arXiv 2601.05296), section 2; Switch Transformer (arXiv 2101.03961), 2.2;
//              ST-MoE (arXiv 2202.08906), router z-loss.
// Idea         Neighbouring lanes read neighbouring columns, PACK of them at once, and the row is read
//              from memory once. Each lane sorts its own columns; then choosing is merging 32 lists, of
//              which only the heads are compared. The backward needs no probabilities but those that it
//              makes of the logits, and adds up the whole gradient of a logit before it writes.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); PER_LANE columns of a lane, at least E / 32; PACK, which
//              divides E and PER_LANE; RENORMALIZE, 1 if gates are divided by their sum; BALANCE and Z_LOSS,
//              1 if that loss has a gradient; Scalar type of d_logits, of s bytes.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel                grid                  block    shared bytes
//                       bytes read                                                          bytes written
// softmax_top_k         ceil(32 L / THREADS)  THREADS  8 THREADS (PER_LANE + 2)
//                       4 L E                                                               4 L E + 8 R
// d_logits              ceil(32 L / THREADS)  THREADS  0
//                       4 L E (1 + BALANCE) + 4 R (3 + BALANCE) + 128 L (BALANCE + Z_LOSS)  s L E + s R
// load_balancing_terms  ceil(32 L / THREADS)  THREADS  4 THREADS / 32
//                       8 L E                                                               4 blocks
// router_z_terms        ceil(32 L / THREADS)  THREADS  4 THREADS / 32
//                       4 L E                                                               4 blocks
// Bytes are those that threads ask for; blocks is the whole grid. Bound: memory, 8 L E + 8 R bytes
// for softmax_top_k and (4 + s) L E + 12 R for d_logits; they find the shares, and the losses' gradients that
// every lane asks for, in the cache. At L = 262,144, E = 128, k = 8: 285 MB, 68 us at 4.2 TB/s. Each
// choice takes some ten instructions of the warp: with many of them, those are the bound. That is why
// exponentials and logarithms are the hardware's: of a logit x below the peak, 2 + 1.2 x ulp off at most.
#include "gating.cuh"

__device__ __forceinline__ int token_of_warp() { return blockIdx.x * (THREADS / WARP) + warp_id(); }

// probs = softmax(logits); the k best experts, best first; gates = their probabilities.
// A token with a NaN gets k experts too, NaN before infinity, and gates of NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_top_k(const float* logits, float* probs, int* topk_experts, float* gates, int L, int E, int k) {
    DYNAMIC_SHARED(Lists, lists_of_warps);  // (THREADS / WARP,)
    const int token = token_of_warp();
    if (token >= L) return;
    Row row;
    load_row(logits + first_of(token, E), E, -infinity(), row);
    const Routed routed = route(row, E, k, lists_of_warps[warp_id()]);
    store_row(probs + first_of(token, E), E, row);
    store_choice(routed, token, k, topk_experts, gates);
}

// A lane's part of the dot product of two rows.
__device__ __forceinline__ float lane_dot(const Row& x, const Row& y) {
    float sum = 0.0f;
    for (int i = 0; i < PER_LANE; ++i) sum += x[i] * y[i];
    return sum;
}

// One term a block: the sum over its tokens of sum_e f_e p_e, f_e the share of expert e.
extern "C" __global__ void __launch_bounds__(THREADS)
    load_balancing_terms(const float* probs, const float* shares, float* terms, int L, int E) {
    const int token = token_of_warp();
    float part = 0.0f;
    if (token < L) {
        Row row, share;
        load_row(probs + first_of(token, E), E, 0.0f, row);
        load_row(shares, E, 0.0f, share);
        part = lane_dot(row, share);
    }
    const float term = block_sum<THREADS>(part);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

// One term a block: the sum over its tokens of logsumexp(logits) squared.
extern "C" __global__ void __launch_bounds__(THREADS) router_z_terms(const float* logits, float* terms, int L, int E) {
    const int token = token_of_warp();
    float z = 0.0f;
    if (token < L) {
        Row row;
        load_row(logits + first_of(token, E), E, -infinity(), row);
        const float peak = peak_of(row);
        z = peak + __logf(exponentiate(row, peak));
    }
    const float term = block_sum<THREADS>(lane_id() == 0 ? z * z : 0.0f);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

// The whole gradient of the logits, in one pass. Through the softmax, d_logit = p (d_p - mean of d_p):
//   of the gates              d_p is d_gate for chosen experts, and 0 for the others. Renormalised gates
//                             are a softmax over the chosen: the others get nothing. A shift of all d_p
//                             changes nothing; that of the best choice is taken away, whose gate may be
//                             near 1: d_p - mean would leave few digits;
//   of the balancing loss     d_p is balance f_e, balance = E / L * d_load_balancing_loss;
//   of the router z-loss      p z, z = 2 / L * d_router_z_loss * logsumexp(logits).
extern "C" __global__ void __launch_bounds__(THREADS)
    d_logits(const float* d_gates, const float* logits, const int* topk_experts, const float* shares,
             const float* d_load_balancing_loss, const float* d_router_z_loss, Scalar* d_logits, int L, int E, int k) {
    const int token = token_of_warp();
    if (token >= L) return;
    Row row, share;
    load_row(logits + first_of(token, E), E, -infinity(), row);
    if (BALANCE) load_row(shares, E, 0.0f, share);
    int expert = 0;
    float logit = -infinity(), share_of_chosen = 0.0f, d_gate = 0.0f;
    if (lane_id() < k) {
        const long long slot = first_of(token, k) + lane_id();
        expert = topk_experts[slot];
        logit = logits[first_of(token, E) + expert];
        d_gate = d_gates[slot];
        if (BALANCE) share_of_chosen = shares[expert];
    }

    const float peak = peak_of(row), sum = exponentiate(row, peak), scale = 1.0f / sum;
    const float per_token = 1.0f / L;  // both losses are means
    const float z = Z_LOSS ? 2.0f * per_token * d_router_z_loss[0] * (peak + __logf(sum)) : 0.0f;
    for (int i = 0; i < PER_LANE; ++i) row[i] *= scale;
    const float balance = BALANCE ? E * per_token * d_load_balancing_loss[0] : 0.0f;
    const float mean_share = BALANCE ? warp_sum(lane_dot(row, share)) : 0.0f;

    const float prob = scale * __expf(logit - peak);  // of the chosen; 0 in lanes without a choice
    float gate = prob;
    if (RENORMALIZE) {
        const float weight = __expf(logit - warp_max(logit));
        gate = weight / warp_sum(weight);
        d_gate -= __shfl_sync(FULL_WARP, d_gate, 0);
    }
    const float mean = warp_sum(gate * d_gate);

    const float for_all = RENORMALIZE ? z : z - mean;
    for (int i = 0; i < PER_LANE; ++i) row[i] *= BALANCE ? for_all + balance * (share[i] - mean_share) : for_all;
    store_row(d_logits + first_of(token, E), E, row);
    __syncwarp();  // the chosen are written over what another lane may have written
    const float of_losses = prob * (z + balance * (share_of_chosen - mean_share));
    if (lane_id() < k) d_logits[first_of(token, E) + expert] = from_float<Scalar>(of_losses + gate * (d_gate - mean));
}
