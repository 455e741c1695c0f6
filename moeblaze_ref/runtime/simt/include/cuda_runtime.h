// nvcc includes CUDA's before every file; here that is simt.hpp.
#pragma once
#include "vector_types.h"
