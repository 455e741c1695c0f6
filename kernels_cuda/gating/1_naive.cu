// gating, version 1: one thread a token, which walks along the token's row.
//
// Purpose      logits (L, E) -> probs (L, E), topk_experts and gates (L, k); gradients of the logits
//              from those of the gates and of both auxiliary losses; the terms of these losses.
// Source       MoEBlaze (arXiv 2601.05296), section 2; Switch Transformer (arXiv 2101.03961), 2.2;
//              ST-MoE (arXiv 2202.08906), router z-loss.
// Idea         Choosing needs no copy of the row: expert by expert, the next choice is the best of
//              those that come after the last one, by logit and then by id.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); RENORMALIZE, 1 if gates are divided by their sum; BALANCE and
//              Z_LOSS, 1 if that loss has a gradient; Scalar type of d_logits, of s bytes.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel                grid               block    shared bytes
//                       bytes read                                                                        bytes written
// softmax_top_k         ceil(L / THREADS)  THREADS  0
//                       4 L E (k + 2) + 4 R                                                               4 L E + 12 R
// d_logits              ceil(L / THREADS)  THREADS  0
//                       4 (3 L E (1 + BALANCE) + L (BALANCE + Z_LOSS) + R (6 + BALANCE + 4 RENORMALIZE))  s L E + s R
// load_balancing_terms  ceil(L / THREADS)  THREADS  4 THREADS / 32
//                       8 L E                                                                             4 blocks
// router_z_terms        ceil(L / THREADS)  THREADS  4 THREADS / 32
//                       8 L E                                                                             4 blocks
// Bytes are those that threads ask for; blocks is the whole grid. Bound: memory. Neighbouring
// threads read 4 E bytes apart: from E = 8 on, every logit asks for a 32-byte sector of its own,
// and the choice alone reads the row k times.
#include "common.cuh"
#include "scalar.cuh"

__device__ __forceinline__ long long token_of_thread() { return blockIdx.x * THREADS + threadIdx.x; }

struct Choice {
    int expert;
    int ordered;  // its logit as an ordered integer: NaN has a place too, so that there is always a next best
};

constexpr int BEST = 0x7fffffff, WORST = -0x7fffffff - 1;  // the ordered integer of no logit is WORST

// The best of the experts after `last`: those with a smaller logit, or with the same and a higher id.
__device__ __forceinline__ Choice next_best(const float* logits, int E, Choice last) {
    Choice best = {E, WORST};
    for (int e = 0; e < E; ++e) {
        const int ordered = to_ordered(logits[e]);
        const bool after = ordered < last.ordered || (ordered == last.ordered && e > last.expert);
        if (after && ordered > best.ordered) best = {e, ordered};
    }
    return best;
}

// probs = softmax(logits); the k best experts, best first; gates = their probabilities.
// A token with a NaN gets k experts too, NaN before infinity, and gates of NaN.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_top_k(const float* logits, float* probs, int* topk_experts, float* gates, int L, int E, int k) {
    const long long token = token_of_thread();
    if (token >= L) return;
    const float* const row = logits + token * E;
    float peak = 0.0f, sum_of_chosen = 0.0f;
    Choice choice = {-1, BEST};
    for (int j = 0; j < k; ++j) {
        choice = next_best(row, E, choice);
        const float logit = from_ordered(choice.ordered);
        if (j == 0) peak = logit;  // exponents are at most 0: nothing overflows
        const float weight = expf(logit - peak);
        topk_experts[token * k + j] = choice.expert;
        gates[token * k + j] = weight;
        sum_of_chosen += weight;
    }
    float sum = 0.0f;
    for (int e = 0; e < E; ++e) sum += expf(row[e] - peak);
    const float prob_scale = 1.0f / sum, gate_scale = RENORMALIZE ? 1.0f / sum_of_chosen : prob_scale;
    for (int e = 0; e < E; ++e) probs[token * E + e] = prob_scale * expf(row[e] - peak);
    for (int j = 0; j < k; ++j) gates[token * k + j] *= gate_scale;
}

