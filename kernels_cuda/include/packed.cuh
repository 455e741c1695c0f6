// Weights as models store them: both up-projections in one tensor, and a and b in one, ab. Compiled for one LAYOUT.
//
// LAYOUT       gate_up      its columns                 down
// linear       (E, G h, d)  w1's, then w2's             (E, d, h)
// matmul       (E, d, G h)  w1's, then w2's             (E, h, d)
// interleaved  (E, d, G h)  w1's and w2's, alternating  (E, h, d)
// G is 2 with a gated activation, else 1. A column is one result of the projection. ab is (R, G h), its columns in the
// order of gate_up's; so is a bias, (E, G h). BIASED: a column's bias is added to its sum in float32. Runs everywhere.
#pragma once
#include "hidden.cuh"

#ifndef BIASED
#define BIASED 0
#endif

constexpr int PROJECTIONS = GATED ? 2 : 1;  // the G

struct linear {
    static constexpr bool TRANSPOSED = true, INTERLEAVED = false;
};
struct matmul {
    static constexpr bool TRANSPOSED = false, INTERLEAVED = false;
};
struct interleaved {
    static constexpr bool TRANSPOSED = false, INTERLEAVED = true;
};
static_assert(GATED || !LAYOUT::INTERLEAVED, "one projection alternates with none");

// The column of element j of a (projection 0) or of b (1).
__device__ __forceinline__ int packed_column(int projection, int j, int h) {
    return LAYOUT::INTERLEAVED ? PROJECTIONS * j + projection : projection * h + j;
}
// Where that element of a row lies in ab.
__device__ __forceinline__ long long packed_at(int row, int projection, int j, int h) {
    return (long long)row * PROJECTIONS * h + packed_column(projection, j, h);
}
// A sum with its column's bias, of those of an expert, for element j of a (projection 0) or of b (1).
__device__ __forceinline__ float with_bias(float sum, const Scalar* biases, int projection, int j, int h) {
    return BIASED ? sum + to_float(biases[packed_column(projection, j, h)]) : sum;
}
// Where gate_up has input i of a column of an expert.
__device__ __forceinline__ long long up_weight_at(int expert, int i, int column, int d, int h) {
    const int columns = PROJECTIONS * h;
    return LAYOUT::TRANSPOSED ? ((long long)expert * columns + column) * d + i
                              : ((long long)expert * d + i) * columns + column;
}
// Where down has output i of hidden element j of an expert.
__device__ __forceinline__ long long down_weight_at(int expert, int j, int i, int d, int h) {
    return LAYOUT::TRANSPOSED ? ((long long)expert * d + i) * h + j : ((long long)expert * h + j) * d + i;
}
