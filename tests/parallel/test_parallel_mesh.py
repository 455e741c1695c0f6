"""A mesh of data parallelism x expert parallelism: two groups of two ranks train as one device does."""

import numpy as np
import pytest
import torch
from test_parallel import error
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.parallel import local
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.placement.maps import Copies, Placement

SIZES = {"d": 16, "h": 24, "E": 5, "k": 2}
TOKENS = ((13, 8), (6, 11))  # of each group, of each rank in it
BOUND = 1e-5
STEPS, RATE = 2, 0.1
LOSSES = (0.0, 1.0)  # by which the router's losses are multiplied
MAPS = {
    "without copies": Placement(np.array([[1, 0, 0, 1, 0]], np.int32), 2),
    "with copies": Copies(np.array([[[1, 1], [1, 0], [0, 1], [1, 1], [0, 1]]], bool)),
}


def inputs():
    """x and the weight of each output, of every group and rank."""
    generator = torch.Generator().manual_seed(8)
    return [[torch.randn(2, tokens, SIZES["d"], generator=generator) for tokens in group] for group in TOKENS]


def whole():
    torch.manual_seed(4)
    return MoELayer(**SIZES)


def loss_of(result, weight, of_losses):
    """A sum over tokens, and multiples of the router's losses."""
    return (result.out * weight).sum() + of_losses * (0.7 * result.load_balancing_loss + 0.3 * result.router_z_loss)


def trained():
    """What this process trains by each map and with each weight of the router's losses.

    Its experts, its gradients in each step, and its weights after the last.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    batch = inputs()[mesh.get_local_rank("dp")][mesh.get_local_rank("ep")]
    return {(name, of_losses): train(mesh, MAPS[name], *batch, of_losses) for name in MAPS for of_losses in LOSSES}


def train(mesh, placement, x, weight, of_losses):
    layer = ExpertParallelMoE(placement=placement, ranks=Ranks(mesh["ep"].get_group()), **SIZES)
    layer.take(whole())
    model = DistributedDataParallel(layer, process_group=mesh["dp"].get_group())
    gradients = steps(layer, lambda: loss_of(model(x), weight, of_losses).backward())
    return layer.experts, gradients, {name: weight.detach() for name, weight in layer.named_parameters()}


@pytest.fixture(scope="module")
def of_processes():
    """What each of four processes trains."""
    return local.run(trained, 4)


def trained_on_one_device(batches, of_losses):
    """The gradients of the whole layer in each step: means over the batches."""
    layer = whole()

    def backward():
        for x, weight in batches:
            (loss_of(layer(x), weight, of_losses) / len(batches)).backward()

    return steps(layer, backward)


def steps(layer, backward):
    """The gradients of each step."""
    optimizer, found = torch.optim.SGD(layer.parameters(), RATE), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward()
        found.append({name: parameter.grad.clone() for name, parameter in layer.named_parameters()})
        optimizer.step()
    return found


def assert_gradients_are_parts(experts, gradients, expected):
    """A rank's gradients in a step are those of its experts, and of the router."""
    for name, whole_gradient in expected.items():
        part = whole_gradient if name == "wg" else whole_gradient[experts]
        assert error(gradients[name], part) < BOUND, name


@pytest.mark.parametrize("name", MAPS)
def test_a_mesh_trains_as_one_device(name, of_processes):
    expected = trained_on_one_device([torch.cat(group, dim=1) for group in inputs()], 1.0)
    found = [each[name, 1.0] for each in of_processes]
    for experts, gradients, _ in found:
        for mine, whole_gradients in zip(gradients, expected, strict=True):
            assert_gradients_are_parts(experts, mine, whole_gradients)
    assert_copies_stay_alike(found)


def assert_copies_stay_alike(found):
    """After the steps, every copy of an expert has the same bits, in both groups."""
    first = {}
    for experts, _, weights in found:
        for name in ("w1", "w2", "w3"):
            for expert, weight in zip(experts, weights[name], strict=True):
                assert torch.equal(weight, first.setdefault((name, expert), weight)), (name, expert)


@pytest.mark.parametrize("name", MAPS)
def test_without_the_routers_losses_it_is_one_batch(name, of_processes):
    """Of sums over tokens, the mean over the groups is half of the gradient of all tokens together."""
    (expected, _) = trained_on_one_device([torch.cat([rank for group in inputs() for rank in group], dim=1)], 0.0)
    for experts, (gradients, _), _ in (each[name, 0.0] for each in of_processes):
        assert_gradients_are_parts(experts, gradients, {name: all / 2 for name, all in expected.items()})
