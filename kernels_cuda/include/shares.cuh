// Which tiles of a weight gradient a block takes. They are as deep as their experts have rows, so in turns a few deep
// ones may keep their blocks busy long after the others. Where that would cost more than a part in EVEN, tiles go, the
// deepest first, to the block that has least to do (Graham 1969, "Bounds on multiprocessing timing anomalies": longest
// processing time first). Every block works it out for all of them: the same routing is shared out alike every time.
// Runs everywhere.
#pragma once
#include "common.cuh"

constexpr int EVEN = 16;
constexpr int MOST_TURNS = 64;  // with more of them no tile is deep beside all that its block has to do
constexpr int MOST_EXPERTS = 1024, MOST_BLOCKS = 512;    // what dispatch takes; no more than a block has threads
constexpr int MOST_LOAD = 0x7fffffff / MOST_BLOCKS - 1;  // in steps
constexpr int STEP = 64, STORING = 3;  // rows in a step of the depth; about as many steps as storing a tile takes

// In shared memory: the block's tiles, in the order in which it takes them.
struct Shares {
    static constexpr int MOST = 400, IN_TURNS = -1, NONE = 0x7fffffff;
    int count;
    int tiles[MOST];

    // The tile after so many others; NONE, or a number beyond all tiles, at the end.
    __device__ __forceinline__ int tile(int taken) const {
        if (count == IN_TURNS) return blockIdx.x + taken * gridDim.x;
        return taken < count ? tiles[taken] : NONE;
    }
};

// Where it is worked out: thread b stands for block b.
struct Sharing {
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
    __device__ __forceinline__ bool even_in_turns() {
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
        for (int block = 0; block < gridDim.x; ++block) before -= (loads[block] - own) >> 31;  // a -1 for who has less
        return before;
    }

    // Lists the tiles of this block; returns how many there are of the thread's.
    __device__ __forceinline__ int list(int* of_this_block) {
        int count = 0, load = 0;
        for (int next = 0, takers = 0; next < tiles; next += takers) {
            put(load * MOST_BLOCKS + threadIdx.x);  // no two are equal
            // Nobody takes two before all have taken one who had less than the first taker has with his.
            const int limit = least_load() + steps(order[next / of_expert]);
            const bool takes = stands() && load < limit;
            takers = __syncthreads_count(takes);
            const int at = takes ? next + rank() : tiles;
            if (at < tiles) {
                const int expert = order[at / of_expert];
                if (threadIdx.x == blockIdx.x && count < Shares::MOST)
                    of_this_block[count] = expert * of_expert + at % of_expert;
                load += steps(expert);
                ++count;
            }
        }
        return count;
    }
};

// Shares out the tiles of all experts, of_expert each. All threads of the block call it; `sharing` is free afterwards.
__device__ __forceinline__ void share_out(Shares& shares, Sharing& sharing, const int* expert_token_offsets, int E,
                                          int of_expert) {
    int count = Shares::IN_TURNS;
    if (E * of_expert <= MOST_TURNS * int(gridDim.x)) {
        for (int i = threadIdx.x; i <= E; i += blockDim.x) sharing.ends[i] = expert_token_offsets[i];
        if (threadIdx.x == 0) sharing.of_expert = of_expert, sharing.tiles = E * of_expert;
        __syncthreads();
        if (!sharing.even_in_turns()) {
            sharing.order_experts(E);
            count = sharing.list(shares.tiles);
            if (__syncthreads_or(count > Shares::MOST)) count = Shares::IN_TURNS;
        }
    }
    if (threadIdx.x == blockIdx.x) shares.count = count;
    __syncthreads();
}
