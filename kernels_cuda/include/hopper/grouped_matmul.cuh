// A grouped matrix product on Hopper: some warps load tiles, two warpgroups multiply them, other warps store them.
// sm_90a.
//
// A tile of the result is (128, 256), made from 64 of the depth at a time. Producer warps fill a ring of stages in
// shared memory and run ahead of the consumers, past the ends of tiles. Each consumer owns 64 rows, in 128 float32
// registers a thread. It leaves a finished tile in shared memory, rounded, and goes on with the next one, while
// epilogue warps bring the tile to global memory and compute what follows from it. Blocks are persistent: block b takes
// tiles b, b + gridDim.x, ..., or the tiles of a weight gradient that tile_lists.cuh assigns to it.
#pragma once
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;

#include "hopper/consumers.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/ring.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

// The warp roles of a block: producer warps, epilogue warps, and two consumer warpgroups. COPYING: all lanes of the
// producers copy, not one alone. A_ALONG_M, B_ALONG_N: as in wgmma. SHORT_STEP: after a tile's steps comes one with 16
// of the depth.
template <int PRODUCER_WARPS_, int EPILOGUE_WARPS_, bool COPYING, bool A_ALONG_M_, bool B_ALONG_N_,
          bool SHORT_STEP_ = false>
struct WarpRoles {
    static constexpr int PRODUCER_WARPS = PRODUCER_WARPS_, EPILOGUE_WARPS = EPILOGUE_WARPS_;
    static constexpr bool SHORT_STEP = SHORT_STEP_;
    static constexpr int CONSUMERS = 2 * WARPGROUP / WARP;
    static constexpr int FIRST_CONSUMER = PRODUCER_WARPS + EPILOGUE_WARPS, BLOCK = (FIRST_CONSUMER + CONSUMERS) * WARP;
    static constexpr int COPIERS = COPYING ? PRODUCER_WARPS * WARP : 0;
    static constexpr bool A_ALONG_M = A_ALONG_M_, B_ALONG_N = B_ALONG_N_;
    // Up to four warps beside the consumers leave everyone the 168 registers that these need. Eight do not: then
    // registers are dealt out anew, 128 at first, too few for ptxas to take a wgmma of all columns.
    static constexpr bool CROWDED = FIRST_CONSUMER > WARPGROUP / WARP;
    static constexpr int PRODUCER_REGISTERS = 72, CONSUMER_REGISTERS = 168, EPILOGUE_REGISTERS = 104;  // if crowded
    static constexpr int REGISTERS =
        PRODUCER_WARPS * PRODUCER_REGISTERS + EPILOGUE_WARPS * EPILOGUE_REGISTERS + CONSUMERS * CONSUMER_REGISTERS;
    static_assert(!CROWDED || REGISTERS <= BLOCK / WARP * 128,
                  "a warp that asks for more than the block began with waits for ever");
};

// A block's shared memory. A finished tile is handed over in PARTS of its columns, one after another: whole if the
// epilogue warps are to work beside the product, in parts if that leaves room for a stage more.
template <int STAGES_, int PARTS_, template <int> class Finished = FinishedRows>
struct Shared {
    static constexpr int STAGES = STAGES_, PARTS = PARTS_;
    Stage stages[STAGES];  // on a boundary of 1024 bytes, from which the swizzle counts
    Finished<TILE_COLUMNS / PARTS> finished[EPILOGUE_TILES];
    Barrier full[STAGES], empty[STAGES];
    Barrier done[EPILOGUE_TILES], stored[EPILOGUE_TILES];
};

template <class Roles, class Shared>
__device__ __forceinline__ void open_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
        // Each thread that copies arrives when its copies are there.
        open_ring(shared.full, shared.empty, 1 + Roles::COPIERS, Roles::CONSUMERS);
        for (int tile = 0; tile < EPILOGUE_TILES; ++tile) {
            barrier_init(&shared.done[tile], 1);
            barrier_init(&shared.stored[tile], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// Fills the ring: load(tile) returns what fills a stage, (step, stage, barrier): all threads may copy, and then one of
// them arrives at the barrier with the bytes of its TMA copies. (In that order: after a branch that one lane takes, a
// warp may go on in two parts, and its copies take twice as long.) A short step is filled by all threads, with
// fill.short_step(stage).
template <class Roles, class Shared, class Tiles, class Load>
__device__ __forceinline__ void load_tiles(Shared& shared, Tiles tiles, Load load) {
    PipelineState<Shared::STAGES> state;
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        auto fill = load(tile);
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step, state.next()) {
            Barrier* const full = &shared.full[state.stage];
            barrier_wait(&shared.empty[state.stage], state.parity ^ 1);
            fill(step, shared.stages[state.stage], full);
            if (Roles::COPIERS) cp_async_arrive(full);
        }
        if constexpr (Roles::SHORT_STEP) {
            Barrier* const full = &shared.full[state.stage];
            barrier_wait(&shared.empty[state.stage], state.parity ^ 1);
            fill.short_step(shared.stages[state.stage]);
            barrier_arrive(full);
            if (threadIdx.x == 0) barrier_arrive(full);  // where else the copies by TMA are announced
            state.next();
        }
    }
}

// The whole block.
template <class Roles, class Shared, class Tiles, class Load, class Store>
__device__ __forceinline__ void grouped_matmul(Shared& shared, Tiles tiles, Load load, Store store) {
    open_barriers<Roles>(shared);
    if (warp_id() >= Roles::FIRST_CONSUMER) {
        if constexpr (Roles::CROWDED) registers_up<Roles::CONSUMER_REGISTERS>();
        multiply_tiles<Roles>(shared, tiles);
    } else if (warp_id() >= Roles::PRODUCER_WARPS) {
        if constexpr (Roles::CROWDED) registers_down<Roles::EPILOGUE_REGISTERS>();
        store_tiles<Roles>(shared, tiles, store);
    } else {
        if constexpr (Roles::CROWDED) registers_down<Roles::PRODUCER_REGISTERS>();
        if (Roles::COPIERS || threadIdx.x == 0) load_tiles<Roles>(shared, tiles, load);
    }
}
