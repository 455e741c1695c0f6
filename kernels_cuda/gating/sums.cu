// gating, for every version: the sums over all tokens that the auxiliary losses need.
//
// Purpose      topk_experts (L, k) -> shares (E,), the part of the R routed rows that each expert
//              gets; terms -> their sum.
// Source       Switch Transformer (arXiv 2101.03961), 2.2: f_e, here over R rows instead of L.
// Idea         Two steps instead of atomics: blocks leave what they have, then one block per result
//              adds it up in a fixed order. A token's k experts are distinct, so the k lanes that
//              count one token never meet in a histogram.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps).
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel         grid               block    shared bytes      bytes read  bytes written
// expert_counts  ceil(L / THREADS)  THREADS  4 E THREADS / 32  4 R         4 E TILES
// expert_shares  E                  THREADS  4 THREADS / 32    4 E TILES   4 E
// sum_terms      1                  THREADS  4 THREADS / 32    4 N         4
// TILES = ceil(L / THREADS), N is the number of terms. Bytes are those that threads ask for; those of
// the counts are 2 / THREADS of the 4 L E bytes of the probabilities, which the losses read too.
#include "common.cuh"

// Step 1. A block counts its tile of THREADS tokens; each of its warps has a histogram, and takes 32
// tokens one after the other, lane j the j-th expert.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_counts(const int* topk_experts, int* counts, int L, int E, int k) {
    DYNAMIC_SHARED(int, histograms);  // (THREADS / WARP, E)
    int* const histogram = histograms + warp_id() * E;
    for (int e = lane_id(); e < E; e += WARP) histogram[e] = 0;
    __syncwarp();
    const long long first = blockIdx.x * THREADS + warp_id() * WARP;
    const long long end = min(first + WARP, (long long)L);
    for (long long token = first; token < end; ++token) {
        if (lane_id() < k) histogram[topk_experts[token * k + lane_id()]] += 1;
        __syncwarp();  // the next token may have an expert in common
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += THREADS) {
        int count = 0;
        for (int warp = 0; warp < THREADS / WARP; ++warp) count += histograms[warp * E + e];
        counts[(long long)blockIdx.x * E + e] = count;
    }
}

// Step 2. A block adds up its expert's counts over all tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_shares(const int* counts, float* shares, int tiles, int E, int R) {
    const int expert = blockIdx.x;
    int count = 0;
    for (long long tile = threadIdx.x; tile < tiles; tile += THREADS) count += counts[tile * E + expert];
    const int rows = block_sum<THREADS>(count);
    if (threadIdx.x == 0) shares[expert] = float(rows) / R;
}

// total = scale * the sum of the terms.
extern "C" __global__ void __launch_bounds__(THREADS)
    sum_terms(const float* terms, float* total, float scale, int num_terms) {
    float part = 0.0f;
    for (int i = threadIdx.x; i < num_terms; i += THREADS) part += terms[i];
    const float sum = block_sum<THREADS>(part);
    if (threadIdx.x == 0) total[0] = scale * sum;
}
