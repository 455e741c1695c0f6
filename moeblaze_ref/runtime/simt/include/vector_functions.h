// CUDA's make_float4 and its like, which stand beside their types here.
#pragma once
#include "vector_types.h"
