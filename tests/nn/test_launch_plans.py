"""Launch plans of the layers: a replay gives the bits of the stages, whatever changes between the steps."""

import gc
import threading
import weakref

import pytest
import torch
from over_simt import SimtTensorBridge, SimtTensors
from stages import alter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_layers import EACH_POLICY, all_equal, gradients, make_layer, make_x, same_bits, step

from moeblaze_ref.backends.raw_cuda import dispatch
from moeblaze_ref.core.routers import Shared
from moeblaze_ref.nn import (
    Experts,
    clear_launch_plans,
    keep_routing,
    launch_plan_counts,
    launch_plans,
    torch_node,
    use_launch_plans,
    without_launch_plans,
)
from moeblaze_ref.runtime.simt.cache import SimtUnavailable

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def no_plans_of_others():
    clear_launch_plans()
    before = use_launch_plans()
    yield before
    use_launch_plans(before)
    clear_launch_plans()


@pytest.fixture
def device(monkeypatch):
    """The pretended device that layers run on."""
    executor = SimtTensors()
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: SimtTensorBridge(executor))
    return executor


def replays(work, times=3):
    """What ``work`` returns at each call after the one that is recorded, and how many calls replayed a plan."""
    for _ in range(2):
        work()
    before = launch_plan_counts().replayed
    found = [work() for _ in range(times)]
    return found, launch_plan_counts().replayed - before


