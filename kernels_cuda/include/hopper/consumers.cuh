// Two consumers, a warpgroup each: they multiply what the ring holds and hand their results to the epilogue warps.
// sm_90a.
#pragma once
#include "hopper/epilogue.cuh"
#include "hopper/ring.cuh"
#include "hopper/stmatrix.cuh"
#include "hopper/wgmma.cuh"

// One for the whole warp, as the compiler sees by the shuffle: what follows from it needs no register a lane.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(FULL_WARP, value, 0); }

constexpr int TOGETHER = 4;  // matrices of 8 x 8 that stmatrix writes

// Half the rows of an epilogue tile, the upper or the lower ones: TOGETHER chunks from `first` on, rounded.
struct RoundedPairs {
    unsigned pairs[TOGETHER];

    __device__ __forceinline__ RoundedPairs(const float* sums, int first, int half) {
#pragma unroll
        for (int j = 0; j < TOGETHER; ++j) {
            const int i = (first + j) * 4 + half * 2;
            pairs[j] = packed<Scalar>(sums[i], sums[i + 1]);
        }
    }
};

// Leaves a warp's sums of some columns, rounded, in shared memory.
template <int COLUMNS>
__device__ __forceinline__ void hand_over(FinishedRows<COLUMNS>& finished, const float* sums) {
#pragma unroll
    for (int first = 0; first < COLUMNS / CHUNK; first += TOGETHER)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [pairs] = RoundedPairs(sums, first, half);
            stmatrix_x4(&finished.at(half * 8 + lane_id() % 8, first + lane_id() / 8),  //
                        pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}
template <int COLUMNS>
__device__ __forceinline__ void hand_over(FinishedColumns<COLUMNS>& finished, const float* sums) {
#pragma unroll
    for (int first = 0; first < COLUMNS / CHUNK; first += TOGETHER)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto [pairs] = RoundedPairs(sums, first, half);
            stmatrix_x4_transposed(&finished.at(first * CHUNK + lane_id(), half),  //
                                   pairs[0], pairs[1], pairs[2], pairs[3]);
        }
}

// Adds (64, 16) by (16, COLUMNS), in one wgmma or in as few as there are.
template <class Roles, int COLUMNS>
__device__ __forceinline__ void multiply_columns(float* sums, unsigned long long a, unsigned long long b) {
    if constexpr (COLUMNS == 64)
        wgmma_m64n64k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums, a, b, true);
    else if constexpr (COLUMNS == 128)
        wgmma_m64n128k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums, a, b, true);
    else if constexpr (COLUMNS == 256 && !Roles::CROWDED)
        wgmma_m64n256k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums, a, b, true);
    else {
        constexpr int FIRST = 128, FIRST_BYTES = FIRST / PANEL * PANEL_BYTES;
        multiply_columns<Roles, FIRST>(sums, a, b);
        multiply_columns<Roles, COLUMNS - FIRST>(sums + FIRST / 2, a, wgmma_advance(b, FIRST_BYTES));
    }
}

// Adds to a consumer's sums the PRODUCTS of a step from the first on, each 16 of the depth, of some columns.
template <class Roles, int COLUMNS, int PRODUCTS>
__device__ __forceinline__ void multiply(float* sums, Stage& stage, int consumer, int first = 0) {
    // 64 rows of A are one panel further on. 16 of the depth are 32 bytes along K, 16 rows otherwise.
    constexpr int A_STEP = Roles::A_ALONG_M ? 16 * 128 : 32, B_STEP = Roles::B_ALONG_N ? 16 * 128 : 32;
    const unsigned long long a = wgmma_operand(stage.a + consumer * PANEL_BYTES + first * A_STEP, PANEL_BYTES);
    const unsigned long long b = wgmma_operand(stage.b + first * B_STEP, PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < PRODUCTS; ++i)
        multiply_columns<Roles, COLUMNS>(sums, wgmma_advance(a, i * A_STEP), wgmma_advance(b, i * B_STEP));
    wgmma_commit();
}

// The same of the first products of a step, if it is a whole one at once.
template <class Roles, int COLUMNS>
__device__ __forceinline__ void multiply_first(float* sums, Stage& stage, int consumer, int products) {
    if (products == STAGE_PRODUCTS)
        multiply<Roles, COLUMNS, STAGE_PRODUCTS>(sums, stage, consumer);
    else
#pragma unroll 1
        for (int i = 0; i < products; ++i) multiply<Roles, COLUMNS, 1>(sums, stage, consumer, i);
}

// The same of the first panels of columns, rounded up to what the consumer's registers leave a choice of.
template <class Roles, int MOST = TILE_COLUMNS / PANEL>
__device__ __forceinline__ void multiply_panels(float* sums, Stage& stage, int consumer, int panels, int products) {
    constexpr int LESS = MOST - (Roles::CROWDED ? 1 : 2);
    if (panels > LESS)
        multiply_first<Roles, MOST * PANEL>(sums, stage, consumer, products);
    else if constexpr (LESS > 0)
        multiply_panels<Roles, LESS>(sums, stage, consumer, panels, products);
}

// The same of what a step holds of a tile. Where widths are RAGGED, a consumer leaves out what no one stores, panels of
// columns or all its 64 rows, and what is zero in both operands at the end of the depth.
template <class Roles, class Tiles>
__device__ __forceinline__ void multiply_step(float* sums, Stage& stage, const Tiles& tiles,
                                              const typename Tiles::Tile& tile, int step, int consumer) {
    if constexpr (RAGGED)
        multiply_panels<Roles>(sums, stage, consumer,
                               uniform(consumer * PANEL < tiles.rows_of(tile) ? tiles.panels_for(tile) : 0),
                               uniform(tiles.products_in(tile, step)));
    else
        multiply<Roles, TILE_COLUMNS, STAGE_PRODUCTS>(sums, stage, consumer);
}

// What a kernel does to the sums of a tile before they are rounded, if it does anything.
struct NothingMore {
    template <class Tile>
    __device__ __forceinline__ void operator()(const Tile&, float (&)[TILE_COLUMNS / 2]) const {}
};

// Multiplies every tile and hands it over, after finish(tile, sums).
template <class Roles, class Shared, class Tiles, class Finish>
__device__ __forceinline__ void multiply_tiles(Shared& shared, Tiles tiles, Finish finish) {
    constexpr int BEHIND = Shared::STAGES > 1;  // steps that a stage is freed late, unless there is no other
    const int warp = uniform(warp_id()) - Roles::FIRST_CONSUMER;
    auto& finished = shared.finished[warp];
    PipelineState<Shared::STAGES> state;
    unsigned parity = 1;  // of the part before
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        float sums[TILE_COLUMNS / 2] = {};
        int read = 0;  // the stage of the step before
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step, state.next()) {
            const int now = uniform(state.stage);
            barrier_wait(&shared.full[now], state.parity);
            if (Roles::COPIERS) fence_async_proxy();
            multiply_step<Roles>(sums, shared.stages[now], tiles, tile, step, warp / (WARPGROUP / WARP));
            wgmma_wait<BEHIND>();
            if (step >= BEHIND && lane_id() == 0) barrier_arrive(&shared.empty[BEHIND ? read : now]);
            read = now;
        }
        wgmma_wait<0>();
        wgmma_results(sums);
        if (BEHIND && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);
        finish(tile, sums);
#pragma unroll
        for (int part = 0; part < Shared::PARTS; ++part, parity ^= 1) {
            barrier_wait(&shared.stored[warp], parity);
            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);
            __syncwarp();
            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);
        }
    }
}
