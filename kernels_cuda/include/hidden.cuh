// The work between the two GEMMs, for one element: the epilogue of the up-projection and,
// in the backward, of the gradient's down-projection. Compiled for one Scalar and one ACTIVATION.
#pragma once
#include "activation.cuh"
#include "scalar.cuh"

constexpr bool GATED = ACTIVATION::gated;

// y_swi from a and b as they are stored, so that rebuilding it later gives the same bits.
__device__ __forceinline__ float hidden_activation(float a, float b) {
    const float act_a = ACTIVATION::act(a);
    return GATED ? act_a * ACTIVATION::factor(b) : act_a;
}

// The save policy decides at compile time what the up-projection stores: the projections for the backward, y_swi for
// the down-projection. By default both.
#ifndef STORE_PROJECTIONS
#define STORE_PROJECTIONS 1
#endif
#ifndef STORE_Y_SWI
#define STORE_Y_SWI 1
#endif

// Section 5, Algorithm 1: rounds both projections and stores them and y_swi.
__device__ __forceinline__ void store_hidden(Scalar* a, Scalar* b, Scalar* y_swi, long long at, float a_sum,
                                             float b_sum) {
    const Scalar a_value = from_float<Scalar>(a_sum), b_value = from_float<Scalar>(GATED ? b_sum : 0.0f);
    if (STORE_PROJECTIONS) {
        a[at] = a_value;
        if (GATED) b[at] = b_value;
    }
    if (STORE_Y_SWI) y_swi[at] = from_float<Scalar>(hidden_activation(to_float(a_value), to_float(b_value)));
}

// The same of eight neighbours that are rounded already.
__device__ __forceinline__ void store_hidden(Scalar* a, Scalar* b, Scalar* y_swi, long long at, Chunk a_chunk,
                                             Chunk b_chunk) {
    if (STORE_PROJECTIONS) {
        *reinterpret_cast<Chunk*>(a + at) = a_chunk;
        if (GATED) *reinterpret_cast<Chunk*>(b + at) = b_chunk;
    }
    if (STORE_Y_SWI) {
        Chunk y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float a_pair[2], b_pair[2];
            unpack<Scalar>(a_chunk.words[i], a_pair);
            unpack<Scalar>(b_chunk.words[i], b_pair);
            y.words[i] =
                packed<Scalar>(hidden_activation(a_pair[0], b_pair[0]), hidden_activation(a_pair[1], b_pair[1]));
        }
        *reinterpret_cast<Chunk*>(y_swi + at) = y;
    }
}

// Section 5 and SonicMoE: from d = <d_out, w3> of an element and the row's gate, everything that the backward needs of
// the hidden layer. `gate` is the element's term of the gate's gradient.
struct HiddenGradient {
    float d_a, d_b, gated_y, gate;
};
__device__ __forceinline__ HiddenGradient hidden_gradient(float a, float b, float d, float gate) {
    const float y = hidden_activation(a, b), slope = ACTIVATION::slope(a), d_y = gate * d;
    const float d_a = GATED ? d_y * ACTIVATION::factor(b) * slope : d_y * slope;
    return {d_a, d_y * ACTIVATION::act(a) * ACTIVATION::factor_slope(b), gate * y, d * y};
}

// Loads a and b, and stores the gradients of `hidden_gradient`. Returns the term of the gate's gradient.
__device__ __forceinline__ float store_hidden_gradients(const Scalar* a, const Scalar* b, Scalar* d_a, Scalar* d_b,
                                                        Scalar* gated_y, long long at, float d, float gate) {
    const HiddenGradient found = hidden_gradient(to_float(a[at]), GATED ? to_float(b[at]) : 0.0f, d, gate);
    d_a[at] = from_float<Scalar>(found.d_a);
    if (GATED) d_b[at] = from_float<Scalar>(found.d_b);
    gated_y[at] = from_float<Scalar>(found.gated_y);
    return found.gate;
}
