// Warp and block primitives for every kernel file. Runs everywhere.
#pragma once

#ifndef MOEBLAZE_SIMT
#define DYNAMIC_SHARED(type, name)                                  \
    extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
    type* const name = reinterpret_cast<type*>(dynamic_shared)
#endif

constexpr int WARP = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr int EMPTY = -1;  // in place of an index: there is none

// NVRTC has no INFINITY.
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

__device__ __forceinline__ int lane_id() { return threadIdx.x % WARP; }
__device__ __forceinline__ int warp_id() { return threadIdx.x / WARP; }

// Sum over the lanes of a warp, in a fixed order; every lane gets it.
template <class T>
__device__ __forceinline__ T warp_sum(T value) {
    static_assert(sizeof(T) >= 4, "a bool cannot hold its own sum");
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
    return value;
}

// Largest and smallest value over the lanes of a warp; every lane gets it, by one instruction.
__device__ __forceinline__ int warp_max(int value) { return __reduce_max_sync(FULL_WARP, value); }
__device__ __forceinline__ int warp_min(int value) { return __reduce_min_sync(FULL_WARP, value); }

// Integers in the order of the floats, and back. The bits of positive floats are in order already;
// those of negative ones are in reverse. Adding 0 makes -0 and 0 one integer. Every NaN is INT_MAX,
// above infinity; nothing becomes INT_MIN.
__device__ __forceinline__ int to_ordered(float value) {
    const int bits = __float_as_int(value + 0.0f);
    return value != value ? 0x7fffffff : bits ^ ((bits >> 31) & 0x7fffffff);
}
__device__ __forceinline__ float from_ordered(int ordered) {
    return __int_as_float(ordered ^ ((ordered >> 31) & 0x7fffffff));
}
__device__ __forceinline__ float warp_max(float value) { return from_ordered(warp_max(to_ordered(value))); }

// Sum of the values of all lower lanes.
__device__ __forceinline__ int warp_exclusive_sum(int value) {
    int inclusive = value;
    for (int step = 1; step < WARP; step *= 2) {
        const int lower = __shfl_up_sync(FULL_WARP, inclusive, step);
        if (lane_id() >= step) inclusive += lower;
    }
    return inclusive - value;
}

// Sum over a one-dimensional block of SIZE threads, in a fixed order; every thread gets it.
template <int SIZE, class T>
__device__ T block_sum(T value) {
    constexpr int WARPS = SIZE / WARP;
    static_assert(SIZE % WARP == 0 && WARPS <= WARP, "whole warps, at most 32 of them");
    __shared__ T warp_totals[WARPS];
    const T in_warp = warp_sum(value);
    if (lane_id() == 0) warp_totals[warp_id()] = in_warp;
    __syncthreads();
    T total = 0;
    for (int warp = 0; warp < WARPS; ++warp) total += warp_totals[warp];
    __syncthreads();  // warp_totals may be written again by the next call
    return total;
}

struct BlockScan {
    int exclusive;  // sum of the values of all lower threads
    int total;      // sum over the block
};

// Exclusive prefix sum over a one-dimensional block of SIZE threads.
template <int SIZE>
__device__ BlockScan block_exclusive_sum(int value) {
    constexpr int WARPS = SIZE / WARP;
    static_assert(SIZE % WARP == 0 && WARPS <= WARP, "whole warps, at most 32 of them");
    __shared__ int warp_totals[WARPS];
    const int below_in_warp = warp_exclusive_sum(value);
    if (lane_id() == WARP - 1) warp_totals[warp_id()] = below_in_warp + value;
    __syncthreads();
    BlockScan scan = {below_in_warp, 0};
    for (int warp = 0; warp < WARPS; ++warp) {
        if (warp < warp_id()) scan.exclusive += warp_totals[warp];
        scan.total += warp_totals[warp];
    }
    __syncthreads();  // warp_totals may be written again by the next call
    return scan;
}
