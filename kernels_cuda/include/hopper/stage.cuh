// One step's operands in shared memory: panels of 64 elements, in rows of 128 bytes under TMA's swizzle. sm_90a.
//
// Constants    Scalar, 16 bits; TILE_ROWS and TILE_COLUMNS of a tile of the result, TILE_DEPTH of a stage: 64.
#pragma once
#include "chunk.cuh"
#include "common.cuh"
#include "ptx.cuh"

constexpr int PANEL = 64;              // elements of 128 bytes: a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;  // 64 such rows
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;

// One step of the depth.
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

// Where 16 bytes lie in panels: TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