__device__ __forceinline__ float dot(const float* x, const float* y, int E) {
    float sum = 0.0f;
    for (int e = 0; e < E; ++e) sum += x[e] * y[e];
    return sum;
}

// One term a block: the sum over its tokens of sum_e f_e p_e, f_e the share of expert e.
extern "C" __global__ void __launch_bounds__(THREADS)
    load_balancing_terms(const float* probs, const float* shares, float* terms, int L, int E) {
    const long long token = token_of_thread();
    const float term = block_sum<THREADS>(token < L ? dot(probs + token * E, shares, E) : 0.0f);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

struct Exponentials {
    float peak;  // largest logit
    float sum;   // of exp(logit - peak)
};

__device__ __forceinline__ Exponentials exponentials(const float* logits, int E) {
    Exponentials row = {-infinity(), 0.0f};
    for (int e = 0; e < E; ++e) row.peak = fmaxf(row.peak, logits[e]);
    for (int e = 0; e < E; ++e) row.sum += expf(logits[e] - row.peak);
    return row;
}

__device__ __forceinline__ float logsumexp(Exponentials row) { return row.peak + logf(row.sum); }

// One term a block: the sum over its tokens of logsumexp(logits) squared.
extern "C" __global__ void __launch_bounds__(THREADS) router_z_terms(const float* logits, float* terms, int L, int E) {
    const long long token = token_of_thread();
    const float z = token < L ? logsumexp(exponentials(logits + token * E, E)) : 0.0f;
    const float term = block_sum<THREADS>(z * z);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

// Over the chosen alone.
__device__ __forceinline__ Exponentials exponentials_of_chosen(const float* logits, const int* chosen, int k) {
    Exponentials row = {-infinity(), 0.0f};
    for (int j = 0; j < k; ++j) row.peak = fmaxf(row.peak, logits[chosen[j]]);
    for (int j = 0; j < k; ++j) row.sum += expf(logits[chosen[j]] - row.peak);
    return row;
}

__device__ __forceinline__ float share_of(Exponentials row, float logit) { return expf(logit - row.peak) / row.sum; }

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
    const long long token = token_of_thread();
    if (token >= L) return;
    const float* const row = logits + token * E;
    const int* const chosen = topk_experts + token * k;
    const Exponentials all = exponentials(row, E);
    const float per_token = 1.0f / L;  // both losses are means
    const float z = Z_LOSS ? 2.0f * per_token * d_router_z_loss[0] * logsumexp(all) : 0.0f;
    const float balance = BALANCE ? E * per_token * d_load_balancing_loss[0] : 0.0f;
    float mean_share = 0.0f;
    if (BALANCE)
        for (int e = 0; e < E; ++e) mean_share += shares[e] * share_of(all, row[e]);

    const Exponentials of_gates = RENORMALIZE ? exponentials_of_chosen(row, chosen, k) : all;
    const float shift = RENORMALIZE ? d_gates[token * k] : 0.0f;
    float mean = 0.0f;
    for (int j = 0; j < k; ++j) mean += (d_gates[token * k + j] - shift) * share_of(of_gates, row[chosen[j]]);

    const float for_all = RENORMALIZE ? z : z - mean;
    for (int e = 0; e < E; ++e) {
        const float slope = BALANCE ? for_all + balance * (shares[e] - mean_share) : for_all;
        d_logits[token * E + e] = from_float<Scalar>(slope * share_of(all, row[e]));
    }
    for (int j = 0; j < k; ++j) {
        const int expert = chosen[j];
        const float logit = row[expert], gate = share_of(of_gates, logit);
        const float of_losses = share_of(all, logit) * (BALANCE ? z + balance * (shares[expert] - mean_share) : z);
        const float of_gate = gate * (d_gates[token * k + j] - shift - mean);
        d_logits[token * E + expert] = from_float<Scalar>(of_losses + of_gate);
    }
}
