// block_sparse, version 7: persistent blocks.
//
// Purpose      The three products of block-sparse (S) and dense (D) matrices, the result first: SDD, DSD, DDS.
// Source       MegaBlocks (arXiv 2211.15841), sections 5.1, 5.1.3 and 5.1.4.
// Idea         The products of version 3 on grouped_matmul. A block's values lie together: to the copy engine they are
//              a matrix of its own, so that every operand comes by TMA, 64 by 64 elements at a time, whichever block is
//              next. A tile of 128 rows is part of one block row; DDS is computed as D S = (S^T D^T)^T, so that its
//              tiles, too, meet the blocks of one block column only, and is turned round as it is stored.
// Runs on      sm_90a; SIMT executor.
// Constants    Scalar, __half or __nv_bfloat16; BLOCK, a multiple of 128; TRANSPOSE_LHS and TRANSPOSE_RHS;
//              BAND, see hopper/scheduler.cuh. K is a multiple of 8.
// Determinism  Same input, same bits: each output element has one writer, sums have a fixed order.
//
// kernel  grid             block  shared bytes  bytes read                                       bytes written
// sdd     multiprocessors  512    230592        3080 (M / 128 blocks + Q) + (8 + 768 K) tiles    2 V
// dsd     multiprocessors  512    230592        2056 rows / 128 C + 2 V C + 2 H K P + 4 I n P C  2 rows K
// dds     multiprocessors  512    230592        2056 N / 128 C + 2 V C + 2 H K P + 8 n P C       2 N K
// S is a matrix (M, N) of n blocks, which have H = n BLOCK lines and V = H BLOCK values. SDD has a depth K, the others
// a dense width K. Of dsd, rows are M, or N with TRANSPOSE_LHS; I = 1 + TRANSPOSE_LHS indices lead to a block. There
// are P = BLOCK / 128 tiles down a block and C = ceil(K / 256) along K. tiles are those of sdd, P ceil(BLOCK m / 256)
// in a block row of m blocks, and Q their places in bands of BAND rows, each as wide as its widest row; blocks is the
// whole grid. Threads that follow the tiles read both ends of a block row or column, epilogue warps only in sdd.
// 2 V K FLOPs each. Bound: tensor cores.
constexpr int SIDE = BLOCK;  // WarpRoles has a BLOCK of its own
#undef BLOCK
#include "hopper/gradients.cuh"
#include "hopper/grouped_matmul.cuh"
#include "sparse.cuh"

static_assert(SIDE % TILE_ROWS == 0, "a tile's rows are those of one block");
constexpr int TILES_DOWN = SIDE / TILE_ROWS;             // a block
constexpr int STEPS_OF_BLOCK = SIDE / TILE_DEPTH;        // if it is the depth
constexpr int HALVES = 2, HALF = TILE_COLUMNS / HALVES;  // of a tile's columns: what epilogue warps store at once

template <template <int> class Finished>
using SparseShared = Shared<4, HALVES, Finished>;
template <bool A_ALONG_M, bool B_ALONG_N>
using SparseRoles = WarpRoles<4, 4, false, A_ALONG_M, B_ALONG_N>;

// ---- tiles ----

// Where a block stands in rows of tiles: in bands of rows, down each column of a band, which is as wide as the widest
// of its rows.
template <class Width>
struct Bands {
    Width width;  // tiles of a row
    int rows, number = blockIdx.x;
    int top = -BAND, high = 0, wide = 0;  // the band: its first row, its tiles

    __device__ __forceinline__ bool next(int& row, int& column) {
        while (number >= high * wide) {
            number -= high * wide;
            top += BAND;
            if (top >= rows) return false;
            high = min(BAND, rows - top);
            wide = 0;
            for (int i = 0; i < high; ++i) wide = max(wide, width(top + i));
        }
        column = number / high;
        row = top + number - column * high;
        number += gridDim.x;
        return true;
    }
};

// Part (128, 256) of a dense result: rows from one block row or block column of S, whose blocks are the depth.
template <bool BY_COLUMN>
struct DenseTile {
    Blocks<BY_COLUMN> blocks;
    int row, line, column;  // the first one of the result, of the blocks, and of the other operand
    int steps;
};

struct SameWidth {
    int columns;
    __device__ __forceinline__ int operator()(int) const { return (columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }
};

template <bool BY_COLUMN>
struct DenseTiles {
    using Tile = DenseTile<BY_COLUMN>;
    const int *offsets, *others, *order;
    Bands<SameWidth> bands;