def check_replays(work, calls=2):
    """Each replay gives the bits of the stages; a call of ``work`` is so many calls of plans."""
    with without_launch_plans():
        expected = work()
    found, replayed = replays(work)
    assert replayed == calls * len(found)
    assert all(all_equal(each, expected) for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize(("system", "options"), EACH_POLICY)
def test_a_replay_gives_the_bits_of_the_stages(device, system, options, dtype):
    layer, x = make_layer(system, dtype=dtype, **options), make_x(dtype=dtype)
    check_replays(lambda: step(layer, x), calls=2 if system == "moeblaze" else 1)  # MegaBlocks' forward waits


@pytest.mark.parametrize("activation", ["gelu", "relu", "reglu"])
@pytest.mark.parametrize("policy", ["minimal", "inputs"])
def test_other_activations_and_renormalized_gates(device, activation, policy):
    layer = make_layer(activation=activation, policy=policy, renormalize=True, dtype=BF16)
    x = make_x(dtype=BF16)
    check_replays(lambda: step(layer, x))


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_tensor_maps_are_encoded_anew(monkeypatch, activation):
    device = SimtTensors(capability=(9, 0))
    monkeypatch.setattr(torch_node, "bridge_to", lambda _: SimtTensorBridge(device))
    layer, x = make_layer(d=64, h=64, dtype=BF16, activation=activation), make_x(19, 64, dtype=BF16)
    check_replays(lambda: step(layer, x))
    assert device.encoded


def test_nothing_is_launched_beside_the_plans(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    replays(lambda: step(layer, x), times=0)
    launched, sent = device.launched, len(device.sent)
    step(layer, x)
    assert device.launched == launched and len(device.sent) - sent == 19


def test_x_the_weights_and_the_gradient_may_be_others_in_each_step(device):
    layer = make_layer(dtype=BF16)
    replays(lambda: step(layer, make_x(dtype=BF16)), times=0)
    for seed in range(3):
        other, x = make_layer(dtype=BF16, seed=seed), make_x(dtype=BF16, seed=7 + seed)
        with without_launch_plans():
            expected = step(other, x)
        assert all_equal(step(other, x), expected)
    assert launch_plan_counts().replayed == 6


@pytest.mark.parametrize(
    ("changed", "x"),
    [
        ({}, {"shape": (12, 16)}),
        ({}, {"shape": (2, 6, 16)}),
        ({"dtype": torch.float16}, {"dtype": torch.float16}),
        ({"policy": "inputs"}, {}),
        ({"k": 2}, {}),
        ({"activation": "gelu"}, {}),
        ({"renormalize": True}, {}),
        ({"version": "2_tiled"}, {}),
    ],
    ids=str,
)
def test_a_step_of_another_kind_has_a_plan_of_its_own(device, changed, x):
    """One of each kind after the other: a plan that ignored the change would run the other's launches."""
    layer, other = make_layer(dtype=BF16), make_layer(**{"dtype": BF16, **changed})
    inputs = make_x(dtype=BF16), make_x(*x.get("shape", ()), dtype=x.get("dtype", BF16))
    with without_launch_plans():
        expected = step(layer, inputs[0]), step(other, inputs[1])
    for _ in range(4):
        assert all_equal(step(layer, inputs[0]), expected[0])
        assert all_equal(step(other, inputs[1]), expected[1])
    assert launch_plan_counts().replayed == 8


def test_frozen_weights_and_an_input_without_a_gradient(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16).detach()
    layer.w1.requires_grad_(False)
    leaves = [layer.wg, layer.w2, layer.w3]

    def work():
        return torch.autograd.grad(layer(x).out.float().square().sum(), leaves)

    check_replays(work)
    layer.w1.requires_grad_(True)
    check_replays(lambda: step(layer, make_x(dtype=BF16)))


def test_each_choice_of_gradients_has_a_plan_of_its_own(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    names = ("wg", "w1", "w2", "w3")
    for frozen in names:
        for name in names:
            getattr(layer, name).requires_grad_(name != frozen)
        leaves = [x, *(getattr(layer, name) for name in names if name != frozen)]
        check_replays(lambda leaves=leaves: torch.autograd.grad(layer(x).out.float().square().sum(), leaves))


def test_losses_with_and_without_gradients_and_one_gradient_for_both(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)

    def of(take):
        return lambda: torch.autograd.grad(take(layer(x)), [x, layer.wg])

    for take in (
        lambda result: result.out.float().square().sum(),
        lambda result: 2 * result.load_balancing_loss,
        lambda result: 2 * result.router_z_loss,
        lambda result: result.load_balancing_loss + result.router_z_loss,  # the same tensor is the gradient of both
        lambda result: result.out.float().sum() + 2 * result.router_z_loss,
    ):
        check_replays(of(take))


def test_the_gradient_may_be_x_itself(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    d_out = torch.randn_like(x)
    check_replays(lambda: torch.autograd.grad(layer(x).out, [x, layer.w3], x.detach()))
    with without_launch_plans():
        expected = torch.autograd.grad(layer(x).out, [x, layer.w3], d_out)
    assert all_equal(torch.autograd.grad(layer(x).out, [x, layer.w3], d_out), expected)


def test_forward_alone(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    with torch.no_grad():
        check_replays(lambda: layer(x), calls=1)


def test_a_routing_that_is_given(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    routing = layer(x).topk_experts.flip(0).contiguous()

    def work():
        result = layer(x, routing)
        return (*result, *torch.autograd.grad(result.out.float().sum(), [x, *layer.parameters()]))

    check_replays(work)


@pytest.mark.parametrize("layout", ["linear", "interleaved"])
def test_experts_without_a_router(device, layout):
    torch.manual_seed(0)
    module = Experts(E=5, d=16, h=24, layout=layout, dtype=BF16, bias=True)
    x, weights = make_x(dtype=BF16), torch.rand(37, 2, requires_grad=True)
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(37)])

    def work():
        out = module(x, ids, weights)
        return (out, *torch.autograd.grad(out.float().square().sum(), [x, weights, *module.parameters()]))

    check_replays(work)


def test_a_router_in_torch_and_a_shared_expert(device):
    layer = make_layer(router="gpt_oss", shared=Shared(8), dtype=BF16)
    x = make_x(dtype=BF16)
    check_replays(lambda: step(layer, x))


# Around the layer


def test_a_kept_graph_has_a_second_backward_with_the_same_bits(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)

    def work():
        out = layer(x).out.float().square().sum()
        first = torch.autograd.grad(out, [x, layer.w1], retain_graph=True)
        return (*first, *torch.autograd.grad(out, [x, layer.w1]))

    check_replays(work, calls=3)


def test_hooks_see_each_step(device):
    layer, x, seen = make_layer(dtype=BF16), make_x(dtype=BF16), []
    layer.register_forward_hook(lambda module, inputs, output: seen.append("forward"))
    layer.w1.register_hook(lambda gradient: seen.append("w1"))
    x.register_hook(lambda gradient: seen.append("x"))
    check_replays(lambda: step(layer, x))
    assert sorted(seen) == sorted(["forward", "w1", "x"] * 6)


def test_saved_tensors_that_come_back_elsewhere(device):
    """As torch's own offloading to the host does."""
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)

    def work():
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            result = layer(x)
        return torch.autograd.grad(result.out.float().square().sum(), [x, *layer.parameters()])

    check_replays(work)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(device, reentrant):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    options = {} if reentrant else {"context_fn": keep_routing}

    def work():
        out = checkpoint(lambda x: layer(x).out, x, use_reentrant=reentrant, **options)
        return torch.autograd.grad(out.float().square().sum(), [x]) if not reentrant else _by_backward(out, x)

    with without_launch_plans():
        expected = work()
    for _ in range(5):
        assert all_equal(work(), expected)
    assert launch_plan_counts().replayed > 5


def _by_backward(out, x):
    x.grad = None
    out.float().square().sum().backward()
    return [x.grad]


def test_autocast_casts_before_the_plan(device):
    layer, x = make_layer(), make_x()

    def work():
        with torch.autocast("cpu", dtype=BF16):
            return list(gradients(layer, x).values())

    check_replays(work)
    check_replays(lambda: list(gradients(layer, x).values()))


def test_torch_compile_compiles_around_it(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    compiled = torch.compile(lambda x: layer(2 * x).out.float().square().sum(), backend="eager")

    def work():
        return torch.autograd.grad(compiled(x), [x, *layer.parameters()])

    check_replays(work)


# Threads, streams and devices


def test_launches_go_to_the_stream_of_the_call(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    for address in (16, 32):
        device.current_stream.address = address
        device.sent.clear()
        _, replayed = replays(lambda: layer(x))
        assert replayed == 3 and {stream for _, stream in device.sent} == {address}


def test_four_threads_share_a_plan(device):
    layer, inputs = make_layer(dtype=BF16), [make_x(dtype=BF16, seed=seed) for seed in range(4)]
    with without_launch_plans():
        expected = [step(layer, x) for x in inputs]
    found = [[] for _ in inputs]

    def work(number):
        for _ in range(6):
            found[number].append(step(layer, inputs[number]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in found] == [6] * 4
    assert all(all_equal(each, right) for of, right in zip(found, expected, strict=True) for each in of)
    assert launch_plan_counts().replayed >= 20


def test_each_device_has_plans_of_its_own(monkeypatch):
    """Kernels of one device cannot be launched on another."""
    devices = SimtTensors(), SimtTensors()
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    for device in devices:
        monkeypatch.setattr(torch_node, "bridge_to", lambda _, device=device: SimtTensorBridge(device))
        check_replays(lambda: step(layer, x))
        assert device.sent
    assert len(devices[0].sent) == len(devices[1].sent)


# What is kept, and when there is no plan


def test_plans_hold_no_tensor_of_the_caller(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    result = [step(layer, x) for _ in range(3)][-1]
    owned = [weakref.ref(tensor) for tensor in (x, *layer.parameters(), *result)]
    assert launch_plan_counts().replayed == 2
    del layer, x, result
    gc.collect()
    assert not [reference for reference in owned if reference() is not None]


def test_the_number_of_plans_is_bounded(device, monkeypatch):
    monkeypatch.setattr(launch_plans, "CAPACITY", 3)
    layer = make_layer(dtype=BF16)
    with torch.no_grad():
        for rows in range(1, 6):
            replays(lambda rows=rows: layer(make_x(rows, 16, dtype=BF16)), times=1)
    assert launch_plan_counts() == (5, 10)
    assert len(launch_plans._cache) == 3


class Counter(TorchDispatchMode):
    """Which operations were called."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


def test_a_mode_of_torchs_sees_every_operation(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    replays(lambda: step(layer, x), times=0)
    with Counter() as counter:
        step(layer, x)
    assert counter.seen.count(torch.ops.aten.empty.memory_format) > 20 and launch_plan_counts().replayed == 0


def test_a_capture_launches_without_plans(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    replays(lambda: step(layer, x), times=0)
    device.is_capturing = True
    step(layer, x)
    device.is_capturing = False
    assert launch_plan_counts().replayed == 0 and not device.sent


def test_without_a_compiler_the_stages_run(device, monkeypatch):
    def refuse(text):
        raise SimtUnavailable("no compiler")

    monkeypatch.setattr("moeblaze_ref.runtime.launch_plan.sender.library", lambda: refuse(""))
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    with without_launch_plans():
        expected = step(layer, x)
    for _ in range(4):
        assert all_equal(step(layer, x), expected)
    assert launch_plan_counts() == (0, 8)


def test_what_waits_for_the_host_has_no_plan(device, monkeypatch):
    build = dispatch.build.unchecked

    def waiting(topk_experts, *arguments, **options):
        topk_experts.sum().item()
        return build(topk_experts, *arguments, **options)

    alter(monkeypatch, "simt", "dispatch.build", lambda build: waiting)
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    with torch.no_grad():
        for _ in range(4):
            layer(x)
    assert launch_plan_counts() == (0, 4)


def test_a_launch_that_the_driver_refuses_raises(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    replays(lambda: step(layer, x), times=0)
    device.fails = "combine"
    with pytest.raises(RuntimeError, match=r"the driver refused .*combine.*: error 719"):
        layer(x)


def test_no_tokens(device):
    layer = make_layer(dtype=BF16)
    for _ in range(4):
        assert layer(torch.zeros(0, 16, dtype=BF16)).out.shape == (0, 16)


def test_checks_are_made_of_each_new_call(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    replays(lambda: step(layer, x))
    with pytest.raises(ValueError, match=r"x has shape \(37, 15\), but it must be \(\.\.\., d=16\)"):
        layer(x[:, :15])
    with pytest.raises(TypeError, match="wg is torch.bfloat16, but x is torch.float32"):
        layer(x.float())
    layer.k = 5
    assert layer(x).topk_experts.shape == (37, 5)
    layer.w3.data = layer.w3.data[:, :8].contiguous()
    with pytest.raises(ValueError, match="w3 has shape"):
        layer(x)


def test_tensors_that_begin_anywhere_are_copied_as_before(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    with without_launch_plans():
        expected = step(layer, x)
    shifted = torch.empty(x.numel() + 1, dtype=BF16)[1:].view(x.shape).copy_(x.detach()).requires_grad_()
    replays(lambda: step(layer, x))
    for _ in range(3):
        assert all_equal(step(layer, shifted), expected)
        assert all_equal(step(layer, x), expected)


def test_gradients_by_name_are_the_same(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    with without_launch_plans():
        expected = gradients(layer, x)
    found, _ = replays(lambda: gradients(layer, x))
    assert all(same_bits(each, expected) for each in found)


def test_inputs_that_are_refused_say_why_as_before(device):
    layer = make_layer(dtype=BF16)
    for _ in range(3):
        with pytest.raises(TypeError, match="x is None, but it must be a Tensor"):
            layer(None)
        with pytest.raises(TypeError, match="x has layout torch.sparse_coo"):
            layer(make_x(dtype=BF16).detach().to_sparse())
        with pytest.raises(ValueError, match="x is on meta, but MoELayer runs on cuda or cpu"):
            layer(make_x(dtype=BF16).detach().to("meta"))


def test_weights_that_are_not_contiguous_are_copied_in_each_step(device):
    layer, x = make_layer(dtype=BF16), make_x(dtype=BF16)
    layer.w1 = torch.nn.Parameter(layer.w1.detach().transpose(1, 2).contiguous().transpose(1, 2))
    assert not layer.w1.is_contiguous()
    check_replays(lambda: step(layer, x))


def test_layers_have_plans_unless_they_are_turned_off(device, no_plans_of_others):
    assert no_plans_of_others and use_launch_plans(False)
    layer, x = make_layer(), make_x()
    for _ in range(4):
        step(layer, x)
    assert launch_plan_counts() == (0, 0)
    assert not use_launch_plans()
    for _ in range(4):
        step(layer, x)
    assert launch_plan_counts().replayed > 0
