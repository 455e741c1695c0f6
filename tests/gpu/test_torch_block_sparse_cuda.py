"""MegaBlocks' torch layer on a CUDA device: gradients, memory to the byte, determinism."""

import pytest
import torch
import torch_layers
from torch_layers import all_equal, peak_of_step, step

from moeblaze_ref.backends.raw_cuda.block_sparse import BLOCK
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import ACTIVATIONS, MoEConfig
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.memory.accounting import Assumptions, account, megablocks_step_account
from moeblaze_ref.memory.measured import measured
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import every_activation

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CONFIG = MoEConfig(L=4_096, d=512, h=1_024, E=16, k=4)
COUNTS = (4_096, 2_049, 2_048, 2_047, 1_000, 1_000, 1_000, 1_000, 500, 500, 500, 500, 144, 0, 0, 0)
DTYPES = ("float32", "bfloat16", "float16")


def make_layer(dtype, **options):
    sizes = {name: getattr(CONFIG, name) for name in torch_layers.SIZES}
    return torch_layers.make_layer("megablocks", **sizes, block=BLOCK, device="cuda", dtype=dtype, **options)


def make_x(dtype):
    return torch_layers.make_x(CONFIG.L, CONFIG.d, device="cuda", dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", every_activation(), ids=lambda case: case.name)
def test_every_activation_agrees_with_autograd(case, dtype):
    assert check.passed(list(check.check_gradients(BACKENDS["cuda"], None, case, dtype, "torch_block_sparse")))


@pytest.mark.parametrize("system", ["megablocks", "capacity"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_autograd_keeps_what_the_accounting_says(activation, dtype, system):
    config = CONFIG.replace(activation=activation, dtype=dtype)
    for counts in (None, COUNTS):
        one = account(config, system, assumptions=Assumptions(counts))
        assert measured(one, "cuda").kept_bytes == one.kept_bytes


@pytest.mark.usefixtures("one_autograd_thread")
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_allocators_peak_of_a_step_is_the_accountings_within_two_percent(activation):
    config = CONFIG.replace(activation=activation)
    layer, x = make_layer(torch.bfloat16, activation=activation), make_x(torch.bfloat16)
    counts = layer(x).topk_experts.flatten().bincount(minlength=config.E).tolist()
    expected = megablocks_step_account(config, Assumptions(counts)).peak_bytes - x.nbytes  # which was there
    assert peak_of_step(layer, x) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ten_runs_give_the_same_bits(dtype):
    dtype = getattr(torch, dtype)
    layer, x = make_layer(dtype), make_x(dtype)
    first = step(layer, x)
    for _ in range(10):
        assert all_equal(step(layer, x), first)
    assert layer.executor == "cuda"
