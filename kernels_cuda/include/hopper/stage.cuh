// One step's operands in shared memory: panels of 64 elements, in rows of 128 bytes under TMA's swizzle. sm_90a.
//
// Constants    Scalar, 16 bits; TILE_ROWS and TILE_COLUMNS of a tile of the result, TILE_DEPTH of a stage: 64.
//              RAGGED: 1 if the last tile or step may be half empty, see hopper/consumers.cuh.
#pragma once
#include "chunk.cuh"
#include "common.cuh"
#include "ptx.cuh"

#ifndef RAGGED
#define RAGGED 0
#endif

constexpr int PANEL = 64;                        // elements of 128 bytes: a row of the swizzle
constexpr int PANEL_BYTES = 64 * 128;            // 64 such rows
constexpr int STAGE_PRODUCTS = TILE_DEPTH / 16;  // wgmma's depth is 16
constexpr int A_BYTES = TILE_ROWS * TILE_DEPTH * 2, B_BYTES = TILE_COLUMNS * TILE_DEPTH * 2;

// One step of the depth.
struct Stage {
    unsigned char a[A_BYTES], b[B_BYTES];
};

// Products of 16 of the depth that a stage holds, if so much of the depth is left.
__device__ __forceinline__ int products_of(int left) { return (min(left, TILE_DEPTH) + 15) / 16; }

// Panels of B that a tile needs of so many columns of a result that are left: those beyond are neither loaded nor
// multiplied. Panels of some results may lie side by side.
__device__ __forceinline__ int panels_of(int left, int results = 1) {
    constexpr int MOST = TILE_COLUMNS / PANEL;
    return RAGGED ? min(MOST, (left + PANEL - 1) / PANEL * results) : MOST;
}

constexpr int SHARED_ALIGNMENT = 1024;

template <class Shared>
__device__ __forceinline__ Shared& shared_memory() {
    DYNAMIC_SHARED(unsigned char, memory);
    const unsigned beyond = shared_address(memory) % SHARED_ALIGNMENT;
    return *reinterpret_cast<Shared*>(memory + (SHARED_ALIGNMENT - beyond) % SHARED_ALIGNMENT);
}

// Where 16 bytes lie in panels: TMA's 128-byte swizzle.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * 128 + (chunk ^ row % 8) * 16; }
