// dispatch, rung 3: no map at all. Every tile of slots is counted, then sorted where it lies.
//
// Purpose      topk_experts (L, k) -> the four index structures of a Dispatch.
// Source       Beyond MoEBlaze (arXiv 2601.05296), section 4.2: its tile-wise scan, for all experts at
//              once. It is one pass of a radix sort whose digit is the expert.
// Idea         In place of a map, one count for each expert and tile. Their scan tells every tile where
//              its rows of each expert go; the order inside the tile nobody else need know.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    THREADS per block (whole warps); ROWS slots per thread; EXPERT_BITS, enough for the
//              ids 0 to E - 1.
// Determinism  Same input, same bits: each output element and each count has one writer.
//
// kernel       grid   block    shared bytes                             bytes read       bytes written
// count_tiles  TILES  THREADS  E THREADS / 8                            4 R              4 R + 4 E TILES
// scan_tiles   E      THREADS  4 THREADS / 32                           4 E TILES        4 E TILES + 4 E
// route_tiles  TILES  THREADS  (4 ROWS + E / 8 + 4 / 32) THREADS + 4 E  4 R + 8 E TILES  8 R + 4 E + 4
// TILES = ceil(R / (ROWS THREADS)). Bytes are those that threads ask for. Bound: 20 R bytes, since
// nothing grows as L E; the counts add 20 E TILES, 1/32 of that when a tile has 32 rows for each
// expert. At L = 2**20, E = 128, k = 8: 168 + 5 MB, 41 us at 4.2 TB/s, and less if the L2 cache still
// has topk_experts for step 3. At L = 2**15, E = 16, k = 4: 2.7 MB in 128 tiles, so three launches
// decide. Rows leave a tile in expert order: neighbouring threads write neighbouring words.
#include "dispatch.cuh"

constexpr int WARPS = THREADS / WARP;
constexpr int TILE = ROWS * THREADS;
constexpr int NONE = -1;  // the expert of a slot past the end

// A tile is TILE neighbouring slots, of which each warp takes a run of ROWS strips of 32.
struct Tile {
    long long first;  // its first slot
    int rows;         // its slots: fewer than TILE in the last tile
};

__device__ __forceinline__ Tile tile_of_block(int R) {
    const long long first = (long long)blockIdx.x * TILE;
    return {first, (int)min((long long)TILE, R - first)};
}

__device__ __forceinline__ int slot_in_tile(int strip) { return (warp_id() * ROWS + strip) * WARP + lane_id(); }

// The thread's slots, one a strip.
struct Slots {
    int expert[ROWS];
    int rank[ROWS];  // slots of the warp's run before it that have its expert
};

// Adds a strip to the counts of the warp's run so far; returns the rank of the lane's slot.
__device__ __forceinline__ int count_strip(int expert, int* counts) {
    const unsigned present = __ballot_sync(FULL_WARP, expert != NONE);
    const unsigned same = lanes_with_same<EXPERT_BITS>(expert, present);
    const unsigned lower = (1u << lane_id()) - 1;
    const int rank = expert == NONE ? 0 : counts[expert] + __popc(same & lower);
    __syncwarp();  // every lane has read its count
    if (is_highest_of(same)) counts[expert] = rank + 1;
    __syncwarp();  // votes order lanes, but not their memory: the next strip must see the count
    return rank;
}

// Reads the tile, and counts each warp's run: warp_counts (WARPS, E) in shared memory.
__device__ __forceinline__ Slots count_runs(const int* topk_experts, Tile tile, int E, int* warp_counts) {
    Slots slots;
#pragma unroll
    for (int strip = 0; strip < ROWS; ++strip) {
        const int slot = slot_in_tile(strip);
        slots.expert[strip] = slot < tile.rows ? topk_experts[tile.first + slot] : NONE;
    }
    int* const counts = warp_counts + warp_id() * E;
    for (int e = lane_id(); e < E; e += WARP) counts[e] = 0;
    __syncwarp();
#pragma unroll
    for (int strip = 0; strip < ROWS; ++strip) slots.rank[strip] = count_strip(slots.expert[strip], counts);
    __syncthreads();  // every warp has counted
    return slots;
}

__device__ __forceinline__ int rows_of_expert(const int* warp_counts, int E, int expert) {
    int rows = 0;
    for (int warp = 0; warp < WARPS; ++warp) rows += warp_counts[warp * E + expert];
    return rows;
}

