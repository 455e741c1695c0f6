// Floats of 16 bits: half (IEEE 754's binary16) and bfloat16, the upper half of a float32. First as bits.
//
// From float32 they round to nearest, ties to even. NaN becomes 0x7fff, CUDART_NAN_FP16 and CUDART_NAN_BF16 of CUDA.
#pragma once
#include <bit>
#include <cstdint>
#include "simt_math.h"
#include "vector_types.h"

// On a GPU a conversion is one instruction, whatever its value. So is it one call where accesses are counted: inlined,
// its branches could get a copy each of the store behind them, and a warp's one store would count as several.
#if defined(__clang__)
#define SIMT_COUNTS_ACCESSES __has_feature(thread_sanitizer)
#elif defined(__SANITIZE_THREAD__)
#define SIMT_COUNTS_ACCESSES 1
#else
#define SIMT_COUNTS_ACCESSES 0
#endif
#if SIMT_COUNTS_ACCESSES
#define SIMT_INSTRUCTION __attribute__((noinline, const))
#else
#define SIMT_INSTRUCTION
#endif

constexpr uint32_t SIMT_FLOAT_INFINITY = 0x7f800000, SIMT_FLOAT_NAN = 0x7fffffff;
constexpr uint16_t SIMT_HALF_INFINITY = 0x7c00, SIMT_NARROW_NAN = 0x7fff;

SIMT_INSTRUCTION inline float simt_half_to_float(uint16_t bits) {
    const uint32_t magnitude = bits & 0x7fffu, sign = (bits & 0x8000u) << 16;
    if (magnitude > SIMT_HALF_INFINITY) return std::bit_cast<float>(SIMT_FLOAT_NAN);
    if (magnitude == SIMT_HALF_INFINITY) return std::bit_cast<float>(SIMT_FLOAT_INFINITY | sign);
    return std::bit_cast<float>(magnitude << 13 | sign) * 0x1p112f;  // the biases of the exponents differ by 112
}

SIMT_INSTRUCTION inline uint16_t simt_float_to_half(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value), magnitude = bits & 0x7fffffffu;
    const uint32_t sign = bits >> 16 & 0x8000u;
    if (magnitude > SIMT_FLOAT_INFINITY) return SIMT_NARROW_NAN;
    // Below 2^-14 halves are as far apart as floats from 0.5 on: there the addition rounds.
    if (magnitude < 0x38800000u)
        return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u));
    const uint32_t rounded = ((magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13) - (112u << 10);
    return uint16_t(sign | (rounded < SIMT_HALF_INFINITY ? rounded : SIMT_HALF_INFINITY));
}

inline float simt_bfloat16_to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }

