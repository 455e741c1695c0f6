// Which rows a thread or a block works on when experts have groups of different lengths. Runs everywhere.
#pragma once
#include "common.cuh"

// One element of an expert's (rows, width) group: block.y is the expert, and grid.x covers the
// longest group that there can be, so most threads find themselves outside.
struct GroupElement {
    int row, column;  // row in expert order
    bool inside;
};

template <int SIZE>
__device__ __forceinline__ GroupElement group_element(const int* expert_token_offsets, int width) {
    const int begin = expert_token_offsets[blockIdx.y], end = expert_token_offsets[blockIdx.y + 1];
    const long long index = (long long)blockIdx.x * SIZE + threadIdx.x;
    const long long row = begin + index / width;
    return {int(row), int(index % width), row < end};
}

// A tile of an expert's rows.
struct RowTile {
    int expert, first;  // first row in expert order
    int rows;           // 0: there is no such tile
};

// The block's tile, when every group is cut into tiles of SIZE rows and the tiles are numbered
// expert after expert. The whole block must call it; one warp searches.
template <int SIZE>
__device__ const RowTile& find_row_tile(const int* expert_token_offsets, int E, int number) {
    __shared__ RowTile found;
    if (warp_id() == 0) {
        if (lane_id() == 0) found = {0, 0, 0};
        __syncwarp();
        int tiles_before = 0;
        for (int base = 0; base < E; base += WARP) {
            const int expert = base + lane_id();
            const int begin = expert < E ? expert_token_offsets[expert] : 0;
            const int end = expert < E ? expert_token_offsets[expert + 1] : 0;
            const int tiles = (end - begin + SIZE - 1) / SIZE;
            const int index = number - tiles_before - warp_exclusive_sum(tiles);  // inside this expert
            if (index >= 0 && index < tiles)
                found = {expert, begin + index * SIZE, min(SIZE, end - begin - index * SIZE)};
            tiles_before += warp_sum(tiles);
        }
    }
    __syncthreads();
    return found;
}
