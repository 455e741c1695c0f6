// <cmath> without the special functions of C++17, such as std::cyl_bessel_j, which CUDA lacks. With them libstdc++'s
// <cmath> takes a tenth of a kernel's compilation.
#pragma once
#include <cstddef>  // the macro is then defined, if the library has it
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <cmath>
