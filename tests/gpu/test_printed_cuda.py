"""The steps as printed on a CUDA device: the same bits from run to run, and rows without a message."""

import numpy as np
import pytest

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import expert_down, gemm
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.papers import printed
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import make_case

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CASE = make_case(3001, 264, 520, 13, 4, "zipf")
CONFIG = MoEConfig(L=4096, d=512, h=1024, E=16, k=4)


@pytest.mark.parametrize("dtype", gemm.WIDE)
def test_twenty_runs_give_the_same_sums(dtype):
    from moeblaze_ref.runtime.cupy import CupyExecutor

    executor, case = CupyExecutor(poisoned=True), CASE.astype(dtype)
    *_, y_swi, gates = comparisons.hidden(case)
    operands = [executor.from_numpy(array) for array in (y_swi, case.weights.w3, gates)]
    dispatch = build_by_sort(case.topk_experts, case.E).map(executor.from_numpy)
    first, *others = (
        executor.to_numpy(expert_down.summed_forward(*operands, dispatch, executor=executor)) for _ in range(20)
    )
    assert np.linalg.norm(first.astype(float)) > 0
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("measure", [printed.time_dispatch, printed.time_sums])
def test_every_version_is_timed_and_right(measure):
    from moeblaze_ref.runtime.device import Gpu

    rows = measure("small", CONFIG, Gpu())
    assert [row.get("message") for row in rows] == [None] * len(rows)
    assert all(row["ms"] > 0 and row["bytes_read"] > 0 for row in rows)
