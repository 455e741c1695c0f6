"""Numbers narrower than float32 on the SIMT executor: tf32's rounding and what it costs, and pairs in a word."""

import numpy as np
import pytest
from expert_stages import PRODUCTS, RAGGED, dispatch_of, quick, run

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import relative_error


def to_tf32(array):
    """The floats whose mantissas have 10 bits that are nearest to the array's, the larger magnitude of two."""
    mantissa, exponent = np.frexp(array.astype(np.float64))
    return np.ldexp(np.copysign(np.floor(np.abs(mantissa) * 2**11 + 0.5), mantissa), exponent - 11)


ROUND = """#include "ptx.cuh"
extern "C" __global__ void round_all(const float* x, float* out) {
    out[threadIdx.x] = __int_as_float(to_tf32(unsigned(__float_as_int(x[threadIdx.x]))));
}"""


def test_floats_are_rounded_to_the_nearest_of_tf32_and_ties_away_from_zero():
    ulp = 2.0**-10
    halves = [1 + (n + 0.5) * ulp for n in (0, 1, 2, 1023)]
    exact = [0.0, 1.0, 1 + ulp, 2.0**-126, 3.0e38, np.inf]
    x = np.array([*halves, *exact, *np.random.default_rng(0).standard_normal(54)], np.float32)
    x = np.concatenate([x, -x, np.nextafter(x[:4], 0), np.nextafter(x[:4], 2), [np.nan, 0.0]]).astype(np.float32)
    executor = SimtExecutor()
    out = executor.empty(x.shape, "float32")
    executor.load("round.cu", text=ROUND).launch("round_all", grid=1, block=x.size, x=x, out=out)
    finite = np.isfinite(x)
    np.testing.assert_array_equal(out[finite], to_tf32(x[finite]).astype(np.float32))
    np.testing.assert_array_equal(out[~finite], x[~finite])
    np.testing.assert_array_equal(out[:4], np.float32([1 + ulp, 1 + 2 * ulp, 1 + 3 * ulp, 2.0]))


def products(case, round_to):
    """Every result of both stages that is one product, in float64, from rounded operands: {name: array}."""
    dispatch, (_, w1, w2, w3) = dispatch_of(case), case.weights
    rows = np.repeat(np.arange(case.E), np.diff(dispatch.expert_token_offsets))
    x, d_out = (array[dispatch.expert_token_indices] for array in (case.x, case.d_out))
    y_swi, (d_a, d_b) = comparisons.hidden(case)[2], comparisons.d_hidden(case)

    def times(left, right):
        return np.einsum("ri,rij->rj", round_to(left), round_to(right)[rows])

    def summed(left, right):
        outer = np.zeros((case.E, left.shape[1], right.shape[1]))
        np.add.at(outer, rows, round_to(left)[:, :, None] * round_to(right)[:, None])
        return outer

    d_x = np.zeros(case.x.shape)
    turned = [w.transpose(0, 2, 1) for w in (w1, w2)]
    np.add.at(d_x, dispatch.expert_token_indices, times(d_a, turned[0]) + times(d_b, turned[1]))
    up = {"a": times(x, w1), "b": times(x, w2), "d_x": d_x, "d_w1": summed(x, d_a), "d_w2": summed(x, d_b)}
    return up | {"y": times(y_swi, w3)}


def test_tf32_products_are_those_of_rounded_operands_to_the_last_bits():
    case, found = RAGGED.astype("float32"), {}
    for stage in PRODUCTS:
        for results in run(stage, gemm.TF32, quick(gemm.TF32), case).values():
            found |= results
    rounded, exact = products(case, to_tf32), products(case, lambda array: array.astype(np.float64))
    for name in rounded:
        assert relative_error(found[name], rounded[name]) < 1e-6, name
        assert 1e-4 < relative_error(found[name], exact[name]) < comparisons.TF32_PRODUCT, name


@pytest.mark.parametrize("bits", [7, 8])
def test_the_bound_of_tf32_tells_it_from_fewer_bits(bits):
    case = RAGGED.astype("float32")

    def coarser(array):
        mantissa, exponent = np.frexp(array.astype(np.float64))
        return np.ldexp(np.round(mantissa * 2 ** (bits + 1)), exponent - bits - 1)

    found, exact = products(case, coarser), products(case, lambda array: array.astype(np.float64))
    assert all(relative_error(found[name], exact[name]) > comparisons.TF32_PRODUCT for name in exact)


PAIRS = """
extern "C" __global__ void pairs(const unsigned* words, float* values, unsigned* again, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float pair[2];
    unpack<Scalar>(words[i], pair);
    values[2 * i] = pair[0];
    values[2 * i + 1] = pair[1];
    again[i] = packed<Scalar>(pair[0], pair[1]);
}"""


def assert_pairs(dtype, right="", wrong=""):
    """Every number of the dtype is found in its half of a word, and comes back to it."""
    scalar = (kernels_dir() / "include/scalar.cuh").read_text()
    assert right in scalar
    numbers = np.random.default_rng(0).permutation(2**16).astype(np.uint16).view(dtype)
    numbers = numbers[~np.isnan(numbers.astype(np.float32))]
    words, executor = numbers.view(np.uint32), SimtExecutor()
    values, again = executor.empty(numbers.shape, "float32"), executor.empty(words.shape, "uint32")
    module = executor.load("pairs.cu", text=scalar.replace(right, wrong) + PAIRS, Scalar=gemm.C_TYPE[dtype])
    module.launch("pairs", len(words) // 256 + 1, 256, words=words, values=values, again=again, n=len(words))
    np.testing.assert_array_equal(values, numbers.astype(np.float32))
    np.testing.assert_array_equal(again, words)


@pytest.mark.parametrize("dtype", gemm.NARROW)
def test_a_pair_is_unpacked_and_packed_again(dtype):
    assert_pairs(dtype)


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        ("float16", "to_float(values[0])", "to_float(values[1])"),
        ("bfloat16", "word << 16", "word & 0xffff0000u"),
        ("bfloat16", "word & 0xffff0000u", "word"),  # the first's bits below the second's
        ("float16", "from_float<T>(first), from_float<T>(second)", "from_float<T>(second), from_float<T>(first)"),
    ],
)
def test_a_pair_of_wrong_halves_is_seen(dtype, right, wrong):
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        assert_pairs(dtype, right, wrong)
