// gating, rung 2: one warp a token, which holds the token's row in its registers.
//
// Purpose      logits (L, E) -> probs (L, E), topk_experts and gates (L, k); gradients of the logits
//              from those of the gates and of both auxiliary losses; the terms of these losses.
// Source       MoEBlaze (arXiv 2601.05296), section 2; Switch Transformer (arXiv 2101.03961), 2.2;
//              ST-MoE (arXiv 2202.08906), router z-loss.
// Idea         Neighbouring lanes read neighbouring columns, so that sectors are used whole, and the row
//              is read from memory once. Each lane sorts its own columns; then choosing is merging 32
//              lists, of which only the heads are compared.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); PER_LANE columns of a lane, at least E / 32;
//              RENORMALIZE, 1 if gates are divided by their sum.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel                   grid                  block    shared bytes    bytes read                       bytes written
// softmax_top_k            ceil(32 L / THREADS)  THREADS  0               4 L E                            4 L E + 8 R
// gates_backward           ceil(32 L / THREADS)  THREADS  0               12 R + 4 L E (1 - RENORMALIZE)   4 L E + 4 R
// load_balancing_terms     ceil(32 L / THREADS)  THREADS  4 THREADS / 32  8 L E                            4 blocks
// load_balancing_backward  ceil(32 L / THREADS)  THREADS  0               8 L E                            4 L E
// router_z_terms           ceil(32 L / THREADS)  THREADS  4 THREADS / 32  4 L E                            4 blocks
// router_z_backward        ceil(32 L / THREADS)  THREADS  0               4 L E                            4 L E
// Bytes are those that threads ask for; blocks is the whole grid. Bound: memory, 8 L E + 8 R bytes
// for softmax_top_k; the balancing kernels find the shares, half of what they read, in the cache.
// At L = 262,144, E = 128, k = 8: 285 MB, 68 us at 4.2 TB/s.
#include "common.cuh"

using Row = float[PER_LANE];  // a lane's columns of a token's row

__device__ __forceinline__ long long token_of_warp() {
    return (long long)blockIdx.x * (THREADS / WARP) + warp_id();
}
__device__ __forceinline__ int column(int i) { return i * WARP + lane_id(); }

// `beyond` stands where the row has ended.
__device__ __forceinline__ void load_row(const float* source, int E, float beyond, Row& row) {
    for (int i = 0; i < PER_LANE; ++i) row[i] = column(i) < E ? source[column(i)] : beyond;
}
__device__ __forceinline__ void store_row(float* target, int E, const Row& row) {
    for (int i = 0; i < PER_LANE; ++i)
        if (column(i) < E) target[column(i)] = row[i];
}

struct Exponentials {
    float peak;  // largest logit
    float sum;   // of exp(logit - peak)
};

// Replaces each logit by exp(logit - peak): exponents are at most 0, so nothing overflows.
__device__ __forceinline__ Exponentials exponentiate(Row& row) {
    float peak = row[0];
    for (int i = 1; i < PER_LANE; ++i) peak = fmaxf(peak, row[i]);
    peak = warp_max(peak);
    float sum = 0.0f;
    for (int i = 0; i < PER_LANE; ++i) sum += row[i] = expf(row[i] - peak);
    return {peak, warp_sum(sum)};
}

// A lane's columns of a token, best first, of equal ones the lower first.
struct List {
    int ordered[PER_LANE];  // logits as ordered integers
    int expert[PER_LANE];
};

constexpr int EXHAUSTED = -0x7fffffff - 1;  // below the ordered integer of every logit, -infinity and NaN too
constexpr int NO_EXPERT = 0x7fffffff;

__device__ __forceinline__ void swap(int& x, int& y) {
    const int old = x;
    x = y;
    y = old;
}

// Neighbours change places until all are in order: half of them in turn, and never equal ones.
__device__ __forceinline__ List sorted(const Row& logits, int E) {
    List list;
    for (int i = 0; i < PER_LANE; ++i) {
        list.ordered[i] = column(i) < E ? to_ordered(logits[i]) : EXHAUSTED;
        list.expert[i] = column(i);
    }
#pragma unroll
    for (int pass = 0; pass < PER_LANE; ++pass)
#pragma unroll
        for (int i = pass % 2; i < PER_LANE - 1; i += 2)
            if (list.ordered[i] < list.ordered[i + 1]) {
                swap(list.ordered[i], list.ordered[i + 1]);
                swap(list.expert[i], list.expert[i + 1]);
            }
    return list;
}

struct Choice {
    int expert;
    int ordered;
};

// The best of the heads of all lists, of equal ones the lowest expert, the same in every lane; the
// list that it heads moves up.
__device__ __forceinline__ Choice take_best(List& list) {
    const int best = warp_max(list.ordered[0]);
    const int expert = warp_min(list.ordered[0] == best ? list.expert[0] : NO_EXPERT);
    if (list.expert[0] == expert) {
        for (int i = 0; i < PER_LANE - 1; ++i) {
            list.ordered[i] = list.ordered[i + 1];
            list.expert[i] = list.expert[i + 1];
        }
        list.ordered[PER_LANE - 1] = EXHAUSTED;
    }
    return {expert, best};
}

