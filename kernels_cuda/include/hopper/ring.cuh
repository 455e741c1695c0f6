// What a block loads: stages of a ring in shared memory, whose operands lie in panels under the 128-byte swizzle.
// sm_90a.
//
// Constants    Scalar, 16 bits; TILE_ROWS and TILE_COLUMNS of a tile of the result, TILE_DEPTH of a stage.
#pragma once
#include "hopper/barrier.cuh"
#include "hopper/wgmma.cuh"
#include "scalar.cuh"

constexpr int CHUNK = 8;               // elements of 16 bytes
constexpr int PANEL = 64;              // elements of 128 bytes: a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;  // 64 such rows
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;

// One step of the depth. Operands lie in panels: rows of 128 bytes under TMA's swizzle.
struct Stage {
    unsigned char a[A_BYTES], b[B_BYTES];
};

constexpr int SHARED_ALIGNMENT = 1024;

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    const unsigned beyond = shared_address(memory) % SHARED_ALIGNMENT;
    return *reinterpret_cast<Shared*>(memory + (SHARED_ALIGNMENT - beyond) % SHARED_ALIGNMENT);
}

// Where a role stands in the ring: the stage, and the parity of its phase.
template <int STAGES>
struct Turn {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Where 16 bytes lie in panels: TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }

// Operand A whose 128 rows lie anywhere in x: thread t brings chunk t % 8 of rows t / 8, t / 8 + AT_ONCE, ...
template <int COPIERS>
struct GatheredRows {
    static constexpr int AT_ONCE = COPIERS / 8, COUNT = TILE_ROWS / AT_ONCE;
    unsigned chunks[COUNT];  // where the thread's chunks of each row begin, in 16 bytes
    const Chunk* x;
    int target;  // of the first, in the stage

    __device__ __forceinline__ GatheredRows(const Scalar* x, int d, const int* tokens, int rows)
        : x(reinterpret_cast<const Chunk*>(x)), target(swizzled(threadIdx.x / 8, threadIdx.x % 8)) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {  // rows beyond the last are read again: no one stores their results
            const int token = tokens[min(int(threadIdx.x) / 8 + i * AT_ONCE, rows - 1)];
            chunks[i] = unsigned(token) * unsigned(d / CHUNK) + threadIdx.x % 8;
        }
    }
    // 64 of the depth d, from p on, zeros beyond its end. All addresses are there before the first copy: a copy holds
    // on to the registers of its addresses.
    __device__ __forceinline__ void load(unsigned char* panel, int p, int d) const {
        const Chunk* const source = x + p / CHUNK;
        const bool inside = p + int(threadIdx.x) % 8 * CHUNK < d;
        const void* sources[COUNT];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) sources[i] = source + chunks[i];
#pragma unroll
        for (int i = 0; i < COUNT; ++i) cp_async_or_zero(panel + target + i * AT_ONCE * 128, sources[i], inside);
    }
};
