"""Layers as CUDA graphs, and the garbage collector during a capture, on pretended graphs; tests/gpu has real ones."""

import copy
import gc
import io
import weakref

import pytest
import torch
from pretended_graphs import pretended_graphs
from torch.utils.checkpoint import checkpoint
from torch_layers import all_equal, eager_collector, make_layer, make_x

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.routers import ROUTERS, Shared
from moeblaze_ref.nn import torch_graphs
from moeblaze_ref.nn.systems import SYSTEMS
from moeblaze_ref.nn.torch_graphs import LayerGraphs, graphed
from moeblaze_ref.nn.torch_layer import MoEOutput, keep_routing
from moeblaze_ref.runtime.torch_capture import capture, without_collector, without_collector_if_capturing
from moeblaze_ref.systems import layer as layer_system


@pytest.fixture
def cuda():
    with pretended_graphs() as pretended:
        yield pretended


def make_graphed(x=None, **options):
    """`graphed`, without its look for a GPU."""
    layer = make_layer(**options)
    layer.graphs = LayerGraphs(layer, make_x() if x is None else x)
    return layer


def loss_of(result):
    return result.out.sum() + result.load_balancing_loss + result.router_z_loss


def step(layer, x):
    result = layer(x)
    return (*result, *torch.autograd.grad(loss_of(result), [x, *layer.parameters()]))


# The collector


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_off_within_and_then_as_before(enabled):
    try:
        gc.enable() if enabled else gc.disable()
        with pytest.raises(KeyError), without_collector():
            assert not gc.isenabled()
            with without_collector():
                pass
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_stages_keep_the_collector_out_of_a_capture_alone(cuda):
    with without_collector_if_capturing():
        assert gc.isenabled()
    with torch.cuda.graph(torch.cuda.CUDAGraph()), without_collector_if_capturing():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.fixture
def collector_at_work():
    with eager_collector():
        yield
    gc.collect()


class Cycle:
    """Garbage that owns something, as soon as the last reference to it goes."""

    def __init__(self, owned):
        self.owned, self.itself = owned, self


def test_a_capture_collects_first(cuda):
    with without_collector():
        older = weakref.ref(Cycle(torch.cuda.CUDAGraph()))
        assert older() is not None
        with capture(torch.cuda.CUDAGraph()):
            assert older() is None
    assert cuda.events[:2] == ["collection", "begin"]


@pytest.mark.usefixtures("collector_at_work")
def test_a_capture_keeps_the_collector_out(cuda):
    graph = torch.cuda.CUDAGraph()
    with capture(graph):
        cuda.events.append("work")
        younger = weakref.ref(Cycle(torch.cuda.CUDAGraph()))
        [[] for _ in range(100)]
        assert younger() is not None
    begin = cuda.events.index("begin")
    assert cuda.events[begin - 1 : begin + 3] == ["collection", "begin", "work", "end"] and graph.captured
    assert cuda.collector == [False, False] and gc.isenabled()


def test_a_capture_that_fails_leaves_torch_able_to_capture(cuda, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda size, device: zeros(size))
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="waits for the GPU"), capture(graph):
        raise RuntimeError("waits for the GPU")
    captures = [event for event in cuda.events if event != "collection"]
    assert captures == ["begin", "failed", "end", "begin", "end"] and not graph.captured
    assert gc.isenabled() and not any(cuda.collector)


@pytest.mark.usefixtures("collector_at_work")
def test_a_graphed_layer_is_captured_without_the_collector(cuda, monkeypatch):
    """Though old graphs become garbage in both captures."""
    older, dropped = [Cycle(torch.cuda.CUDAGraph()) for _ in range(2)], []

    def dropping(stage):
        def run(*arguments, **options):
            if cuda.capturing:
                dropped.append(weakref.ref(older.pop()))
            result = stage(*arguments, **options)
            assert not cuda.capturing or dropped[-1]() is not None
            return result

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(layer_system, name, dropping(getattr(layer_system, name)))
    make_graphed()
    assert len(dropped) == 2 and cuda.collector == [False] * 4 and gc.isenabled()
    for begin in (i for i, event in enumerate(cuda.events) if event == "begin"):
        assert cuda.events[begin - 1 : begin + 2] == ["collection", "begin", "end"]


# Nothing is left to the collector


@pytest.fixture
def collector_off():
    gc.collect()
    with without_collector():
        yield
    gc.collect()


