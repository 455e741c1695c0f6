// The epilogue warps: what consumers have finished, from shared memory to global memory. sm_90a.
#pragma once
#include "hopper/ring.cuh"
#include "hopper/scheduler.cuh"

constexpr int WARP_ROWS = 16;  // of a tile, in a consumer's warp
constexpr int EPILOGUE_TILES = TILE_ROWS / WARP_ROWS;

// An epilogue tile: 16 rows of a tile that one warp of a consumer has finished. It writes them, an epilogue warp reads
// them.
template <int COLUMNS>
struct FinishedRows {
    Chunk lines[WARP_ROWS][COLUMNS / CHUNK];

    __device__ __forceinline__ Chunk& at(int row, int chunk) { return lines[row][chunk ^ row % 8]; }
};
// The same epilogue tile transposed: of each column the 16 rows side by side, in two chunks.
template <int COLUMNS>
struct FinishedColumns {
    Chunk lines[COLUMNS][WARP_ROWS / CHUNK];

    __device__ __forceinline__ Chunk& at(int column, int half) { return lines[column][half ^ column / 4 % 2]; }
};

// The epilogue tiles of one epilogue warp, of a part of a tile: every EPILOGUE_WARPS-th.
template <class Roles, class Shared>
struct EpilogueTiles {
    static constexpr int COUNT = EPILOGUE_TILES / Roles::EPILOGUE_WARPS;
    Shared& shared;
    unsigned parity;

    static __device__ __forceinline__ int number(int i) {
        return warp_id() - Roles::PRODUCER_WARPS + i * Roles::EPILOGUE_WARPS;
    }
    // The i-th epilogue tile's first row in the tile.
    static __device__ __forceinline__ int row(int i) { return number(i) * WARP_ROWS; }
    // Waits until the consumer has finished it.
    __device__ __forceinline__ auto& take(int i) const {
        barrier_wait(&shared.done[number(i)], parity);
        return shared.finished[number(i)];
    }
    __device__ __forceinline__ void give_back(int i) const {
        __syncwarp();
        if (lane_id() == 0) barrier_arrive(&shared.stored[number(i)]);
    }
};

// Calls store(tile, column, epilogue) for every part of every tile: its first column in the tile. It must
// take each epilogue tile and give it back.
template <class Roles, class Shared, class Tiles, class Store>
__device__ __forceinline__ void store_tiles(Shared& shared, Tiles tiles, Store store) {
    unsigned parity = 0;
    typename Tiles::Tile tile;
    while (tiles.next(tile))
#pragma unroll 1
        for (int part = 0; part < Shared::PARTS; ++part, parity ^= 1)
            store(tile, part * TILE_COLUMNS / Shared::PARTS, EpilogueTiles<Roles, Shared>{shared, parity});
}

// Stores epilogue tiles as they are, a warp for some rows at once: row 0 of the tile begins at `place`; `count` of its
// rows are there, and so many columns.
template <class Epilogue>
__device__ __forceinline__ void store_plain(const Epilogue& epilogue, Scalar* place, int width, int count,
                                            int columns) {
#pragma unroll 1
    for (int i = 0; i < Epilogue::COUNT; ++i) {
        auto& finished = epilogue.take(i);
        constexpr int CHUNKS = sizeof finished.lines[0] / sizeof(Chunk), AT_ONCE = WARP / CHUNKS;
        const int chunk = lane_id() % CHUNKS, first = epilogue.row(i);
        if (chunk * CHUNK < columns)
#pragma unroll 4
            for (int row = lane_id() / CHUNKS; row < min(WARP_ROWS, count - first); row += AT_ONCE)
                *reinterpret_cast<Chunk*>(place + (long long)(first + row) * width + chunk * CHUNK) =
                    finished.at(row, chunk);
        epilogue.give_back(i);
    }
}

struct StoreRows {
    Scalar* rows;
    int width;
    template <class Epilogue>
    __device__ __forceinline__ void operator()(const RowTile& tile, int column, const Epilogue& epilogue) const {
        column += tile.column;
        store_plain(epilogue, rows + (long long)tile.first * width + column, width, tile.rows, width - column);
    }
};
