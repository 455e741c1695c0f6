// A block's matrix product through shared memory, in float32. Runs everywhere.
//
// 256 threads multiply a tile A (64, depth) by one or two tiles B (depth, 64), 16 of the depth
// at a time; each thread keeps a 4 x 4 corner of every result in registers, so an element that
// is read from shared memory is used four times.
#pragma once
#include "common.cuh"

constexpr int TILE = 64;        // rows and columns of a result
constexpr int TILE_DEPTH = 16;  // of the depth in shared memory at a time
constexpr int CORNER = 4;       // rows and columns of one thread
constexpr int TILE_THREADS = (TILE / CORNER) * (TILE / CORNER);
static_assert(TILE_THREADS == THREADS, "one thread a corner");

enum class Along { DEPTH, SIDE };  // the axis along which an operand's elements are neighbours in memory

// element(side, depth) -> float, copied so that neighbouring threads read neighbouring elements.
template <Along ALONG, class Element>
__device__ __forceinline__ void load_tile(float (&tile)[TILE_DEPTH][TILE + CORNER], int first, int depth,
                                          Element element) {
    for (int i = threadIdx.x; i < TILE * TILE_DEPTH; i += TILE_THREADS) {
        const int side = ALONG == Along::DEPTH ? i / TILE_DEPTH : i % TILE;
        const int p = ALONG == Along::DEPTH ? i % TILE_DEPTH : i / TILE;
        tile[p][side] = first + p < depth ? element(side, first + p) : 0.0f;
    }
}

template <int RESULTS>
struct Corners {
    float values[RESULTS][CORNER][CORNER] = {};

    // Calls visit(row, column, values of every result) for the thread's elements of the tile.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const int row = threadIdx.x / (TILE / CORNER) * CORNER, column = threadIdx.x % (TILE / CORNER) * CORNER;
#pragma unroll
        for (int i = 0; i < CORNER; ++i)
#pragma unroll
            for (int j = 0; j < CORNER; ++j) visit(row + i, column + j, values[0][i][j], values[RESULTS - 1][i][j]);
    }
};

// corners += A B for every result: a(row, p) and b(result, column, p) give elements, zero outside.
template <Along A_ALONG, Along B_ALONG, int RESULTS, class A, class B>
__device__ void tiled_matmul(Corners<RESULTS>& corners, int depth, A a, B b) {
    __shared__ float a_tile[TILE_DEPTH][TILE + CORNER];
    __shared__ float b_tile[RESULTS][TILE_DEPTH][TILE + CORNER];
    const int row = threadIdx.x / (TILE / CORNER) * CORNER, column = threadIdx.x % (TILE / CORNER) * CORNER;
    for (int first = 0; first < depth; first += TILE_DEPTH) {
        load_tile<A_ALONG>(a_tile, first, depth, a);
        for (int r = 0; r < RESULTS; ++r)
            load_tile<B_ALONG>(b_tile[r], first, depth, [&](int side, int p) { return b(r, side, p); });
        __syncthreads();
        for (int p = 0; p < TILE_DEPTH; ++p)
#pragma unroll
            for (int r = 0; r < RESULTS; ++r)
#pragma unroll
                for (int i = 0; i < CORNER; ++i)
#pragma unroll
                    for (int j = 0; j < CORNER; ++j)
                        corners.values[r][i][j] += a_tile[p][row + i] * b_tile[r][p][column + j];
        __syncthreads();  // all have read before the tiles are written again
    }
}
