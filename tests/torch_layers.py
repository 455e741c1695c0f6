"""Torch layers that tests make, and what a step of theirs gives."""

import gc
from contextlib import contextmanager

import torch

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.nn.systems import SYSTEMS

SIZES = {"d": 16, "h": 24, "E": 5, "k": 3}
L = 37  # no tile divides it, and no block the groups of its rows
OPTIONS = {name: {"block": 8} for name in ("megablocks", "megablocks_memory_optimized")}  # of a system, for these sizes
EACH_POLICY = [("moeblaze", {"policy": policy}) for policy in POLICIES] + [(name, {}) for name in OPTIONS]


def make_layer(system="moeblaze", seed=0, **options):
    """The layer of a system by its name, small unless the options say otherwise."""
    torch.manual_seed(seed)
    return SYSTEMS[system](**(SIZES | OPTIONS.get(system, {}) | options))


def make_x(*shape, seed=1, dtype=None, device="cpu"):
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(*(shape or (L, SIZES["d"])), generator=generator, device=device)
    return x.to(dtype).requires_grad_()


def loss_of(result):
    """A scalar to which every output of a layer contributes."""
    weights = torch.linspace(-1.0, 1.0, result.out.numel(), device=result.out.device).reshape(result.out.shape)
    losses = 0.7 * result.load_balancing_loss + 0.3 * result.router_z_loss
    return (result.out.float() * weights).sum() + losses


def gradients(layer, x, function=None):
    """Gradients of `loss_of` by x and the parameters, by name."""
    leaves = {"x": x, **dict(layer.named_parameters())}
    return dict(zip(leaves, torch.autograd.grad(loss_of((function or layer)(x)), leaves.values()), strict=True))


def same_bits(found, expected):
    """Whether the same names have the same tensors."""
    return found.keys() == expected.keys() and all_equal(found.values(), [expected[name] for name in found])


def all_equal(found, expected):
    """Whether both have the same tensors, in order."""
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def step(layer, x):
    """Every output and gradient of one forward and backward."""
    result = layer(x)
    loss = (result.out.float() * x.detach().float()).sum() + result.load_balancing_loss + result.router_z_loss
    gradients = torch.autograd.grad(loss, [x, *layer.parameters()])
    return (*[output.detach() for output in result], *gradients)


@contextmanager
def eager_collector():
    """A full collection at nearly each allocation of a Python object; there is little else to look through."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.collect()  # Python puts full collections off until a quarter of what this one found is new
    gc.set_threshold(1, 1, 1)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def settled():
    """Bytes in use on the GPU, once the garbage of earlier tests is gone: it would be freed during the step."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_of_step(layer, x):
    """The most bytes that torch's allocator gives a step, over those in use before it."""
    leaves = [x, *layer.parameters()]
    torch.autograd.grad(layer(x).out.sum(), leaves)  # compiles, and lets cuBLAS take its workspace
    before = settled()
    gradients = torch.autograd.grad(layer(x).out.sum(), leaves)  # sum keeps no output, and its gradient is expanded
    torch.cuda.synchronize()
    assert len(gradients) == len(leaves)
    return torch.cuda.max_memory_allocated() - before
