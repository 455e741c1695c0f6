// expert_down, a lesson: the epilogue of the product adds every row to its token by atomics, in one launch.
//
// Purpose      sums (L, d) float32 += gate * (y_swi w3) for every routed row; sums start as zeros.
// Source       MoEBlaze (arXiv 2601.05296), section 3.1, read as one kernel for all experts.
// Idea         None to keep: tiles of different experts have the same token at the same time, so k writers share an
//              element of the sums. as_printed.cu runs one expert after another and needs no atomics.
// Runs on      sm_80 and newer; SIMT executor.
// Constants    As in as_printed.cu.
// Determinism  None: float sums depend on their order, and the order on which block comes first.
//
// kernel    grid                                               block    shared bytes
//           bytes read                                        bytes written
// add_rows  R / TILE_ROWS + min(E, R), ceil(d / TILE_COLUMNS)  THREADS  12 + 8 TILE_ROWS + Q
//           8 E blocks + (s h + 8) R D + s d h tiles + 4 R d  4 R d
// Symbols as in as_printed.cu. An atomic addition reads and writes its 4 bytes. Bound: as there.
#include "down_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    add_rows(const Scalar* y_swi, const Scalar* w3, const float* gate_of_row, const int* expert_token_indices,
             const int* expert_token_offsets, float* sums, int d, int h, int E) {
    const Place place = place_of_block();
    const RowTile tile = find_row_tile<TILE_ROWS>(expert_token_offsets, E, place.row_tile);
    if (tile.rows == 0) return;
    __shared__ Targets targets;
    targets.read(tile, expert_token_indices, gate_of_row);
    const int first_column = place.column_tile * TILE_COLUMNS;
    Products products;
    multiply_rows(products, y_swi, w3, tile, first_column, d, h);

    struct Unread {};
    auto load = [](int, int) { return Unread{}; };
    each_product(products, load, [&](int row, int column, const float (&values)[NEIGHBOURS], Unread&) {
        const int i = first_column + column;
        if (row >= tile.rows || i >= d) return;
        float* const sums_of_row = sums + (long long)targets.tokens[row] * d + i;
#pragma unroll
        for (int n = 0; n < NEIGHBOURS; ++n) atomicAdd(&sums_of_row[n], targets.gates[row] * values[n]);
    });
}
