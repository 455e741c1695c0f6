// Storage types: float, __half and __nv_bfloat16 in memory, float in registers. Runs everywhere.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rounds to nearest, ties to even.
template <class T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
    return value;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float value) {
    return __float2half_rn(value);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
    return __float2bfloat16_rn(value);
}

// Two neighbours in one register, the first in the low half.
template <class T>
__device__ __forceinline__ unsigned packed(float first, float second) {
    const T pair[2] = {from_float<T>(first), from_float<T>(second)};
    return reinterpret_cast<const unsigned&>(pair);
}
template <class T>
__device__ __forceinline__ void unpack(unsigned word, float (&pair)[2]) {
    const T* const values = reinterpret_cast<const T*>(&word);
    pair[0] = to_float(values[0]);
    pair[1] = to_float(values[1]);
}
template <>  // a bfloat16 is the high half of a float32
__device__ __forceinline__ void unpack<__nv_bfloat16>(unsigned word, float (&pair)[2]) {
    pair[0] = __int_as_float(word << 16);
    pair[1] = __int_as_float(word & 0xffff0000u);
}
