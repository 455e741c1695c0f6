"""The half, bfloat16 and vector types of the SIMT executor, which stand under the names of CUDA's headers."""

import operator
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import processes
import pytest

from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.executor import SimtExecutor, Traffic

TYPES = {"__half": np.float16, "__nv_bfloat16": ml_dtypes.bfloat16}
EVERY_VALUE = np.arange(2**16, dtype=np.uint16)  # as bits
NAN, FLOAT_NAN = 0x7FFF, 0x7FFFFFFF  # the one NaN that conversions give
THREADS = 32
HEADER = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "scalar.cuh"
"""
CONVERSIONS = """
extern "C" __global__ void widen(const Scalar* narrow, float* wide, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) wide[i] = to_float(narrow[i]);
}
extern "C" __global__ void round_to(const float* wide, Scalar* narrow, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) narrow[i] = from_float<Scalar>(wide[i]);
}"""


def run(text, kernel, instrumented=True, block=THREADS, scalar="__half", **arguments):
    module = SimtExecutor(instrumented).load("narrow.cu", text=HEADER + text, Scalar=scalar)
    module.launch(kernel, 1, block, **arguments)


@pytest.fixture(params=[True, False], ids=["instrumented", "plain"])
def converted(request):
    """Calls a kernel of `CONVERSIONS` on every element of an array."""

    def convert(scalar, kernel, array, dtype):
        names = ("narrow", "wide") if kernel == "widen" else ("wide", "narrow")
        out = np.zeros(array.size, dtype)
        arrays = dict(zip(names, (array, out), strict=True))
        run(CONVERSIONS, kernel, request.param, scalar=scalar, **arrays, n=out.size)
        return out

    return convert


def floats_around(dtype):
    """float32 numbers that are hard to round: every value, the middle to the next one, and both neighbours of it."""
    with np.errstate(invalid="ignore"):
        values = EVERY_VALUE[:-1].view(dtype).astype(np.float64)
        following = EVERY_VALUE[1:].view(dtype).astype(np.float64)
        finite = np.isfinite(values) & np.isfinite(following)
        middles = ((values + following) / 2)[finite].astype(np.float32)
    limits = ml_dtypes.finfo(dtype)
    overflow = (float(limits.max) + 2.0**limits.maxexp) / 2  # from here on infinity is nearest
    edges = np.float32([overflow, -overflow, np.inf, -np.inf, np.nan, -np.nan])
    hard = np.concatenate([values.astype(np.float32), middles, edges])
    return np.concatenate([hard, np.nextafter(hard, np.float32(np.inf)), np.nextafter(hard, np.float32(-np.inf))])


@pytest.mark.parametrize("scalar", TYPES)
def test_every_narrow_value_becomes_the_same_float(scalar, converted):
    narrow = EVERY_VALUE.view(TYPES[scalar])
    found = converted(scalar, "widen", narrow, np.float32)
    with np.errstate(invalid="ignore"):
        expected = narrow.astype(np.float32)
    is_nan = np.isnan(expected)
    assert is_nan.any() and np.isnan(found[is_nan]).all()
    np.testing.assert_array_equal(found[~is_nan].view(np.uint32), expected[~is_nan].view(np.uint32))
    back = converted(scalar, "round_to", found, TYPES[scalar]).view(np.uint16)
    np.testing.assert_array_equal(back, np.where(is_nan, NAN, EVERY_VALUE))


def test_the_nan_of_a_half_is_that_of_float(converted):
    nans = EVERY_VALUE[np.isnan(EVERY_VALUE.view(np.float16))]
    assert (converted("__half", "widen", nans.view(np.float16), np.float32).view(np.uint32) == FLOAT_NAN).all()


@pytest.mark.parametrize("scalar", TYPES)
def test_a_float_is_rounded_to_nearest_even(scalar, converted):
    dtype = TYPES[scalar]
    random = np.random.default_rng(0).integers(0, 2**32, 2**18, dtype=np.uint32).view(np.float32)
    subnormal = np.random.default_rng(1).integers(0, 2**23, 2**12, dtype=np.uint32).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.concatenate([floats_around(dtype), random, subnormal, -subnormal])
        expected = wide.astype(dtype)
    expected = np.where(np.isnan(wide), np.uint16(NAN), expected.view(np.uint16))
    assert (expected == 0x8000).any() and np.isinf(expected.view(dtype)[np.isfinite(wide)]).any()
    np.testing.assert_array_equal(converted(scalar, "round_to", wide, dtype).view(np.uint16), expected)


@pytest.mark.parametrize("scalar", TYPES)
def test_a_warp_stores_what_it_converts_at_once(scalar):
    """Also where lanes take other branches of the conversion: on a GPU it has none."""
    executor, dtype, rows = SimtExecutor(), TYPES[scalar], 4
    smallest = float(ml_dtypes.finfo(dtype).smallest_subnormal)
    d_out = np.resize([1, smallest, np.nan, np.inf, 0, -smallest, -1], (rows, THREADS)).astype(dtype)
    gates, place = np.ones(rows, np.float32), np.arange(rows, dtype=np.int32)
    d_y = np.zeros((rows, THREADS), dtype)
    module = executor.load("combine/1_gather.cu", Scalar=scalar, THREADS=THREADS)
    arguments = {"d_out": d_out, "gates": gates, "token_index_map": place, "d_y": d_y}
    with executor.recording() as launches:
        module.launch("d_y", rows, THREADS, **arguments, R=rows, d=THREADS, k=1)
    np.testing.assert_array_equal(d_y.astype(np.float32), d_out.astype(np.float32))
    assert launches[0].buffers["d_y"] == Traffic(0, d_y.nbytes, 0, d_y.nbytes // 32)


OPERATORS = (operator.add, operator.sub, operator.mul, operator.truediv)
COMPARISONS = (operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge)
ARITHMETIC = """
extern "C" __global__ void arithmetic(const Scalar* a, const Scalar* b, Scalar* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        Scalar* const row = out + 9 * i;
        row[0] = a[i] + b[i]; row[1] = a[i] - b[i]; row[2] = a[i] * b[i]; row[3] = a[i] / b[i];
        row[4] = row[5] = row[6] = row[7] = a[i];
        row[4] += b[i]; row[5] -= b[i]; row[6] *= b[i]; row[7] /= b[i];
        row[8] = -a[i];
    }
}
extern "C" __global__ void comparisons(const Scalar* a, const Scalar* b, bool* out, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        bool* const row = out + 6 * i;
        row[0] = a[i] == b[i]; row[1] = a[i] != b[i]; row[2] = a[i] < b[i];
        row[3] = a[i] <= b[i]; row[4] = a[i] > b[i]; row[5] = a[i] >= b[i];
    }
}"""


@pytest.mark.parametrize("scalar", TYPES)
def test_arithmetic_is_rounded_once(scalar):
    a, b = np.random.default_rng(2).integers(0, 2**16, (2, 4096), dtype=np.uint16).view(TYPES[scalar])
    b[:64], b[64:128] = a[:64], 0
    found, told = np.zeros((a.size, 9), TYPES[scalar]), np.zeros((a.size, 6), bool)
    run(ARITHMETIC, "arithmetic", scalar=scalar, a=a, b=b, out=found, n=a.size)
    run(ARITHMETIC, "comparisons", scalar=scalar, a=a, b=b, out=told, n=a.size)
    with np.errstate(all="ignore"):
        results = [function(a, b) for function in OPERATORS]
        expected = np.stack([*results, *results, -a], axis=1)
        compared = np.stack([function(a, b) for function in COMPARISONS], axis=1)
        found, expected = found.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(told, compared)


FUNCTIONS = """
template <class T>
__device__ void functions_of(T a, T b, T c, T* row) {
    row[0] = ADD(a, b); row[1] = SUB(a, b); row[2] = MUL(a, b); row[3] = DIV(a, b);
    row[4] = a + b; row[5] = a - b; row[6] = a * b; row[7] = a / b;
    row[8] = FMA(a, b, c); row[9] = NEG(a); row[10] = -a; row[11] = ABS(a); row[12] = MAX(a, b); row[13] = MIN(a, b);
    row[14] = EXP(a); row[15] = EXP2(a); row[16] = LOG(a); row[17] = LOG2(a);
    row[18] = RCP(a); row[19] = SQRT(a); row[20] = RSQRT(a);
}
extern "C" __global__ void functions(const Scalar* a, const Scalar* b, const Scalar* c, Scalar* out, int n) {
    const auto to = reinterpret_cast<Type*>(out);
    const auto x = reinterpret_cast<const Type*>(a), y = reinterpret_cast<const Type*>(b);
    const auto z = reinterpret_cast<const Type*>(c);
    for (int i = threadIdx.x; i < n; i += blockDim.x) functions_of(x[i], y[i], z[i], to + 21 * i);
}"""
NAMES = {  # of a scalar, of a pair
    "ADD": ("__hadd", "__hadd2"),
    "SUB": ("__hsub", "__hsub2"),
    "MUL": ("__hmul", "__hmul2"),
    "DIV": ("__hdiv", "__h2div"),
    "FMA": ("__hfma", "__hfma2"),
    "NEG": ("__hneg", "__hneg2"),
    "ABS": ("__habs", "__habs2"),
    "MAX": ("__hmax", "__hmax2"),
    "MIN": ("__hmin", "__hmin2"),
} | {name.upper(): (f"h{name}", f"h2{name}") for name in ("exp", "exp2", "log", "log2", "rcp", "sqrt", "rsqrt")}


def rounded_once(exact, dtype):
    """The number of a type that is nearest to a fraction; of two, the one whose last bit is 0."""
    near = np.array(float(exact)).astype(dtype)[()]
    around = [near, np.nextafter(near, dtype(-np.inf)), np.nextafter(near, dtype(np.inf))]
    finite = [number for number in around if np.isfinite(number)]
    return min(finite, key=lambda number: (abs(Fraction(float(number)) - exact), int(number.view(np.uint16)) & 1))


def fused(a, b, c):
    """a * b + c rounded once, of finite numbers."""
    exact = [Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c, strict=True)]
    return np.array([rounded_once(number, a.dtype.type) for number in exact])


def operands(dtype, n):
    """(3, n) finite numbers a, b and c; in half of them a * b + c is so near a tie that a second rounding is wrong."""
    random, limits = np.random.default_rng(3), ml_dtypes.finfo(dtype)
    places, n = limits.nmant + 1, n // 4
    powers = random.integers(limits.minexp // 2, limits.maxexp // 2 - 5, (2, 2 * n))  # c is finite too
    a, b = np.ldexp(random.uniform(-1, 1, (2, 2 * n)), powers).astype(dtype).astype(np.float64)
    anything = a, b, a * b * np.ldexp(-1.0, random.choice([0, -14, -9, 9], 2 * n))
    odd = 2 * random.integers(2**places // 6 + 1, 2**places // 3, n) + 1  # three times it has a place too many
    tie = 3 + 0 * odd, odd, random.choice([-1, 1], n) * float(limits.smallest_subnormal)
    last = 2.0 ** (1 - places)
    near_tie = np.full(n, 1 + last), np.full(n, 1 - last), 2.0**places + random.integers(0, 2 ** (places - 1), n) * 2
    return np.concatenate([anything, tie, near_tie], axis=1).astype(dtype)


def functions_of(executor, scalar, pairs, *numbers):
    """(n, 21) results of FUNCTIONS, the first 14 of them exact."""
    defined = "".join(f"#define {macro} {names[pairs]}\n" for macro, names in NAMES.items())
    text = f"{HEADER}using Type = {scalar}{'2' if pairs else ''};\n{defined}{FUNCTIONS}"
    n, per_step = numbers[0].size, 2 if pairs else 1
    out = executor.from_numpy(np.zeros((n // per_step, 21, per_step), TYPES[scalar]))
    a, b, c = map(executor.from_numpy, numbers)
    executor.load("narrow.cu", text=text, Scalar=scalar).launch(
        "functions", 1, THREADS, a=a, b=b, c=c, out=out, n=n // per_step
    )
    return executor.to_numpy(out).transpose(0, 2, 1).reshape(n, 21)


@pytest.mark.parametrize("pairs", [False, True], ids=["one", "pairs"])
@pytest.mark.parametrize("scalar", TYPES)
def test_cudas_functions_of_narrow_floats(scalar, pairs):
    dtype, n = TYPES[scalar], 4096
    a, b, c = operands(dtype, n)
    found = functions_of(SimtExecutor(), scalar, pairs, a, b, c)
    with np.errstate(all="ignore"):
        x = a.astype(np.float32)
        single = [np.exp(x), np.exp2(x), np.log(x), np.log2(x), 1 / x, np.sqrt(x), 1 / np.sqrt(x)]
        four = [function(a, b) for function in OPERATORS]
        exact = np.stack([*four, *four, fused(a, b, c), -a, -a, abs(a), np.maximum(a, b), np.minimum(a, b)], axis=1)
        rounded = np.stack(single, axis=1).astype(dtype)
    np.testing.assert_array_equal(found[:, :14].astype(np.float32), exact.astype(np.float32))
    # Another library's exp may differ in float32's last place, and so round to the next number of 16 bits.
    places = np.where(rounded == rounded, abs(found[:, 14:].view(np.int16) - rounded.view(np.int16)), 0)
    assert places.max() <= 1 and (places > 0).mean() < 0.001
    np.testing.assert_array_equal(np.isnan(found[:, 14:]), np.isnan(rounded))


EXTREMES = """
extern "C" __global__ void extremes(const Scalar* a, const Scalar* b, Scalar* out, bool* told, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        Scalar* const row = out + 4 * i;
        row[0] = __hmax(a[i], b[i]); row[1] = __hmin(a[i], b[i]);
        row[2] = __hmax_nan(a[i], b[i]); row[3] = __hmin_nan(a[i], b[i]);
        bool* const truth = told + 7 * i;
        truth[0] = __heq(a[i], b[i]); truth[1] = __hne(a[i], b[i]); truth[2] = __hlt(a[i], b[i]);
        truth[3] = __hle(a[i], b[i]); truth[4] = __hgt(a[i], b[i]); truth[5] = __hge(a[i], b[i]);
        truth[6] = __hisnan(a[i]);
    }
}"""


@pytest.mark.parametrize("scalar", TYPES)
def test_extremes_and_comparisons_of_zeros_and_nan(scalar):
    """+0 is larger than -0. NaN is missing, or with _nan it is the result; it is equal, and unequal, to nothing."""
    nan = np.nan
    a = np.array([0.0, -0.0, nan, 1.0, nan, 2.0, -np.inf], TYPES[scalar])
    b = np.array([-0.0, 0.0, 1.0, nan, nan, 2.0, np.inf], TYPES[scalar])
    out, told = np.zeros((a.size, 4), TYPES[scalar]), np.zeros((a.size, 7), bool)
    run(EXTREMES, "extremes", scalar=scalar, a=a, b=b, out=out, told=told, n=a.size)
    high, low = np.array([0.0, 0.0, 1, 1, nan, 2, np.inf]), np.array([-0.0, -0.0, 1, 1, nan, 2, -np.inf])
    either = np.isnan(a.astype(np.float32)) | np.isnan(b.astype(np.float32))
    expected = np.stack([high, low, np.where(either, nan, high), np.where(either, nan, low)], axis=1)
    found = out.astype(np.float64)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found[:2]), np.signbit(expected[:2]))
    with np.errstate(invalid="ignore"):
        compared = [np.where(either, False, function(a, b)) for function in COMPARISONS]
    np.testing.assert_array_equal(told, np.stack([*compared, np.isnan(a.astype(np.float32))], axis=1))


PAIRS = """
extern "C" __global__ void pairs(float* out) {
    const __half2 half[] = {__floats2half2_rn(1, 2), __float22half2_rn(make_float2(3, 4)), __half2half2(5),
                            __halves2half2(6, 7)};
    const __nv_bfloat162 brain[] = {__floats2bfloat162_rn(1, 2), __float22bfloat162_rn(make_float2(3, 4)),
                                    __bfloat162bfloat162(5), __halves2bfloat162(6, 7)};
    for (int i = 0; i < 4; ++i) {
        reinterpret_cast<float2*>(out)[i] = __half22float2(half[i]);
        reinterpret_cast<float2*>(out)[4 + i] = __bfloat1622float2(brain[i]);
        reinterpret_cast<float2*>(out)[8 + i] = {__low2half(half[i]), __high2half(half[i])};
        reinterpret_cast<float2*>(out)[12 + i] = {__low2bfloat16(brain[i]), __high2bfloat16(brain[i])};
        reinterpret_cast<float2*>(out)[16 + i] = {__low2float(half[i]), __high2float(__lowhigh2highlow(brain[i]))};
    }
}
extern "C" __global__ void bits(unsigned short* out) {
    out[0] = __half_as_ushort(__float2half(1.0f)), out[1] = __bfloat16_as_ushort(__float2bfloat16(1.0f));
    out[2] = __half2float(__ushort_as_half(0x4000)), out[3] = __bfloat162float(__ushort_as_bfloat16(0x4040));
    out[4] = sizeof(half2), out[5] = alignof(half2), out[6] = sizeof(nv_bfloat162), out[7] = alignof(nv_bfloat162);
}"""


def test_pairs_and_bits():
    found, bits = np.zeros(40, np.float32), np.zeros(8, np.uint16)
    run(PAIRS, "pairs", block=1, out=found)
    run(PAIRS, "bits", block=1, out=bits)
    np.testing.assert_array_equal(found, 4 * [1, 2, 3, 4, 5, 5, 6, 7] + [1, 1, 3, 3, 5, 5, 6, 6])
    np.testing.assert_array_equal(bits, [0x3C00, 0x3F80, 2, 3, 4, 4, 4, 4])


VECTORS = {"char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "long": 8, "ulong": 8, "longlong": 8}
VECTORS |= {"ulonglong": 8, "float": 4, "double": 8}


def test_vectors_have_the_sizes_and_alignments_of_cuda():
    """CUDA C++ Programming Guide, "Built-in Vector Types"."""
    out, expected, lines = np.zeros((len(VECTORS), 4, 3), np.int32), [], []
    for i, (name, size) in enumerate(VECTORS.items()):
        for n in (1, 2, 3, 4):
            aligned = min(n * size, 16) if n != 3 else size
            expected.append((n * size, aligned, sum(range(1, n + 1))))
            values = ", ".join(map(str, range(1, n + 1)))
            total = " + ".join(f"int(v.{axis})" for axis in "xyzw"[:n])
            lines.append(f"{{ const auto v = make_{name}{n}({values}); int* const row = out + {3 * (4 * i + n - 1)};")
            lines.append(f"  row[0] = sizeof({name}{n}); row[1] = alignof({name}{n}); row[2] = {total}; }}")
    text = "\n".join(['extern "C" __global__ void vectors(int* out) {', *lines, "}"])
    run(text, "vectors", block=1, out=out)
    np.testing.assert_array_equal(out.reshape(-1, 3), expected)


def test_no_header_is_cudas_own(tmp_path):
    """What the executor's prelude and the kernels' headers read lies in this project, or is the compiler's."""
    own = [build.SIMT_DIR / "include", kernels_dir() / "include"]
    names = ("cuda_bf16.h", "cuda_fp16.h", "cuda_runtime.h", "vector_functions.h", "vector_types.h")
    kernels = ("common.cuh", "scalar.cuh", "ptx.cuh")
    text = build.PRELUDE + "".join(f"#include <{name}>\n" for name in (*names, *kernels))
    (tmp_path / "all.cpp").write_text(text)
    command = [*build.compiler(), "-std=c++20", *(f"-I{path}" for path in own), "-M", tmp_path / "all.cpp"]
    told = processes.run(command)
    assert told.returncode == 0, told.stderr
    read = [Path(word) for word in told.stdout.split() if word.endswith((".h", ".hpp", ".cuh"))]
    assert {path.name for path in read if path.parent == own[0]} >= {*names, "simt.hpp"}
    assert {path.name for path in read if path.parent == own[1]} == {*kernels}
    assert not [path for path in read if path.parent not in own and ("cuda" in str(path) or "nvidia" in str(path))]
