// Helpers of all versions of dispatch. Runs everywhere.
#pragma once
#include "common.cuh"

// Exclusive prefix sums of n values, written to sums (which may be values itself); the block gets
// the total. SIZE values at a time, each read and written by one thread.
template <int SIZE>
__device__ int block_prefix_sums(const int* values, int* sums, int n) {
    int base = 0;
    for (int first = 0; first < n; first += SIZE) {
        const int i = first + threadIdx.x;
        const BlockScan scan = block_exclusive_sum<SIZE>(i < n ? values[i] : 0);
        if (i < n) sums[i] = base + scan.exclusive;
        base += scan.total;
    }
    return base;
}

// Which of a token's k slots names the expert.
__device__ __forceinline__ int slot_of(const int* experts_of_token, int expert) {
    int j = 0;
    while (experts_of_token[j] != expert) ++j;
    return j;
}
