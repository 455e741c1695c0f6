// expert_down as the paper prints it: the epilogue of the product sums over a token's experts, and y is never stored.
//
// Purpose      sums (L, d) float32 += gate * (y_swi w3) for every routed row; then out (L, d), the sums rounded.
// Source       MoEBlaze (arXiv 2601.05296), section 3.1: the sum is fused with the second product.
// Idea         A token has at most one row of an expert. So the experts run in their order, a launch each: in a
//              launch every element of the sums has one writer, which reads it, adds and writes it back. The sums
//              start as zeros. They are float32, and are the output itself if that is float32.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    Scalar storage type of s bytes, THREADS per block. For tensor cores also TILE_ROWS, TILE_COLUMNS,
//              TILE_DEPTH, STAGES, WARP_ROWS, WARP_COLUMNS and BAND, see mma_matmul.cuh; d and h are multiples of 8.
// Determinism  Same input, same bits: a token's rows are added in the order of its experts.
//
// kernel      grid                                         block    shared bytes
//             bytes read                                              bytes written
// add_expert  ceil(L / TILE_ROWS), ceil(d / TILE_COLUMNS)  THREADS  8 TILE_ROWS + Q
//             8 THREADS blocks + (s h + 8) R D + s d h tiles + 4 R d  4 R d
// round_sums  ceil(L d / THREADS)                          THREADS  0
//             4 L d                                                   s L d
// Bytes of add_expert are those of its E launches together; blocks is the grid of all of them. D = ceil(d /
// TILE_COLUMNS); tiles is the sum over the experts of ceil(rows / TILE_ROWS). Without tensor cores a tile is 64 x 64.
// Q is the product's: s STAGES TILE_DEPTH (TILE_ROWS + TILE_COLUMNS) on tensor cores, else 8704. 2 R d h FLOPs.
// Bound: as the product's, plus 8 R d bytes for the sums. To store y and to gather it moves 2 s R d: half as much in 16
// bits. The sums take 4 L d bytes, y takes s R d.
#include "down_product.cuh"

// Section 3.1. Adds the rows of one expert to their tokens' sums. The grid covers L rows, the longest group that there
// can be; blocks beyond the group leave.
extern "C" __global__ void __launch_bounds__(THREADS)
    add_expert(const Scalar* y_swi, const Scalar* w3, const float* gate_of_row, const int* expert_token_indices,
               const int* expert_token_offsets, float* sums, int expert, int d, int h) {
    const Place place = place_of_block();
    const int begin = expert_token_offsets[expert], end = expert_token_offsets[expert + 1];
    const int before = place.row_tile * TILE_ROWS;  // rows of the group in earlier tiles
    if (before >= end - begin) return;
    const RowTile tile = {expert, begin + before, min(TILE_ROWS, end - begin - before)};
    __shared__ Targets targets;
    targets.read(tile, expert_token_indices, gate_of_row);
    const int first_column = place.column_tile * TILE_COLUMNS;
    Products products;
    multiply_rows(products, y_swi, w3, tile, first_column, d, h);

    auto inside = [&](int row, int column) { return row < tile.rows && first_column + column < d; };
    auto sums_at = [&](int row, int column) {
        return sums + (long long)targets.tokens[row] * d + first_column + column;
    };
    auto load = [&](int row, int column) {
        TokenSums so_far;
        if (inside(row, column)) so_far.load(sums_at(row, column));
        return so_far;
    };
    each_product(products, load, [&](int row, int column, const float (&values)[NEIGHBOURS], TokenSums& so_far) {
        if (!inside(row, column)) return;
        so_far.add(targets.gates[row], values);
        so_far.store(sums_at(row, column));
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) round_sums(const float* sums, Scalar* out, int L, int d) {
    const long long index = (long long)blockIdx.x * THREADS + threadIdx.x;
    if (index < (long long)L * d) out[index] = from_float<Scalar>(sums[index]);
}
