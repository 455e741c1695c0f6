"""Numba kernels at sizes past 2**31 elements, on the simulator."""

from dataclasses import replace

import numpy as np
import pytest
from simulator import rerun

from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR, cuda
from moeblaze_ref.verify import large
from moeblaze_ref.verify.large.cases import BOUNDS


def test_the_last_block_of_a_large_launch_is_right():
    if EXECUTOR != "simulator":
        return rerun(f"{__file__}::test_the_last_block_of_a_large_launch_is_right")
    for case in large.every_case("numba"):
        assert case.run().worst <= BOUNDS[case.dtype], case.kernel


def test_an_index_of_32_bits_leaves_the_elements_of_its_case():
    if EXECUTOR != "simulator":
        return rerun(f"{__file__}::test_an_index_of_32_bits_leaves_the_elements_of_its_case")

    @cuda.jit
    def narrow(a, act_a):
        element = np.int64(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x).astype(np.int32)
        act_a[element // a.shape[1], element % a.shape[1]] = a[element // a.shape[1], element % a.shape[1]]

    (case,) = [case for case in large.every_case("numba") if case.kernel == "act"]
    with pytest.raises(IndexError, match=r"a\[0, 10\d\d\] is none of the elements of this case"):
        replace(case, function=narrow).run()
