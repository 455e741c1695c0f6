// Weight gradients: tiles whose depth is an expert's rows, what loads them and what stores them. sm_90a.
#pragma once
#include "hopper/grouped_matmul.cuh"
#include "tile_lists.cuh"

// Shared memory with the list of the block's tiles of a weight gradient.
template <template <int> class Finished = FinishedRows>
struct WeightShared : Shared<4, 2, Finished> {
    TileList own_tiles;
};

// Part (128, 256) of one expert's weight gradient; the depth is the expert's rows.
struct WeightTile {
    int expert, row, column;
    int begin, end;  // rows in expert order
    int steps;
};

// The tiles that the block takes. All its threads compute the lists together, in the memory of finished tiles.
struct WeightTiles {
    using Tile = WeightTile;
    const TileList* own_tiles;
    const int* expert_token_offsets;
    int E, row_tiles, column_tiles, taken = 0;

    template <class Shared>
    __device__ __forceinline__ WeightTiles(Shared& shared, const int* expert_token_offsets, int E, int rows,
                                           int columns)
        : own_tiles(&shared.own_tiles),
          expert_token_offsets(expert_token_offsets),
          E(E),
          row_tiles((rows + TILE_ROWS - 1) / TILE_ROWS),
          column_tiles((columns + TILE_COLUMNS - 1) / TILE_COLUMNS) {
        static_assert(STEP == TILE_DEPTH && sizeof(TileAssignment) <= sizeof shared.finished, "see tile_lists.cuh");
        TileAssignment& assignment = *reinterpret_cast<TileAssignment*>(shared.finished);
        assign_tiles(shared.own_tiles, assignment, expert_token_offsets, E, row_tiles * column_tiles);
    }

    __device__ __forceinline__ bool next(WeightTile& tile) {
        const int number = own_tiles->tile(taken++), of_expert = row_tiles * column_tiles, expert = number / of_expert;
        if (expert >= E) return false;
        const int inside = number - expert * of_expert, column = inside / row_tiles;
        const int begin = expert_token_offsets[expert], end = expert_token_offsets[expert + 1];
        tile = {expert, (inside - column * row_tiles) * TILE_ROWS,  column * TILE_COLUMNS, begin,
                end,    (end - begin + TILE_DEPTH - 1) / TILE_DEPTH};
        return true;
    }
};

// An operand whose depth is rows of a matrix, WIDTH of their columns: a warp brings chunk t % CHUNKS of rows. From one
// row to the next are `pitch` elements, the first `width` of them the row's.
template <int WIDTH>
struct DepthRows {
    static constexpr int CHUNKS = WIDTH / CHUNK, AT_ONCE = WARPGROUP / CHUNKS, COUNT = TILE_DEPTH / AT_ONCE;
    static constexpr int PERIOD = 8 / AT_ONCE;  // rows this far apart are swizzled alike
    const char* source;
    unsigned row_bytes;
    int targets[PERIOD];
    bool inside;

    __device__ __forceinline__ DepthRows(const Scalar* matrix, int width, int pitch, int column) {
        const int chunk = threadIdx.x % CHUNKS, at = column + chunk * CHUNK;
        inside = at < width;
        source = reinterpret_cast<const char*>(matrix + (inside ? at : 0));
        row_bytes = pitch * 2;
#pragma unroll
        for (int i = 0; i < PERIOD; ++i) targets[i] = chunk / 8 * PANEL_BYTES + swizzled(row(i), chunk % 8);
    }
    // The thread's i-th row in the stage.
    static __device__ __forceinline__ int row(int i) { return threadIdx.x / CHUNKS + i * AT_ONCE; }

