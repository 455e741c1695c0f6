"""The capstone's reference solutions on a GPU: right, and faster where threads share tiles.

Gold asks for fewer bytes than silver, but its blocks need more registers: which one is faster depends on the GPU.
"""

import statistics

import numpy as np
import pytest

from moeblaze_ref.backends.numpy_ref import dispatch
from moeblaze_ref.core import kernel_headers
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.course.exercises.exercise import LEVELS
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.runtime import cupy_executor
from moeblaze_ref.verify.cases import random_topk
from moeblaze_ref.verify.checker import check_kernel

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="there is no CUDA device")

CAPSTONE = EXERCISES["fused-expert"]
SIZES = {"L": 8192, "d": 1024, "h": 2048, "E": 8, "k": 2}
REPETITIONS = 5


@pytest.mark.parametrize("level", LEVELS)
def test_a_solution_is_right_on_a_gpu(level):
    assert check_kernel(CAPSTONE.solutions[level], CAPSTONE.task, backend="cuda").ok


def milliseconds():
    """The median time of each level's solution on a layer of the size of real ones."""
    import cupy

    L, d, h, E, k = SIZES.values()
    routes, R = dispatch.build_by_sort(random_topk(L, E, k, "zipf"), E), L * k
    random = cupy.random.default_rng(0)
    arrays = {name: random.standard_normal(shape, np.float32) for name, shape in
              {"x": (L, d), "w1": (E, d, h), "w2": (E, d, h)}.items()}  # fmt: skip
    arrays |= {name: cupy.empty((R, h), np.float32) for name in ("a", "b", "y_swi")}
    indices = {"expert_token_indices", "expert_token_offsets"}
    arrays |= {name: cupy.asarray(array) for name, array in routes.arrays().items() if name in indices}
    return {level: _milliseconds(cupy, CAPSTONE.solutions[level], arrays, SIZES | {"R": R}) for level in LEVELS}


def _milliseconds(cupy, text, arrays, sizes):
    grid = kernel_headers.sizes(kernel_headers.table(text)["expert_up"]["grid"], sizes)
    module = cupy_executor().load("capstone.cu", text=text, Scalar="float", ACTIVATION="swiglu")

    def launch():
        module.launch("expert_up", grid, 256, 0, **arrays, d=sizes["d"], h=sizes["h"], E=sizes["E"])

    launch()
    times = []
    for _ in range(REPETITIONS):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(times)


def test_tiles_in_shared_memory_are_faster():
    times = milliseconds()
    assert max(times["silver"], times["gold"]) < times["bronze"], times
