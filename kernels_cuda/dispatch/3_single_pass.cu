// dispatch, version 3: no map at all. Every tile of tokens is counted, then sorted where it lies.
//
// Purpose      topk_experts (L, k) -> the four index structures of a Dispatch.
// Source       Beyond MoEBlaze (arXiv 2601.05296), section 4.2: its tile-wise scan, for all experts at
//              once. It is one pass of a radix sort whose digit is the expert.
// Idea         In place of a map, one count for each expert and tile. Their scan tells every tile where
//              its rows of each expert go; no other tile needs the order inside the tile. And since a
//              token's experts are distinct, K lanes count a token at once without meeting in a count.
//              A slot may be EMPTY: its expert is elsewhere. It is no row, and its place is EMPTY too.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    K, the k; THREADS per block (whole warps); STEPS tokens of a team; SCAN_THREADS per
//              block of scan_tiles.
// Determinism  Same input, same bits: each output element and each count has one writer.
//
// R counts the slots.
//
// kernel       grid   block         shared bytes
//              bytes read       bytes written
// count_tiles  TILES  THREADS       2 E TEAMS
//              4 R              4 R + 4 E TILES
// scan_tiles   E      SCAN_THREADS  4 SCAN_THREADS / 32
//              4 E TILES        4 E TILES + 4 E
// route_tiles  TILES  THREADS       4 TEAMS STEPS K + 4 E + 2 E TEAMS + 4 THREADS / 32
//              4 R + 8 E TILES  8 R + 4 E + 4
// TEAMS = THREADS / 32 floor(32 / K), TILES = ceil(L / (STEPS TEAMS)). Bytes are those that threads ask
// for. Bound: 20 R bytes, since nothing grows as L E; the counts add 20 E TILES, 1/32 of that when a
// tile has 32 rows for each expert. At L = 2**20, E = 128, k = 8: 168 + 5 MB, 41 us at 4.2 TB/s, and
// less if the L2 cache still has topk_experts for step 3. At L = 2**15, E = 16, k = 4: 2.7 MB in 128
// tiles, so three launches decide. Rows leave a tile in expert order: neighbouring threads write
// neighbouring words.
#include "dispatch.cuh"

// A team is K lanes of a warp. It takes a run of STEPS neighbouring tokens, one after the other, each
// lane a slot; lanes after the last whole team idle. A tile is the runs of the block's teams.
constexpr int TEAMS_OF_WARP = WARP / K;
constexpr int TEAMS = THREADS / WARP * TEAMS_OF_WARP;
constexpr int TILE = TEAMS * STEPS * K;  // slots
constexpr int NONE = 0xffff;  // the expert of a slot past the end, of an idle lane, and of a slot that is EMPTY
static_assert((EMPTY & 0xffff) == NONE, "16 bits of a slot say that it is EMPTY");

using Count = unsigned short;
static_assert(TILE < 1 << 16, "a count, and a place in the tile, is 16 bits");

struct Tile {
    long long first;  // its first slot
    int slots;        // fewer than TILE in the last tile
};

__device__ __forceinline__ Tile tile_of_block(int R) {
    const long long first = blockIdx.x * TILE;
    return {first, (int)min((long long)TILE, R - first)};
}

__device__ __forceinline__ bool in_team() { return lane_id() < TEAMS_OF_WARP * K; }
__device__ __forceinline__ int team() { return warp_id() * TEAMS_OF_WARP + lane_id() / K; }
__device__ __forceinline__ int token_in_tile(int step) { return team() * STEPS + step; }
__device__ __forceinline__ int slot_in_tile(int step) { return token_in_tile(step) * K + lane_id() % K; }
__device__ __forceinline__ bool has_slot(Tile tile, int step) { return in_team() && slot_in_tile(step) < tile.slots; }

// The thread's slots, one a step, each in one register: a tile's slots are many, and their experts few.
struct Slots {
    unsigned packed[STEPS];

    __device__ __forceinline__ int expert(int step) const { return packed[step] & 0xffff; }
    __device__ __forceinline__ int rank(int step) const { return packed[step] >> 16; }  // see count_runs
};

// Reads the tile, and counts each team's run: counts (TEAMS, E) in shared memory. A slot's rank is the
// number of earlier tokens of the run that have its expert.
__device__ __forceinline__ Slots count_runs(const int* topk_experts, Tile tile, int E, Count* counts) {
    Slots slots;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        slots.packed[step] = has_slot(tile, step) ? topk_experts[tile.first + slot_in_tile(step)] : NONE;
    }
    for (int i = threadIdx.x; i < TEAMS * E; i += THREADS) counts[i] = 0;
    __syncthreads();  // the counts are zeros
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        const int expert = slots.expert(step);
        if (expert != NONE) {
            Count& count = counts[team() * E + expert];
            const int rank = count;
            count = rank + 1;
            slots.packed[step] |= rank << 16;
        }
        __syncwarp();  // the team's next token must see the counts
    }
    __syncthreads();  // every team has counted
    return slots;
}

