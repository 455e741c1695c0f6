// CUDA's bfloat16 under CUDA's names: the type, its pairs, and their conversions. Written for this project.
#pragma once
#include "narrow_floats.h"

struct __nv_bfloat16 : SimtNarrow<__nv_bfloat16, simt_float_to_bfloat16, simt_bfloat16_to_float> {
    using SimtNarrow::SimtNarrow;
};
using __nv_bfloat162 = SimtPair<__nv_bfloat16>;
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

SIMT_CONVERSIONS(__nv_bfloat16, bfloat16)
