// gating, version 2: one warp a token, which holds the token's row in its registers.
//
// Purpose      logits (L, E) -> probs (L, E), topk_experts and gates (L, k); gradients of the logits
//              from those of the gates and of both auxiliary losses; the terms of these losses.
// Source       MoEBlaze (arXiv 2601.05296), section 2; Switch Transformer (arXiv 2101.03961), 2.2;
//              ST-MoE (arXiv 2202.08906), router z-loss.
// Idea         Neighbouring lanes read neighbouring columns, PACK of them at once, and the row is read
//              from memory once. Each lane sorts its own columns; then choosing is merging 32 lists, of
//              which only the heads are compared. The backward needs no probabilities but those that it
//              makes of the logits, and adds up all that reaches a logit before it writes.
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
#include "common.cuh"
#include "pack.cuh"
#include "scalar.cuh"

using Row = float[PER_LANE];  // a lane's columns of a token's row

__device__ __forceinline__ int token_of_warp() { return blockIdx.x * (THREADS / WARP) + warp_id(); }

// Where the columns of a token, or its slots, begin: one multiplication of 32 bits by 32.
__device__ __forceinline__ long long first_of(int token, int columns) { return (long long)token * columns; }

// Neighbours: the lower of two lanes has the lower columns.
__device__ __forceinline__ int column(int i) { return lane_id() * PER_LANE + i; }

// `beyond` stands where the row has ended.
__device__ __forceinline__ void load_row(const float* source, int E, float beyond, Row& row) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i += PACK) {
        Pack<float, PACK> pack;
        if (column(i) < E) pack = load_pack<PACK>(source + column(i));
#pragma unroll
        for (int p = 0; p < PACK; ++p) row[i + p] = column(i) < E ? pack.elements[p] : beyond;
    }
}
template <class T>
__device__ __forceinline__ void store_row(T* target, int E, const Row& row) {
#pragma unroll
    for (int i = 0; i < PER_LANE; i += PACK) {
        Pack<T, PACK> pack;
#pragma unroll
        for (int p = 0; p < PACK; ++p) pack.elements[p] = from_float<T>(row[i + p]);
        if (column(i) < E) store_pack(target + column(i), pack);
    }
}

__device__ __forceinline__ float peak_of(const Row& row) {
    float peak = row[0];
    for (int i = 1; i < PER_LANE; ++i) peak = fmaxf(peak, row[i]);
    return warp_max(peak);
}

// Replaces each logit by exp(logit - peak) and returns their sum: exponents are at most 0, so nothing overflows.
__device__ __forceinline__ float exponentiate(Row& row, float peak) {
    float sum = 0.0f;
    for (int i = 0; i < PER_LANE; ++i) sum += row[i] = __expf(row[i] - peak);
    return warp_sum(sum);
}

struct alignas(8) Choice {
    int ordered;  // the logit as an ordered integer
    int expert;
};

constexpr int EXHAUSTED = -0x7fffffff - 1;  // below the ordered integer of every logit, -infinity and NaN too

// In shared memory, a warp's: 32 lists of a lane's columns, each with its end, and room for k choices.
struct Lists {
    Choice sorted[PER_LANE + 1][WARP];
    Choice chosen[WARP];
};

// Writes the lane's list: its columns, best first, of equal ones the lower first. Neighbours change
// places until all are in order: half of them in turn, and never equal ones.
__device__ __forceinline__ void write_sorted(const Row& logits, int E, Lists& lists) {
    Choice list[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const bool in_row = column(i - i % PACK) < E;
        list[i] = {in_row ? to_ordered(logits[i]) : EXHAUSTED, column(i)};
    }
#pragma unroll
    for (int pass = 0; pass < PER_LANE; ++pass)
#pragma unroll
        for (int i = pass % 2; i < PER_LANE - 1; i += 2)
            if (list[i].ordered < list[i + 1].ordered) {
                const Choice better = list[i + 1];
                list[i + 1] = list[i];
                list[i] = better;
            }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) lists.sorted[i][lane_id()] = list[i];
    lists.sorted[PER_LANE][lane_id()] = {EXHAUSTED, 0};
}

// Chooses k times the best of the heads of all lists, and the list that it headed moves up. Of equal heads
// the lowest lane's is the best, as its expert is the lowest. Every lane gets the largest logit.
__device__ __forceinline__ float choose(Lists& lists, int k) {
    const unsigned lower_lanes = (1u << lane_id()) - 1;
    const Choice* next = &lists.sorted[0][lane_id()];
    Choice head = *next;
    const int peak = warp_max(head.ordered);
    for (int j = 0; j < k; ++j) {
        const bool is_best = head.ordered == warp_max(head.ordered);
        const unsigned best = __ballot_sync(FULL_WARP, is_best);
        if (is_best && (best & lower_lanes) == 0) {
            lists.chosen[j] = head;
            next += WARP;
            head = *next;
        }
    }
    __syncwarp();  // the choices are complete
    return from_ordered(peak);
}

// probs = softmax(logits); the k best experts, best first; gates = their probabilities.
// A token with a NaN gets k experts too, NaN before infinity, and gates of NaN.
// Lane j writes the j-th choice, so that choices and gates are written by neighbours.
extern "C" __global__ void __launch_bounds__(THREADS)
    softmax_top_k(const float* logits, float* probs, int* topk_experts, float* gates, int L, int E, int k) {
    DYNAMIC_SHARED(Lists, lists_of_warps);  // (THREADS / WARP,)
    Lists& lists = lists_of_warps[warp_id()];
    const int token = token_of_warp();
    if (token >= L) return;
    Row row;
    load_row(logits + first_of(token, E), E, -infinity(), row);
    write_sorted(row, E, lists);
    const float peak = choose(lists, k);
    const Choice mine = lists.chosen[lane_id()];  // of the first k lanes

    const float scale = 1.0f / exponentiate(row, peak);
    for (int i = 0; i < PER_LANE; ++i) row[i] *= scale;
    store_row(probs + first_of(token, E), E, row);

    const bool has_choice = lane_id() < k;
    const float weight = has_choice ? __expf(from_ordered(mine.ordered) - peak) : 0.0f;
    const float gate = weight * (RENORMALIZE ? 1.0f / warp_sum(weight) : scale);
    if (has_choice) {
        const long long slot = first_of(token, k) + lane_id();
        topk_experts[slot] = mine.expert;
        gates[slot] = gate;
    }
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

// All that reaches the logits, in one pass. Through the softmax, d_logit = p (d_p - mean of d_p):
//   of the gates              d_p is d_gate for who was chosen, and 0 for the others. Renormalised gates
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
