// expert_up, rung 4: Hopper.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "hopper_gemm.cuh"

constexpr int PARTS = GATED ? 2 : 1;
constexpr int UP_WIDTH = TILE_COLUMNS / PARTS;  // columns of a and of b in a tile

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    expert_up(const Scalar* x, const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
              const int* expert_token_indices, const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi,
              int d, int h, int E) {
    Shared* const shared = shared_memory();
    RowTiles tiles = list_row_tiles(reinterpret_cast<int*>(shared + 1), expert_token_offsets, E, h, UP_WIDTH);
    open_ring(shared, true);
    __syncthreads();
    const int steps = (d + TILE_DEPTH - 1) / TILE_DEPTH;
    Turn turn;
    Tile tile;
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        GatheredRows rows;
        while (tiles.next(tile)) {
            const int first = tiles.begin[tile.expert] + tile.row, last = tiles.begin[tile.expert + 1] - 1;
            rows.find([&](int row) { return x + (long long)expert_token_indices[min(first + row, last)] * d; });
            fill(shared, turn, steps, [&](int step, Stage& stage, Barrier* full) {
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
#pragma unroll
                    for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel) {
                        const int part = panel / (UP_WIDTH / PANEL), column = tile.column + panel % (UP_WIDTH / PANEL) * PANEL;
                        tma_load(stage.b + panel * PANEL_BYTES, part ? &w2 : &w1, full, column, step * TILE_DEPTH, tile.expert);
                    }
                }
                rows.load(stage.a, step * TILE_DEPTH, d);
                barrier_arrive_after_copies(full);
            });
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        Scratch& scratch = my_scratch(shared);
        while (tiles.next(tile)) {
            multiply<true, false, true>(sums, shared, turn, steps);
            const int rows = tiles.rows() - tile.row;
#pragma unroll
            for (int group = 0; group < UP_WIDTH / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk a_values = rounded(sums, scratch, group, half, GATED ? 0 : half);
                    const Chunk b_values = GATED ? rounded(sums, scratch, group + UP_WIDTH / 32, half, 1) : a_values;
                    const int row = row_of(half), column = tile.column + column_of(group);
                    if (row >= rows || column >= h) continue;
                    const long long at = (long long)(tiles.begin[tile.expert] + tile.row + row) * h + column;
                    if (STORE_PROJECTIONS) {
                        *reinterpret_cast<Chunk*>(a + at) = a_values;
                        if (GATED) *reinterpret_cast<Chunk*>(b + at) = b_values;
                    }
                    if (STORE_Y_SWI) {
                        const Scalar *a_at = reinterpret_cast<const Scalar*>(&a_values), *b_at = reinterpret_cast<const Scalar*>(&b_values);
                        Chunk y;
#pragma unroll
                        for (int i = 0; i < 4; ++i)
                            y.words[i] = pack(hidden_activation(a_at[2 * i], b_at[2 * i]), hidden_activation(a_at[2 * i + 1], b_at[2 * i + 1]));
                        *reinterpret_cast<Chunk*>(y_swi + at) = y;
                    }
                }
        }
    }
}

