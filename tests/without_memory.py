"""Layers with and without memory, what they keep, and what lives when in a step of theirs."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_layers import SIZES, L, loss_of, make_layer, make_x

from moeblaze_ref.core.config import even_counts
from moeblaze_ref.memory import measure


def make(system, tokens=L, dtype=torch.float32, device="cpu", **options):
    """A layer, an input, and the router's choice for it: as many rows for each expert as integers allow."""
    sizes = SIZES | {name: size for name, size in options.items() if name in SIZES}
    d, E, k = (sizes[name] for name in "dEk")
    layer = make_layer(system, dtype=dtype, device=device, **options)
    x = make_x(tokens, d, dtype=dtype, device=device)
    chosen = measure.routing_of(even_counts(tokens * k, E), k).to(device)
    with torch.no_grad():
        layer.wg.copy_(torch.eye(d, E))
        x.zero_()[:, :E] = torch.zeros(tokens, E, device=device).scatter_(1, chosen.long(), 1.0)
    return layer, x, chosen


def make_fake(system, tokens=L, dtype=torch.float32, device="cpu", **options):
    """The same under FakeTensorMode; only its sizes matter."""
    layer = make_layer(system, dtype=dtype, device=device, **options)
    x = torch.empty(tokens, layer.wg.shape[0], dtype=dtype, device=device, requires_grad=True)
    return layer, x, torch.empty(tokens, layer.k, dtype=torch.int32, device=device)


def kept(system, **options):
    return measure.kept_storages(*make(system, **options)[:2])


def kept_without_memory(system, **options):
    with FakeTensorMode():
        return measure.kept_storages(*make_fake(system, **options)[:2])


def gradients(of, layer, x, **options):
    return torch.autograd.grad(of, [x, *layer.parameters()], **options)


def of_the_output(layer, x, chosen):
    return gradients(layer(x).out.sum(), layer, x)


def of_everything(layer, x, chosen):
    return gradients(loss_of(layer(x)), layer, x)


def retained(layer, x, chosen):
    return gradients(layer(x).out.sum(), layer, x, retain_graph=True)


def replayed(layer, x, chosen):
    return gradients(layer(x, chosen).out.sum(), layer, x)


def under_autocast(layer, x, chosen):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return of_everything(layer, x, chosen)


def of_x_alone(layer, x, chosen):
    return torch.autograd.grad(layer(x).out.sum(), x)


def of_w1_and_wg(layer, x, chosen):
    return torch.autograd.grad(layer(x).out.sum(), [layer.w1, layer.wg])


def forward_alone(layer, x, chosen):
    with torch.no_grad():
        return layer(x).out


STEPS = (of_the_output, of_everything, retained, replayed, under_autocast, of_x_alone, of_w1_and_wg, forward_alone)


def lifetimes(step, layer, x, chosen):
    """Bytes alive at each allocation, beside the operands, which are there all the time."""
    operands = (x, chosen, *layer.parameters())
    return measure.live_bytes(step, layer, x, chosen, exclude=operands, device=x.device.type)


def lifetimes_without_memory(step, system, **options):
    with FakeTensorMode():
        return lifetimes(step, *make_fake(system, **options))
