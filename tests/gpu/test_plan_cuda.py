"""Plans beside a GPU: kept storages to the byte, peaks within two percent."""

import multiprocessing

import pytest

from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.plan.measure import CASES, measure

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_plan_is_what_the_gpu_has(case):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        (found,) = pool.apply(measure, (case, (2048,)))
    assert found["same_storages"] and found["kept_bytes"] == found["planned_kept_bytes"] > 0
    for phase, bytes_there in found["peaks"].items():
        assert found["planned_peaks"][phase] == pytest.approx(bytes_there, rel=0.02), phase
