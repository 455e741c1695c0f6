// expert_up, version 6: warps of two roles. The forward alone.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1 and 5 (Algorithm 1); the gather inside the load and the split
//              into producer and consumer: SonicMoE (arXiv 2512.14080).
// Idea         The loads of 5_tma, in warps of their own: two producer warps fill a ring of stages and run ahead as far
//              as it reaches, the consumer, a warpgroup, multiplies and at the end stores. It frees a stage one step
//              late, so that a product always waits behind the one that the tensor cores work on.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; ACTIVATION; STORE_PROJECTIONS and STORE_Y_SWI; TILE_ROWS = 128,
//              TILE_COLUMNS = 128, TILE_DEPTH = 64, THREADS = 192; STAGES; BAND. d and h are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid                          block    shared bytes
//            bytes read                                           bytes written
// expert_up  R / TILE_ROWS + min(E, R), C  THREADS  1036 + 32784 STAGES
//            8 E blocks + (4096 + 256 d) tiles C + 2 d h G tiles  2 R h (G P + Y)
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; G is 2 with a gated
// activation, else 1. C = ceil(G h / TILE_COLUMNS); tiles is the sum over the experts of ceil(rows / TILE_ROWS); blocks
// is the whole grid. In an expert's last tile the last row takes the place of those that it lacks. 2 R d h G FLOPs.
// Times as fast as 5_tma: 0.98 to 0.99 on an H100, 0.86 to 0.97 on an H200 (docs/results/ladder_*.json). Three blocks
// of 5_tma fit on a multiprocessor and hide one another's loads, of this version two. 7_persistent is faster than both.
// Bound: shared memory: a product of (64, 128, 16) reads 6 KiB in 64 cycles, and stages arrive at 64 bytes a cycle.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "hopper/results.cuh"
#include "hopper/ring.cuh"
#include "hopper/tma.cuh"
#include "hopper/wgmma.cuh"
#include "stages.cuh"

constexpr int RESULTS = GATED ? 2 : 1;
constexpr int WIDTH = TILE_COLUMNS / RESULTS;  // columns of a tile of a and b
constexpr int PANELS = TILE_COLUMNS / PANEL;   // those of w2 lie beside those of w1
constexpr int PRODUCERS = THREADS - WARPGROUP;

struct Shared {
    Stage stages[STAGES];
    Barrier full[STAGES], empty[STAGES];
};

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    expert_up(const Scalar* x, const __grid_constant__ TensorMap w1, const __grid_constant__ TensorMap w2,
              const int* expert_token_indices, const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi,
              int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * WIDTH;
    const int steps = (d + TILE_DEPTH - 1) / TILE_DEPTH;
    auto& shared = shared_memory<Shared>();
    if (threadIdx.x == 0) {
        open_ring(shared.full, shared.empty, 1 + PRODUCERS, WARPGROUP / WARP);
        barrier_init_fence();
    }
    __syncthreads();

    PipelineState<STAGES> state;
    if (threadIdx.x >= WARPGROUP) {
        const GatheredRows<PRODUCERS, WARPGROUP> rows(x, d, expert_token_indices + tile.first, tile.rows);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, state.next()) {
            Stage& stage = shared.stages[state.stage];
            Barrier* const full = &shared.full[state.stage];
            barrier_wait(&shared.empty[state.stage], state.parity ^ 1);
            rows.load(stage.a, step * TILE_DEPTH, d);
            cp_async_arrive(full);
            if (threadIdx.x == WARPGROUP) {
                barrier_arrive_expecting(full, B_BYTES);
#pragma unroll
                for (int panel = 0; panel < PANELS; ++panel)
                    tma_load(stage.b + panel * PANEL_BYTES, panel % RESULTS ? &w2 : &w1, full,
                             first_column + panel / RESULTS * PANEL, step * TILE_DEPTH, tile.expert);
            }
        }
        return;
    }

    TileSums sums;            // the first product of a sum overwrites what it holds
    Barrier* read = nullptr;  // of the step before
#pragma unroll 1
    for (int step = 0; step < steps; ++step, state.next()) {
        Stage& stage = shared.stages[state.stage];
        barrier_wait(&shared.full[state.stage], state.parity);
        fence_async_proxy();  // what threads have copied, before wgmma reads it
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
        wgmma_wait<1>();  // the product before is done
        if (step > 0 && lane_id() == 0) barrier_arrive(read);
        read = &shared.empty[state.stage];
    }
    wgmma_wait<0>();
    wgmma_results(sums[0]);
    wgmma_results(sums[1]);

    each_chunk<RESULTS>(sums, [&](int row, int column, Chunk a_chunk, Chunk b_chunk) {
        const int j = first_column + column;
        if (row >= tile.rows || j >= h) return;
        store_hidden(a, b, y_swi, (long long)(tile.first + row) * h + j, a_chunk, b_chunk);
    });
}
