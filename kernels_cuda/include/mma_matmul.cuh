// A block's matrix product on tensor cores: mma.sync, ldmatrix, cp.async. sm_80 and newer; SIMT executor.
//
// 256 threads multiply a tile A (128, depth) by one or two tiles B (depth, 64), 32 of the depth at
// a time, in three stages of shared memory: while one is multiplied the next two arrive. Eight
// warps, 4 x 2, own 32 x 32 of every result, in float32 registers.
#pragma once
#include "common.cuh"
#include "ptx.cuh"

constexpr int ROWS = 128, COLUMNS = 64;  // of a result
constexpr int DEPTH = 32;                // of a stage
constexpr int STAGES = 3;
constexpr int CHUNK = 8;  // elements of 16 bytes
constexpr int SIDE = 32;  // rows and columns of a warp's part
constexpr int MMA_THREADS = (ROWS / SIDE) * (COLUMNS / SIDE) * WARP;
static_assert(MMA_THREADS == THREADS, "one warp a part");

enum class Along { DEPTH, SIDE };  // the axis along which an operand's elements are neighbours in memory

// An operand's stage in shared memory: lines of chunks, in the order of global memory. Chunks of
// a line are permuted by its number, so that the eight rows of a matrix lie in different banks.
template <int EXTENT, Along ALONG>
struct Operand {
    static constexpr int LINES = ALONG == Along::DEPTH ? EXTENT : DEPTH;
    static constexpr int CHUNKS = (ALONG == Along::DEPTH ? DEPTH : EXTENT) / CHUNK;  // of a line
    static constexpr int SIZE = LINES * CHUNKS;

    static __device__ __forceinline__ int place(int line, int chunk) {
        const int key = CHUNKS >= 8 ? line % 8 : line / (8 / CHUNKS) % CHUNKS;
        return line * CHUNKS + (chunk ^ key);
    }

    // chunk_at(side, p): where eight elements begin, or null for zeros.
    template <class ChunkAt>
    static __device__ __forceinline__ void load(Chunk* stage, int first, int depth, ChunkAt chunk_at) {
        for (int i = threadIdx.x; i < SIZE; i += MMA_THREADS) {
            const int line = i / CHUNKS, chunk = i % CHUNKS;
            const int side = ALONG == Along::DEPTH ? line : chunk * CHUNK;
            const int p = first + (ALONG == Along::DEPTH ? chunk * CHUNK : line);
            const Scalar* const source = p < depth ? chunk_at(side, p) : nullptr;
            Chunk* const target = stage + place(line, chunk);
            if (source)
                cp_async(target, source);
            else
                *target = Chunk{{0, 0, 0, 0}};
        }
    }

    // Four 8 x 8 matrices, 2 x 2 of (side, p) from (side, p) on: matrix m is (m % 2, m / 2) if
    // SIDE_FIRST, else (m / 2, m % 2). Each is read so that a register holds neighbours along p.
    template <bool SIDE_FIRST>
    static __device__ __forceinline__ void fragments(unsigned (&registers)[4], const Chunk* stage, int side, int p) {
        const int matrix = lane_id() / 8, row = lane_id() % 8;
        side += (SIDE_FIRST ? matrix % 2 : matrix / 2) * 8;
        p += (SIDE_FIRST ? matrix / 2 : matrix % 2) * 8;
        if (ALONG == Along::DEPTH)
            ldmatrix_x4(registers, stage + place(side + row, p / CHUNK));
        else
            ldmatrix_x4_transposed(registers, stage + place(p + row, side / CHUNK));
    }
};

template <int RESULTS>
struct WarpResults {
    float values[RESULTS][SIDE / 16][SIDE / 8][4] = {};

    static __device__ __forceinline__ int first_row() { return warp_id() / (COLUMNS / SIDE) * SIDE; }
    static __device__ __forceinline__ int first_column() { return warp_id() % (COLUMNS / SIDE) * SIDE; }

    // Calls visit(row, column, values of every result) for the thread's elements of the tile.
    template <class Visit>
    __device__ __forceinline__ void each(Visit visit) const {
        const int row = first_row() + lane_id() / 4, column = first_column() + lane_id() % 4 * 2;
#pragma unroll
        for (int m = 0; m < SIDE / 16; ++m)
#pragma unroll
            for (int n = 0; n < SIDE / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    visit(row + 16 * m + i / 2 * 8, column + 8 * n + i % 2, values[0][m][n][i],
                          values[RESULTS - 1][m][n][i]);
    }
};

// results += A B for every result; a(row, p) and b(result, column, p) say where eight elements
// along the operand's axis begin, or null. p is a multiple of 8 along DEPTH, the side along SIDE.
// Needs STAGES * DEPTH * (ROWS + RESULTS * COLUMNS) * 2 bytes of dynamic shared memory.
template <Along A_ALONG, Along B_ALONG, int RESULTS, class A, class B>
__device__ void mma_matmul(WarpResults<RESULTS>& results, int depth, A a, B b) {
    using OperandA = Operand<ROWS, A_ALONG>;
    using OperandB = Operand<COLUMNS, B_ALONG>;
    constexpr int STAGE = OperandA::SIZE + RESULTS * OperandB::SIZE;
    DYNAMIC_SHARED(Chunk, shared);
    const int steps = (depth + DEPTH - 1) / DEPTH;

    auto load = [&](int step) {
        Chunk* const stage = shared + step % STAGES * STAGE;
        if (step < steps) {
            OperandA::load(stage, step * DEPTH, depth, a);
#pragma unroll
            for (int r = 0; r < RESULTS; ++r)
                OperandB::load(stage + OperandA::SIZE + r * OperandB::SIZE, step * DEPTH, depth,
                               [&](int side, int p) { return b(r, side, p); });
        }
        cp_async_commit();  // a group for every step, so that counting them tells what has arrived
    };

    for (int step = 0; step < STAGES - 1; ++step) load(step);
    for (int step = 0; step < steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // the stage has arrived for all, and all are done with the one before
        load(step + STAGES - 1);
        const Chunk* const stage = shared + step % STAGES * STAGE;
#pragma unroll
        for (int p = 0; p < DEPTH; p += 16) {
            unsigned a_fragments[SIDE / 16][4];
#pragma unroll
            for (int m = 0; m < SIDE / 16; ++m)
                OperandA::template fragments<true>(a_fragments[m], stage, results.first_row() + 16 * m, p);
#pragma unroll
            for (int r = 0; r < RESULTS; ++r)
#pragma unroll
                for (int n = 0; n < SIDE / 16; ++n) {
                    unsigned b_fragments[4];
                    OperandB::template fragments<false>(b_fragments, stage + OperandA::SIZE + r * OperandB::SIZE,
                                                        results.first_column() + 16 * n, p);
#pragma unroll
                    for (int m = 0; m < SIDE / 16; ++m) {
                        mma_m16n8k16<Scalar>(results.values[r][m][2 * n], a_fragments[m],
                                             {b_fragments[0], b_fragments[1]});
                        mma_m16n8k16<Scalar>(results.values[r][m][2 * n + 1], a_fragments[m],
                                             {b_fragments[2], b_fragments[3]});
                    }
                }
        }
    }
    cp_async_wait<0>();
    __syncthreads();  // the stages may be written again
}
