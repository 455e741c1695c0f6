// dispatch, version 1: the paper's three steps without atomics, both phases of step 3 in one kernel.
//
// Purpose      topk_experts (L, k) -> the four index structures of a Dispatch.
// Source       MoEBlaze (arXiv 2601.05296), sections 4.1 and 4.2.
// Idea         A dense token-expert map (L, E) turns grouping by expert into counting and
//              scanning columns; every position is computed, none is contended for.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps).
// Determinism  Same input, same bits: each output element has one writer.
//
// kernel          grid               block    shared bytes    bytes read                         bytes written
// dense_map       ceil(L / THREADS)  THREADS  0               4 R                                4 L E + 8 R
// expert_lengths  E                  THREADS  4 THREADS / 32  4 L E                              4 E
// expert_offsets  1                  THREADS  4 THREADS / 32  4 E                                4 E + 4
// route_indices   E                  THREADS  4 THREADS / 32  4 L E + 4 E THREADS + 2 R (k + 1)  8 R
// Bytes are those that threads ask for. Bound: the map, written once and read twice column by
// column (12 L E bytes). A column's entries lie 4 E bytes apart, so from E = 8 on every 4-byte
// entry costs a 32-byte sector: that is what the next versions remove.
#include "dispatch.cuh"

// Step 1. A warp fills the map's rows of its tile of 32 tokens with EMPTY, then enters each
// token under its experts. token_expert_indices is written on the way.
extern "C" __global__ void __launch_bounds__(THREADS)
    dense_map(const int* topk_experts, int* dense_map, int* token_expert_indices, int L, int E, int k) {
    const long long first_token = blockIdx.x * THREADS + warp_id() * WARP;
    const int tokens = min((long long)WARP, L - first_token);
    int* const rows = dense_map + first_token * E;
    for (int entry = lane_id(); entry < tokens * E; entry += WARP) rows[entry] = EMPTY;
    __syncwarp();
    const long long first_slot = first_token * k;
    for (int slot = lane_id(); slot < tokens * k; slot += WARP) {
        const int expert = topk_experts[first_slot + slot];
        rows[slot / k * E + expert] = first_token + slot / k;
        token_expert_indices[first_slot + slot] = expert;
    }
}

// Step 2a. A block counts the tokens in its expert's column.
extern "C" __global__ void __launch_bounds__(THREADS) expert_lengths(const int* dense_map, int* lengths, int L, int E) {
    const int expert = blockIdx.x;
    int tokens = 0;
    for (long long token = threadIdx.x; token < L; token += THREADS) tokens += dense_map[token * E + expert] != EMPTY;
    const int length = block_sum<THREADS>(tokens);
    if (threadIdx.x == 0) lengths[expert] = length;
}

// Step 2b. One block turns lengths into offsets.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_offsets(const int* lengths, int* expert_token_offsets, int E) {
    const int total = block_prefix_sums<THREADS>(lengths, expert_token_offsets, E);
    if (threadIdx.x == 0) expert_token_offsets[E] = total;
}

// Step 3. A block walks its expert's column in tiles of THREADS tokens; a token's position is
// the expert's offset, plus the tokens of earlier tiles, plus its rank in the tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    route_indices(const int* dense_map, const int* expert_token_offsets, const int* topk_experts,
                  int* expert_token_indices, int* token_index_map, int L, int E, int k) {
    const int expert = blockIdx.x;
    int base = expert_token_offsets[expert];
    for (long long first = 0; first < L; first += THREADS) {
        const long long token = first + threadIdx.x;
        const bool routed = token < L && dense_map[token * E + expert] != EMPTY;
        const BlockScan rank = block_exclusive_sum<THREADS>(routed);
        if (routed) {
            const int position = base + rank.exclusive;
            const int slot = slot_of(topk_experts + token * k, expert);
            expert_token_indices[position] = token;
            token_index_map[token * k + slot] = position;
        }
        base += rank.total;
    }
}
