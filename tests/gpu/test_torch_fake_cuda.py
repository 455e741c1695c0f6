"""On a CUDA device a layer keeps, allocates and frees what it does there without memory."""

import pytest
import torch
from torch_layers import EACH_POLICY
from without_memory import STEPS, kept, kept_without_memory, lifetimes, lifetimes_without_memory, make

from moeblaze_ref.core.devices import cuda_device_count

pytestmark = [
    pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device"),
    pytest.mark.usefixtures("one_autograd_thread"),
]

SIZES = {"tokens": 4096, "d": 1024, "h": 256, "E": 16, "k": 4, "device": "cuda"}
PARTS = SIZES | {"tokens": 16_384}  # y and the rows of d_x exist in two halves
of_each_policy = pytest.mark.parametrize(("system", "options"), EACH_POLICY, ids=str)
of_each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def all_options(system, options, dtype, sizes):
    return options | sizes | {"dtype": dtype} | ({} if system == "moeblaze" else {"block": 128})


@pytest.mark.parametrize("sizes", [SIZES, PARTS], ids=["rows whole", "rows in parts"])
@of_each_dtype
@of_each_policy
def test_the_same_storages_are_kept(system, options, dtype, sizes):
    options = all_options(system, options, dtype, sizes)
    found = kept_without_memory(system, **options)
    assert found == kept(system, **options) and found


@pytest.mark.parametrize("step", STEPS)
@of_each_dtype
@of_each_policy
def test_each_tensor_lives_as_long(system, options, dtype, step):
    options = all_options(system, options, dtype, SIZES)
    found = lifetimes_without_memory(step, system, **options)
    assert found == lifetimes(step, *make(system, **options)) and len(found) > 10


@of_each_policy
def test_rows_in_parts_live_as_long(system, options):
    options = all_options(system, options, torch.bfloat16, PARTS)
    found = lifetimes_without_memory(STEPS[0], system, **options)
    assert found == lifetimes(STEPS[0], *make(system, **options))
