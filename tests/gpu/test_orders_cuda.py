"""The stated order of sums and the second step on a CUDA device: raw CUDA, and the Numba kernels."""

import pytest
from stages import alter
from test_check import kept_by_shape

from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify import check, orders
from moeblaze_ref.verify.cases import make_case

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

ON_A_GPU = {"cuda", "numba"}
PROMISED = sorted({(one.stage, backend) for one in orders.SUMS for backend in ON_A_GPU.intersection(one.backends)})


@pytest.mark.parametrize(("stage", "backend"), PROMISED)
def test_every_stated_order_is_kept_to_the_bit(stage, backend):
    for version in BACKENDS[backend].versions(stage):
        if BACKENDS[backend].refusal(stage, version):
            continue  # Hopper's kernels on another GPU
        for one in orders.promises(stage, backend, version):
            rows = list(check.check_order(BACKENDS[backend], version, one))
            assert rows and all(row.ok for row in rows), rows


@pytest.mark.parametrize("backend", ["cuda", "numba"])
def test_a_dispatch_kept_by_shape_fails(backend, monkeypatch):
    alter(monkeypatch, backend, "dispatch.build", kept_by_shape)
    version, *_ = BACKENDS[backend].versions("layer")
    case = make_case(13, 8, 16, 4, 2, "zipf", "small")
    first, *_ = rows = list(check.check_of("layer")(BACKENDS[backend], version, case))
    assert all(not row.ok and "second step" in row.shape for row in rows if row.dtype == first.dtype)
