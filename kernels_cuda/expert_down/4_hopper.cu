// expert_down, rung 4: Hopper.
//
// Runs on      sm_90a; SIMT executor.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "hopper_gemm.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    expert_down(const __grid_constant__ TensorMap y_swi, const __grid_constant__ TensorMap w3, const int* expert_token_offsets,
                Scalar* y, int d, int h, int E) {
    Shared* const shared = shared_memory();
    RowTiles tiles = list_row_tiles(reinterpret_cast<int*>(shared + 1), expert_token_offsets, E, d, TILE_COLUMNS);
    open_ring(shared, false);
    __syncthreads();
    const int steps = (h + TILE_DEPTH - 1) / TILE_DEPTH;
    Turn turn;
    Tile tile;
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        if (threadIdx.x == 0)
            while (tiles.next(tile))
                fill(shared, turn, steps, [&](int step, Stage& stage, Barrier* full) {
                    const int p = step * TILE_DEPTH;
                    barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                    tma_load(stage.a, &y_swi, full, p, tiles.begin[tile.expert] + tile.row);
#pragma unroll
                    for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                        tma_load(stage.b + panel * PANEL_BYTES, &w3, full, tile.column + panel * PANEL, p, tile.expert);
                });
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        while (tiles.next(tile)) {
            multiply<false, true>(sums, shared, turn, steps);
            const int group_rows = tiles.rows() - tile.row;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, group, half);
                    const int row = row_of(half), column = tile.column + column_of(group);
                    if (row < group_rows && column < d)
                        *reinterpret_cast<Chunk*>(y + (long long)(tiles.begin[tile.expert] + tile.row + row) * d + column) = chunk;
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap w3, const float* gate_of_row, const Scalar* a, const Scalar* b,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a, Scalar* d_b,
             Scalar* gated_y, float* gate_terms, int d, int h, int E) {
    Shared* const shared = shared_memory();
    RowTiles tiles = list_row_tiles(reinterpret_cast<int*>(shared + 1), expert_token_offsets, E, h, TILE_COLUMNS);
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
            rows.find([&](int row) { return d_out + (long long)expert_token_indices[min(first + row, last)] * d; });
            fill(shared, turn, steps, [&](int step, Stage& stage, Barrier* full) {
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
                    tma_load(stage.b, &w3, full, step * TILE_DEPTH, tile.column, tile.expert);
                }
                rows.load(stage.a, step * TILE_DEPTH, d);
                barrier_arrive_after_copies(full);
            });
#ifdef PREFETCH
            // The epilogue reads a and b once the product is done: bring them nearer meanwhile.
            const int row = min(first + int(threadIdx.x), last);
            for (int column = tile.column; column < min(h, tile.column + TILE_COLUMNS); column += PANEL) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(a + (long long)row * h + column));
                if (GATED) asm volatile("prefetch.global.L2 [%0];" ::"l"(b + (long long)row * h + column));
            }
#endif
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        while (tiles.next(tile)) {
            const int first = tiles.begin[tile.expert] + tile.row, rows = tiles.rows() - tile.row;
            multiply<false, false>(sums, shared, turn, steps);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_of(half);
                const float gate = row < rows ? gate_of_row[first + row] : 0.0f;
                float term = 0.0f;
#pragma unroll
                for (int group = 0; group < TILE_COLUMNS / 32; ++group) {
                    float sum[8];
                    exact(sum, sums, group, half);
                    const int column = tile.column + column_of(group);
                    if (row >= rows || column >= h) continue;
                    const long long at = (long long)(first + row) * h + column;
                    union Eight {
                        Chunk chunk;
                        Scalar values[8];
                        __device__ Eight() {}
                    } a_values, b_values, y_values;
                    a_values.chunk = *reinterpret_cast<const Chunk*>(a + at);
                    if (GATED) b_values.chunk = *reinterpret_cast<const Chunk*>(b + at);
#pragma unroll
                    for (int i = 0; i < 8; ++i)
                        term += store_hidden_gradients(a_values.values, b_values.values, a_values.values, b_values.values, y_values.values, i, sum[i], gate);
                    *reinterpret_cast<Chunk*>(d_a + at) = a_values.chunk;
                    if (GATED) *reinterpret_cast<Chunk*>(d_b + at) = b_values.chunk;
                    *reinterpret_cast<Chunk*>(gated_y + at) = y_values.chunk;
                }
                term += __shfl_xor_sync(FULL_WARP, term, 1);
                term += __shfl_xor_sync(FULL_WARP, term, 2);
                if (row < rows && lane_id() % 4 == 0)
                    gate_terms[(long long)(first + row) * tiles.column_tiles + tile.column / TILE_COLUMNS] = term;
            }
        }
    }
}

