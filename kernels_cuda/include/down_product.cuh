// The down-projection of a tile of an expert's rows, for an epilogue that sums them by token: on tensor cores if the
// tile is defined (see mma_matmul.cuh), else as in tiled_matmul.cuh. Runs everywhere.
#pragma once
#include "expert_rows.cuh"
#include "pack.cuh"
#include "scalar.cuh"

// ---- the product -------------------------------------------------------------------------------

#ifdef TILE_ROWS
#include "mma_matmul.cuh"

constexpr int NEIGHBOURS = 8;  // columns of a row that one visit gets
using Products = WarpResults<1>;

__device__ __forceinline__ Place place_of_block() { return place_in_bands(); }

// products += y_swi w3 for the rows of the tile and the columns from first_column on.
__device__ __forceinline__ void multiply_rows(Products& products, const Scalar* y_swi, const Scalar* w3,
                                              const RowTile& tile, int first_column, int d, int h) {
    const Lines<false> rows = {y_swi + (long long)tile.first * h, h, tile.rows, h};
    const Lines<false> weights = {w3 + (long long)tile.expert * h * d + first_column, d, h, d - first_column};
    mma_matmul<Along::DEPTH, Along::SIDE>(products, h, rows, &weights);
}

// Calls visit(row, column, NEIGHBOURS products, load(row, column)) for the thread's part of the tile.
template <class Load, class Visit>
__device__ __forceinline__ void each_product(const Products& products, Load load, Visit visit) {
    using Loaded = decltype(load(0, 0));
    products.each(load, [&](int, int row, int column, const float (&values)[1][NEIGHBOURS], Loaded& loaded) {
        visit(row, column, values[0], loaded);
    });
}
#else
#include "tiled_matmul.cuh"

constexpr int TILE_ROWS = TILE, TILE_COLUMNS = TILE;
constexpr int NEIGHBOURS = 1;
using Products = Corners<1>;

struct Place {
    int row_tile, column_tile;
};
__device__ __forceinline__ Place place_of_block() { return {int(blockIdx.x), int(blockIdx.y)}; }

__device__ __forceinline__ void multiply_rows(Products& products, const Scalar* y_swi, const Scalar* w3,
                                              const RowTile& tile, int first_column, int d, int h) {
    tiled_matmul<Along::DEPTH, Along::SIDE>(
        products, h,
        [&](int row, int p) { return row < tile.rows ? to_float(y_swi[(long long)(tile.first + row) * h + p]) : 0.0f; },
        [&](int, int column, int p) {
            const int i = first_column + column;
            return i < d ? to_float(w3[((long long)tile.expert * h + p) * d + i]) : 0.0f;
        });
}

template <class Load, class Visit>
__device__ __forceinline__ void each_product(const Products& products, Load load, Visit visit) {
    products.each([&](int row, int column, float product, float) {
        const float values[NEIGHBOURS] = {product};
        auto loaded = load(row, column);
        visit(row, column, values, loaded);
    });
}
#endif

// ---- where the rows go -------------------------------------------------------------------------

// The token and the gate of each row of a tile; in shared memory.
struct Targets {
    int tokens[TILE_ROWS];
    float gates[TILE_ROWS];

    // For the whole block. The barriers of the product stand between this and the epilogue.
    __device__ __forceinline__ void read(const RowTile& tile, const int* expert_token_indices,
                                         const float* gate_of_row) {
        for (int row = threadIdx.x; row < tile.rows; row += THREADS) {
            tokens[row] = expert_token_indices[tile.first + row];
            gates[row] = gate_of_row[tile.first + row];
        }
    }
};

// Neighbouring columns of a token's sums, moved 16 bytes at a time.
struct TokenSums {
    static constexpr int PACKED = NEIGHBOURS < 4 ? NEIGHBOURS : 4;
    Pack<float, PACKED> packs[NEIGHBOURS / PACKED];

    __device__ __forceinline__ void load(const float* source) {
#pragma unroll
        for (int p = 0; p < NEIGHBOURS / PACKED; ++p) packs[p] = load_pack<PACKED>(source + p * PACKED);
    }
    __device__ __forceinline__ void add(float gate, const float (&products)[NEIGHBOURS]) {
#pragma unroll
        for (int i = 0; i < NEIGHBOURS; ++i) packs[i / PACKED].elements[i % PACKED] += gate * products[i];
    }
    __device__ __forceinline__ void store(float* target) const {
#pragma unroll
        for (int p = 0; p < NEIGHBOURS / PACKED; ++p) store_pack(target + p * PACKED, packs[p]);
    }
};