// Step 1. A block counts its tile's rows of each expert: column blockIdx.x of tile_bases (E, TILES + 1).
// token_expert_indices is copied on the way.
extern "C" __global__ void __launch_bounds__(THREADS)
    count_tiles(const int* topk_experts, int* tile_bases, int* token_expert_indices, int R, int E) {
    DYNAMIC_SHARED(int, warp_counts);  // (WARPS, E)
    const Tile tile = tile_of_block(R);
    const Slots slots = count_runs(topk_experts, tile, E, warp_counts);
#pragma unroll
    for (int strip = 0; strip < ROWS; ++strip)
        if (slots.expert[strip] != NONE) token_expert_indices[tile.first + slot_in_tile(strip)] = slots.expert[strip];
    for (int e = threadIdx.x; e < E; e += THREADS)
        tile_bases[e * (gridDim.x + 1LL) + blockIdx.x] = rows_of_expert(warp_counts, E, e);
}

// Step 2. A block turns its expert's counts into the rows of earlier tiles; after the last tile comes
// the expert's length.
extern "C" __global__ void __launch_bounds__(THREADS) scan_tiles(int* tile_bases, int tiles) {
    int* const bases = tile_bases + blockIdx.x * (tiles + 1LL);
    const int length = block_prefix_sums<THREADS>(bases, bases, tiles);
    if (threadIdx.x == 0) bases[tiles] = length;
}

// Turns the warps' counts of an expert into where their rows of it begin, the expert's own beginning at `first`.
__device__ __forceinline__ void place_warps(int* counts_of_expert, int E, int first) {
    for (int warp = 0; warp < WARPS; ++warp) {
        const int rows = counts_of_expert[warp * E];
        counts_of_expert[warp * E] = first;
        first += rows;
    }
}

// Gives every expert its place, twice: in the tile's own order, which is all of the tile's rows, expert
// by expert, and `shift` positions further in the order of all. Block 0 keeps the experts' offsets.
__device__ __forceinline__ void place_experts(const int* tile_bases, int E, int* warp_counts, int* shift,
                                              int* expert_token_offsets) {
    int rows_below = 0, offset_below = 0;  // of the experts in earlier turns
    for (int turn = 0; turn < E; turn += THREADS) {
        const int e = turn + threadIdx.x;
        const int* const bases = tile_bases + e * (gridDim.x + 1LL);
        const BlockScan rows = block_exclusive_sum<THREADS>(e < E ? rows_of_expert(warp_counts, E, e) : 0);
        const BlockScan length = block_exclusive_sum<THREADS>(e < E ? bases[gridDim.x] : 0);
        if (e < E) {
            const int first = rows_below + rows.exclusive, offset = offset_below + length.exclusive;
            place_warps(warp_counts + e, E, first);
            shift[e] = offset + bases[blockIdx.x] - first;
            if (blockIdx.x == 0) expert_token_offsets[e] = offset;
        }
        rows_below += rows.total;
        offset_below += length.total;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) expert_token_offsets[E] = offset_below;
}

struct __align__(4) Row {
    unsigned short slot;  // in the tile
    unsigned short expert;
};
static_assert(TILE <= 1 << 16, "a slot of the tile is 16 bits");

// Step 3. A block ranks its tile once more, lays the rows out in the tile's own order, and from
// there neighbouring threads write neighbouring positions.
extern "C" __global__ void __launch_bounds__(THREADS)
    route_tiles(const int* topk_experts, const int* tile_bases, int* expert_token_indices, int* expert_token_offsets,
                int* token_index_map, int R, int E, int k) {
    DYNAMIC_SHARED(Row, ordered);                                     // (TILE,)
    int* const warp_counts = reinterpret_cast<int*>(ordered + TILE);  // (WARPS, E)
    int* const shift = warp_counts + WARPS * E;                       // (E,)
    const Tile tile = tile_of_block(R);
    const Slots slots = count_runs(topk_experts, tile, E, warp_counts);
    place_experts(tile_bases, E, warp_counts, shift, expert_token_offsets);
    __syncthreads();  // every expert and warp has its place

#pragma unroll
    for (int strip = 0; strip < ROWS; ++strip) {
        const int slot = slot_in_tile(strip), expert = slots.expert[strip];
        if (expert == NONE) continue;
        const int row = warp_counts[warp_id() * E + expert] + slots.rank[strip];
        ordered[row] = {(unsigned short)slot, (unsigned short)expert};
        token_index_map[tile.first + slot] = row + shift[expert];
    }
    __syncthreads();  // the rows lie in order

    for (int row = threadIdx.x; row < tile.rows; row += THREADS) {
        const Row here = ordered[row];
        expert_token_indices[row + shift[here.expert]] = int(tile.first + here.slot) / k;
    }
}
