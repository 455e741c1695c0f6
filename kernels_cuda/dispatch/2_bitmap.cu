// dispatch, version 2: the paper's three steps over bits.
//
// Purpose      topk_experts (L, k) -> the four index structures of a Dispatch.
// Source       Beyond MoEBlaze (arXiv 2601.05296), section 4.2, whose dense map grows as 4 L E bytes.
// Idea         Of an entry of the dense map one bit matters. 32 tokens of an expert's column are one
//              word, an expert's words are neighbours: L E / 8 bytes, read without a gap.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); EXPERT_BITS, enough for the ids 0 to E - 1.
// Determinism  Same input, same bits: each output element has one writer.
//
// kernel          grid               block    shared bytes    bytes read                             bytes written
// bitmap          ceil(L / THREADS)  THREADS  E THREADS / 8   8 R                                    4 E WORDS + 4 R
// expert_lengths  E                  THREADS  4 THREADS / 32  4 E WORDS                              4 E
// expert_offsets  1                  THREADS  4 THREADS / 32  4 E                                    4 E + 4
// route_indices   E                  THREADS  4 THREADS / 32  4 E WORDS + 4 E THREADS + 2 R (k + 1)  8 R
// WORDS = ceil(L / THREADS) THREADS / 32, an expert's: zeros follow the last token. Bytes are those
// that threads ask for. Bound: the map no longer (3 L E / 8 bytes in all), but step 3, where every
// routed row looks for its slot and writes its position at an address of its own.
#include "dispatch.cuh"

constexpr int WARPS = THREADS / WARP;

// Those lanes of `among` that bring the same expert as this one, by a vote on each of its BITS bits
// (__match_any_sync would compare all 32).
template <int BITS>
__device__ __forceinline__ unsigned lanes_with_same(int expert, unsigned among) {
    unsigned same = among;
#pragma unroll
    for (int bit = 0; bit < BITS; ++bit) {
        const bool set = expert >> bit & 1;
        const unsigned voted = __ballot_sync(FULL_WARP, set);
        same &= set ? voted : ~voted;
    }
    return same;
}

// True if no higher lane is in the mask: one lane of each group, to write for all of it.
__device__ __forceinline__ bool is_highest_of(unsigned lanes) { return lanes >> lane_id() == 1; }

__device__ __forceinline__ int words_of_expert(int L) { return (L + THREADS - 1) / THREADS * WARPS; }

// Step 1. A warp builds the words of its tile of 32 tokens, a lane for each token: the lanes that
// name the same expert at once are bits of its word. Then the block writes WARPS neighbouring words
// of each expert. token_expert_indices is copied on the way.
extern "C" __global__ void __launch_bounds__(THREADS)
    bitmap(const int* topk_experts, unsigned* bitmap, int* token_expert_indices, int L, int E, int k) {
    DYNAMIC_SHARED(unsigned, words);  // (E, WARPS)
    for (int word = threadIdx.x; word < E * WARPS; word += THREADS) words[word] = 0;
    __syncthreads();

    const long long first_token = blockIdx.x * THREADS + warp_id() * WARP;
    const int tokens = min((long long)WARP, L - first_token);
    const int* const experts = topk_experts + first_token * k;  // (tokens, k)
    for (int slot = lane_id(); slot < tokens * k; slot += WARP)
        token_expert_indices[first_token * k + slot] = experts[slot];

    const bool present = lane_id() < tokens;
    const unsigned present_lanes = __ballot_sync(FULL_WARP, present);
    for (int j = 0; j < k; ++j) {
        const int expert = present ? experts[lane_id() * k + j] : 0;
        const unsigned chosen_by = lanes_with_same<EXPERT_BITS>(expert, present_lanes);
        if (is_highest_of(chosen_by)) words[expert * WARPS + warp_id()] |= chosen_by;
        __syncwarp();  // votes order lanes, but not their memory: the next j may add to the same word
    }
    __syncthreads();  // the words are complete

    const long long stride = words_of_expert(L);
    for (int word = threadIdx.x; word < E * WARPS; word += THREADS)
        bitmap[word / WARPS * stride + blockIdx.x * WARPS + word % WARPS] = words[word];
}

// Step 2a. A block counts the bits in its expert's words.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_lengths(const unsigned* bitmap, int* lengths, int L, int E) {
    const int words = words_of_expert(L);
    const unsigned* const column = bitmap + (long long)blockIdx.x * words;
    int tokens = 0;
    for (int word = threadIdx.x; word < words; word += THREADS) tokens += __popc(column[word]);
    const int length = block_sum<THREADS>(tokens);
    if (threadIdx.x == 0) lengths[blockIdx.x] = length;
}

// Step 2b. One block turns lengths into offsets.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_offsets(const int* lengths, int* expert_token_offsets, int E) {
    const int total = block_prefix_sums<THREADS>(lengths, expert_token_offsets, E);
    if (threadIdx.x == 0) expert_token_offsets[E] = total;
}

// Step 3. A block walks its expert's words in tiles of THREADS words; a token's position is the
// expert's offset, plus the bits of earlier tiles, of lower words in the tile and of the word below it.
extern "C" __global__ void __launch_bounds__(THREADS)
    route_indices(const unsigned* bitmap, const int* expert_token_offsets, const int* topk_experts,
                  int* expert_token_indices, int* token_index_map, int L, int E, int k) {
    const int expert = blockIdx.x, words = words_of_expert(L);
    const unsigned* const column = bitmap + (long long)expert * words;
    int base = expert_token_offsets[expert];
    for (int first = 0; first < words; first += THREADS) {
        const int word = first + threadIdx.x;
        const unsigned bits = word < words ? column[word] : 0;
        const BlockScan rank = block_exclusive_sum<THREADS>(__popc(bits));
        for (unsigned left = bits; left != 0; left &= left - 1) {
            const unsigned lowest = left & -left;
            const long long token = word * WARP + __popc(lowest - 1);
            const int position = base + rank.exclusive + __popc(bits & (lowest - 1));
            const int slot = slot_of(topk_experts + token * k, expert);
            expert_token_indices[position] = token;
            token_index_map[token * k + slot] = position;
        }
        base += rank.total;
    }
}
