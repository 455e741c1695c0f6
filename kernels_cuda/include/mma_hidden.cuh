// The epilogue of d_hidden on mma_matmul: from a tile of <d_out, w3> everything that hangs on it. sm_80 and newer; SIMT
// executor.
//
// Section 5 of MoEBlaze and SonicMoE. The caller says how eight hidden elements of a row are kept: a `Kept` has
// pointers a(i) and b(i) to them, which the gradients replace.
#pragma once
#include "expert_rows.cuh"
#include "hidden.cuh"
#include "mma_matmul.cuh"

template <class Kept>
struct HiddenAhead {
    Kept kept;
    float gate;
};

// read(row, j) gives the `Kept` of the elements from j on of a row in expert order; store(kept, row, j) stores the
// gradients that are left in it.
template <class Kept, class Read, class Store>
__device__ __forceinline__ void store_hidden_tile(const WarpResults<1>& sums, const RowTile& tile, const Place& place,
                                                  int h, const float* gate_of_row, Scalar* gated_y, float* gate_terms,
                                                  Read read, Store store) {
    const int first_column = place.column_tile * TILE_COLUMNS;
    auto inside = [&](int row, int column) { return row < tile.rows && first_column + column < h; };
    auto load = [&](int row, int column) {
        HiddenAhead<Kept> ahead;
        if (!inside(row, column)) return ahead;
        ahead.kept = read(tile.first + row, first_column + column);
        ahead.gate = gate_of_row[tile.first + row];
        return ahead;
    };
    float terms[WarpResults<1>::LINES] = {};  // of the gates' gradients
    sums.each(load, [&](int line, int row, int column, const float (&values)[1][8], HiddenAhead<Kept>& ahead) {
        if (!inside(row, column)) return;
        Kept& kept = ahead.kept;
        Eight y;
#pragma unroll
        for (int i = 0; i < 8; ++i)
            terms[line] += store_hidden_gradients(kept.a(i), kept.b(i), kept.a(i), kept.b(i), y.values + i, 0,
                                                  values[0][i], ahead.gate);
        const int routed = tile.first + row, j = first_column + column;
        store(kept, routed, j);
        y.store(gated_y + (long long)routed * h + j);
    });
    __shared__ float parts[TILE_COLUMNS / WARP_COLUMNS][TILE_ROWS];  // of each warp's columns
#pragma unroll
    for (int line = 0; line < WarpResults<1>::LINES; ++line) {
        terms[line] += __shfl_xor_sync(FULL_WARP, terms[line], 1);
        terms[line] += __shfl_xor_sync(FULL_WARP, terms[line], 2);
        if (lane_id() % 4 == 0) parts[warp_id() % (TILE_COLUMNS / WARP_COLUMNS)][sums.row(line)] = terms[line];
    }
    __syncthreads();
    for (int row = threadIdx.x; row < tile.rows; row += THREADS) {
        float term = 0.0f;
        for (int part = 0; part < TILE_COLUMNS / WARP_COLUMNS; ++part) term += parts[part][row];
        gate_terms[(long long)(tile.first + row) * gridDim.y + place.column_tile] = term;
    }
}