    __device__ __forceinline__ bool next(Tile& tile) {
        int row, column;
        if (!bands.next(row, column)) return false;
        const auto blocks = blocks_of<BY_COLUMN>(offsets, others, order, row / TILES_DOWN);
        tile = {blocks, row * TILE_ROWS, row % TILES_DOWN * TILE_ROWS, column * TILE_COLUMNS,
                blocks.count * STEPS_OF_BLOCK};
        return true;
    }
};

// Part (128, 256) of the blocks of a block row, as they lie beside each other; the last one may be half empty.
struct StoredTile {
    Blocks<false> blocks;
    int row, line, column;  // the first one of the dense operand, of the blocks, and in their row
    int steps;
};

struct StoredWidth {
    const int* row_offsets;
    __device__ __forceinline__ int operator()(int row) const {
        const auto blocks = blocks_of<false>(row_offsets, nullptr, nullptr, row / TILES_DOWN);
        return (blocks.count * SIDE + TILE_COLUMNS - 1) / TILE_COLUMNS;
    }
};

struct StoredTiles {
    using Tile = StoredTile;
    const int *row_offsets, *column_indices;
    int steps;
    Bands<StoredWidth> bands;

    __device__ __forceinline__ bool next(Tile& tile) {
        int row, column;
        while (bands.next(row, column)) {
            const auto blocks = blocks_of<false>(row_offsets, column_indices, nullptr, row / TILES_DOWN);
            tile = {blocks, row * TILE_ROWS, row % TILES_DOWN * TILE_ROWS, column * TILE_COLUMNS, steps};
            if (tile.column < blocks.count * SIDE) return true;  // a row may be shorter than its band
        }
        return false;
    }
};

// ---- loading ----

// EXTENT of an operand's rows or columns by 64 of the depth: neighbours in memory along the side, or along the depth.
template <int EXTENT, bool ALONG_SIDE>
__device__ __forceinline__ void load_panels(unsigned char* panels, const TensorMap& map, Barrier* full, int side,
                                            int depth, int matrix) {
#pragma unroll
    for (int at = 0; at < EXTENT; at += PANEL)
        tma_load(panels + at / PANEL * PANEL_BYTES, &map, full, ALONG_SIDE ? side + at : depth,
                 ALONG_SIDE ? depth : side + at, matrix);
}

// The depth of a dense tile: block after block, and what each meets of D, in parts of `part` along the depth.
template <class Roles>
struct SparseSteps {
    const DenseTile<Roles::A_ALONG_M> tile;
    const TensorMap &values, &dense;
    int part;
    int number, other, next_number, next_other;  // of this block and the next

    __device__ __forceinline__ SparseSteps(const DenseTile<Roles::A_ALONG_M>& tile, const TensorMap& values,
                                           const TensorMap& dense, int part)
        : tile(tile), values(values), dense(dense), part(part) {
        read(0);
    }
    // Indices come long before they are needed.
    __device__ __forceinline__ void read(int i) {
        if (i >= tile.blocks.count) return;
        next_number = tile.blocks.number(i);
        next_other = tile.blocks.others[next_number];
    }

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) {
        const int i = step / STEPS_OF_BLOCK, p = step % STEPS_OF_BLOCK * TILE_DEPTH;
        if (p == 0) number = next_number, other = next_other;
        const int depth = other * SIDE + p;
        barrier_arrive_expecting(full, A_BYTES + B_BYTES);
        load_panels<TILE_ROWS, Roles::A_ALONG_M>(stage.a, values, full, tile.line, p, number);
        load_panels<TILE_COLUMNS, Roles::B_ALONG_N>(stage.b, dense, full, tile.column, depth % part, depth / part);
        if (p == 0) read(i + 1);
    }
};

// The depth of a tile of stored blocks. Its columns are those of the blocks' columns, in parts of `part`.
template <class Roles>
struct DenseSteps {
    const StoredTile tile;
    const TensorMap &lhs, &rhs;
    int columns[HALVES], parts[HALVES];

    __device__ __forceinline__ DenseSteps(const StoredTile& tile, const TensorMap& lhs, const TensorMap& rhs, int part)
        : tile(tile), lhs(lhs), rhs(rhs) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int at = tile.column + half * HALF;
            const int i = min(at / SIDE, tile.blocks.count - 1);  // again if there is none: no one stores its results
            const int column = tile.blocks.other(i) * SIDE + at % SIDE;
            columns[half] = column % part, parts[half] = column / part;
        }
    }

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) const {
        const int p = step * TILE_DEPTH;
        barrier_arrive_expecting(full, A_BYTES + B_BYTES);
        load_panels<TILE_ROWS, false>(stage.a, lhs, full, tile.row, p, 0);
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            load_panels<HALF, Roles::B_ALONG_N>(stage.b + half * (B_BYTES / HALVES), rhs, full, columns[half], p,
                                                parts[half]);
    }
};

