"""The launch by hand of docs/cupy_by_hand.md on a CUDA device, with the real CuPy."""

import pytest

from moeblaze_ref.backends.raw_cuda import combine
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.course.site import cupy_by_hand
from moeblaze_ref.verify.cases import relative_error

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")


def test_the_launch_gives_the_bits_of_the_packages_own_launch():
    import cupy

    names = {}
    exec("".join(cupy_by_hand.blocks(cupy_by_hand.DOCUMENT.read_text())), names)
    assert relative_error(names["by_cupy"], names["by_numpy"]) < 1e-6
    on_gpu = [cupy.asarray(names[name]) for name in ("y", "gates")]
    ours = combine.forward(*on_gpu, names["dispatch"].map(cupy.asarray), version="1_gather")
    assert (cupy.asnumpy(ours) == names["by_cupy"]).all()
    assert cupy.asnumpy(ours).any()


def test_the_page_can_be_recorded():
    printed = cupy_by_hand.measure(cupy_by_hand.DOCUMENT.read_text())["printed"]
    assert [line.split()[0] for line in printed.splitlines()] == ["numpy", "torch", "cupy", "relative"]
