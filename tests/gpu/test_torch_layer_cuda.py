"""The torch layer on a CUDA device: gradients, memory to the byte, determinism, streams, and torch's allocator."""

import pytest
import torch

from moeblaze_ref import check
from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.cases import every_choice
from moeblaze_ref.config import POLICIES, MoEConfig
from moeblaze_ref.devices import cuda_device_count
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.torch_layer import MoELayer

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CONFIG = MoEConfig(L=4_096, d=512, h=1_024, E=16, k=4)
DTYPES = ("float32", "bfloat16", "float16")


def make_layer(config=CONFIG, dtype="bfloat16", **options):
    torch.manual_seed(0)
    return MoELayer(config.d, config.h, config.E, config.k, device="cuda", dtype=getattr(torch, dtype), **options)


def make_x(config=CONFIG, dtype="bfloat16"):
    return torch.randn(config.L, config.d, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)


def step(layer, x):
    """Every output and gradient of one forward and backward."""
    result = layer(x)
    loss = (result.out.float() * x.detach().float()).sum() + result.load_balancing_loss + result.router_z_loss
    return (*result, *torch.autograd.grad(loss, [x, *layer.parameters()]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", every_choice(), ids=lambda case: case.name)
def test_every_activation_and_policy_agrees_with_autograd(case, dtype):
    assert check.passed(list(check.check_gradients(BACKENDS["cuda"], None, case, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits(dtype):
    layer, x = make_layer(dtype=dtype), make_x(dtype=dtype)
    first = step(layer, x)
    for _ in range(20):
        assert all(torch.equal(*pair) for pair in zip(step(layer, x), first, strict=True))
    assert layer.executor == "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("policy", POLICIES)
def test_autograd_keeps_what_the_accounting_says(policy, dtype):
    one = account(CONFIG.replace(dtype=dtype), "moeblaze", policy)
    assert measure.kept_bytes(make_layer(dtype=dtype, policy=policy), make_x(dtype=dtype)) == one.kept_bytes


@pytest.mark.parametrize("policy", POLICIES)
def test_the_allocators_peak_is_the_accountings_within_two_percent(policy):
    layer, x = make_layer(policy=policy), make_x()
    layer(x)  # compiles, and lets cuBLAS take its workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x)
    torch.cuda.synchronize()
    one = account(CONFIG, "moeblaze", policy)
    expected = one.peak_bytes - x.nbytes  # which was there before
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(expected, rel=0.02)


def test_everything_comes_from_torchs_allocator_and_returns_to_it():
    import cupy

    layer, x = make_layer(), make_x()
    step(layer, x)
    torch.cuda.synchronize()
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = torch.cuda.memory_allocated(), pool.total_bytes()
    for _ in range(3):
        step(layer, x)
    assert (torch.cuda.memory_allocated(), pool.total_bytes()) == before


def test_it_runs_on_torchs_current_stream():
    layer, x = make_layer(), make_x()
    expected = step(layer, x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # whoever does not wait for this stream reads x before it is written
        doubled = (2 * x.detach() / 2).requires_grad_()
        found = step(layer, doubled)
    stream.synchronize()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="wg is on cuda:0, but x is on cpu"):
        make_layer()(make_x().cpu())
