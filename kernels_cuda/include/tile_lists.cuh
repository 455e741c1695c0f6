// The tile scheduler of weight gradients: which tiles a block takes. They are as deep as their experts have rows, so
// with tiles b, b + gridDim.x, ... a few deep ones may keep their blocks busy long after the others. Where that would
// cost more than a part in EVEN, tiles go, the deepest first, to the block with the least work (Graham 1969, "Bounds on
// multiprocessing timing anomalies": longest processing time first). Every block computes all lists: the same routing
// always gives the same lists.
// Runs everywhere.
#pragma once
#include "common.cuh"

constexpr int EVEN = 16;
constexpr int MOST_ROUNDS = 64;  // with more of them no tile is deep beside the rest of its block's work
constexpr int MOST_EXPERTS = 1024, MOST_BLOCKS = 512;    // what dispatch takes; no more than a block has threads
constexpr int MOST_LOAD = 0x7fffffff / MOST_BLOCKS - 1;  // in steps
constexpr int STEP = 64, STORING = 3;  // rows in a step of the depth; about as many steps as storing a tile takes

// In shared memory: the block's tiles, in the order in which it takes them.
struct TileList {
    static constexpr int MOST = 400, STRIDED = -1, NONE = 0x7fffffff;
    int count;
    int tiles[MOST];

    // The tile after so many others; NONE, or a number beyond all tiles, at the end.
    __device__ __forceinline__ int tile(int taken) const {
        if (count == STRIDED) return blockIdx.x + taken * gridDim.x;
        return taken < count ? tiles[taken] : NONE;
    }
};

// The state while the lists are computed: thread b stands for block b.
struct TileAssignment {
    int loads[MOST_BLOCKS];                           // of each block, in steps
    int ends[MOST_EXPERTS + 1], order[MOST_EXPERTS];  // experts with more rows come first
    int of_expert, tiles;                             // an expert's, and all

    __device__ __forceinline__ int rows(int expert) const { return ends[expert + 1] - ends[expert]; }
    __device__ __forceinline__ int steps(int expert) const { return (rows(expert) + STEP - 1) / STEP + STORING; }
    static __device__ __forceinline__ bool stands() { return threadIdx.x < gridDim.x; }

    __device__ __forceinline__ void put(int load) {
        __syncthreads();
        if (stands()) loads[threadIdx.x] = load;
        __syncthreads();
    }

    // Or if no lists can be made: a load and its block's number would not fit into one integer.
    __device__ __forceinline__ bool even_if_strided() {
        int load = 0;
        if (stands())
            for (int tile = threadIdx.x; tile < tiles; tile += gridDim.x) load += steps(tile / of_expert);
        put(load);
        int most = 0;
        long long sum = 0;
        for (int block = lane_id(); block < gridDim.x; block += WARP) {
            most = max(most, loads[block]);
            sum += loads[block];
        }
        most = warp_max(most);
        sum = warp_sum(sum);
        return sum / gridDim.x + most > MOST_LOAD - most || int(most * gridDim.x) <= sum + sum / EVEN;
    }

    __device__ __forceinline__ void order_experts(int E) {
        for (int expert = threadIdx.x; expert < E; expert += blockDim.x) {
            int place = 0;
#pragma unroll 4
            for (int other = 0; other < E; ++other)
                place += rows(other) > rows(expert) || (rows(other) == rows(expert) && other < expert);
            order[place] = expert;
        }
    }

    __device__ __forceinline__ int least_load() const {
        int least = 0x7fffffff;
        for (int block = lane_id(); block < gridDim.x; block += WARP) least = min(least, loads[block]);
        return warp_min(least) / MOST_BLOCKS;
    }
    // How many blocks have less to do than this thread's.
    __device__ __forceinline__ int rank() const {
        const int own = loads[threadIdx.x];
        int before = 0;
#pragma unroll 8
        for (int block = 0; block < gridDim.x; ++block) before -= (loads[block] - own) >> 31;  // -1 if it has less
        return before;
    }

    // Lists the tiles of this block; returns how many there are of the thread's.
    __device__ __forceinline__ int list(int* of_this_block) {
        int count = 0, load = 0;
        for (int next = 0, takers = 0; next < tiles; next += takers) {
            put(load * MOST_BLOCKS + threadIdx.x);  // no two are equal
            // No block takes a second tile before every block with less work than the first taker has taken one.
            const int limit = least_load() + steps(order[next / of_expert]);
            const bool takes = stands() && load < limit;
            takers = __syncthreads_count(takes);
            const int at = takes ? next + rank() : tiles;
            if (at < tiles) {
                const int expert = order[at / of_expert];
                if (threadIdx.x == blockIdx.x && count < TileList::MOST)
                    of_this_block[count] = expert * of_expert + at % of_expert;
                load += steps(expert);
                ++count;
            }
        }
        return count;
    }
};

// Assigns the tiles of all experts, of_expert each. All threads of the block call it; `assignment` is free afterwards.
__device__ __forceinline__ void assign_tiles(TileList& own_tiles, TileAssignment& assignment,
                                             const int* expert_token_offsets, int E, int of_expert) {
    int count = TileList::STRIDED;
    if (E * of_expert <= MOST_ROUNDS * int(gridDim.x)) {
        for (int i = threadIdx.x; i <= E; i += blockDim.x) assignment.ends[i] = expert_token_offsets[i];
        if (threadIdx.x == 0) assignment.of_expert = of_expert, assignment.tiles = E * of_expert;
        __syncthreads();
        if (!assignment.even_if_strided()) {
            assignment.order_experts(E);
            count = assignment.list(own_tiles.tiles);
            if (__syncthreads_or(count > TileList::MOST)) count = TileList::STRIDED;
        }
    }
    if (threadIdx.x == blockIdx.x) own_tiles.count = count;
    __syncthreads();
}
