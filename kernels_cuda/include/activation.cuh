// The activations: a function, its slope, and whether it multiplies by a factor that b = x w2 makes.
//
// Source  MoEBlaze, section 5, for SwiGLU and its derivative; gpt-oss in transformers 5.23 for clamped_swiglu.
//         A kernel is compiled for one of them (-DACTIVATION=swiglu), so its inner loop has no branch on the choice.
// Runs everywhere.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ float sigmoid(float a) { return fast_reciprocal(1.0f + fast_exp2(-1.44269504f * a)); }

// The factor is b itself.
struct plain_factor {
    static __device__ float factor(float b) { return b; }
    static __device__ float factor_slope(float) { return 1.0f; }
};

struct silu : plain_factor {
    static constexpr bool gated = false;
    static __device__ float act(float a) { return a * sigmoid(a); }
    static __device__ float slope(float a) {
        const float s = sigmoid(a);
        return s * (1.0f + a * (1.0f - s));
    }
};

struct gelu : plain_factor {
    static constexpr bool gated = false;
    static __device__ float cdf(float a) { return 0.5f * erfcf(-0.70710678f * a); }
    static __device__ float act(float a) { return a * cdf(a); }
    static __device__ float slope(float a) { return cdf(a) + a * 0.39894228f * expf(-0.5f * a * a); }
};

// 0.5 (1 + tanh u) is the sigmoid of 2u: a SiLU of a bent argument.
struct gelu_tanh : plain_factor {
    static constexpr bool gated = false;
    static constexpr float SCALE = 1.59576912f, CUBIC = 0.044715f;  // 2 sqrt(2 / pi)
    static __device__ float bent(float a) { return SCALE * (a + CUBIC * a * a * a); }
    static __device__ float act(float a) { return a * sigmoid(bent(a)); }
    static __device__ float slope(float a) {
        const float s = sigmoid(bent(a));
        return s * (1.0f + a * (1.0f - s) * SCALE * (1.0f + 3.0f * CUBIC * a * a));
    }
};

struct relu : plain_factor {
    static constexpr bool gated = false;
    static __device__ float act(float a) { return max_or_nan(a, 0.0f); }       // NaN stays NaN, as in torch
    static __device__ float slope(float a) { return a > 0.0f ? 1.0f : 0.0f; }  // 0 at the kink, as in torch
};

struct relu2 : plain_factor {
    static constexpr bool gated = false;
    static __device__ float act(float a) { return relu::act(a) * relu::act(a); }
    static __device__ float slope(float a) { return 2.0f * relu::act(a); }
};

struct swiglu : silu {
    static constexpr bool gated = true;
};
struct geglu : gelu {
    static constexpr bool gated = true;
};
struct reglu : relu {
    static constexpr bool gated = true;
};

// a and b are clamped, and b gets 1 more: clamped a * sigmoid(ALPHA * clamped a) * (clamped b + 1). As in torch, a
// gradient passes at a limit, and NaN stays NaN.
struct clamped_swiglu {
    static constexpr bool gated = true;
    static constexpr float ALPHA = 1.702f, LIMIT = 7.0f;
    static __device__ float at_most(float a) { return min_or_nan(a, LIMIT); }
    static __device__ float act(float a) { return at_most(a) * sigmoid(ALPHA * at_most(a)); }
    static __device__ float slope(float a) {
        const float s = sigmoid(ALPHA * at_most(a));
        return a > LIMIT ? 0.0f : s + ALPHA * (s * a) * (1.0f - s);  // s * a stays finite
    }
    static __device__ float factor(float b) { return max_or_nan(at_most(b), -LIMIT) + 1.0f; }
    static __device__ float factor_slope(float b) { return fabsf(b) > LIMIT ? 0.0f : 1.0f; }
};
