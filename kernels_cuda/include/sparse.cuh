// A dense operand of the block-sparse products, and the blocks that make up one result. Runs everywhere.
//
// Constants    Scalar storage type; BLOCK rows and columns of a block; TRANSPOSE_LHS and TRANSPOSE_RHS, 1 if that
//              operand is used transposed.
#pragma once
#include "scalar.cuh"

// A dense matrix (rows, ...) as parts of `width` columns side by side; one part is a plain matrix.
struct Dense {
    const Scalar* data;
    int rows, width;

    // Where an element lies; those of one row and part that follow it lie behind it.
    __device__ __forceinline__ long long at(int row, int column) const {
        return ((long long)(column / width) * rows + row) * width + column % width;
    }
    __device__ __forceinline__ float operator()(int row, int column) const { return to_float(data[at(row, column)]); }
};

// The blocks whose products make up one block row of a result: those of a block row of the sparse matrix, as they lie,
// or those of a block column, by the transpose indices.
template <bool BY_COLUMN>
struct Blocks {
    const int* others;  // column_indices, or row_indices: which block of the dense operand each one meets
    const int* order;   // transpose_indices
    int first, count;

    __device__ __forceinline__ int number(int i) const { return BY_COLUMN ? order[first + i] : first + i; }
    __device__ __forceinline__ int other(int i) const { return others[number(i)]; }
};

template <bool BY_COLUMN>
__device__ __forceinline__ Blocks<BY_COLUMN> blocks_of(const int* offsets, const int* others, const int* order,
                                                       int index) {
    const int first = offsets[index];
    return {others, order, first, offsets[index + 1] - first};
}