    // A step whose i-th row is row number(i) of the matrix.
    template <class Number>
    __device__ __forceinline__ void load(unsigned char* panels, Number number) const {
        constexpr int BATCH = 8;
#pragma unroll
        for (int first = 0; first < COUNT; first += BATCH) {
            const void* sources[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                sources[i] = source + (unsigned long long)(unsigned)number(first + i) * row_bytes;
#pragma unroll
            for (int i = 0; i < BATCH; ++i)  // a period of the swizzle is 8 rows of 128 bytes
                cp_async_or_zero(panels + targets[(first + i) % PERIOD] + (first + i) / PERIOD * 1024, sources[i],
                                 inside);
        }
    }
    // The same of the first `rows` rows, zeros below: an expert's last step, so it need not be fast.
    template <class Number>
    __device__ __forceinline__ void load(unsigned char* panels, int rows, Number number) const {
        const int chunk = threadIdx.x % CHUNKS;
#pragma unroll 1
        for (int i = 0; i < COUNT; ++i)
            cp_async_or_zero(panels + chunk / 8 * PANEL_BYTES + swizzled(row(i), chunk % 8),
                             source + (unsigned long long)(unsigned)number(i) * row_bytes, inside && row(i) < rows);
    }
};

// Stores epilogue tiles that are FinishedColumns, the tile's columns as rows: column 0 begins at `place`; so many
// columns are there, and so many of their rows.
template <class Epilogue>
__device__ __forceinline__ void store_transposed(const Epilogue& epilogue, Scalar* place, int width, int columns,
                                                 int rows) {
#pragma unroll 1
    for (int i = 0; i < Epilogue::COUNT; ++i) {
        auto& finished = epilogue.take(i);
        constexpr int COLUMNS = sizeof finished.lines / sizeof finished.lines[0], CHUNKS = WARP_ROWS / CHUNK;
        const int chunk = lane_id() % CHUNKS, row = epilogue.row(i) + chunk * CHUNK;
        if (row < rows)
#pragma unroll 4
            for (int column = lane_id() / CHUNKS; column < min(COLUMNS, columns); column += WARP / CHUNKS)
                *reinterpret_cast<Chunk*>(place + (long long)column * width + row) = finished.at(column, chunk);
        epilogue.give_back(i);
    }
}

struct StoreWeights {
    Scalar* weights;
    int rows, width;
    template <class Epilogue>
    __device__ __forceinline__ void operator()(const WeightTile& tile, int column, const Epilogue& epilogue) const {
        column += tile.column;
        Scalar* const place = weights + ((long long)tile.expert * rows + tile.row) * width + column;
        store_plain(epilogue, place, width, rows - tile.row, width - column);
    }
};
struct StoreTransposedWeights {
    Scalar* weights;
    int rows, width;
    template <class Epilogue>
    __device__ __forceinline__ void operator()(const WeightTile& tile, int column, const Epilogue& epilogue) const {
        column += tile.column;
        Scalar* const place = weights + ((long long)tile.expert * rows + column) * width + tile.row;
        store_transposed(epilogue, place, width, rows - column, width - tile.row);
    }
};

// A step of a weight gradient: rows of A are gathered, those of B lie in expert order and come by TMA, but for the last
// step, which must end where the expert does.
struct GatheredAndPlain {
    using Gathered = DepthRows<TILE_ROWS>;
    using Plain = DepthRows<TILE_COLUMNS>;
    static constexpr int TOGETHER = WARP / Gathered::CHUNKS;  // rows at once in a warp

    const WeightTile tile;
    Gathered gathered;
    Plain plain;
    const TensorMap& plain_map;
    const int* tokens;  // of the expert
    int now, later;     // a token a lane: of this step (and the next, if it is even), and of the two after them

    __device__ __forceinline__ GatheredAndPlain(const WeightTile& tile, const Scalar* gathered, int gathered_width,
                                                int gathered_pitch, const TensorMap& plain_map, const Scalar* plain,
                                                int plain_width, int plain_pitch, const int* expert_token_indices)
        : tile(tile),
          gathered(gathered, gathered_width, gathered_pitch, tile.row),
          plain(plain, plain_width, plain_pitch, tile.column),
          plain_map(plain_map),
          tokens(expert_token_indices + tile.begin),
          now(0),
          later(tile.steps > 0 ? read(0) : 0) {}

    // Of the 16 rows that this warp brings in a step: lane l reads the token of row l % 16 in step + l / 16.
    __device__ __forceinline__ int read(int step) const {
        const int i = lane_id() % 16;
        const int row = (step + lane_id() / 16) * TILE_DEPTH + warp_id() * TOGETHER + i % TOGETHER +
                        i / TOGETHER * Gathered::AT_ONCE;
        return tokens[min(row, tile.end - tile.begin - 1)];
    }

    __device__ __forceinline__ void operator()(int step, Stage& stage, Barrier* full) {
        const int left = tile.end - tile.begin - step * TILE_DEPTH;
        const bool whole = left >= TILE_DEPTH;
        if (step % 2 == 0) {
            now = later;
            later = read(step + 2);
        } else
            now = __shfl_down_sync(FULL_WARP, now, 16);
        auto token = [&](int i) { return __shfl_sync(FULL_WARP, now, i * TOGETHER + lane_id() / Gathered::CHUNKS); };
        if (whole)
            gathered.load(stage.a, token);
        else {
            gathered.load(stage.a, left, token);
            plain.load(stage.b, left,
                       [&](int i) { return min(tile.begin + step * TILE_DEPTH + plain.row(i), tile.end - 1); });
        }
        if (threadIdx.x == 0) {
            barrier_arrive_expecting(full, whole ? B_BYTES : 0);
            if (whole)
#pragma unroll
                for (int panel = 0; panel < TILE_COLUMNS / PANEL; ++panel)
                    tma_load(stage.b + panel * PANEL_BYTES, &plain_map, full, tile.column + panel * PANEL,
                             tile.begin + step * TILE_DEPTH);
        }
    }
};