__device__ __forceinline__ int rows_of_expert(const Count* counts_of_expert, int E) {
    int rows = 0;
#pragma unroll 8
    for (int team = 0; team < TEAMS; ++team) rows += counts_of_expert[team * E];
    return rows;
}

// Step 1. A block counts its tile's rows of each expert: column blockIdx.x of tile_bases (E, TILES + 1).
// token_expert_indices is copied on the way.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_tiles(const int* topk_experts, int* tile_bases, int* token_expert_indices, int R, int E) {
    DYNAMIC_SHARED(Count, counts);  // (TEAMS, E)
    const Tile tile = tile_of_block(R);
    const Slots slots = count_runs(topk_experts, tile, E, counts);
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
        if (has_slot(tile, step)) {
            const int expert = slots.expert(step);
            token_expert_indices[tile.first + slot_in_tile(step)] = expert == NONE ? EMPTY : expert;
        }
    for (int e = threadIdx.x; e < E; e += THREADS)
        tile_bases[e * (gridDim.x + 1LL) + blockIdx.x] = rows_of_expert(counts + e, E);
}

// Step 2. A block turns its expert's counts into the rows of earlier tiles; after the last tile comes
// the expert's length.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS) scan_tiles(int* tile_bases, int tiles) {
    int* const bases = tile_bases + blockIdx.x * (tiles + 1LL);
    const int length = block_prefix_sums<SCAN_THREADS>(bases, bases, tiles);
    if (threadIdx.x == 0) bases[tiles] = length;
}

// Turns the teams' counts of an expert into where their rows of it begin, the expert's own beginning at
// `first`. Several counts are read before the first is written: one wait for all.
__device__ __forceinline__ void place_teams(Count* counts_of_expert, int E, int first) {
    constexpr int AT_ONCE = 8;
    static_assert(TEAMS % AT_ONCE == 0, "whole turns of teams");
    for (int team = 0; team < TEAMS; team += AT_ONCE) {
        Count* const counts = counts_of_expert + team * E;
        int rows[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) rows[i] = counts[i * E];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            counts[i * E] = first;
            first += rows[i];
        }
    }
}

// Gives every expert its place, twice: in the tile's own order, which is all of the tile's rows, expert
// by expert, and `shift` positions further in the order of all. Block 0 keeps the experts' offsets.
// Returns how many rows the tile has.
__device__ __forceinline__ int place_experts(const int* tile_bases, int E, Count* counts, int* shift,
                                             int* expert_token_offsets) {
    int rows_below = 0, offset_below = 0;  // of the experts in earlier turns
    for (int turn = 0; turn < E; turn += THREADS) {
        const int e = turn + threadIdx.x;
        const int* const bases = tile_bases + e * (gridDim.x + 1LL);
        const BlockScan rows = block_exclusive_sum<THREADS>(e < E ? rows_of_expert(counts + e, E) : 0);
        const BlockScan length = block_exclusive_sum<THREADS>(e < E ? bases[gridDim.x] : 0);
        if (e < E) {
            const int first = rows_below + rows.exclusive, offset = offset_below + length.exclusive;
            place_teams(counts + e, E, first);
            shift[e] = offset + bases[blockIdx.x] - first;
            if (blockIdx.x == 0) expert_token_offsets[e] = offset;
        }
        rows_below += rows.total;
        offset_below += length.total;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) expert_token_offsets[E] = offset_below;
    return rows_below;
}

struct __align__(4) Row {
    unsigned short token;  // in the tile
    unsigned short expert;
};

// Step 3. A block ranks its tile once more, lays the rows out in the tile's own order, and from
// there neighbouring threads write neighbouring positions.
extern "C" __global__ void __launch_bounds__(THREADS)
    route_tiles(const int* topk_experts, const int* tile_bases, int* expert_token_indices, int* expert_token_offsets,
                int* token_index_map, int R, int E) {
    DYNAMIC_SHARED(Row, ordered);                               // (TILE,)
    int* const shift = reinterpret_cast<int*>(ordered + TILE);  // (E,)
    Count* const counts = reinterpret_cast<Count*>(shift + E);  // (TEAMS, E)
    const Tile tile = tile_of_block(R);
    const Slots slots = count_runs(topk_experts, tile, E, counts);
    const int rows = place_experts(tile_bases, E, counts, shift, expert_token_offsets);
    __syncthreads();  // every expert and team has its place

#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (!has_slot(tile, step)) continue;
        const int expert = slots.expert(step);
        int place = EMPTY;
        if (expert != NONE) {
            const int row = counts[team() * E + expert] + slots.rank(step);
            ordered[row] = {(unsigned short)token_in_tile(step), (unsigned short)expert};
            place = row + shift[expert];
        }
        token_index_map[tile.first + slot_in_tile(step)] = place;
    }
    __syncthreads();  // the rows lie in order

    const int first_token = tile.first / K;
    for (int row = threadIdx.x; row < rows; row += THREADS) {
        const Row here = ordered[row];
        expert_token_indices[row + shift[here.expert]] = first_token + here.token;
    }
}
