// CUDA's half under CUDA's names: the type, its pairs, and their conversions. Written for this project.
#pragma once
#include "narrow_floats.h"
#include "vector_types.h"

struct __half : SimtNarrow<__half, simt_float_to_half, simt_half_to_float> {
    using SimtNarrow::SimtNarrow;
};
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;

inline __half __float2half_rn(float value) { return value; }
inline __half __float2half(float value) { return value; }
inline float __half2float(__half value) { return value; }
inline __half __ushort_as_half(unsigned short bits) { return __half::from_bits(bits); }
inline unsigned short __half_as_ushort(__half value) { return value.bits; }

inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half both) { return {both, both}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 pair) { return {pair.x, pair.y}; }
inline float2 __half22float2(__half2 pair) { return {pair.x, pair.y}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
