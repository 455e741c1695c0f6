// expert_up, version 4: wgmma. The forward alone.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1 and 5 (Algorithm 1); PTX ISA, wgmma.
// Idea         The stages of 3_mma arrive by cp.async as before, and a warpgroup multiplies them by wgmma. It reads
//              both operands from shared memory: no fragments pass through registers, so they hold 128 x 128 sums.
//              The chunks that 3_mma permutes lie just as the 128-byte swizzle has them, in panels of 64 columns.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; STORE_PROJECTIONS and STORE_Y_SWI; TILE_ROWS = 128,
//              TILE_COLUMNS = 128, TILE_DEPTH = 64, THREADS = 128; STAGES; BAND. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid                          block    shared bytes
//            bytes read                                     bytes written
// expert_up  R / TILE_ROWS + min(E, R), C  THREADS  1036 + 32768 STAGES
//            8 E blocks + 32 R C + 2 R d C + 2 d h G tiles  2 R h (G P + Y)
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; G is 2 with a gated
// activation, else 1. C = ceil(G h / TILE_COLUMNS); tiles is the sum over the experts of ceil(rows / TILE_ROWS); blocks
// is the whole grid. A row's number in the list is read for each 16 bytes of a stage. 2 R d h G FLOPs.
// Bound: the loads. Two blocks of a multiprocessor alternate: while one waits for copies the other multiplies.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "hopper/results.cuh"
#include "hopper/stage.cuh"
#include "hopper/wgmma.cuh"
#include "stages.cuh"

constexpr int RESULTS = GATED ? 2 : 1;
constexpr int WIDTH = TILE_COLUMNS / RESULTS;  // columns of a tile of a and b
constexpr int PANELS = TILE_COLUMNS / PANEL;   // those of w2 lie beside those of w1

struct Shared {
    Stage stages[STAGES];
};

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_up(const Scalar* x, const Scalar* w1, const Scalar* w2, const int* expert_token_indices,
              const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi, int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * WIDTH;
    const int steps = (d + TILE_DEPTH - 1) / TILE_DEPTH;
    auto& shared = shared_memory<Shared>();

    Copies<Operand<TILE_ROWS, Along::DEPTH>, Along::DEPTH, Lines<true>> rows;
    rows.open({x, d, tile.rows, d, expert_token_indices + tile.first});
    Copies<Operand<PANEL, Along::SIDE>, Along::SIDE, Lines<false>> panels[PANELS];
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
        const int column = first_column + panel / RESULTS * PANEL;
        const Scalar* const weights = (panel % RESULTS ? w2 : w1) + (long long)tile.expert * d * h;
        panels[panel].open({weights + column, h, d, h - column});
    }
    auto load = [&](int step) {
        if (step < steps) {
            Stage& stage = shared.stages[step % STAGES];
            rows.start(reinterpret_cast<Chunk*>(stage.a), step * TILE_DEPTH);
#pragma unroll
            for (int panel = 0; panel < PANELS; ++panel)
                panels[panel].start(reinterpret_cast<Chunk*>(stage.b + panel * PANEL_BYTES), step * TILE_DEPTH);
        }
        cp_async_commit();  // a group for every step, so that counting them tells what has arrived
    };

    TileSums sums;  // the first product of a sum overwrites what it holds
    for (int step = 0; step < STAGES - 1; ++step) load(step);
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
        Stage& stage = shared.stages[step % STAGES];
        cp_async_wait<STAGES - 2>();
        fence_async_proxy();  // what threads have copied, before wgmma reads it
        __syncthreads();      // this stage has arrived for all, and all have multiplied the one before
        const unsigned long long rows_now = wgmma_operand(stage.a, PANEL_BYTES);
        const unsigned long long weights_now = wgmma_operand(stage.b, PANEL_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < TILE_DEPTH / 16; ++i)  // 16 of the depth: 32 bytes of each row of x, 16 rows of the weights
#pragma unroll
            for (int half = 0; half < 2; ++half)
                wgmma_m64n128k16<Scalar, false, true>(sums[half], wgmma_advance(rows_now, half * PANEL_BYTES + i * 32),
                                                      wgmma_advance(weights_now, i * 16 * 128), step + i > 0);
        wgmma_commit();
        load(step + STAGES - 1);  // while the tensor cores are busy
        wgmma_wait<0>();
    }
    wgmma_results(sums[0]);
    wgmma_results(sums[1]);

    each_chunk<RESULTS>(sums, [&](int row, int column, Chunk a_chunk, Chunk b_chunk) {
        const int j = first_column + column;
        if (row >= tile.rows || j >= h) return;
        store_hidden(a, b, y_swi, (long long)(tile.first + row) * h + j, a_chunk, b_chunk);
    });
}
