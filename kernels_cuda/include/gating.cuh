// A warp that routes a token: the token's row of logits lies in its registers. Runs everywhere.
//
// Constants    THREADS per block (whole warps); PER_LANE columns of a lane, at least E / 32; PACK, which divides
//              E and PER_LANE; RENORMALIZE, 1 if gates are divided by their sum.
//
// Exponentials and logarithms are the hardware's: of a logit x below the peak, 2 + 1.2 x ulp off at most.
#pragma once
#include "common.cuh"
#include "pack.cuh"
#include "scalar.cuh"

using Row = float[PER_LANE];  // a lane's columns of a token's row

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

// The results of a warp for a token's logits.
struct Routed {
    int expert;       // in the first k lanes, lane j has the j-th choice
    float gate;       // of the choice
    float logsumexp;  // of the logits
};

// The row becomes softmax(logits); the k best experts, best first; gates = their probabilities.
__device__ __forceinline__ Routed route(Row& row, int E, int k, Lists& lists) {
    write_sorted(row, E, lists);
    const float peak = choose(lists, k);
    const Choice mine = lists.chosen[lane_id()];  // of the first k lanes

    const float sum = exponentiate(row, peak), scale = 1.0f / sum;
    for (int i = 0; i < PER_LANE; ++i) row[i] *= scale;

    const float weight = lane_id() < k ? __expf(from_ordered(mine.ordered) - peak) : 0.0f;
    return {mine.expert, weight * (RENORMALIZE ? 1.0f / warp_sum(weight) : scale), peak + __logf(sum)};
}

// Lane j writes the j-th choice, so that choices and gates are written by neighbours.
__device__ __forceinline__ void store_choice(Routed routed, int token, int k, int* topk_experts, float* gates) {
    if (lane_id() >= k) return;
    const long long slot = first_of(token, k) + lane_id();
    topk_experts[slot] = routed.expert;
    gates[slot] = routed.gate;
}
