"""Layers work on the device of their input, whatever torch's default device is; here its tensors have no memory."""

import pytest
import torch
from torch_layers import SIZES, all_equal, make_layer, make_x, step

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.routers import ROUTERS
from moeblaze_ref.nn import SYSTEMS, Experts
from moeblaze_ref.verify.layers.adapters.plain import fitting


@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "oracle"])
def test_a_step_of_each_system(system):
    layer, x = make_layer(system), make_x()
    expected = step(layer, x)
    with torch.device("meta"):
        assert all_equal(step(layer, x), expected)


@pytest.mark.parametrize("family", ROUTERS)
def test_a_step_with_each_router(family):
    sizes = SIZES | {"E": 8, "k": 2}
    layer, x = make_layer(router=fitting(ROUTERS[family], 8, 2), **sizes), make_x()
    expected = step(layer, x)
    with torch.device("meta"):
        assert all_equal(step(layer, x), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_experts_whose_routing_is_given(policy):
    torch.manual_seed(0)
    layer, x = Experts(d=SIZES["d"], h=SIZES["h"], E=SIZES["E"], policy=policy), make_x()
    index = torch.stack([torch.arange(len(x)) % 5, (torch.arange(len(x)) + 2) % 5], 1)
    gates = torch.rand(index.shape).requires_grad_()
    leaves = [x, gates, *layer.parameters()]

    def gradients():
        out = layer(x, index, gates)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    expected = gradients()
    with torch.device("meta"):
        assert all_equal(gradients(), expected)