// d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_w3(const __grid_constant__ TensorMap gated_y_map, const Scalar* gated_y, const Scalar* d_out, const int* expert_token_indices,
         const int* expert_token_offsets, Scalar* d_w3, int d, int h, int E) {
    Shared* const shared = shared_memory();
    open_ring(shared, true);
    __syncthreads();
    const int row_tiles = (h + TILE_ROWS - 1) / TILE_ROWS, column_tiles = (d + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int tiles = row_tiles * column_tiles;
    Turn turn;
    if (threadIdx.x < WARPGROUP) {
        registers_down<LOADER_REGISTERS>();
        for (int number = blockIdx.x; number < tiles * E; number += gridDim.x) {
            const Tile tile = tile_in_bands(number / tiles, number % tiles, row_tiles, column_tiles, TILE_COLUMNS);
            const int begin = expert_token_offsets[tile.expert], end = expert_token_offsets[tile.expert + 1];
            // Lane l holds the token of row warp + l * 4 of the stage.
            const int mine = begin + warp_id() + lane_id() * 4;
            int token = mine < end && lane_id() < 16 ? expert_token_indices[mine] : -1;
            fill(shared, turn, (end - begin + TILE_DEPTH - 1) / TILE_DEPTH, [&](int step, Stage& stage, Barrier* full) {
                const int p = begin + step * TILE_DEPTH, now = token;
                const bool whole = p + TILE_DEPTH <= end;
                token = mine + (step + 1) * TILE_DEPTH < end && lane_id() < 16 ? expert_token_indices[mine + (step + 1) * TILE_DEPTH] : -1;
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, whole ? A_BYTES : 0);
                    if (whole)
#pragma unroll
                        for (int panel = 0; panel < TILE_ROWS / PANEL; ++panel)
                            tma_load(stage.a + panel * PANEL_BYTES, &gated_y_map, full, tile.row + panel * PANEL, p);
                }
                DepthRows<TILE_COLUMNS>::load(stage.b, d_out, d, tile.column, [&](int i, int) { return __shfl_sync(FULL_WARP, now, i); });
                if (!whole)
                    DepthRows<TILE_ROWS>::load(stage.a, gated_y, h, tile.row, [&](int, int row) { return p + row < end ? p + row : -1; });
                barrier_arrive_after_copies(full);
            });
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        for (int number = blockIdx.x; number < tiles * E; number += gridDim.x) {
            const Tile tile = tile_in_bands(number / tiles, number % tiles, row_tiles, column_tiles, TILE_COLUMNS);
            const int depth = expert_token_offsets[tile.expert + 1] - expert_token_offsets[tile.expert];
            multiply<true, true>(sums, shared, turn, (depth + TILE_DEPTH - 1) / TILE_DEPTH);
            Scalar* const matrix = d_w3 + (long long)tile.expert * h * d;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, group, half);
                    const int row = tile.row + row_of(half), column = tile.column + column_of(group);
                    if (row < h && column < d) *reinterpret_cast<Chunk*>(matrix + (long long)row * d + column) = chunk;
                }
        }
    }
}