SIMT_INSTRUCTION inline uint16_t simt_float_to_bfloat16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > SIMT_FLOAT_INFINITY) return SIMT_NARROW_NAN;
    return uint16_t((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// a * b + c rounded to odd: exact, or else the neighbour whose last bit is 1. A second rounding, to 16 bits, is then as
// good as one. The product is exact in a double; `lost` is what the addition rounds away.
SIMT_INSTRUCTION inline float simt_fused(float a, float b, float c) {
    const double product = double(a) * b, sum = product + c, added = sum - product;
    const double lost = (product - (sum - added)) + (c - added);
    const float result = float(sum);
    const double residual = sum != result ? sum - result : lost;
    if (!std::isfinite(sum) || residual == 0) return result;
    const bool too_far = std::signbit(residual) != std::signbit(result);  // from zero
    return std::bit_cast<float>((std::bit_cast<uint32_t>(result) - too_far) | 1u);
}

// The larger number. NaN counts as missing, and +0 is larger than -0.
SIMT_INSTRUCTION inline float simt_larger(float a, float b) {
    if (std::isnan(a) || a < b || (a == b && std::signbit(a))) return b;
    return a;
}
SIMT_INSTRUCTION inline float simt_larger_or_nan(float a, float b) {
    return std::isunordered(a, b) ? std::bit_cast<float>(SIMT_FLOAT_NAN) : simt_larger(a, b);
}

// What both types have: the bits, conversions, and arithmetic in float32, rounded once. It is exact but for that
// rounding: float32 has more than twice the places of either.
template <class Float, uint16_t (*NARROW)(float), float (*WIDE)(uint16_t)>
struct SimtNarrow {
    uint16_t bits;

    SimtNarrow() = default;
    SimtNarrow(float value) : bits(NARROW(value)) {}
    operator float() const { return WIDE(bits); }

    static Float from_bits(uint16_t bits) {
        Float result;
        result.bits = bits;
        return result;
    }

    friend Float operator+(Float a, Float b) { return float(a) + float(b); }
    friend Float operator-(Float a, Float b) { return float(a) - float(b); }
    friend Float operator*(Float a, Float b) { return float(a) * float(b); }
    friend Float operator/(Float a, Float b) { return float(a) / float(b); }
    friend Float operator-(Float a) { return from_bits(a.bits ^ 0x8000u); }
    friend Float& operator+=(Float& a, Float b) { return a = a + b; }
    friend Float& operator-=(Float& a, Float b) { return a = a - b; }
    friend Float& operator*=(Float& a, Float b) { return a = a * b; }
    friend Float& operator/=(Float& a, Float b) { return a = a / b; }

    friend bool operator==(Float a, Float b) { return float(a) == float(b); }
    friend bool operator!=(Float a, Float b) { return float(a) != float(b); }
    friend bool operator<(Float a, Float b) { return float(a) < float(b); }
    friend bool operator<=(Float a, Float b) { return float(a) <= float(b); }
    friend bool operator>(Float a, Float b) { return float(a) > float(b); }
    friend bool operator>=(Float a, Float b) { return float(a) >= float(b); }

    friend Float __hadd(Float a, Float b) { return a + b; }
    friend Float __hsub(Float a, Float b) { return a - b; }
    friend Float __hmul(Float a, Float b) { return a * b; }
    friend Float __hdiv(Float a, Float b) { return a / b; }
    friend Float __hfma(Float a, Float b, Float c) { return simt_fused(a, b, c); }
    friend Float __hneg(Float a) { return -a; }
    friend Float __habs(Float a) { return from_bits(a.bits & 0x7fffu); }
    friend Float __hmax(Float a, Float b) { return simt_larger(a, b); }
    friend Float __hmin(Float a, Float b) { return -simt_larger(-float(a), -float(b)); }
    friend Float __hmax_nan(Float a, Float b) { return simt_larger_or_nan(a, b); }
    friend Float __hmin_nan(Float a, Float b) { return -simt_larger_or_nan(-float(a), -float(b)); }

    friend bool __heq(Float a, Float b) { return a == b; }
    friend bool __hne(Float a, Float b) { return a < b || a > b; }
    friend bool __hlt(Float a, Float b) { return a < b; }
    friend bool __hle(Float a, Float b) { return a <= b; }
    friend bool __hgt(Float a, Float b) { return a > b; }
    friend bool __hge(Float a, Float b) { return a >= b; }
    friend bool __hisnan(Float a) { return std::isnan(float(a)); }

    friend Float hexp(Float a) { return std::exp(float(a)); }
    friend Float hexp2(Float a) { return std::exp2(float(a)); }
    friend Float hlog(Float a) { return std::log(float(a)); }
    friend Float hlog2(Float a) { return std::log2(float(a)); }
    friend Float hrcp(Float a) { return 1.0f / float(a); }
    friend Float hsqrt(Float a) { return std::sqrt(float(a)); }
    friend Float hrsqrt(Float a) { return 1.0f / std::sqrt(float(a)); }
};

// Two of them in one register, the first in the low half. What is done, is done to each.
template <class Float>
struct alignas(4) SimtPair {
    Float x, y;

    SimtPair() = default;
    SimtPair(Float x, Float y) : x(x), y(y) {}

    friend SimtPair operator+(SimtPair a, SimtPair b) { return {a.x + b.x, a.y + b.y}; }
    friend SimtPair operator-(SimtPair a, SimtPair b) { return {a.x - b.x, a.y - b.y}; }
    friend SimtPair operator*(SimtPair a, SimtPair b) { return {a.x * b.x, a.y * b.y}; }
    friend SimtPair operator/(SimtPair a, SimtPair b) { return {a.x / b.x, a.y / b.y}; }
    friend SimtPair operator-(SimtPair a) { return {-a.x, -a.y}; }
    friend SimtPair& operator+=(SimtPair& a, SimtPair b) { return a = a + b; }
    friend SimtPair& operator-=(SimtPair& a, SimtPair b) { return a = a - b; }
    friend SimtPair& operator*=(SimtPair& a, SimtPair b) { return a = a * b; }
    friend SimtPair& operator/=(SimtPair& a, SimtPair b) { return a = a / b; }

    friend SimtPair __hadd2(SimtPair a, SimtPair b) { return a + b; }
    friend SimtPair __hsub2(SimtPair a, SimtPair b) { return a - b; }
    friend SimtPair __hmul2(SimtPair a, SimtPair b) { return a * b; }
    friend SimtPair __h2div(SimtPair a, SimtPair b) { return a / b; }
    friend SimtPair __hfma2(SimtPair a, SimtPair b, SimtPair c) {
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
    }
    friend SimtPair __hneg2(SimtPair a) { return -a; }
    friend SimtPair __habs2(SimtPair a) { return {__habs(a.x), __habs(a.y)}; }
    friend SimtPair __hmax2(SimtPair a, SimtPair b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
    friend SimtPair __hmin2(SimtPair a, SimtPair b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }

    friend SimtPair h2exp(SimtPair a) { return {hexp(a.x), hexp(a.y)}; }
    friend SimtPair h2exp2(SimtPair a) { return {hexp2(a.x), hexp2(a.y)}; }
    friend SimtPair h2log(SimtPair a) { return {hlog(a.x), hlog(a.y)}; }
    friend SimtPair h2log2(SimtPair a) { return {hlog2(a.x), hlog2(a.y)}; }
    friend SimtPair h2rcp(SimtPair a) { return {hrcp(a.x), hrcp(a.y)}; }
    friend SimtPair h2sqrt(SimtPair a) { return {hsqrt(a.x), hsqrt(a.y)}; }
    friend SimtPair h2rsqrt(SimtPair a) { return {hrsqrt(a.x), hrsqrt(a.y)}; }
};

// CUDA's conversions. NAME is what CUDA calls the type in them: half or bfloat16.
#define SIMT_CONVERSIONS(Float, NAME)                                                       \
    inline Float __float2##NAME##_rn(float value) { return value; }                         \
    inline Float __float2##NAME(float value) { return value; }                              \
    inline float __##NAME##2float(Float value) { return value; }                            \
    inline Float __ushort_as_##NAME(unsigned short bits) { return Float::from_bits(bits); } \
    inline unsigned short __##NAME##_as_ushort(Float value) { return value.bits; }          \
    inline SimtPair<Float> __halves2##NAME##2(Float x, Float y) { return {x, y}; }          \
    inline SimtPair<Float> __##NAME##2##NAME##2(Float both) { return {both, both}; }        \
    inline SimtPair<Float> __floats2##NAME##2_rn(float x, float y) { return {x, y}; }       \
    inline SimtPair<Float> __float2##NAME##2_rn(float both) { return {both, both}; }        \
    inline SimtPair<Float> __float22##NAME##2_rn(float2 pair) { return {pair.x, pair.y}; }  \
    inline float2 __##NAME##22float2(SimtPair<Float> pair) { return {pair.x, pair.y}; }     \
    inline Float __low2##NAME(SimtPair<Float> pair) { return pair.x; }                      \
    inline Float __high2##NAME(SimtPair<Float> pair) { return pair.y; }                     \
    inline float __low2float(SimtPair<Float> pair) { return pair.x; }                       \
    inline float __high2float(SimtPair<Float> pair) { return pair.y; }                      \
    inline SimtPair<Float> __lowhigh2highlow(SimtPair<Float> pair) { return {pair.y, pair.x}; }
