"""The kernels that a .cu file declares, in all the ways in which people write them."""

import numpy as np
import pytest

from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.declarations import Declarations, Parameter
from moeblaze_ref.runtime.simt.executor import SimtExecutor


def only(text, **constants):
    """The parameters of the one kernel of a text, which is called f."""
    return Declarations.read(text, constants).parameters("f")


POINTER = Parameter("x", "int32", pointer=True, writable=True)
CONSTANT = Parameter("x", "int32", pointer=True, writable=False)


@pytest.mark.parametrize(
    ("declared", "parameter"),
    [
        ("int* x", POINTER),
        ("int *x", POINTER),
        ("int* __restrict__ x", POINTER),
        ("int* const __restrict__ x", POINTER),
        ("signed int * const x", POINTER),
        ("const int* x", CONSTANT),
        ("int const* x", CONSTANT),
        ("int const * __restrict x", CONSTANT),
        ("const int* const x", CONSTANT),
        ("int x", Parameter("x", "int32", False, False)),
        ("const int x", Parameter("x", "int32", False, False)),
        ("unsigned x", Parameter("x", "uint32", False, False)),
        ("unsigned int x", Parameter("x", "uint32", False, False)),
        ("int unsigned x", Parameter("x", "uint32", False, False)),
        ("long long int x", Parameter("x", "int64", False, False)),
        ("unsigned long long int* x", Parameter("x", "uint64", True, True)),
        ("unsigned char const* x", Parameter("x", "uint8", True, False)),
        ("size_t x", Parameter("x", "uint64", False, False)),
        ("bool x", Parameter("x", "bool", False, False)),
        ("const half* x", Parameter("x", "float16", True, False)),
        ("T const* x", Parameter("x", "uint16", True, False)),
        ("const __grid_constant__ TensorMap x", Parameter("x", "TensorMap", False, False)),
        ("TensorMap const __grid_constant__ x", Parameter("x", "TensorMap", False, False)),
    ],
)
def test_types(declared, parameter):
    assert only(f'extern "C" __global__ void f({declared}) {{}}', T="unsigned short") == (parameter,)


@pytest.mark.parametrize(
    "text",
    [
        'extern "C" __global__ void f(int* x) { if (x) { x[0] = 1; } }',
        'extern "C" __global__ void\n    __launch_bounds__(256, 2)\n    f(int* x)\n{ }',
        'extern "C" __global__ __launch_bounds__(32 * (WARPS + 1)) void f(int* x) {}',
        'extern "C" __launch_bounds__(256) __global__ void f(int* x) {}',
        'extern "C" void __global__ f(int* x) {}',
        'extern "C" { __global__ void f(int* x) {} }',
        'extern "C" {\n__device__ int g() { return 1; }\n#if 1\n__global__ void f(int* x) { x[0] = g(); }\n#endif\n}',
        'extern "C" __global__ void f(int* x);\n__global__ void f(int* x) {}',
        'extern "C" __global__ void f(  // kernels; with { a comment }\n    int* x /* one, only */) {}',
        'const char* brace = "{ // no comment";\nextern "C" __global__ void f(int* x) {}',
        "constexpr char BRACE = '{';\nextern \"C\" { __global__ void f(int* x) {} }\n__global__ void g() {}",
        '#define THREADS 32\n#define SIZE(n) \\\n    (n * 4)\nextern "C" __global__ void f(int* x) {}',
        'template <class T> __global__ void other(T* x) {}\nextern "C" __global__ void f(int* x) {}',
    ],
)
def test_places(text):
    assert only(text) == (POINTER,)


@pytest.mark.parametrize("nothing", ["", "void", " \n "])
def test_no_parameters(nothing):
    assert only(f'extern "C" __global__ void f({nothing}) {{}}') == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__global__ void f(int* x) {}", r"'__global__ void f\(int\* x\)': it is not declared extern \"C\""),
        ("template <int N> __global__ void f(int* x) {}", r"'template <int N> __global__ void f.*not declared extern"),
        ('extern "C" {} __global__ void f(int* x) {}', "it is not declared extern"),
        (
            'extern "C" __global__ void f(float x[4]) {}',
            r"f\(float x\[4\]\)': cannot read the parameter 'float x\[4\]'",
        ),
        ('extern "C" __global__ void f(int** x) {}', r"cannot read the parameter 'int\*\* x'"),
        ('extern "C" __global__ void f(int*) {}', r"cannot read the parameter 'int\*'"),
        ('extern "C" __global__ void f(unsigned int) {}', "cannot read the parameter 'unsigned int'"),
        ('extern "C" __global__ void f(int* x, Pair p) {}', "unknown type of parameter p 'Pair'"),
        ('extern "C" __global__ void f(int (*x)[4]) {}', "its declaration cannot be read as void name"),
        *(
            (
                f'extern "C" __global__ void f({declared}) {{}}',
                "parameter m must be declared const __grid_constant__ TensorMap m",
            )
            for declared in ("TensorMap m", "const TensorMap m", "const __grid_constant__ TensorMap* m")
        ),
        ('extern "C" __global__ int f(int* x) {}', "its declaration cannot be read as void name"),
        (
            '#if A\nextern "C" __global__ void f(int* x) {}\n#else\nextern "C" __global__ void f(float* x) {}\n#endif',
            "it is declared twice, with different parameters",
        ),
        (
            '#define KERNEL(name) extern "C" __global__ void name(int* x)\nKERNEL(f) {}',
            "unknown kernel 'f'.*#define KERNEL",
        ),
        ('extern "C" __global__ void g() {}', "unknown kernel 'f'.*Valid: g"),
        ("__global__ void g(int* x) {}", "unknown kernel 'f'.*cannot launch '__global__ void g"),
    ],
)
def test_what_cannot_be_launched_is_named_with_its_declaration(text, message):
    with pytest.raises(ValueError, match=message):
        only(text)


def test_a_kernel_that_cannot_be_read_does_not_hide_the_others():
    text = 'extern "C" __global__ void f(int* x) {}\nextern "C" __global__ void g(float4 x) {}\n__global__ void h() {}'
    found = Declarations.read(text, {})
    assert found.kernels == {"f": (POINTER,)}
    assert found.refused.keys() == {"g", "h"}


def test_no_kernel_of_the_project_is_refused():
    constants = {"Scalar": "float"}
    for file in kernels_dir().glob("*/*.cu"):
        found = Declarations.read(file.read_text(), constants)
        assert found.kernels and not found.refused, file


def test_such_kernels_run():
    text = """
    extern "C" {
    __global__ void nothing() {}
    __global__ void add(unsigned int const* x, bool twice, unsigned long long int* out) {
        out[threadIdx.x] = x[threadIdx.x] * (twice ? 2 : 1);
    }
    }"""
    module = SimtExecutor().load("test.cu", text=text)
    module.launch("nothing", grid=2, block=32)
    out = np.zeros(32, np.uint64)
    module.launch("add", 1, 32, x=np.arange(32, dtype=np.uint32), twice=True, out=out)
    np.testing.assert_array_equal(out, 2 * np.arange(32))
    with pytest.raises(ValueError, match="argument twice of kernel add is 2, but it must be 0..1"):
        module.launch("add", 1, 32, x=np.arange(32, dtype=np.uint32), twice=2, out=out)