// d_a w1^T + d_b w2^T for every routed row.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_x_rows(const __grid_constant__ TensorMap d_a, const __grid_constant__ TensorMap d_b, const __grid_constant__ TensorMap w1,
             const __grid_constant__ TensorMap w2, const int* expert_token_offsets, Scalar* rows, int d, int h, int E) {
    Shared* const shared = shared_memory();
    RowTiles tiles = list_row_tiles(reinterpret_cast<int*>(shared + 1), expert_token_offsets, E, d, TILE_COLUMNS);
    open_ring(shared, false);
    __syncthreads();
    const int part_steps = (h + TILE_DEPTH - 1) / TILE_DEPTH, steps = PARTS * part_steps;
    Turn turn;
    Tile tile;
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            while (tiles.next(tile))
                fill(shared, turn, steps, [&](int step, Stage& stage, Barrier* full) {
                    const bool second = step >= part_steps;
                    const int p = (second ? step - part_steps : step) * TILE_DEPTH;
                    barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                    tma_load(stage.a, second ? &d_b : &d_a, full, p, tiles.begin[tile.expert] + tile.row);
                    tma_load(stage.b, second ? &w2 : &w1, full, p, tile.column, tile.expert);
                });
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        Scratch& scratch = my_scratch(shared);
        while (tiles.next(tile)) {
            multiply<false, false, false>(sums, shared, turn, steps);
            const int group_rows = tiles.rows() - tile.row;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, scratch, group, half, half);
                    const int row = row_of(half), column = tile.column + column_of(group);
                    if (row < group_rows && column < d)
                        *reinterpret_cast<Chunk*>(rows + (long long)(tiles.begin[tile.expert] + tile.row + row) * d + column) = chunk;
                }
        }
    }
}

// d_w = X^T d_hidden over the expert's rows, x gathered again: d_w1 from d_a, d_w2 from d_b.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_w(const __grid_constant__ TensorMap d_hidden_map, const Scalar* d_hidden, const Scalar* x, const int* expert_token_indices,
        const int* expert_token_offsets, Scalar* d_w, int d, int h, int E) {
    Shared* const shared = shared_memory();
    open_ring(shared, true);
    __syncthreads();
    const int row_tiles = (d + TILE_ROWS - 1) / TILE_ROWS, column_tiles = (h + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles = row_tiles * column_tiles;
    Turn turn;
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        for (int number = blockIdx.x; number < tiles * E; number += gridDim.x) {
            const Tile tile = tile_in_bands(number / tiles, number % tiles, row_tiles, column_tiles, TILE_COLUMNS);
            const int begin = expert_token_offsets[tile.expert], end = expert_token_offsets[tile.expert + 1];
            auto row_of = [](int i) { return warp_id() * 2 + i % 2 + i / 2 * 8; };
            Tokens<decltype(row_of)> tokens(expert_token_indices + begin, end - begin, row_of);
            fill(shared, turn, (end - begin + TILE_DEPTH - 1) / TILE_DEPTH, [&](int step, Stage& stage, Barrier* full) {
                const int p = begin + step * TILE_DEPTH;
                const bool whole = p + TILE_DEPTH <= end;
                tokens.begin(step);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, whole ? B_BYTES : 0);
                    if (whole)
#pragma unroll
                        for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                            tma_load(stage.b + panel * PANEL_BYTES, &d_hidden_map, full, tile.column + panel * PANEL, p);
                }
                DepthRows<TILE_ROWS>::load(stage.a, x, d, tile.row, [&](int i, int) { return tokens.at(step, i * 2 + lane_id() / 16); });
                if (!whole)
                    DepthRows<TILE_COLUMNS>::load(stage.b, d_hidden, h, tile.column, [&](int, int row) { return p + row < end ? p + row : -1; });
                barrier_arrive_after_copies(full);
            });
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        Scratch& scratch = my_scratch(shared);
        for (int number = blockIdx.x; number < tiles * E; number += gridDim.x) {
            const Tile tile = tile_in_bands(number / tiles, number % tiles, row_tiles, column_tiles, TILE_COLUMNS);
            const int depth = expert_token_offsets[tile.expert + 1] - expert_token_offsets[tile.expert];
            multiply<true, true, true>(sums, shared, turn, (depth + TILE_DEPTH - 1) / TILE_DEPTH);
            Scalar* const matrix = d_w + (long long)tile.expert * d * h;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, scratch, group, half, half);
                    const int row = tile.row + row_of(half), column = tile.column + column_of(group);
                    if (row < d && column < h) *reinterpret_cast<Chunk*>(matrix + (long long)row * h + column) = chunk;
                }
        }
    }
}
