// expert_down, version 3: tensor cores.
//
// Purpose      y = y_swi w3 for every routed row; in the backward the gradients of a, b, the
//              gates and w3 from that of the layer's output.
// Source       MoEBlaze (arXiv 2601.05296), sections 3.1, 3.2 and 5; the gate gradient without
//              any kept expert output: SonicMoE (arXiv 2512.14080).
// Idea         The products of version 2 on mma_matmul: tiles arrive by cp.async while others are
//              multiplied by mma.sync, gathered rows like any other. Tiles are taken in bands that
//              share operands in the L2 cache.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar of s bytes: __half, __nv_bfloat16, or float, which is multiplied as tf32;
//              ACTIVATION; TILE_ROWS, TILE_COLUMNS, TILE_DEPTH, STAGES, WARP_ROWS, WARP_COLUMNS and
//              BAND, see mma_matmul.cuh; THREADS, a warp for each of its parts of a tile. d and h
//              are multiples of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel       grid                                               block
//              shared bytes
//              bytes read                                                        bytes written
// expert_down  R / TILE_ROWS + min(E, R), ceil(d / TILE_COLUMNS)  THREADS
//              12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//              8 E blocks + s R h D + s d h tiles                                s R d
// d_hidden     R / TILE_ROWS + min(E, R), ceil(h / TILE_COLUMNS)  THREADS
//              12 + s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS) + 4 TILE_ROWS TILE_COLUMNS / WARP_COLUMNS
//              8 E blocks + 4 K R J + s R d J + s d h tiles + s R h G + R h / 2  s R h (1 + G) + 4 R J
// d_w3         ceil(h / TILE_ROWS), ceil(d / TILE_COLUMNS), E     THREADS
//              s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS)
//              8 THREADS blocks + s R h D + s R d H + 4 B R H D                  s E h d
// G is 2 with a gated activation, else 1. D = ceil(d / TILE_COLUMNS), J = ceil(h / TILE_COLUMNS),
// H = ceil(h / TILE_ROWS). A line's number in a list is read for each 16 bytes of it: K = s TILE_DEPTH / 16 of a
// stage, B = s TILE_COLUMNS / 16 of a tile; a gate for each eight elements of its row. tiles is the sum over the
// experts of ceil(rows / TILE_ROWS); blocks is the whole grid. 2 R d h FLOPs a GEMM. Bound: tensor cores; on
// Hopper, shared memory.
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "mma_hidden.cuh"
#include "mma_matmul.cuh"

// Section 5: every routed row's expert output, not yet weighted by its gate.
extern "C" __global__ void __launch_bounds__(THREADS)
    expert_down(const Scalar* y_swi, const Scalar* w3, const int* expert_token_offsets, Scalar* y, int d, int h,
                int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * TILE_COLUMNS;
    const Lines<false> rows = {y_swi + (long long)tile.first * h, h, tile.rows, h};
    const Lines<false> weights = {w3 + (long long)tile.expert * h * d + first_column, d, h, d - first_column};
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, Along::SIDE>(sums, h, rows, &weights);
    store_tile(sums, y + (long long)tile.first * d + first_column, tile.rows, d - first_column, d);
}

// Eight hidden elements of a row, as the forward kept them.
struct Hidden {
    Eight a_values, b_values;

    __device__ __forceinline__ Scalar* a(int i) { return a_values.values + i; }
    __device__ __forceinline__ Scalar* b(int i) { return b_values.values + i; }
};

// Sections 3.2 and 5: <d_out, w3> of a tile of hidden elements, then everything that hangs on it.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_hidden(const Scalar* d_out, const float* gate_of_row, const Scalar* a, const Scalar* b, const Scalar* w3,
             const int* expert_token_indices, const int* expert_token_offsets, Scalar* d_a, Scalar* d_b,
             Scalar* gated_y, float* gate_terms, int d, int h, int E) {
    const Place place = place_in_bands();
    const RowTile& tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    const int first_column = place.column_tile * TILE_COLUMNS;
    const Lines<true> rows = {d_out, d, tile.rows, d, expert_token_indices + tile.first};
    const Lines<false> weights = {w3 + ((long long)tile.expert * h + first_column) * d, d, h - first_column, d};
    WarpResults<1> sums;
    mma_matmul<Along::DEPTH, Along::DEPTH>(sums, d, rows, &weights);
    auto read = [&](int row, int j) {
        Hidden hidden = {Eight(a + (long long)row * h + j)};
        if (GATED) hidden.b_values = Eight(b + (long long)row * h + j);
        return hidden;
    };
    auto store = [&](const Hidden& gradients, int row, int j) {
        gradients.a_values.store(d_a + (long long)row * h + j);
        if (GATED) gradients.b_values.store(d_b + (long long)row * h + j);
    };
    store_hidden_tile<Hidden>(sums, tile, place, h, gate_of_row, gated_y, gate_terms, read, store);
}

// Section 5: d_w3 = (gate * y_swi)^T d_out over the expert's rows, d_out gathered.
extern "C" __global__ void __launch_bounds__(THREADS)
    d_w3(const Scalar* gated_y, const Scalar* d_out, const int* expert_token_indices, const int* expert_token_offsets,
         Scalar* d_w3, int d, int h) {
    const int begin = expert_token_offsets[blockIdx.z], rows = expert_token_offsets[blockIdx.z + 1] - begin;
    const int first_row = blockIdx.x * TILE_ROWS, first_column = blockIdx.y * TILE_COLUMNS;
    const Lines<false> hidden = {gated_y + (long long)begin * h + first_row, h, rows, h - first_row};
    const Lines<true> tokens = {d_out + first_column, d, rows, d - first_column, expert_token_indices + begin};
    WarpResults<1> sums;
    mma_matmul<Along::SIDE, Along::SIDE>(sums, rows, hidden, &tokens);
    Scalar* const target = d_w3 + ((long long)blockIdx.z * h + first_row) * d + first_column;
    store_tile(sums, target, h - first_row, d - first_column, d);
}
