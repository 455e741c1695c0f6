"""Captures on a CUDA device while Python's collector runs at nearly each allocation, and old graphs are garbage."""

import gc
import weakref

import pytest
import torch
import torch_layers
from torch_layers import all_equal, eager_collector, step

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.routers import ROUTERS, Shared
from moeblaze_ref.nn.launch_plans import without_launch_plans
from moeblaze_ref.nn.torch_graphs import graphed
from moeblaze_ref.runtime.torch_capture import capture, without_collector
from moeblaze_ref.systems import layer as layer_system

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

SIZES = {"d": 256, "h": 512, "E": 8, "k": 2}
L = 1_024


def make_layer(system="moeblaze", dtype=torch.bfloat16, **options):
    return torch_layers.make_layer(system, device="cuda", dtype=dtype, **(SIZES | options))


def make_x(seed=1, dtype=torch.bfloat16):
    return torch_layers.make_x(L, SIZES["d"], seed=seed, device="cuda", dtype=dtype)


class OlderGraph:
    """A CUDA graph in a cycle: once nothing else refers to it, only the garbage collector destroys it."""

    def __init__(self):
        self.graph, self.itself = torch.cuda.CUDAGraph(), self
        with capture(self.graph):
            self.ones = torch.ones(1, device="cuda")


class Dropper:
    """Drops an older graph in each of the layer's calls that is captured."""

    def __init__(self, monkeypatch):
        self.waiting, self.dropped = [OlderGraph() for _ in range(8)], []
        for name in ("forward", "backward"):
            monkeypatch.setattr(layer_system, name, self._dropping(getattr(layer_system, name)))

    def _dropping(self, stage):
        def run(*arguments, **options):
            if not torch.cuda.is_current_stream_capturing():
                return stage(*arguments, **options)
            self.dropped.append(weakref.ref(self.waiting.pop()))
            result = stage(*arguments, **options)
            assert self.dropped[-1]() is not None
            return result

        return run


@pytest.mark.parametrize("policy", POLICIES)
def test_a_graphed_layer_is_right_though_old_graphs_become_garbage_in_its_capture(policy, monkeypatch):
    layer, x = make_layer(policy=policy), make_x()
    expected = step(layer, x)
    with eager_collector():
        dropper = Dropper(monkeypatch)
        OlderGraph()  # garbage from before
        replayed = graphed(make_layer(policy=policy), make_x(2))
        assert len(dropper.dropped) == 2
        assert all_equal(step(replayed, x), expected) and all_equal(step(layer, x), expected)
    gc.collect()
    assert not any(graph() for graph in dropper.dropped)
    assert all_equal(step(replayed, x), expected)


@pytest.mark.parametrize("router", ROUTERS)
def test_every_router_and_a_shared_expert_are_replayed_with_the_same_bits(router):
    options = {"router": router, "shared": Shared(64, gated=True), "E": 16}
    layer, x = make_layer(**options), make_x()
    expected = step(layer, x)
    assert all_equal(step(graphed(make_layer(**options), make_x(2)), x), expected)


def test_a_replay_chooses_by_the_selection_bias_of_now():
    layer = graphed(make_layer(router="lfm2_moe", E=16), make_x(2))
    layer.selection_bias[5] = 100.0
    assert (layer(make_x()).topk_experts == 5).any(dim=1).all()


def test_a_whole_step_is_captured_though_old_graphs_become_garbage_in_it(monkeypatch):
    layer, x = make_layer(), make_x()
    expected = step(layer, x)
    with eager_collector():
        dropper, graph = Dropper(monkeypatch), torch.cuda.CUDAGraph()
        with capture(graph):
            captured = step(layer, x)
        graph.replay()
    assert len(dropper.dropped) == 2 and all_equal(captured, expected)


def test_megablocks_layer_beside_captures_is_right(monkeypatch):
    """Its host waits for the GPU, so it cannot be captured; to try leaves torch as it was."""
    megablocks, x = make_layer("megablocks", block=128), make_x()
    expected, of_ours = step(megablocks, x), step(make_layer(), x)
    with pytest.raises(TypeError, match="layer is a BlockSparseMoE, but only a MoELayer can be graphed"):
        graphed(megablocks, x)
    with eager_collector():
        dropper, stream = Dropper(monkeypatch), torch.cuda.current_stream()
        with pytest.raises(RuntimeError), capture(torch.cuda.CUDAGraph()):
            megablocks(x)
        assert torch.cuda.current_stream() == stream and gc.isenabled()
        assert all_equal(step(megablocks, x), expected)
        replayed = graphed(make_layer(), make_x(2))
        assert len(dropper.dropped) == 2
        for _ in range(2):
            assert all_equal(step(replayed, x), of_ours) and all_equal(step(megablocks, x), expected)
    assert torch.rand(1, device="cuda").item() < 1


def test_stages_keep_the_collector_out_of_torchs_own_capture(monkeypatch):
    layer, x, seen = make_layer(), make_x(), []
    expected = step(layer, x)
    for name in ("forward", "backward"):
        stage = getattr(layer_system, name)
        monkeypatch.setattr(
            layer_system, name, lambda *a, stage=stage, **o: seen.append(gc.isenabled()) or stage(*a, **o)
        )
    graph = torch.cuda.CUDAGraph()
    gc.collect()
    with without_collector():  # so that this test's own objects provoke no collection
        with torch.cuda.graph(graph):
            gc.enable()
            captured = step(layer, x)
            gc.disable()
    graph.replay()
    assert seen == [False, False] and all_equal(captured, expected)
    with without_launch_plans():
        step(layer, x)
    assert seen[2:] == [True, True]


@pytest.mark.usefixtures("one_autograd_thread")
def test_a_dropped_layer_gives_its_graphs_and_their_memory_back_without_the_collector():
    def use():
        layer = graphed(make_layer(), make_x())
        step(layer, make_x(2))
        return weakref.ref(layer.graphs)

    use()  # cuBLAS takes its workspace
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with without_collector():
        graphs = use()
        torch.cuda.synchronize()
        assert graphs() is None and torch.cuda.memory_allocated() == before


def test_a_layer_is_graphed_again_for_another_shape():
    layer, x = make_layer(), make_x()
    expected = step(layer, x)
    graphed(layer, make_x()[:100].detach().requires_grad_())
    with pytest.raises(ValueError, match=r"x has shape \(1024, 256\), but the layer was graphed for \(100, 256\)"):
        layer(x)
    assert all_equal(step(layer.eval(), x), expected)
    layer.train()
    assert all_equal(step(graphed(layer, x), x), expected)


def test_under_autocast_the_casts_are_those_of_the_capture():
    layer, x = make_layer(dtype=torch.float32), make_x(dtype=torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = step(layer, x)
        assert all_equal(step(graphed(layer, make_x(2, torch.float32)), x), expected)


def test_only_the_output_of_the_last_forward_goes_backward():
    layer, x = graphed(make_layer(), make_x()), make_x()
    first, second = layer(x).out, layer(x).out
    with pytest.raises(RuntimeError, match="each forward has one backward, before the next forward"):
        first.sum().backward()
    (found,) = torch.autograd.grad(second.sum(), x)
    (expected,) = torch.autograd.grad(make_layer()(x).out.sum(), x)
    assert torch.equal(found, expected)
