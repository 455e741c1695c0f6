// expert_down, version 7: persistent blocks.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without any kept
//              expert output, and the split into producer and consumers: SonicMoE (arXiv 2512.14080).
// Idea         The products of version 3 on grouped_matmul: some warps load, by TMA and gathered rows by
//              cp.async, while two warpgroups multiply by wgmma and other warps store what those
//              have finished; a block stays and takes tile after tile.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; BAND, see hopper/scheduler.cuh. d, h and the pitches,
//              which are elements from one row of tokens and of hidden rows to the next, are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel       grid             block  shared bytes
//              bytes read                                                              bytes written
// expert_down  multiprocessors  512    230592
//              (1540 E + 508) blocks + 2 h boxes D + 2 d h tiles                       2 R d
// d_hidden     multiprocessors  512    230592
//              2048 E blocks + (4096 + 256 d) tiles C + 2 d h tiles + 4 R C + 2 R h G  2 R h (1 + G) + 4 R C
// d_w3         multiprocessors  512    232196
//              4 (E + 1) blocks + (3072 E + 512 (tiles + X)) W C + 2 R d C + 2 R h W   2 E h d
// G is 2 with a gated activation, else 1. D = ceil(d / 256), C = ceil(h / 256), W = ceil(d / 128).
// blocks is the whole grid; tiles is the sum over the experts of ceil(rows / 128), X the number of
// experts with rows, boxes the rows that a box of 128 from the first row of each tile on finds in the
// whole matrix. Threads that follow the tiles read all ends of the experts' rows, idle producers the first
// alone. In a weight gradient they read an expert's begin and end for each of its tiles, and a block all
// ends once if it has at most 64 tiles, to assign them. 2 R d h FLOPs a GEMM. Bound: tensor cores.
#include "hidden.cuh"
#include "hopper/gradients.cuh"
#include "hopper/grouped_matmul.cuh"
#include "hopper/hidden_gradients.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
using DownRoles = WarpRoles<4, 4, false, false, true>;
extern "C" __global__ void __launch_bounds__(DownRoles::BLOCK, 1)
    expert_down(const __grid_constant__ TensorMap y_swi, const __grid_constant__ TensorMap w3,
                const int* expert_token_offsets, Scalar* y, int d, int h, int E) {
    auto& shared = shared_memory<Shared<3, 1>>();
    grouped_matmul<DownRoles>(
        shared, RowTiles(expert_token_offsets, E, d, TILE_COLUMNS, h),
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
        StoreRows{y, d});
}

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
using HiddenRoles = WarpRoles<4, 4, true, false, false>;
extern "C" __global__ void __launch_bounds__(HiddenRoles::BLOCK, 1)
    d_hidden(const Scalar* d_out, const __grid_constant__ TensorMap w3, const float* gate_of_row, const Scalar* a,
             const Scalar* b, const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a,
             Scalar* d_b, Scalar* gated_y, float* gate_terms, int d, int h, int E, int d_pitch, int h_pitch) {
    auto& shared = shared_memory<HiddenShared>();
    grouped_matmul<HiddenRoles>(
        shared, RowTiles(expert_token_offsets, E, h, TILE_COLUMNS, d),
        [&](const RowTile& tile) {
            const GatheredRows<HiddenRoles::COPIERS> rows(d_out, d_pitch, expert_token_indices + tile.first, tile.rows);
            return [=, &w3](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                rows.load(stage.a, p, d);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
                    tma_load(stage.b, &w3, full, p, tile.column, tile.expert);
                }
            };
        },
        HiddenGradients<false>{gate_of_row, a, b, d_a, d_b, gated_y, gate_terms, h, h_pitch, h_pitch, shared.ahead,
                               NoSums()});
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered. Made transposed: the gathered
// operand is the smaller one, since a copy by cp.async costs more than one by TMA.
using WeightRoles = WarpRoles<4, 4, true, true, true>;
extern "C" __global__ void __launch_bounds__(WeightRoles::BLOCK, 1)
    d_w3(const __grid_constant__ TensorMap gated_y_map, const Scalar* gated_y, const Scalar* d_out,
         const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_w3, int d, int h, int E,
         int d_pitch, int h_pitch) {
    auto& shared = shared_memory<WeightShared<FinishedColumns>>();
    grouped_matmul<WeightRoles>(
        shared, WeightTiles(shared, expert_token_offsets, E, d, h),
        [&](const WeightTile& tile) {
            return GatheredAndPlain(tile, d_out, d, d_pitch, gated_y_map, gated_y, h, h_pitch, expert_token_indices);
        },
        StoreTransposedWeights{d_w3, h, d});
}
