// CUDA's half under CUDA's names: the type, its pairs, and their conversions. Written for this project.
#pragma once
#include "narrow_floats.h"

struct __half : SimtNarrow<__half, simt_float_to_half, simt_half_to_float> {
    using SimtNarrow::SimtNarrow;
};
using __half2 = SimtPair<__half>;
using half = __half;
using half2 = __half2;

SIMT_CONVERSIONS(__half, half)
