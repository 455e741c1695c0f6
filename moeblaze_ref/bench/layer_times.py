"""How long a step of any layer takes beside plain torch: for ``moeblaze check --layer``."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.runtime.clock import Lap, interleave
from moeblaze_ref.runtime.device import Device, Gpu
from moeblaze_ref.verify.layers import cases, reference
from moeblaze_ref.verify.layers.adapter import Factory, Sizes
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.faults import LayerFault
from moeblaze_ref.verify.layers.layer import CheckedLayer
from moeblaze_ref.verify.layers.layouts import BUFFERS
from moeblaze_ref.verify.layers.reference import Case

SIZES = Sizes(L=8192, d=1024, h=1024, E=16, k=2)
REPETITIONS = 9

Step = Callable[[int, Lap], object]


class LayerTimes(NamedTuple):
    """Milliseconds of a step of `SIZES`, forward and backward: medians of interleaved rounds."""

    step_ms: float
    plain_ms: float  #: of `reference.layer` in the layer's dtype: plain torch, one expert after another


def times_of(factory: Factory, dtype: torch.dtype) -> LayerTimes | None:
    """Time a layer on the GPU; None if it raises an error or needs other widths."""
    try:
        layer = CheckedLayer.make(factory, SIZES, dtype, "cuda")
        return timed(layer, SIZES, Gpu()) if SIZES == cases.widened(SIZES, layer.adapter.multiple) else None
    except LayerFault:
        return None


def timed(layer: CheckedLayer, sizes: Sizes, device: Device) -> LayerTimes:
    """Time a layer and the reference on the same numbers, interleaved."""
    case = cases.make(layer.adapter, Pattern("times", sizes, cases.distinct), layer.dtype)
    steps = {"layer": _step(layer, case), "plain": _plain_step(layer, case)}
    found = interleave(steps, REPETITIONS, device)
    return LayerTimes(found["layer"].median, found["plain"].median)


def _step(layer: CheckedLayer, case: Case) -> Step:
    inputs, d_out = layer.load(case), layer.d_out(case)
    return lambda number, lap: layer.raw_gradients(layer.forward(inputs), d_out, inputs)


def _plain_step(layer: CheckedLayer, case: Case) -> Step:
    spec = cases.spec_of(layer.adapter, case.sizes.k)
    dtypes = {"topk_weights": layer.gate_dtype}

    def there(name: str, values: Tensor) -> Tensor:
        return values.to(layer.device, dtypes.get(name, layer.dtype))

    leaves = {name: there(name, values).requires_grad_() for name, values in case.inputs().items()}
    buffers = {name: there(name, case.weights[name]) for name in BUFFERS if name in case.weights}
    index, d_out = case.topk_index.to(layer.device), layer.d_out(case)

    def step(number: int, lap: Lap) -> object:
        out = reference.layer(spec, leaves | buffers, index)
        return torch.autograd.grad(out, list(leaves.values()), d_out, materialize_grads=True)

    return step
