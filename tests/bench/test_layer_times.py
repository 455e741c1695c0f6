"""The time of any layer beside plain torch, on a device with made-up time."""

from functools import partial

import pytest
import torch
from pretended import PretendedDevice

from moeblaze_ref.bench.layer_times import timed
from moeblaze_ref.verify.layers import reference
from moeblaze_ref.verify.layers.adapter import Sizes
from moeblaze_ref.verify.layers.adapters import factories, plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts
from moeblaze_ref.verify.layers.layer import CheckedLayer

SIZES = Sizes(L=24, d=16, h=24, E=4, k=2)
FACTORIES = factories()


def times(factory, dtype=torch.float32, device=None):
    return timed(CheckedLayer.make(factory, SIZES, dtype, "cpu"), SIZES, device or PretendedDevice())


def test_each_has_the_time_of_its_own_work(monkeypatch):
    device = PretendedDevice()

    class Slow(PlainExperts):
        def forward(self, x, topk_index, topk_weights):
            device.now += 5
            return super().forward(x, topk_index, topk_weights)

    def slower(*arguments):
        device.now += 7
        return layer(*arguments)

    layer = reference.layer
    monkeypatch.setattr(reference, "layer", slower)
    assert times(partial(plain.experts, kind=Slow), device=device) == (5, 7)


KINDS = {
    "the routing given": "torch/experts",
    "biases, and a function as the activation": "torch/experts with biases",
    "a router, a selection bias and a shared expert": "torch/deepseek_v3",
    "a router that weighs the input": "transformers/llama4/block",
    "weights of another layout": "moeblaze_ref/experts/interleaved",
}


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_plain_torch_runs_beside_every_kind_of_layer(name):
    found = times(FACTORIES[name], torch.float32)
    assert min(found) > 0
