"""Layers checked on a GPU: CUDA graphs, compiled code, and a layer that bakes its routing into a graph."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moeblaze_ref.bench.layer_bytes import bytes_of
from moeblaze_ref.bench.layer_times import times_of
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.verify.layers import ways
from moeblaze_ref.verify.layers.adapters import factories, plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts
from moeblaze_ref.verify.layers.check import check_layer

pytestmark = pytest.mark.skipif(cuda_device_count() == 0, reason="no CUDA device")

FACTORIES = factories()
NAMES = [name for name in FACTORIES if name.startswith(("torch/", "moeblaze_ref/"))]
GRAPHED = {"moeblaze_ref/minimal", "moeblaze_ref/inputs", "torch/grouped_mm", "torch/gather_sum"}


def verdict_on(factory, dtype=torch.bfloat16):
    (verdict,) = check_layer(factory, [dtype], "cuda")
    return verdict


@pytest.mark.parametrize("name", NAMES)
def test_a_right_layer_is_called_right(name):
    verdict = verdict_on(FACTORIES[name])
    assert verdict.ok, str(verdict)
    assert verdict.graphs or name not in GRAPHED


def test_a_step_allocates_more_than_it_keeps():
    found = bytes_of(FACTORIES["moeblaze_ref/minimal"], torch.bfloat16, "cuda")
    assert found.kept == found.account < found.peak


def test_a_step_is_timed_beside_plain_torch():
    found = times_of(FACTORIES["moeblaze_ref/minimal"], torch.bfloat16)
    assert 0 < found.step_ms < found.plain_ms
    odd = partial(_with_multiple, 48)
    assert times_of(odd, torch.bfloat16) is None


def _with_multiple(multiple, **sizes):
    return replace(FACTORIES["moeblaze_ref/minimal"](**sizes), multiple=multiple)


class Baked(PlainExperts):
    """Every row by every expert, masked by the routing of the first call of a shape."""

    def forward(self, x, topk_index, topk_weights):
        of_expert = torch.zeros(len(x), len(self.down), device=x.device, dtype=topk_weights.dtype)
        if not torch.cuda.is_current_stream_capturing():
            self.seen = topk_index.clone()
        of_expert = of_expert.scatter_add(1, self.seen, topk_weights).to(x.dtype)  # (L, E)
        a, b = torch.einsum("ld,ehd->leh", x, self.gate_up).chunk(2, -1)
        y = torch.einsum("leh,edh->led", self.activation(a, b), self.down)
        return (y * of_expert[..., None]).sum(1)


def test_a_layer_that_bakes_its_routing_into_a_graph_is_wrong_there_alone():
    verdict = verdict_on(partial(plain.experts, kind=Baked), torch.float32)
    assert not verdict.ok and {finding.way for finding in verdict.findings if not finding.ok} == {ways.GRAPH}
