"""Hopper's instructions and kernels on the GPU that has them: the tests of the CPU, so that its model of them is true."""

import hopper
import numpy as np
import pytest
from hopper import KERNELS, Inputs
from test_hopper import (
    BOXES,
    RAGGED,
    assert_box_arrives,
    assert_copies_arrive,
    assert_product,
    assert_relayed,
    assert_right,
    both_dtypes,
)

from moeblaze_ref.cases import make_case
from moeblaze_ref.devices import cuda_device_count

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

BLOCKS = 132  # an H100's and an H200's multiprocessors


@pytest.fixture(scope="module")
def cuda():
    """The CuPy executor, with poisoned outputs."""
    import cupy

    from moeblaze_ref.raw_cuda.runtime.cupy import CupyExecutor

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs compute capability 9.0")
    return CupyExecutor(poisoned=True)


@both_dtypes
@pytest.mark.parametrize("name", BOXES)
def test_a_box_arrives_as_on_the_cpu(cuda, name, dtype):
    assert_box_arrives(cuda, name, dtype)


def test_copies_and_phases(cuda):
    assert_copies_arrive(cuda)
    assert_relayed(cuda)


@both_dtypes
@pytest.mark.parametrize("b_along_n", [False, True])
@pytest.mark.parametrize("a_along_m", [False, True])
def test_a_product_of_either_layout(cuda, a_along_m, b_along_n, dtype):
    assert_product(cuda, dtype, a_along_m, b_along_n, accumulate=1)


LARGE = make_case(3000, 520, 1096, 9, 3, "zipf", "many tiles")


@both_dtypes
@pytest.mark.parametrize("case", [RAGGED, LARGE], ids=lambda case: case.name)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_right(cuda, kernel, case, dtype):
    assert_right(kernel, Inputs.make(case, dtype), cuda, BLOCKS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_ten_runs_give_the_same_bits(cuda, kernel):
    inputs = Inputs.make(LARGE, "bfloat16")
    first = hopper.found(kernel, inputs, cuda, BLOCKS)
    for _ in range(9):
        for name, array in hopper.found(kernel, inputs, cuda, BLOCKS).items():
            np.testing.assert_array_equal(array, first[name])
