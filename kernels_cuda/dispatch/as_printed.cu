// dispatch, step 3 as the paper prints it: a location map, then a kernel of its own that writes.
//
// Purpose      dense_map (L, E), expert_token_offsets (E + 1) -> location_map (L, E), then expert_token_indices
//              and token_index_map (R).
// Source       MoEBlaze (arXiv 2601.05296), section 4.2, step 3.
// Idea         One block an expert scans its column tile by tile and stores where each token would go. A second
//              kernel, parallel over the whole map, moves the token ids there. Steps 1 and 2 are the kernels of
//              1_dense_map.cu, which does both phases of step 3 in one kernel and stores no location map.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps).
// Determinism  Same input, same bits: each output element has one writer.
//
// kernel         grid                 block    shared bytes    bytes read                   bytes written
// location_map   E                    THREADS  4 THREADS / 32  4 L E + 4 E THREADS          4 L E
// write_indices  ceil(L E / THREADS)  THREADS  0               4 L E + 4 R + 2 R (k + 1)    8 R
// Bytes are those that threads ask for. Bound: two maps of 4 L E bytes. The dense map is written once and read
// three times, the location map is written once, and its R routed entries are read. A column's entries lie 4 E
// bytes apart: location_map reads and writes a 32-byte sector for each entry from E = 8 on.
#include "dispatch.cuh"

// Step 3, first phase. A token's location is the expert's offset, plus the routed tokens of earlier tiles, plus those
// before it in its own tile. A token that is not routed to the expert gets the location that the next one has.
extern "C" __global__ void __launch_bounds__(THREADS)
    location_map(const int* dense_map, const int* expert_token_offsets, int* location_map, int L, int E) {
    const int expert = blockIdx.x;
    int base = expert_token_offsets[expert];
    for (long long first = 0; first < L; first += THREADS) {
        const long long token = first + threadIdx.x, entry = token * E + expert;
        const BlockScan rank = block_exclusive_sum<THREADS>(token < L && dense_map[entry] != EMPTY);
        if (token < L) location_map[entry] = base + rank.exclusive;
        base += rank.total;
    }
}

// Step 3, second phase. A thread an entry of the map writes the entry's token id to its location, and the location to
// the token's slot.
extern "C" __global__ void __launch_bounds__(THREADS)
    write_indices(const int* dense_map, const int* location_map, const int* topk_experts, int* expert_token_indices,
                  int* token_index_map, int L, int E, int k) {
    const long long entry = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (entry >= (long long)L * E) return;
    const int token = dense_map[entry];
    if (token == EMPTY) return;
    const int location = location_map[entry];
    const int slot = slot_of(topk_experts + token * k, entry % E);
    expert_token_indices[location] = token;
    token_index_map[token * k + slot] = location;
}