// ---- storing ----

struct StoreBlocks {
    Scalar* values;
    template <class Epilogue>
    __device__ __forceinline__ void operator()(const StoredTile& tile, int column, const Epilogue& epilogue) const {
        column += tile.column;
        const int i = column / SIDE;
        Scalar* const place = values + ((long long)(tile.blocks.first + i) * SIDE + tile.line) * SIDE;
        store_plain(epilogue, place + column % SIDE, SIDE, TILE_ROWS, i < tile.blocks.count ? HALF : 0);
    }
};

template <bool BY_COLUMN>
struct StoreDense {
    Scalar* result;
    int width;
    template <class Epilogue>
    __device__ __forceinline__ void operator()(const DenseTile<BY_COLUMN>& tile, int column,
                                               const Epilogue& epilogue) const {
        column += tile.column;
        store_plain(epilogue, result + (long long)tile.row * width + column, width, TILE_ROWS, width - column);
    }
};

// A tile's columns as rows of the result, which has K of them, in parts of `width` columns.
struct StoreTurned {
    Scalar* result;
    int K, width;

    template <class Epilogue>
    __device__ __forceinline__ void operator()(const DenseTile<true>& tile, int column,
                                               const Epilogue& epilogue) const {
        column += tile.column;
        Scalar* const place = result + Dense{nullptr, K, width}.at(column, tile.row);
        store_transposed(epilogue, place, width, K - column, TILE_ROWS);
    }
};

// ---- the products ----

// Section 5.1. Parts of rhs, and its transpose, have `part` columns of the result.
using StoredRoles = SparseRoles<false, !TRANSPOSE_RHS>;
extern "C" __global__ void __launch_bounds__(StoredRoles::BLOCK, 1)
    sdd(const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap rhs, const int* row_offsets,
        const int* column_indices, Scalar* values, int M, int K, int part) {
    grouped_matmul<StoredRoles>(
        shared_memory<SparseShared<FinishedRows>>(),
        StoredTiles{row_offsets, column_indices, (K + TILE_DEPTH - 1) / TILE_DEPTH, {{row_offsets}, M / TILE_ROWS}},
        [&](const StoredTile& tile) { return DenseSteps<StoredRoles>(tile, lhs, rhs, part); }, StoreBlocks{values});
}

// Section 5.1. Parts of rhs have `part` of the depth.
using DenseRoles = SparseRoles<TRANSPOSE_LHS, !TRANSPOSE_RHS>;
extern "C" __global__ void __launch_bounds__(DenseRoles::BLOCK, 1)
    dsd(const __grid_constant__ TensorMap values, const __grid_constant__ TensorMap rhs, const int* offsets,
        const int* others, const int* transpose_indices, Scalar* result, int rows, int K, int part) {
    grouped_matmul<DenseRoles>(
        shared_memory<SparseShared<FinishedRows>>(),
        DenseTiles<TRANSPOSE_LHS>{offsets, others, transpose_indices, {{K}, rows / TILE_ROWS}},
        [&](const DenseTile<TRANSPOSE_LHS>& tile) { return SparseSteps<DenseRoles>(tile, values, rhs, part); },
        StoreDense<TRANSPOSE_LHS>{result, K});
}

// Section 5.1, as S^T D^T.
using TurnedRoles = SparseRoles<true, TRANSPOSE_LHS>;
extern "C" __global__ void __launch_bounds__(TurnedRoles::BLOCK, 1)
    dds(const __grid_constant__ TensorMap lhs, const __grid_constant__ TensorMap values, const int* column_offsets,
        const int* row_indices, const int* transpose_indices, Scalar* result, int M, int K, int N, int width) {
    grouped_matmul<TurnedRoles>(
        shared_memory<SparseShared<FinishedColumns>>(),
        DenseTiles<true>{column_offsets, row_indices, transpose_indices, {{K}, N / TILE_ROWS}},
        [&](const DenseTile<true>& tile) { return SparseSteps<TurnedRoles>(tile, values, lhs, M); },
        StoreTurned{result, K, width});
}
