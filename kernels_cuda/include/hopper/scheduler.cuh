// The tile scheduler: which tiles a persistent block takes, and in which order. sm_90a.
#pragma once
#include "hopper/ring.cuh"

#ifndef BAND
#define BAND 8  // row tiles that are worked on side by side: they share B in the L2 cache
#endif

// Part (128, width) of the rows of one expert and of the columns.
struct RowTile {
    int expert, first, rows, column;  // first row in expert order, and how many there are: fewer than 128 at the end
    int steps;
};

// Where a block stands in the tiles of all experts, expert after expert.
struct RowTiles {
    using Tile = RowTile;
    const int* expert_token_offsets;
    int E, column_tiles, width, steps;
    int number, expert = 0, first = 0;  // the next tile; its expert and that expert's first tile
    int begin, end;                     // the expert's rows in expert order

    __device__ __forceinline__ RowTiles(const int* expert_token_offsets, int E, int columns, int width, int depth)
        : expert_token_offsets(expert_token_offsets),
          E(E),
          column_tiles((columns + width - 1) / width),
          width(width),
          steps((depth + TILE_DEPTH - 1) / TILE_DEPTH),
          number(blockIdx.x),
          begin(0),
          end(expert_token_offsets[1]) {}

    __device__ __forceinline__ int row_tiles() const { return (end - begin + TILE_ROWS - 1) / TILE_ROWS; }

    // The block's next tile, if there is one.
    __device__ __forceinline__ bool next(RowTile& tile) {
        for (int tiles = row_tiles() * column_tiles; number >= first + tiles; tiles = row_tiles() * column_tiles) {
            if (++expert == E) return false;
            first += tiles;
            begin = end;
            end = expert_token_offsets[expert + 1];
        }
        // In bands of row tiles, down each column of a band.
        const int inside = number - first, band = inside / (BAND * column_tiles);
        const int high = min(BAND, row_tiles() - band * BAND);
        const int at = inside - band * BAND * column_tiles, column = at / high;
        const int row = (band * BAND + at - column * high) * TILE_ROWS;
        tile = {expert, begin + row, min(TILE_ROWS, end - begin - row), column * width, steps};
        number += gridDim.x;
        return true;
    }
};
