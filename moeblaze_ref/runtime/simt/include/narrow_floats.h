// Floats of 16 bits: half (IEEE 754's binary16) and bfloat16, the upper half of a float32. First as bits.
//
// From float32 they round to nearest, ties to even. NaN becomes 0x7fff, CUDART_NAN_FP16 and CUDART_NAN_BF16 of CUDA.
#pragma once
#include <bit>
#include <cstdint>

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
};
