// expert_up, rung 4: Hopper.
#include "hidden.cuh"
#include "hopper_gemm.cuh"

constexpr int PARTS = GATED ? 2 : 1;
constexpr int WIDTH = TILE_COLUMNS / PARTS;  // columns of a tile of a and b

extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    expert_up(const Scalar* x, const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
              const int* expert_token_indices, const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi,
              int d, int h, int E) {
    Shared& shared = shared_memory();
    grouped_matmul<true, false, true, 0>(
        shared, RowTiles(shared, expert_token_offsets, E, h, WIDTH, d),
        [&](const RowTile& tile) {
            const GatheredRows rows(x, d, expert_token_indices + tile.first, tile.rows);
            return [=, &w1, &w2](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                rows.load(stage.a, p, d);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
#pragma unroll
                    for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel) {
                        const bool second = panel >= WIDTH / PANEL;  // the columns of w2 lie beside those of w1
                        tma_load(stage.b + panel * PANEL_BYTES, second ? &w2 : &w1, full,
                                 tile.column + panel % (WIDTH / PANEL) * PANEL, p, tile.expert);
                    }
                }
            };
        },
        [&](const RowTile& tile, Results& results, Ring&) {
            constexpr int TOGETHER = 3 - PARTS;  // groups of a, with those of b or without
#pragma unroll
            for (int group = 0; group < WIDTH / GROUP; group += TOGETHER) {
                Chunk chunks[4];  // of a, then of b or the next of a
                results.rounded(chunks, group, GATED ? group + WIDTH / GROUP : group + 1);
#pragma unroll
                for (int i = 0; i < 2 * TOGETHER; ++i) {
                    const int row = Results::row(i % 2), column = tile.column + Results::column(group + i / 2);
                    if (row >= tile.rows || column >= h) continue;
                    const Eight a_values(chunks[i]), b_values(chunks[i % 2 + 2]);
                    const long long at = (long long)(tile.first + row) * h + column;
                    if (STORE_PROJECTIONS) {
                        a_values.store(a + at);
                        if (GATED) b_values.store(b + at);
                    }
                    if (STORE_Y_SWI) {
                        Eight y;
#pragma unroll
                        for (int j = 0; j < CHUNK; ++j) y.set(j, hidden_activation(a_values.at(j), b_values.at(j)));
                        y.store(y_swi + at);
                    }
                }
            }
        });
}

// d_a w1^T + d_b w2^T for every routed row.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_x_rows(const __grid_constant__ TensorMap d_a, const __grid_constant__ TensorMap d_b, const __grid_constant__ TensorMap w1,
             const __grid_constant__ TensorMap w2, const int* expert_token_offsets, Scalar* rows, int d, int h, int E) {
    Shared& shared = shared_memory();
    const int part_steps = (h + TILE_DEPTH - 1) / TILE_DEPTH;
    grouped_matmul<false, false, false, 0>(
        shared, RowTiles(shared, expert_token_offsets, E, d, TILE_COLUMNS, PARTS * part_steps * TILE_DEPTH),
        [&](const RowTile& tile) {
            return [=, &d_a, &d_b, &w1, &w2](int step, Stage& stage, Barrier* full) {
                const bool second = step >= part_steps;  // first the depth of a, then that of b
                const int p = (second ? step - part_steps : step) * TILE_DEPTH;
                barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                tma_load(stage.a, second ? &d_b : &d_a, full, p, tile.first);
                tma_load(stage.b, second ? &w2 : &w1, full, p, tile.column, tile.expert);
            };
        },
        [&](const RowTile& tile, Results& results, Ring&) { store_rows(tile, results, rows, d); });
}

// d_w = X^T d_hidden over the expert's rows, x gathered again: d_w1 from d_a, d_w2 from d_b.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_w(const __grid_constant__ TensorMap d_hidden_map, const Scalar* d_hidden, const Scalar* x, const int* expert_token_indices,
        const int* expert_token_offsets, Scalar* d_w, int d, int h, int E) {
    Shared& shared = shared_memory();
    grouped_matmul<true, true, true, 0>(
        shared, WeightTiles(expert_token_offsets, E, d, h),
        [&](const WeightTile& tile) {
            return GatheredAndPlain<TILE_ROWS, TILE_COLUMNS, true>(tile, x, d, tile.row, d_hidden_map, d_hidden, h, tile.column, expert_token_indices);
        },
        [&](const WeightTile& tile, Results& results, Ring&) { store_weights(tile, results, d_w, d, h); });
}
