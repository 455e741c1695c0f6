// expert_down, rung 4: Hopper.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept
//              expert output, and the split into loader and consumers: SonicMoE (arXiv 2512.14080).
// Idea         The products of rung 3 on grouped_matmul: one warpgroup loads, by TMA and gathered
//              rows by cp.async, while two multiply by wgmma; a block stays and takes tile after
//              tile.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums run in order.
//
// kernel       grid             block  shared bytes  bytes read                                                                          bytes written
// expert_down  multiprocessors  384    222280 + 8 E  256 blocks ceil((E + 1) / 32) + 2 h boxes D + 2 d h tiles                           2 R d
// d_hidden     multiprocessors  384    222280 + 8 E  256 blocks ceil((E + 1) / 32) + (6144 + 256 d) tiles C + 2 d h tiles + 2 h G boxes  2 R h (1 + G) + 4 R C
// d_w3         multiprocessors  384    222280 + 8 E  3072 E H D + 512 (tiles + X) H D + 2 R d H + 2 R h D                                2 E h d
// G is 2 with a gated activation, else 1. D = ceil(d / 256), C = ceil(h / 256), H = ceil(h / 128).
// blocks is the whole grid; tiles is the sum over the experts of ceil(rows / 128), X the number of
// experts with rows, boxes the rows that a box of 128 from the first row of each tile on finds in the
// whole matrix. 2 R d h FLOPs a GEMM. Bound: tensor cores.
#include "hidden.cuh"
#include "hopper_gemm.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    expert_down(const __grid_constant__ TensorMap y_swi, const __grid_constant__ TensorMap w3,
                const int* expert_token_offsets, Scalar* y, int d, int h, int E) {
    Shared& shared = shared_memory();
    grouped_matmul<false, false, true, 0>(
        shared, RowTiles(shared, expert_token_offsets, E, d, TILE_COLUMNS, h),
        [&](const RowTile& tile) {
            return [=, &y_swi, &w3](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                tma_load(stage.a, &y_swi, full, p, tile.first);
#pragma unroll
                for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                    tma_load(stage.b + panel * PANEL_BYTES, &w3, full, tile.column + panel * PANEL, p, tile.expert);
            };
        },
        [&](const RowTile& tile, Results& results, Ring&) { store_rows(tile, results, y, d); });
}

// Two neighbours in one register.
union Pair {
    unsigned word;
    Scalar values[2];
    __device__ __forceinline__ Pair() {}
    __device__ __forceinline__ explicit Pair(unsigned word) : word(word) {}
};
constexpr int PANELS = TILE_COLUMNS / PANEL;

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it. a and b come down the
// ring behind the product's operands, 64 columns a stage.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap w3, const float* gate_of_row,
             const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const int* expert_token_indices,
             const int* expert_token_offsets, Scalar* d_a, Scalar* d_b, Scalar* gated_y, float* gate_terms, int d,
             int h, int E) {
    Shared& shared = shared_memory();
    const int column_tiles = (h + TILE_COLUMNS - 1) / TILE_COLUMNS;
    grouped_matmul<true, false, false, PANELS>(
        shared, RowTiles(shared, expert_token_offsets, E, h, TILE_COLUMNS, d),
        [&](const RowTile& tile) {
            const GatheredRows rows(d_out, d, expert_token_indices + tile.first, tile.rows);
            return [=, &w3, &a, &b](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH, panel = step - tile.steps;
                if (panel < 0) {
                    rows.load(stage.a, p, d);
                    if (threadIdx.x == 0) {
                        barrier_arrive_expecting(full, B_BYTES);
                        tma_load(stage.b, &w3, full, p, tile.column, tile.expert);
                    }
                } else if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, GATED ? 2 * A_BYTES : A_BYTES);
                    tma_load(stage.a, &a, full, tile.column + panel * PANEL, tile.first);
                    if (GATED) tma_load(stage.b, &b, full, tile.column + panel * PANEL, tile.first);
                }
            };
        },
        [&](const RowTile& tile, Results& results, Ring& ring) {
            float gates[2], terms[2] = {0.0f, 0.0f};
#pragma unroll
            for (int half = 0; half < 2; ++half)
                gates[half] = gate_of_row[tile.first + min(Results::row(half), tile.rows - 1)];
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel) {
                const Stage& stage = ring.wait();
                constexpr int OUTPUTS = GATED ? 3 : 2;  // d_a, gated_y, d_b
                unsigned a_pairs[4][4], b_pairs[4][4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    // Lane l brings the address of row l % 8, chunk l / 8: pairs come to the places of their sums.
                    const int place = swizzled(Results::row(i % 2) - lane_id() / 4 + lane_id() % 8,
                                               i / 2 * 4 + lane_id() / 8);
                    ldmatrix_x4(a_pairs[i], stage.a + place);
                    if (GATED) ldmatrix_x4(b_pairs[i], stage.b + place);
                }
#pragma unroll
                for (int part = 0; part < 2; ++part) {
                    const int group = panel * 2 + part;
                    unsigned pairs[2 * OUTPUTS][4];
#pragma unroll
                    for (int half = 0; half < 2; ++half)
#pragma unroll
                        for (int j = 0; j < 4; ++j) {
                            Pair a_pair(a_pairs[part * 2 + half][j]), b_pair(b_pairs[part * 2 + half][j]), y_pair;
#pragma unroll
                            for (int k = 0; k < 2; ++k)
                                terms[half] += store_hidden_gradients(
                                    a_pair.values, b_pair.values, a_pair.values, b_pair.values, y_pair.values, k,
                                    results.sums[Results::at(group, half, j) + k], gates[half]);
                            pairs[half][j] = a_pair.word;
                            pairs[2 + half][j] = y_pair.word;
                            if (GATED) pairs[2 * OUTPUTS - 2 + half][j] = b_pair.word;
                        }
                    Chunk chunks[2 * OUTPUTS];
                    results.scratch.regroup(chunks, pairs);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int row = Results::row(half), column = tile.column + Results::column(group);
                        if (row >= tile.rows || column >= h) continue;
                        const long long at = (long long)(tile.first + row) * h + column;
                        *reinterpret_cast<Chunk*>(d_a + at) = chunks[half];
                        *reinterpret_cast<Chunk*>(gated_y + at) = chunks[2 + half];
                        if (GATED) *reinterpret_cast<Chunk*>(d_b + at) = chunks[2 * OUTPUTS - 2 + half];
                    }
                }
                ring.release(ring.turn.stage);
                ring.turn.next();
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                terms[half] += __shfl_xor_sync(FULL_WARP, terms[half], 1);
                terms[half] += __shfl_xor_sync(FULL_WARP, terms[half], 2);
                if (Results::row(half) >= tile.rows || lane_id() % 4 != 0) continue;
                const long long row = tile.first + Results::row(half);
                gate_terms[row * column_tiles + tile.column / TILE_COLUMNS] = terms[half];
            }
        });
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(BLOCK, 1)
    d_w3(const __grid_constant__ TensorMap gated_y_map, const Scalar* gated_y, const Scalar* d_out,
         const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_w3, int d, int h, int E) {
    Shared& shared = shared_memory();
    grouped_matmul<true, true, true, 0>(
        shared, WeightTiles(expert_token_offsets, E, h, d),
        [&](const WeightTile& tile) {
            return GatheredAndPlain<TILE_COLUMNS, TILE_ROWS, false>(tile, d_out, d, tile.column, gated_y_map, gated_y,
                                                                    h, tile.row, expert_token_indices);
        },
        [&](const WeightTile& tile, Results& results, Ring&) { store_weights(tile, results, d_w3, h, d); });
}
