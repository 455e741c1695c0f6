// expert_up, version 7: persistent blocks.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row, and the gradients
//              of x, w1 and w2.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5 (Algorithm 1); the gather inside the
//              load and the split into producer and consumers: SonicMoE (arXiv 2512.14080).
// Idea         The ring of 6_specialized, in blocks that stay: each takes tile after tile. What this version adds:
//              a tile scheduler (hopper/scheduler.cuh); a second consumer, so that a tile has 256 columns
//              (hopper/consumers.cuh); epilogue warps, which store a finished tile while the next one is
//              multiplied (hopper/epilogue.cuh); and the gradients (hopper/gradients.cuh).
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; STORE_PROJECTIONS and STORE_Y_SWI; BAND, see
//              hopper/scheduler.cuh. d, h and the pitches, which are elements from one row of tokens and
//              of hidden rows to the next, are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid             block  shared bytes
//            bytes read                                                             bytes written
// expert_up  multiprocessors  384    230592
//            1536 E blocks + (4096 + 256 d) tiles ceil(G h / 256) + 2 d h G tiles   2 R h (G P + Y)
// d_x_rows   multiprocessors  512    230592
//            (1540 E + 508) blocks + 2 h G boxes D + 2 d h G tiles                  2 R d
// d_w        multiprocessors  512    232196
//            4 (E + 1) blocks + (3072 E + 512 (tiles + X)) W C + 2 R d C + 2 R h W  2 E d h
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; G is 2 with a
// gated activation, else 1. D = ceil(d / 256), C = ceil(h / 256), W = ceil(d / 128). blocks is the
// whole grid; tiles is the sum over the experts of ceil(rows / 128), X the number of experts with rows,
// boxes the rows that a box of 128 from the first row of each tile on finds in the whole matrix.
// Threads that follow the tiles read all ends of the experts' rows, idle producers the first alone. In a
// weight gradient they read an expert's begin and end for each of its tiles, and a block all ends once if
// it has at most 64 tiles, to assign them. 2 R d h G FLOPs a GEMM, in d_w 2 R d h. Bound: tensor cores.
#include "hidden.cuh"
#include "hopper/gradients.cuh"
#include "hopper/grouped_matmul.cuh"

constexpr int PROJECTIONS = GATED ? 2 : 1;
constexpr int WIDTH = TILE_COLUMNS / PROJECTIONS;  // columns of a tile of a and b

// The epilogue of expert_up. Panels of a and b, 64 columns each, lie side by side in a tile.
struct Hidden {
    Scalar *a, *b, *y_swi;
    int h, pitch;

    template <class Epilogue>
    __device__ __forceinline__ void operator()(const RowTile& tile, int, const Epilogue& epilogue) const {
        constexpr int PANEL_CHUNKS = PANEL / CHUNK, CHUNKS = WIDTH / CHUNK, AT_ONCE = WARP / CHUNKS;
        const int i = lane_id() % CHUNKS, column = tile.column + i * CHUNK;
        const int a_chunk = i / PANEL_CHUNKS * PROJECTIONS * PANEL_CHUNKS + i % PANEL_CHUNKS;
#pragma unroll 1
        for (int n = 0; n < Epilogue::COUNT; ++n) {
            auto& finished = epilogue.take(n);
            const int first = epilogue.row(n);
            if (column < h)
#pragma unroll 2
                for (int row = lane_id() / CHUNKS; row < min(WARP_ROWS, tile.rows - first); row += AT_ONCE)
                    store_hidden(a, b, y_swi, (long long)(tile.first + first + row) * pitch + column,
                                 finished.at(row, a_chunk),
                                 finished.at(row, a_chunk + PANEL_CHUNKS * (PROJECTIONS - 1)));
            epilogue.give_back(n);
        }
    }
};

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
#ifndef RING_STAGES
#define RING_STAGES 3
#endif
using UpRoles = WarpRoles<2, 2, true, false, true>;
extern "C" __global__ void __launch_bounds__(UpRoles::BLOCK, 1)
    expert_up(const Scalar* x, const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
              const int* expert_token_indices, const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi,
              int d, int h, int E, int d_pitch, int h_pitch) {
    auto& shared = shared_memory<Shared<RING_STAGES, 1>>();
    grouped_matmul<UpRoles>(
        shared, RowTiles(expert_token_offsets, E, h, WIDTH, d),
        [&](const RowTile& tile) {
            const GatheredRows<UpRoles::COPIERS> rows(x, d_pitch, expert_token_indices + tile.first, tile.rows);
            return [=, &w1, &w2](int step, Stage& stage, Barrier* full) {
                const int p = step * TILE_DEPTH;
                rows.load(stage.a, p, d);
                if (threadIdx.x == 0) {
                    barrier_arrive_expecting(full, B_BYTES);
#pragma unroll
                    for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel) {
                        const bool second = panel % PROJECTIONS;  // the columns of w2 lie beside those of w1
                        tma_load(stage.b + panel * PANEL_BYTES, second ? &w2 : &w1, full,
                                 tile.column + panel / PROJECTIONS * PANEL, p, tile.expert);
                    }
                }
            };
        },
        Hidden{a, b, y_swi, h, h_pitch});
}

// Section 5: d_a w1^T + d_b w2^T for every routed row.
using InputRoles = WarpRoles<4, 4, false, false, false>;
extern "C" __global__ void __launch_bounds__(InputRoles::BLOCK, 1)
    d_x_rows(const __grid_constant__ TensorMap d_a, const __grid_constant__ TensorMap d_b,
             const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
             const int* expert_token_offsets, Scalar* rows, int d, int h, int E) {
    auto& shared = shared_memory<Shared<4, 2>>();
    const int a_steps = (h + TILE_DEPTH - 1) / TILE_DEPTH;
    grouped_matmul<InputRoles>(
        shared, RowTiles(expert_token_offsets, E, d, TILE_COLUMNS, PROJECTIONS * a_steps * TILE_DEPTH),
        [&](const RowTile& tile) {
            return [=, &d_a, &d_b, &w1, &w2](int step, Stage& stage, Barrier* full) {
                const bool second = step >= a_steps;  // first the depth of a, then that of b
                const int p = (second ? step - a_steps : step) * TILE_DEPTH;
                barrier_arrive_expecting(full, A_BYTES + B_BYTES);
                tma_load(stage.a, second ? &d_b : &d_a, full, p, tile.first);
                tma_load(stage.b, second ? &w2 : &w1, full, p, tile.column, tile.expert);
            };
        },
        StoreRows{rows, d});
}

// Section 5: d_w1 = X^T d_a, or d_w2 = X^T d_b, over the expert's rows, x gathered again.
using WeightRoles = WarpRoles<4, 4, true, true, true>;
extern "C" __global__ void __launch_bounds__(WeightRoles::BLOCK, 1)
    d_w(const __grid_constant__ TensorMap d_hidden_map, const Scalar* d_hidden, const Scalar* x,
        const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_w, int d, int h, int E, int d_pitch,
        int h_pitch) {
    auto& shared = shared_memory<WeightShared<>>();
    grouped_matmul<WeightRoles>(
        shared, WeightTiles(shared, expert_token_offsets, E, d, h),
        [&](const WeightTile& tile) {
            return GatheredAndPlain(tile, x, d, d_pitch, d_hidden_map, d_hidden, h, h_pitch, expert_token_indices);
        },
        StoreWeights{d_w, d, h});
}
