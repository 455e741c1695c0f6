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

// Adds one step's product, of some of the depth, to a consumer's sums.
template <class Roles, int DEPTH = TILE_DEPTH>
__device__ __forceinline__ void multiply(float (&sums)[TILE_COLUMNS / 2], Stage& stage, int consumer) {
    // 64 rows of A are one panel further on. 16 of the depth are 32 bytes along K, 16 rows otherwise.
    constexpr int A_STEP = Roles::A_ALONG_M ? 16 * 128 : 32, B_STEP = Roles::B_ALONG_N ? 16 * 128 : 32;
    const unsigned long long a = wgmma_operand(stage.a + consumer * PANEL_BYTES, PANEL_BYTES);
    const unsigned long long b = wgmma_operand(stage.b, PANEL_BYTES);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < DEPTH / 16; ++i) {
        const unsigned long long a_now = wgmma_advance(a, i * A_STEP), b_now = wgmma_advance(b, i * B_STEP);
        if constexpr (Roles::CROWDED) {
            constexpr int HALF = TILE_COLUMNS / 2, HALF_BYTES = B_BYTES / 2;
            wgmma_m64n128k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums, a_now, b_now, true);
            wgmma_m64n128k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums + HALF / 2, a_now,
                                                                         wgmma_advance(b_now, HALF_BYTES), true);
        } else
            wgmma_m64n256k16<Scalar, Roles::A_ALONG_M, Roles::B_ALONG_N>(sums, a_now, b_now, true);
    }
    wgmma_commit();
}

// Adds the product of a tile's next step, of some of the depth, to a consumer's sums. A stage is freed a step late,
// unless there is no other: `read` is that of the step before.
template <class Roles, int DEPTH, class Shared>
__device__ __forceinline__ void take_step(Shared& shared, PipelineState<Shared::STAGES>& state, int step, int consumer,
                                          float (&sums)[TILE_COLUMNS / 2], int& read) {
    constexpr int BEHIND = Shared::STAGES > 1;
    const int now = uniform(state.stage);
    barrier_wait(&shared.full[now], state.parity);
    if (Roles::COPIERS) fence_async_proxy();
    multiply<Roles, DEPTH>(sums, shared.stages[now], consumer);
    wgmma_wait<BEHIND>();
    if (step >= BEHIND && lane_id() == 0) barrier_arrive(&shared.empty[BEHIND ? read : now]);
    read = now;
    state.next();
}

// Multiplies every tile and hands it over.
template <class Roles, class Shared, class Tiles>
__device__ __forceinline__ void multiply_tiles(Shared& shared, Tiles tiles) {
    const int warp = uniform(warp_id()) - Roles::FIRST_CONSUMER, consumer = warp / (WARPGROUP / WARP);
    auto& finished = shared.finished[warp];
    PipelineState<Shared::STAGES> state;
    unsigned parity = 1;  // of the part before
    typename Tiles::Tile tile;
    while (tiles.next(tile)) {
        float sums[TILE_COLUMNS / 2] = {};
        int read = 0;
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step)
            take_step<Roles, TILE_DEPTH>(shared, state, step, consumer, sums, read);
        if constexpr (Roles::SHORT_STEP) take_step<Roles, 16>(shared, state, tile.steps, consumer, sums, read);
        wgmma_wait<0>();
        wgmma_results(sums);
        if (Shared::STAGES > 1 && tile.steps > 0 && lane_id() == 0) barrier_arrive(&shared.empty[read]);
#pragma unroll
        for (int part = 0; part < Shared::PARTS; ++part, parity ^= 1) {
            barrier_wait(&shared.stored[warp], parity);
            hand_over(finished, sums + part * TILE_COLUMNS / 2 / Shared::PARTS);
            __syncwarp();
            if (lane_id() == 0) barrier_arrive(&shared.done[warp]);
        }
    }
}
