// The loads of a block: its tile of the result, and stages of both operands in shared memory, by cp.async.
// sm_80 and newer; SIMT executor.
//
// Constants    Scalar; THREADS, all of which copy; TILE_DEPTH of a stage; BAND.
#pragma once
#include "chunk.cuh"
#include "common.cuh"
#include "ptx.cuh"

constexpr bool TF32 = sizeof(Scalar) == 4;  // floats are rounded to 10 bits of mantissa before they are multiplied

// ---- tiles -----------------------------------------------------------------------------------

// Which tile of the result a block computes.
struct Place {
    int row_tile, column_tile;
};

// Blocks start in the order of their numbers. Those that run at the same time share operands in the L2 cache if the
// tiles are taken in bands of BAND row tiles, down each column of a band.
__device__ __forceinline__ Place place_in_bands() {
    const int number = blockIdx.x + gridDim.x * blockIdx.y, size = BAND * gridDim.y;
    const int band = number / size, inside = number - band * size;
    const int high = min(BAND, int(gridDim.x) - band * BAND), column = inside / high;
    return {band * BAND + inside - column * high, column};
}

// ---- operands --------------------------------------------------------------------------------

// The lines of an operand in global memory: of a matrix, or those of them that a list names. Beyond are zeros.
template <bool GATHERED>
struct Lines {
    const Scalar* matrix;
    int pitch;         // elements from one line of the matrix to the next
    int count, width;  // lines, and elements of each
    const int* list = nullptr;

    // The line's number in the matrix, or -1. A list is read here, one step ahead of the line itself.
    __device__ __forceinline__ int number(int line) const { return line < count ? (GATHERED ? list[line] : line) : -1; }
    // Where a line's elements from `at` on begin, or null.
    __device__ __forceinline__ const Scalar* chunk(int number, int at) const {
        return number >= 0 && at < width ? matrix + (long long)number * pitch + at : nullptr;
    }
};

// The lines of two matrices of one shape, the second behind the first along the depth, from a whole step on.
struct TwofoldLines {
    Lines<false> lines;  // of the first
    const Scalar* second;
    int first_depth;  // a multiple of TILE_DEPTH

    __device__ __forceinline__ int number(int line) const { return lines.number(line); }
    __device__ __forceinline__ const Scalar* chunk(int number, int at) const {
        Lines<false> chosen = lines;
        if (at >= first_depth) chosen.matrix = second, at -= first_depth;
        return chosen.chunk(number, at);
    }
};

enum class Along { DEPTH, SIDE };  // the axis along which an operand's elements are neighbours in memory

// An operand's stage in shared memory: lines of chunks, in the order of global memory. Chunks of a line are permuted
// by its number, so that what a warp reads at once lies in different banks.
template <int EXTENT, Along ALONG>
struct Operand {
    static constexpr int LINES = ALONG == Along::DEPTH ? EXTENT : TILE_DEPTH;
    static constexpr int CHUNKS = (ALONG == Along::DEPTH ? TILE_DEPTH : EXTENT) / CHUNK;  // of a line
    static constexpr int SIZE = LINES * CHUNKS;
    static constexpr bool TURNED = ALONG == Along::SIDE && !TF32;  // by ldmatrix, which turns elements of 16 bits

    static __device__ __forceinline__ int place(int line, int chunk) {
        // A pass reads one chunk of eight lines or, of elements that ldmatrix cannot turn, two chunks of four.
        const int turn = ALONG == Along::SIDE && !TURNED ? 2 * line : line;
        const int key = CHUNKS >= 8 ? turn % 8 : turn / (8 / CHUNKS) % CHUNKS;
        return line * CHUNKS + (chunk ^ key);
    }

    // Four matrices, 2 x 2 of (side, p) from (side, p) on, each 8 of the side by 16 bytes of the depth: matrix m is
    // (m % 2, m / 2) if SIDE_FIRST, else (m / 2, m % 2). A register holds 4 bytes along the depth.
    template <bool SIDE_FIRST>
    static __device__ __forceinline__ void fragments(unsigned (&registers)[4], const Chunk* stage, int side, int p) {
        const int matrix = lane_id() / 8, row = lane_id() % 8;
        const int my_side = side + (SIDE_FIRST ? matrix % 2 : matrix / 2) * 8;
        const int my_p = p + (SIDE_FIRST ? matrix / 2 : matrix % 2) * CHUNK;
        if (ALONG == Along::DEPTH)
            ldmatrix_x4(registers, stage + place(my_side + row, my_p / CHUNK));
        else if (TURNED)
            ldmatrix_x4_transposed(registers, stage + place(my_p + row, my_side / CHUNK));
        else
            read_turned<SIDE_FIRST>(registers, stage, side + lane_id() / 4, p + lane_id() % 4);
        if (TF32) {
#pragma unroll
            for (int m = 0; m < 4; ++m) registers[m] = to_tf32(registers[m]);
        }
    }

    // Reads as ldmatrix would, with elements of 32 bits along the side.
    template <bool SIDE_FIRST>
    static __device__ __forceinline__ void read_turned(unsigned (&registers)[4], const Chunk* stage, int side, int p) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            const int at = side + (SIDE_FIRST ? m % 2 : m / 2) * 8, line = p + (SIDE_FIRST ? m / 2 : m % 2) * CHUNK;
            registers[m] = stage[place(line, at / CHUNK)].words[at % CHUNK];
        }
    }
};

// The copies of one thread in every stage of an operand.
template <class Operand, Along ALONG, class Source>
struct Copies {
    static constexpr int COUNT = Operand::SIZE / THREADS;
    static_assert(Operand::SIZE % THREADS == 0, "every thread copies as much");
    Source source;
    int numbers[COUNT];  // of the lines that come next

    __device__ __forceinline__ void open(const Source& lines) {
        source = lines;
        look_up(0);
    }

    static __device__ __forceinline__ int line(int i) { return (threadIdx.x + i * THREADS) / Operand::CHUNKS; }
    static __device__ __forceinline__ int chunk(int i) { return (threadIdx.x + i * THREADS) % Operand::CHUNKS; }

    __device__ __forceinline__ void look_up(int first) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) numbers[i] = source.number(first + line(i));
    }
    // The stage that begins at `first` of the depth.
    __device__ __forceinline__ void start(Chunk* stage, int first) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int at = chunk(i) * CHUNK + (ALONG == Along::DEPTH ? first : 0);
            const Scalar* const begin = source.chunk(numbers[i], at);
            cp_async_or_zero(stage + Operand::place(line(i), chunk(i)), begin, begin != nullptr);
        }
        if (ALONG == Along::SIDE) look_up(first + TILE_DEPTH);
    }
};
