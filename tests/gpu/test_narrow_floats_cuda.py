"""CUDA's own arithmetic of 16 bits: the same bits as the SIMT executor's."""

import numpy as np
import pytest
from test_narrow_floats import TYPES, functions_of, operands

from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.runtime.simt.executor import SimtExecutor

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")


@pytest.mark.parametrize("pairs", [False, True], ids=["one", "pairs"])
@pytest.mark.parametrize("scalar", TYPES)
def test_a_gpu_gives_the_executors_bits(scalar, pairs):
    from moeblaze_ref.runtime.cupy import CupyExecutor

    numbers = operands(TYPES[scalar], 4096)
    found, expected = (functions_of(executor, scalar, pairs, *numbers) for executor in (CupyExecutor(), SimtExecutor()))
    np.testing.assert_array_equal(found[:, :14].view(np.uint16), expected[:, :14].view(np.uint16))
