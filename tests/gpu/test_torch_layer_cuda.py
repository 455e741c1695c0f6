"""The torch layer on a CUDA device: gradients, memory to the byte, determinism, streams, and torch's allocator."""

import pytest
import torch
import torch_layers
from torch_layers import all_equal, peak_of_step, settled, step

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.raw_cuda.layer import default_version
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import POLICIES, MoEConfig, preset
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import account, step_account
from moeblaze_ref.nn import without_launch_plans
from moeblaze_ref.nn.torch_graphs import graphed
from moeblaze_ref.nn.torch_layer import MoEOutput
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.torch_capture import capture
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import every_choice

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

CONFIG = MoEConfig(L=4_096, d=512, h=1_024, E=16, k=4)
DTYPES = ("float32", "bfloat16", "float16")


def make_layer(config=CONFIG, dtype="bfloat16", **options):
    sizes = {name: getattr(config, name) for name in torch_layers.SIZES}
    return torch_layers.make_layer(**sizes, device="cuda", dtype=getattr(torch, dtype), **options)


def make_x(config=CONFIG, dtype="bfloat16"):
    return torch.randn(config.L, config.d, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", every_choice(), ids=lambda case: case.name)
def test_every_activation_and_policy_agrees_with_autograd(case, dtype):
    assert check.passed(list(check.check_gradients(BACKENDS["cuda"], None, case, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_twenty_runs_give_the_same_bits(dtype):
    layer, x = make_layer(dtype=dtype), make_x(dtype=dtype)
    first = step(layer, x)
    for _ in range(20):
        assert all_equal(step(layer, x), first)
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
    before = settled()
    layer(x)
    torch.cuda.synchronize()
    one = account(CONFIG, "moeblaze", policy)
    expected = one.peak_bytes - x.nbytes  # which was there before
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(expected, rel=0.02)


STEPS = [(CONFIG.replace(activation=activation), policy) for activation in ("swiglu", "gelu") for policy in POLICIES]
ODD = MoEConfig(L=32_768, d=1_032, h=1_544, E=2, k=2)  # its tokens and weights are copied, and y exists in three parts
PARTS = MoEConfig(L=16_384, d=1_024, h=256, E=16, k=4)  # y and the rows of d_x exist in two parts


@pytest.mark.usefixtures("one_autograd_thread")
@pytest.mark.parametrize(
    ("config", "policy"), [*STEPS, *((config, policy) for config in (PARTS, ODD) for policy in ("minimal", "inputs"))]
)
def test_the_allocators_peak_of_a_step_is_the_accountings_within_two_percent(config, policy):
    layer, x = make_layer(config, policy=policy, activation=config.activation), make_x(config)
    version = default_version(config.dtype, config.d, config.h, bridge_to(x.device).executor)
    expected = step_account(config, policy, version).peak_bytes - x.nbytes  # which was there
    assert peak_of_step(layer, x) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_step_of_odd_widths_is_the_same_without_gaps_and_copies(activation, monkeypatch):
    layer, x = make_layer(ODD, activation=activation), make_x(ODD)
    with without_launch_plans():
        found = step(layer, x)
        monkeypatch.setattr(gemm, "SECTOR", gemm.ALIGNMENT)
        assert all_equal(found, step(layer, x))


def test_gaps_between_odd_rows_are_kept():
    gaps = 2 * 16 * ODD.R  # of a and b
    kept = account(ODD, "moeblaze", "minimal").kept_bytes
    assert measure.kept_bytes(make_layer(ODD), make_x(ODD)) == kept + gaps


@pytest.mark.usefixtures("one_autograd_thread")
def test_the_peak_of_the_preset_odd_is_not_above_that_without_gaps_and_copies(monkeypatch):
    config = preset("odd").config
    layer, x = make_layer(config), make_x(config)
    with without_launch_plans():
        found = peak_of_step(layer, x)
        monkeypatch.setattr(gemm, "SECTOR", gemm.ALIGNMENT)
        assert found <= peak_of_step(layer, x)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_step_in_parts_of_its_columns_is_the_same(activation, monkeypatch):
    layer, x = make_layer(PARTS, activation=activation), make_x(PARTS)
    parts = step(layer, x)
    monkeypatch.setattr(gemm, "MANY_ELEMENTS", PARTS.R * PARTS.d + 1)
    assert all_equal(parts, step(layer, x))


@pytest.mark.usefixtures("one_autograd_thread")
def test_everything_comes_from_torchs_allocator_and_returns_to_it():
    import cupy

    layer, x = make_layer(), make_x()
    step(layer, x)
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before = settled(), pool.total_bytes()
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
    assert all_equal(found, expected)


def fixed_step(layer, x, d_outputs, topk_experts=None):
    """Outputs and gradients without an operation of torch's own in between."""
    result = layer(x, topk_experts)
    return (*result, *torch.autograd.grad(result[:3], [x, *layer.parameters()], d_outputs))


def make_d_outputs(x):
    return [
        torch.randn_like(x, requires_grad=False),
        torch.tensor(0.7, device="cuda"),
        torch.tensor(0.3, device="cuda"),
    ]


CHOICES = {  # every policy, both kinds of layers and gates, every dtype
    "minimal": {"renormalize": True},
    "paper": {"activation": "gelu"},
    "inputs": {"dtype": "float32"},
    "conventional": {"dtype": "float16", "renormalize": True},
}


@pytest.mark.parametrize("policy", CHOICES)
def test_a_captured_step_replays_on_new_inputs_with_the_same_bits(policy):
    options = {"dtype": "bfloat16"} | CHOICES[policy]
    layer, x = make_layer(policy=policy, **options), make_x(dtype=options["dtype"])
    d_outputs, graph, aside = make_d_outputs(x), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):  # compiles, and lets cuBLAS take its workspace
            fixed_step(layer, x, d_outputs)
    torch.cuda.current_stream().wait_stream(aside)
    with capture(graph):
        captured = fixed_step(layer, x, d_outputs)
    choices = []
    for seed in range(3):
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.no_grad():
            for tensor in (x, layer.wg, d_outputs[0]):  # another routing too
                tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cuda") * tensor.std())
        graph.replay()
        replayed = [tensor.clone() for tensor in captured]
        expected = fixed_step(layer, x, d_outputs)
        assert all_equal(replayed, expected)
        choices.append(replayed[3])
    assert not torch.equal(choices[0], choices[1])


def step_of_output(layer, x):
    """Output and gradients where nobody uses the losses."""
    out = layer(x).out
    return out, *torch.autograd.grad(out, [x, *layer.parameters()], x.detach())


def make_graphed_layer(**options):
    """As docs/cuda_graphs.md says to run a small layer."""
    return graphed(make_layer(**options), make_x())


@pytest.mark.parametrize("work", [step, step_of_output])
@pytest.mark.parametrize("policy", ["minimal", "inputs"])
def test_a_graphed_layer_gives_the_same_bits_on_other_inputs(policy, work):
    layer, replayed = make_layer(policy=policy), make_graphed_layer(policy=policy)  # of the same seed
    inputs = [make_x(), make_x()]
    for x in inputs:
        assert all_equal(work(replayed, x), work(layer, x))
    chosen = [replayed(x).topk_experts.clone() for x in inputs]
    assert isinstance(replayed(inputs[0]), MoEOutput) and not torch.equal(*chosen)


def test_an_output_of_a_graphed_layer_lasts_until_its_next_forward():
    replayed = make_graphed_layer()
    first, second = (replayed(make_x()).out for _ in range(2))
    assert torch.equal(first, second)


def test_a_graphed_layer_adds_to_gradients_that_are_there():
    layer, replayed, inputs = make_layer(), make_graphed_layer(), [make_x(), make_x()]
    for each in (layer, replayed):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for x in inputs:
            each(x).out.backward(x.detach())
    assert all_equal(*([parameter.grad for parameter in each.parameters()] for each in (layer, replayed)))


@pytest.mark.parametrize("policy", CHOICES)
def test_the_host_never_waits_for_the_gpu(policy):
    """A step returns while the GPU still sleeps before it; torch raises at each of its own waits."""
    options = {"dtype": "bfloat16"} | CHOICES[policy]
    layer, x = make_layer(policy=policy, **options), make_x(dtype=options["dtype"])
    d_outputs = make_d_outputs(x)
    expected = fixed_step(layer, x, d_outputs)
    settled()
    slept = torch.cuda.Event()
    torch.cuda._sleep(2_000_000_000)  # about a second
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = fixed_step(layer, x, d_outputs)
        awake = slept.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not awake
    assert all_equal(found, expected)


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="wg is on cuda:0, but x is on cpu"):
        make_layer()(make_x().cpu())


def test_tensors_that_begin_anywhere_give_the_same_bits():
    """A view of a buffer may begin between two addresses from which kernels move 16 bytes."""
    layer, x = make_layer(), make_x()
    expected = step(layer, x)
    buffer = torch.empty(x.numel() + 1, device="cuda", dtype=x.dtype)
    buffer[1:] = x.detach().flatten()
    shifted = buffer[1:].view(x.shape).requires_grad_()
    weight = torch.empty(layer.w1.numel() + 3, device="cuda", dtype=x.dtype)
    weight[3:] = layer.w1.detach().flatten()
    layer.w1 = torch.nn.Parameter(weight[3:].view(layer.w1.shape))
    assert shifted.data_ptr() % 16 == 2 and layer.w1.data_ptr() % 16 == 6
    assert all_equal(step(layer, shifted), expected)