def garbage(work):
    """The types of what only the collector frees once ``work`` is done."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        work()
        gc.collect()
        return sorted(type(found).__name__ for found in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


CHOICES = {f"moeblaze, {policy}": ("moeblaze", {"policy": policy}) for policy in POLICIES}
CHOICES |= {name: (name, {}) for name in SYSTEMS if name != "moeblaze"}


@pytest.mark.usefixtures("collector_off")
@pytest.mark.parametrize("choice", CHOICES)
def test_a_step_and_a_dropped_layer_leave_nothing_to_the_collector(choice):
    system, options = CHOICES[choice]

    def work():
        layer, x = make_layer(system, **options), make_x()
        for _ in range(2):
            layer(x)[0].sum().backward()
        with torch.no_grad():
            layer(x)

    work()  # what is made once, is made
    assert garbage(work) == []


@pytest.mark.usefixtures("collector_off")
def test_a_graphed_layer_leaves_nothing_to_the_collector(cuda):
    def work():
        layer, x = make_graphed(), make_x()
        for _ in range(2):
            loss_of(layer(x)).backward()
            layer.zero_grad()
        loss_of(layer(x))
        layer.eval()(x)

    work()
    assert garbage(work) == []


@pytest.mark.usefixtures("collector_off")
def test_a_graph_goes_with_its_layer(cuda):
    layer = make_graphed()
    out = layer(make_x()).out
    graphs = weakref.ref(layer.graphs)
    del layer
    assert graphs() is not None  # the output may still go backward
    del out
    assert graphs() is None


# A graphed layer


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graphed_layer_replays_its_forward_and_its_backward(policy, cuda):
    layer, x = make_graphed(policy=policy), make_x()
    assert all_equal(step(layer, x), step(make_layer(policy=policy), x))
    assert isinstance(layer(x), MoEOutput)
    graphs = layer.graphs
    assert (graphs._forward_graph.replays, graphs._backward_graph.replays) == (2, 1)
    assert [event for event in cuda.events if event != "collection"] == ["begin", "end"] * 2


def test_the_graphs_read_copies_of_the_input_and_of_the_gradients(cuda):
    layer, x = make_graphed(), make_x(seed=2)
    result = layer(x)
    assert torch.equal(layer.graphs._x, x)
    torch.autograd.grad(result.out, x, 3 * x.detach())
    assert torch.equal(layer.graphs._d_outputs[0], 3 * x) and layer.graphs._d_outputs[1:] == [0, 0]


def test_an_ungated_layer_and_frozen_weights(cuda):
    x, options = make_x(), {"activation": "gelu"}
    layer, plain = make_layer(**options), make_layer(**options)
    for each in (layer, plain):
        each.w1.requires_grad_(False)
    layer.graphs = LayerGraphs(layer, x.detach())
    for each in (layer, plain):
        loss_of(each(x.detach())).backward()
    assert layer.w1.grad is None and torch.equal(layer.w3.grad, plain.w3.grad)
    with pytest.raises(RuntimeError, match="x needs a gradient, but did not when the layer was graphed"):
        layer(x)
    layer.w1.requires_grad_()
    with pytest.raises(RuntimeError, match="w1 needs a gradient, but did not when the layer was graphed"):
        layer(x.detach())
    with torch.no_grad():
        assert not layer(x).out.requires_grad


def test_a_layer_without_gradients_has_one_graph(cuda):
    layer = make_layer().requires_grad_(False)
    layer.graphs = LayerGraphs(layer, make_x().detach())
    assert not layer(make_x().detach()).out.requires_grad
    assert cuda.events.count("begin") == 1


def test_in_the_other_mode_and_as_a_copy_it_launches_its_kernels(cuda):
    layer, x = make_graphed(), make_x()
    assert layer.eval()(x[:5]).out.shape == (5, 16)
    layer.train()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert other.graphs is None and torch.equal(other(x).out, layer(x).out)
    assert layer.state_dict().keys() == make_layer().state_dict().keys()


def test_a_compiled_model_replays_it(cuda):
    layer, x = make_graphed(), make_x()
    model = torch.compile(lambda x: 2 * layer(x).out, backend="eager")
    assert torch.equal(model(x), 2 * make_layer()(x).out)
    assert layer.graphs._forward_graph.replays == 1


# Routers of today and shared experts: torch computes them in the same graphs

ROUTED = {"router": "deepseek_v3", "shared": Shared(10, gated=True), "E": 16}


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_and_a_shared_expert_are_replayed_with_the_same_bits(router, cuda):
    options = ROUTED | {"router": router}
    layer, plain, x = make_graphed(**options), make_layer(**options), make_x()
    found, expected = step(layer, x), step(plain, x)
    assert len(found) == 5 + len([*plain.parameters()]) and all_equal(found, expected)
    assert layer.graphs._forward_graph.replays == layer.graphs._backward_graph.replays == 1


@pytest.mark.parametrize("trained", ["w3", "wg", "logit_bias", "shared_expert.gate"])
def test_one_tensor_is_trained_beside_a_router_in_torch(trained, cuda):
    """Where neither x nor the router is, the losses need no gradient."""
    layer, plain = (make_layer(**ROUTED | {"router": "gpt_oss"}) for _ in range(2))
    x = make_x().detach()
    for each in (layer, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_(name == trained)
    layer.graphs = LayerGraphs(layer, x)
    for each in (layer, plain):
        loss_of(each(x)).backward()
    pairs = zip(layer.parameters(), plain.parameters(), strict=True)
    gradients = [(one.grad, other.grad) for one, other in pairs if one.requires_grad]
    assert len(gradients) == 1 and all(torch.equal(*pair) and pair[0].any() for pair in gradients)


def test_a_selection_bias_is_changed_in_place_alone(cuda):
    layer, x = make_graphed(**ROUTED), make_x()
    layer.selection_bias.copy_(torch.ones(16))
    layer(x)
    layer.selection_bias = torch.ones(16)
    with pytest.raises(RuntimeError, match="selection_bias has moved since the layer was graphed: graph the layer"):
        layer(x)


def test_a_shared_expert_that_moves_or_goes_is_named(cuda):
    layer, x = make_graphed(**ROUTED), make_x()
    layer.shared_expert.w1.data = layer.shared_expert.w1.data.clone()
    with pytest.raises(RuntimeError, match=r"shared_expert\.w1 has moved since the layer was graphed"):
        layer(x)
    layer.shared_expert = None
    with pytest.raises(RuntimeError, match=r"shared_expert\.gate has come or gone since the layer was graphed"):
        layer(x)


def test_a_hook_of_the_layer_is_in_no_graph(cuda):
    layer, seen = make_layer(), []
    layer.register_forward_hook(lambda *arguments: seen.append(len(cuda.events)))
    layer.graphs = LayerGraphs(layer, make_x())
    assert seen == []
    layer(make_x())
    assert len(seen) == 1


# Bad input


def test_only_our_layer_on_a_gpu_is_graphed():
    for name in ("megablocks", "capacity"):
        layer = SYSTEMS[name](16, 128, 5, 3)
        with pytest.raises(TypeError, match=f"layer is a {type(layer).__name__}, but only a MoELayer can be graphed"):
            graphed(layer, make_x())
    with pytest.raises(TypeError, match="x is a list, but it must be a Tensor"):
        graphed(make_layer(), [1.0])
    with pytest.raises(ValueError, match="x is on cpu, but CUDA graphs need a CUDA device"):
        graphed(make_layer(), make_x())


def test_a_capture_that_fails_leaves_the_layer_as_it_was(cuda, monkeypatch):
    monkeypatch.setattr(torch_graphs, "capture", lambda *arguments: pytest.fail("no capture"))
    layer = make_layer()
    with pytest.raises(pytest.fail.Exception):
        LayerGraphs(layer, make_x())
    assert layer.graphs is None


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        ([1.0], TypeError, "x is a list, but it must be a Tensor"),
        (torch.zeros(36, 16), ValueError, r"x has shape \(36, 16\), but the layer was graphed for \(37, 16\)"),
        (torch.zeros(37, 16).half(), ValueError, "x has dtype torch.float16, but the layer was graphed for torch"),
        (torch.zeros(37, 16, device="meta"), ValueError, "x has device meta, but the layer was graphed for cpu"),
    ],
)
def test_another_kind_of_input(cuda, x, error, message):
    with pytest.raises(error, match=message):
        make_graphed()(x)


def test_what_a_replay_cannot_do_is_refused(cuda):
    layer, x = make_graphed(), make_x()
    message = "a graphed layer chooses the experts itself"
    with pytest.raises(ValueError, match=message):
        layer(x, torch.tensor([[0, 1, 2]] * 37, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        checkpoint(layer, x, use_reentrant=False, context_fn=keep_routing)
    with pytest.raises(RuntimeError, match="torch.func.grad"):
        torch.func.grad(lambda x: layer(x).out.sum())(x)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).out.sum(), x, create_graph=True)


@pytest.mark.parametrize("move", ["to", "Parameter"])
def test_weights_that_have_moved_are_named(cuda, move):
    layer, x = make_graphed(), make_x()
    if move == "to":
        layer.w1.data = layer.w1.data.clone()
    else:
        layer.w1 = torch.nn.Parameter(layer.w1.detach().clone())
    with pytest.raises(RuntimeError, match="w1 has moved since the layer was graphed: graph the layer again"):
        layer(x)


def test_a_backward_after_another_forward_or_backward_raises(cuda):
    layer, x = make_graphed(), make_x()
    first = loss_of(layer(x))
    second = loss_of(layer(x))
    message = "each forward has one backward, before the next forward"
    with pytest.raises(RuntimeError, match=message):
        first.backward()
    torch.autograd.grad(second, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=message):
        second.backward()


def test_a_gradient_that_the_next_backward_would_overwrite_is_named(cuda):
    x = make_x().detach()
    layer, plain = make_graphed(x), make_layer()
    loss_of(layer(x)).backward()  # autograd takes the graphs' memory as .grad
    with pytest.raises(RuntimeError, match="wg.grad is memory that this backward overwrites: call zero_grad"):
        loss_of(layer(x)).backward()
    for each in (layer, plain):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            loss_of(each(x)).backward()
    assert all_equal(*([parameter.grad for parameter in each.parameters()] for each in (layer, plain)))