// probs = softmax(logits); the k best experts, best first; gates = their probabilities.
// A token with a NaN gets k experts too, NaN before infinity, and gates of NaN.
// Lane j keeps the j-th choice, so that choices and gates are written by neighbours.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_top_k(const float* logits, float* probs, int* topk_experts, float* gates, int L, int E, int k) {
    const long long token = token_of_warp();
    if (token >= L) return;
    Row row;
    load_row(logits + token * E, E, -infinity(), row);
    List list = sorted(row, E);
    const Exponentials exps = exponentiate(row);
    const float scale = 1.0f / exps.sum;
    for (int i = 0; i < PER_LANE; ++i) row[i] *= scale;
    store_row(probs + token * E, E, row);

    Choice mine = {0, to_ordered(-infinity())};
    for (int j = 0; j < k; ++j) {
        const Choice choice = take_best(list);
        if (lane_id() == j) mine = choice;
    }
    const float weight = expf(from_ordered(mine.ordered) - exps.peak);  // 0 in lanes without a choice
    const float gate = weight * (RENORMALIZE ? 1.0f / warp_sum(weight) : scale);
    if (lane_id() < k) {
        const long long slot = token * k + lane_id();
        topk_experts[slot] = mine.expert;
        gates[slot] = gate;
    }
}

// d_logits from d_gates. Through the softmax, d_logit = p (d_p - mean of d_p), and d_p is 0 for who
// was not chosen. Renormalised gates are a softmax over the chosen: the others get nothing.
extern "C" __global__ void __launch_bounds__(THREADS)
    gates_backward(const float* d_gates, const float* probs, const int* topk_experts, float* d_logits, int L, int E,
                   int k) {
    const long long token = token_of_warp();
    if (token >= L) return;
    Row row = {};
    if (!RENORMALIZE) load_row(probs + token * E, E, 0.0f, row);
    int expert = 0;
    float gate = 0.0f, d_gate = 0.0f;
    if (lane_id() < k) {
        const long long slot = token * k + lane_id();
        expert = topk_experts[slot];
        gate = probs[token * E + expert];
        d_gate = d_gates[slot];
    }
    if (RENORMALIZE) gate /= warp_sum(gate);
    const float mean = warp_sum(gate * d_gate);
    for (int i = 0; i < PER_LANE; ++i) row[i] *= -mean;
    store_row(d_logits + token * E, E, row);
    __syncwarp();  // the chosen are written over what another lane may have written
    if (lane_id() < k) d_logits[token * E + expert] = gate * (d_gate - mean);
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
    const long long token = token_of_warp();
    float part = 0.0f;
    if (token < L) {
        Row row, share;
        load_row(probs + token * E, E, 0.0f, row);
        load_row(shares, E, 0.0f, share);
        part = lane_dot(row, share);
    }
    const float term = block_sum<THREADS>(part);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

// d_logits = scale * p (f_e - sum_e f_e p_e).
extern "C" __global__ void __launch_bounds__(THREADS)
    load_balancing_backward(const float* probs, const float* shares, float* d_logits, float scale, int L, int E) {
    const long long token = token_of_warp();
    if (token >= L) return;
    Row row, share;
    load_row(probs + token * E, E, 0.0f, row);
    load_row(shares, E, 0.0f, share);
    const float mean = warp_sum(lane_dot(row, share));
    for (int i = 0; i < PER_LANE; ++i) row[i] *= scale * (share[i] - mean);
    store_row(d_logits + token * E, E, row);
}

__device__ __forceinline__ float logsumexp(Exponentials row) { return row.peak + logf(row.sum); }

// One term a block: the sum over its tokens of logsumexp(logits) squared.
extern "C" __global__ void __launch_bounds__(THREADS) router_z_terms(const float* logits, float* terms, int L, int E) {
    const long long token = token_of_warp();
    float z = 0.0f;
    if (token < L) {
        Row row;
        load_row(logits + token * E, E, -infinity(), row);
        z = logsumexp(exponentiate(row));
    }
    const float term = block_sum<THREADS>(lane_id() == 0 ? z * z : 0.0f);
    if (threadIdx.x == 0) terms[blockIdx.x] = term;
}

// d_logits = scale * logsumexp(logits) * softmax(logits).
extern "C" __global__ void __launch_bounds__(THREADS)
    router_z_backward(const float* logits, float* d_logits, float scale, int L, int E) {
    const long long token = token_of_warp();
    if (token >= L) return;
    Row row;
    load_row(logits + token * E, E, -infinity(), row);
    const Exponentials exps = exponentiate(row);
    const float factor = scale * logsumexp(exps) / exps.sum;
    for (int i = 0; i < PER_LANE; ++i) row[i] *= factor;
    store_row(d_logits + token * E, E, row);
}
