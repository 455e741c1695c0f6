// expert_up, version 3: tensor cores.
//
// Purpose      a = x w1, b = x w2, y_swi = act(a) * b for every routed row, and the gradients
//              of x, w1 and w2.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5 (Algorithm 1).
// Idea         The products of version 2 on mma_matmul: tiles arrive by cp.async while others are
//              multiplied by mma.sync, gathered rows like any other. The columns of a tile are
//              shared by a and b, and tiles are taken in bands that share operands in the L2 cache.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar of s bytes: __half, __nv_bfloat16, or float, which is multiplied as tf32;
//              ACTIVATION; TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, STAGES, WARP_ROWS, WARP_COLUMNS and
//              BAND, see mma_matmul.cuh; THREADS, a warp for each of its parts of a tile. d and h
//              are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel     grid                                                 block
//            shared bytes
//            bytes read                                        bytes written
// expert_up  R / TILE_ROWS + min(E, R), ceil(G h / TILE_COLUMNS)  THREADS
//            12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//            8 E blocks + 4 K R C + s R d C + s d h G tiles    s R h (G P + Y)
// d_x_rows   R / TILE_ROWS + min(E, R), ceil(d / TILE_COLUMNS)    THREADS
//            12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//            8 E blocks + s R h G D + s d h G tiles            s R d
// d_w        ceil(d / TILE_ROWS), ceil(h / TILE_COLUMNS), E       THREADS
//            s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//            8 THREADS blocks + s R d J + 4 A R W J + s R h W  s E d h
// P and Y are STORE_PROJECTIONS and STORE_Y_SWI, 1 unless a save policy leaves one out; G is 2 with a gated
// activation, else 1. C = ceil(G h / TILE_COLUMNS), D = ceil(d / TILE_COLUMNS), J = ceil(h / TILE_COLUMNS),
// W = ceil(d / TILE_ROWS). A line's number in a list is read for each 16 bytes of it: K = s TILE_DEPTH / 16 of a
// stage, A = s TILE_ROWS / 16 of a tile. tiles is the sum over the experts of ceil(rows / TILE_ROWS); blocks is
// the whole grid. 2 R d h G FLOPs a GEMM, in d_w 2 R d h. Bound: tensor cores; on Hopper, shared memory.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "mma_matmul.cuh"

constexpr int RESULTS = GATED ? 2 : 1;
constexpr int WIDTH = WarpResults<RESULTS>::WIDTH;  // columns of a tile of a and b

// Section 5, Algorithm 1: both projections from one tile of x, the activation on the sums.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_up(const Scalar* x, const Scalar* w1, const Scalar* w2, const int* expert_token_indices,
              const int* expert_token_offsets, Scalar* a, Scalar* b, Scalar* y_swi, int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * WIDTH;
    const long long weight = (long long)tile.expert * d * h + first_column;
    const Lines<true> rows = {x, d, tile.rows, d, expert_token_indices + tile.first};
    const Lines<false> weights[] = {{w1 + weight, h, d, h - first_column}, {w2 + weight, h, d, h - first_column}};
    WarpResults<RESULTS> sums;
    mma_matmul<Along::DEPTH, Along::SIDE>(sums, d, rows, weights);
    sums.each(load_nothing, [&](int, int row, int column, const float (&values)[RESULTS][8], Nothing) {
        const int j = first_column + column;
        if (row >= tile.rows || j >= h) return;
        const long long at = (long long)(tile.first + row) * h + j;
        Eight a_values, b_values, y_values;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            store_hidden(a_values.values, b_values.values, y_values.values, i, values[0][i], values[RESULTS - 1][i]);
        if (STORE_PROJECTIONS) {
            a_values.store(a + at);
            if (GATED) b_values.store(b + at);
        }
        if (STORE_Y_SWI) y_values.store(y_swi + at);
    });
}

// Section 5: d_a w1^T + d_b w2^T for every routed row.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_x_rows(const Scalar* d_a, const Scalar* d_b, const Scalar* w1, const Scalar* w2, const int* expert_token_offsets,
             Scalar* rows, int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * TILE_COLUMNS;
    const int depth = (h + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH;  // of a; that of b comes behind it
    const long long row = (long long)tile.first * h, column = ((long long)tile.expert * d + first_column) * h;
    const TwofoldLines gradients = {{d_a + row, h, tile.rows, h}, d_b + row, depth};
    const TwofoldLines weights = {{w1 + column, h, d - first_column, h}, w2 + column, depth};
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, Along::DEPTH>(sums, RESULTS * depth, gradients, &weights);
    store_tile(sums, rows + (long long)tile.first * d + first_column, tile.rows, d - first_column, d);
}

// Section 5: d_w1 = X^T d_a, or d_w2 = X^T d_b, over the expert's rows, x gathered again.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w(const Scalar* d_hidden, const Scalar* x, const int* expert_token_indices, const int* expert_token_offsets,
        Scalar* d_w, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.z], rows = expert_token_offsets[blockIdx.z + 1] - begin;
    const int first_row = blockIdx.x * TILE_ROWS, first_column = blockIdx.y * TILE_COLUMNS;
    const Lines<true> tokens = {x + first_row, d, rows, d - first_row, expert_token_indices + begin};
    const Lines<false> gradients = {d_hidden + (long long)begin * h + first_column, h, rows, h - first_column};
    WarpResults<1> sums;
    mma_matmul<Along::SIDE, Along::SIDE>(sums, rows, tokens, &gradients);
    Scalar* const target = d_w + ((long long)blockIdx.z * d + first_row) * h + first_column;
    store_tile(sums, target, d - first_row, h - first_column, h);
}
