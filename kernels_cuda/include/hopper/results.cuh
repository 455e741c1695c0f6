// A warpgroup's results of a tile of (128, 128), from registers to global memory, 16 bytes a thread. sm_90a.
#pragma once
#include "chunk.cuh"
#include "common.cuh"
#include "hopper/wgmma.cuh"
#include "ptx.cuh"

// Sums of 64 rows and 128 columns each, as wgmma leaves them.
using TileSums = float[2][64];

// Of four lanes, each has two neighbours of four chunks, those of chunk j from sums[4 j] on: lane t gets all of chunk
// t, rounded.
__device__ __forceinline__ Chunk chunk_in_quad(const float* sums) {
    Chunk chunk;
#pragma unroll
    for (int j = 0; j < 4; ++j) chunk.words[j] = packed<Scalar>(sums[4 * j], sums[4 * j + 1]);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
        const bool upper = lane_id() & step;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j & step) continue;
            unsigned &low = chunk.words[j], &high = chunk.words[j + step];
            const unsigned other = __shfl_xor_sync(FULL_WARP, upper ? low : high, step);
            low = upper ? other : low;
            high = upper ? high : other;
        }
    }
    return chunk;
}

// Calls visit(row, column, chunk of the first result, chunk of the last) for the thread's part of the tile: RESULTS
// results lie side by side in it.
template <int RESULTS, class Visit>
__device__ __forceinline__ void each_chunk(const TileSums& sums, Visit visit) {
    constexpr int QUADS = 4 / RESULTS;  // groups of four chunks in a row of one result
#pragma unroll
    for (int row = 0; row < 4; ++row)  // of a thread
#pragma unroll
        for (int quad = 0; quad < QUADS; ++quad) {
            const float* const first = sums[row / 2] + row % 2 * 2;
            visit(row / 2 * 64 + warp_id() % 4 * 16 + row % 2 * 8 + lane_id() / 4, (quad * 4 + lane_id() % 4) * CHUNK,
                  chunk_in_quad(first + quad * 16), chunk_in_quad(first + (quad + QUADS * (RESULTS - 1)) * 16));
        }
}
