// expert_down, rung 4: Hopper.
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
        Scratch& scratch = my_scratch(shared);
        while (tiles.next(tile)) {
            multiply<false, false, true>(sums, shared, turn, steps);
            const int group_rows = tiles.rows() - tile.row;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, scratch, group, half, half);
                    const int row = row_of(half), column = tile.column + column_of(group);
                    if (row < group_rows && column < d)
                        *reinterpret_cast<Chunk*>(y + (long long)(tiles.begin[tile.expert] + tile.row + row) * d + column) = chunk;
                }
        }
    }
}

// Four pairs of neighbours, in the places of their sums.
union Pairs {
    unsigned words[4];
    Scalar values[8];
    __device__ Pairs() {}
};

// The epilogue's operands come down the same ring as the product's: a and b, 64 columns a stage.
constexpr int PANELS = TILE_COLUMNS / PANEL;

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap w3, const float* gate_of_row, const __grid_constant__ TensorMap a,
             const __grid_constant__ TensorMap b, const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a,
             Scalar* d_b, Scalar* gated_y, float* gate_terms, int d, int h, int E) {
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
            if (threadIdx.x == 0)
                for (int panel = 0; panel < PANELS; ++panel) {
                    tma_prefetch(&a, tile.column + panel * PANEL, first);
                    if (GATED) tma_prefetch(&b, tile.column + panel * PANEL, first);
                }
            fill(shared, turn, steps, [&](int step, Stage& stage, Barrier* full) {
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
                    tma_load(stage.b, &w3, full, step * TILE_DEPTH, tile.column, tile.expert);
                }
                rows.load(stage.a, step * TILE_DEPTH, d);
                barrier_arrive_after_copies(full);
            });
            fill(shared, turn, PANELS, [&](int panel, Stage& stage, Barrier* full) {
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, GATED ? 2 * A_BYTES : A_BYTES);
                    tma_load(stage.a, &a, full, tile.column + panel * PANEL, first);
                    if (GATED) tma_load(stage.b, &b, full, tile.column + panel * PANEL, first);
                }
                barrier_arrive_after_copies(full);
            });
        }
    } else {
        registers_up<CONSUMER_REGISTERS>();
        Sums sums;
        Scratch& scratch = my_scratch(shared);
        while (tiles.next(tile)) {
            const int first = tiles.begin[tile.expert] + tile.row, rows = tiles.rows() - tile.row;
            float gates[2], terms[2] = {0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half) gates[half] = row_of(half) < rows ? gate_of_row[first + row_of(half)] : 0.0f;
            multiply<true, false, false>(sums, shared, turn, steps);
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group) {
                Stage& stage = shared->stages[turn.stage];
                if (group % 2 == 0) barrier_wait(&shared->full[turn.stage], turn.parity);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int row = row_of(half), column = tile.column + column_of(group);
                    // Lane i brings the address of row i % 8, chunk i / 8: the pairs come to the places of their sums.
                    const int place = swizzled(row - lane_id() / 4 + lane_id() % 8, group % 2 * 4 + lane_id() / 8);
                    Pairs a_values, b_values, y_values;
                    ldmatrix_x4(a_values.words, stage.a + place);
                    if (GATED) ldmatrix_x4(b_values.words, stage.b + place);
                    float term = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j)
                        term += store_hidden_gradients(a_values.values, b_values.values, a_values.values, b_values.values, y_values.values, j,
                                                       sums.values[place_of(group, j / 2, half) + j % 2], gates[half]);
                    terms[half] += term;
                    const bool inside = row < rows && column < h;
                    const long long at = (long long)(first + row) * h + column;
                    const Chunk d_a_chunk = scratch.regroup(a_values.words, 0);
                    if (inside) *reinterpret_cast<Chunk*>(d_a + at) = d_a_chunk;
                    if (GATED) {
                        const Chunk d_b_chunk = scratch.regroup(b_values.words, 1);
                        if (inside) *reinterpret_cast<Chunk*>(d_b + at) = d_b_chunk;
                    } else
                        __syncwarp();
                    const Chunk y_chunk = scratch.regroup(y_values.words, 0);
                    if (inside) *reinterpret_cast<Chunk*>(gated_y + at) = y_chunk;
                    __syncwarp();
                }
                if (group % 2 == 1) {
                    __syncwarp();
                    if (lane_id() == 0) barrier_arrive(&shared->empty[turn.stage]);
                    turn.next();
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                terms[half] += __shfl_xor_sync(FULL_WARP, terms[half], 1);
                terms[half] += __shfl_xor_sync(FULL_WARP, terms[half], 2);
                if (row_of(half) < rows && lane_id() % 4 == 0)
                    gate_terms[(long long)(first + row_of(half)) * tiles.column_tiles + tile.column / TILE_COLUMNS] = terms[half];
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
            auto row_of = [](int i) { return warp_id() + i * 4; };
            Tokens<decltype(row_of)> tokens(expert_token_indices + begin, end - begin, row_of);
            fill(shared, turn, (end - begin + TILE_DEPTH - 1) / TILE_DEPTH, [&](int step, Stage& stage, Barrier* full) {
                const int p = begin + step * TILE_DEPTH;
                const bool whole = p + TILE_DEPTH <= end;
                tokens.begin(step);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, whole ? A_BYTES : 0);
                    if (whole)
#pragma unroll
                        for (int panel = 0; panel < TILE_ROWS / PANEL; ++panel)
                            tma_load(stage.a + panel * PANEL_BYTES, &gated_y_map, full, tile.row + panel * PANEL, p);
                }
                DepthRows<TILE_COLUMNS>::load(stage.b, d_out, d, tile.column, [&](int i, int) { return tokens.at(step, i); });
                if (!whole)
                    DepthRows<TILE_ROWS>::load(stage.a, gated_y, h, tile.row, [&](int, int row) { return p + row < end ? p + row : -1; });
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
            Scalar* const matrix = d_w3 + (long long)tile.expert * h * d;
#pragma unroll
            for (int group = 0; group < TILE_COLUMNS / 32; ++group)
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const Chunk chunk = rounded(sums, scratch, group, half, half);
                    const int row = tile.row + row_of(half), column = tile.column + column_of(group);
                    if (row < h && column < d) *reinterpret_cast<Chunk*>(matrix + (long long)row * d + column) = chunk;
                }
        }
    }
}
