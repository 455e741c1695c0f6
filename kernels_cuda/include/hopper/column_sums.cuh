// Sums over the rows of a tile of what d_hidden's epilogue stores: parts of the gradient of gate_up's bias. sm_90a.
//
// A lane has the same columns of every row that its warp takes. It adds them up row by row, and the warps' sums are
// added one by one.
#pragma once
#include "hopper/hidden_gradients.cuh"
#include "packed.cuh"

// tile_sums has one row for each tile of rows, with columns as ab's. The tile that begins at row r of an expert e has
// row r / TILE_ROWS + e, which no other has.
template <int EPILOGUE_WARPS>
struct ColumnSums {
    static constexpr int COUNT = 2 * CHUNK;
    float* tile_sums;
    int h;
    Barrier* met;    // all epilogue threads arrive there, twice a tile
    RowAhead* room;  // idle at the end of a tile

    float sums[COUNT] = {};  // of d_a and d_b, in the order in which they lie

    // Before the barriers of grouped_matmul are open.
    __device__ __forceinline__ ColumnSums(float* tile_sums, int h, HiddenShared& shared)
        : tile_sums(tile_sums), h(h), met(&shared.met), room(shared.ahead) {
        if (threadIdx.x == 0) barrier_init(met, EPILOGUE_WARPS * WARP);
    }
    // The gradients of two neighbours, the i-th two of eight.
    __device__ __forceinline__ void add(int i, const HiddenPairs& gradients) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int element = 2 * i + j;
            sums[LAYOUT::INTERLEAVED ? 2 * element : element] += gradients.a[j];
            if (GATED) sums[LAYOUT::INTERLEAVED ? 2 * element + 1 : CHUNK + element] += gradients.b[j];
        }
    }
    // Adds the warps' sums, of four columns a thread, and stores them.
    __device__ __forceinline__ void end(const RowTile& tile) const {
        static_assert(COUNT == 4 * EPILOGUE_WARPS, "a thread has four of the columns of a lane of each warp");
        auto& fours = reinterpret_cast<float4(&)[EPILOGUE_WARPS][EPILOGUE_WARPS][WARP]>(*room);
        const int warp = threadIdx.x / WARP % EPILOGUE_WARPS;
#pragma unroll
        for (int i = 0; i < EPILOGUE_WARPS; ++i)
            fours[i][warp][lane_id()] = make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        meet(0);
        float4 total = {};
#pragma unroll
        for (int of = 0; of < EPILOGUE_WARPS; ++of) {
            const float4 part = fours[warp][of][lane_id()];
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
        }
        meet(1);
        const int element = tile.column + lane_id() * CHUNK, projection = LAYOUT::INTERLEAVED ? 0 : warp / 2;
        const int further = LAYOUT::INTERLEAVED ? 2 * warp : warp % 2 * 4;
        if (element < h && projection < PROJECTIONS) {
            const int row = tile.first / TILE_ROWS + tile.expert;
            *reinterpret_cast<float4*>(tile_sums + packed_at(row, projection, element + further, h)) = total;
        }
    }
    // All epilogue threads are here. Each arrives for itself: compute-sanitizer does not see what __syncwarp() would
    // order before an arrival of one lane for its warp.
    __device__ __forceinline__ void meet(unsigned parity) const {
        barrier_arrive(met);
        barrier_wait(met, parity);
    }
};
