// A grouped matrix product on Hopper: some warps load tiles, two warpgroups multiply them, other warps store them.
// sm_90a.
//
// A tile of the result is (128, 256), made from 64 of the depth at a time. The loaders fill a ring of stages in shared
// memory and run ahead of the consumers, over the ends of tiles. Each consumer owns 64 rows, in 128 float32 registers a
// thread; a finished tile it leaves in shared memory, rounded, and goes on with the next one, while the storers bring
// it to global memory with all that hangs on it. Blocks are persistent: block b takes tiles b, b + gridDim.x, ..., or
// of a weight gradient what shares.cuh says.
#pragma once
constexpr int TILE_ROWS = 128, TILE_COLUMNS = 256, TILE_DEPTH = 64;

#include "hopper/consumers.cuh"
#include "hopper/epilogue.cuh"
#include "hopper/ring.cuh"
#include "hopper/scheduler.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"

// Who does what in a block: warps that load, warps that store, and two warpgroups that multiply. COPYING: all lanes of
// the loaders copy, not one alone. A_ALONG_M, B_ALONG_N: as in wgmma.
template <int LOADERS_, int STORERS_, bool COPYING, bool A_ALONG_M_, bool B_ALONG_N_>
struct Crew {
    static constexpr int LOADERS = LOADERS_, STORERS = STORERS_, CONSUMERS = 2 * WARPGROUP / WARP;
    static constexpr int FIRST_CONSUMER = LOADERS + STORERS, BLOCK = (FIRST_CONSUMER + CONSUMERS) * WARP;
    static constexpr int COPIERS = COPYING ? LOADERS * WARP : 0;
    static constexpr bool A_ALONG_M = A_ALONG_M_, B_ALONG_N = B_ALONG_N_;
    // Up to four warps beside the consumers leave everyone the 168 registers that these need. Eight do not: then
    // registers are dealt out anew, 128 at first, too few for ptxas to take a wgmma of all columns.
    static constexpr bool CROWDED = FIRST_CONSUMER > WARPGROUP / WARP;
    static constexpr int LOADER_REGISTERS = 72, CONSUMER_REGISTERS = 168, STORER_REGISTERS = 104;  // if crowded
    static_assert(!CROWDED || LOADERS * LOADER_REGISTERS + STORERS * STORER_REGISTERS +
                                      CONSUMERS * CONSUMER_REGISTERS <= BLOCK / WARP * 128,
                  "who asks for more than the block began with waits for ever");
};

// A block's shared memory. A finished tile is handed over in PARTS of its columns, one after another: whole if the
// storers are to work beside the product, in parts if that leaves room for a stage more.
template <int STAGES_, int PARTS_, template <int> class Finished = FinishedRows>
struct Shared {
    static constexpr int STAGES = STAGES_, PARTS = PARTS_;
    Stage stages[STAGES];  // on a boundary of 1024 bytes, from which the swizzle counts
    Finished<TILE_COLUMNS / PARTS> finished[PIECES];
    Barrier full[STAGES], empty[STAGES];
    Barrier done[PIECES], stored[PIECES];
};

template <class Crew, class Shared>
__device__ __forceinline__ void open_barriers(Shared& shared) {
    if (threadIdx.x == 0) {
        // Each of the copiers arrives when its copies are there.
        open_ring(shared.full, shared.empty, 1 + Crew::COPIERS, Crew::CONSUMERS);
        for (int piece = 0; piece < PIECES; ++piece) {
            barrier_init(&shared.done[piece], 1);
            barrier_init(&shared.stored[piece], 1);
        }
        barrier_init_fence();
    }
    __syncthreads();
}

// Fills the ring: load(tile) returns what fills a stage, (step, stage, barrier): all threads may copy, and then one of
// them arrives at the barrier with the bytes of its TMA copies. (In that order: after a branch that one lane takes, a
// warp may go on in two parts, and its copies take twice as long.)
template <class Crew, class Shared, class Tiles, class Load>
__device__ __forceinline__ void load_tiles(Shared& shared, Tiles tiles, Load load) {
    Turn<Shared::STAGES> turn;
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        auto fill = load(tile);
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step, turn.next()) {
            Barrier* const full = &shared.full[turn.stage];
            barrier_wait(&shared.empty[turn.stage], turn.parity ^ 1);
            fill(step, shared.stages[turn.stage], full);
            if (Crew::COPIERS) cp_async_arrive(full);
        }
    }
}

// The whole block.
template <class Crew, class Shared, class Tiles, class Load, class Store>
__device__ __forceinline__ void grouped_matmul(Shared& shared, Tiles tiles, Load load, Store store) {
    open_barriers<Crew>(shared);
    if (warp_id() >= Crew::FIRST_CONSUMER) {
        if constexpr (Crew::CROWDED) registers_up<Crew::CONSUMER_REGISTERS>();
        multiply_tiles<Crew>(shared, tiles);
    } else if (warp_id() >= Crew::LOADERS) {
        if constexpr (Crew::CROWDED) registers_down<Crew::STORER_REGISTERS>();
        store_tiles<Crew>(shared, tiles, store);
    } else {
        if constexpr (Crew::CROWDED) registers_down<Crew::LOADER_REGISTERS>();
        if (Crew::COPIERS || threadIdx.x == 0) load_tiles<Crew>(shared, tiles, load);
    }
}
