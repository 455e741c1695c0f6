"""Time experts with their weights as models store them, beside experts with their weights as the layer stores them.

Each contender runs `nn.experts`, the layer without its router, forward and backward, on the same routing. Their weights
hold the same numbers, so those with the same activation must have the same results.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.bench import accuracy, routing
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.nn.torch_experts import SEPARATE, experts
from moeblaze_ref.runtime.clock import Lap, interleave
from moeblaze_ref.runtime.device import Device

PRESETS = ("conf3", "mixtral", "qwen3")


@dataclass(frozen=True)
class Way:
    """How the experts' weights are stored, and what else they compute."""

    layout: str
    activation: str = "swiglu"
    biases: bool = False

    @property
    def parts(self) -> int:
        """Tensors that hold the gate and the up-projection."""
        return 2 if self.layout == SEPARATE else 1


WAYS = (Way(SEPARATE), *map(Way, LAYOUTS), Way("interleaved", "clamped_swiglu", biases=True))  # the last is gpt-oss's


@dataclass(frozen=True, kw_only=True)
class Row:
    """A step of the experts, forward and backward, with their weights in one layout."""

    kind: str  #: "layouts"
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k}
    dtype: str
    layout: str  #: as in `nn.experts`
    activation: str
    biases: bool  #: of both projections; they are 0
    step_ms: float  #: median of the device's time
    quartiles_ms: tuple[float, float]  #: first and third
    over_separate: float  #: step_ms over that of layout "separate" with swiglu: what the layer's own experts take
    peak_bytes: int  #: the most that the step allocates at a time, gradients included; weights and x excluded
    error: float  #: this and the next as `accuracy.Error`, beside layout "separate" with the same activation
    row_error: float


class Scene:
    """The tokens, their routing, and the weights of one layer's experts; every way computes with these numbers."""

    def __init__(self, config: MoEConfig, device: Device):
        c, place = config, {"device": device.torch_device, "dtype": getattr(torch, config.dtype)}
        torch.manual_seed(0)
        self.x, self.d_out = (torch.randn(c.L, c.d, **place) for _ in range(2))
        logits = routing.wanted_logits(c.L, c.E, "uniform", device.torch_device)
        chosen, self.topk_index = torch.topk(logits, c.k)
        self.topk_weights = torch.softmax(chosen, dim=-1).requires_grad_()
        self.x.requires_grad_()
        sizes = {(c.E, c.d, c.h): 2, (c.E, c.h, c.d): 1}
        self.w1, self.w2, self.w3 = [
            torch.randn(size, **place) * size[1] ** -0.5 for size, count in sizes.items() for _ in range(count)
        ]

    def weights(self, way: Way) -> list[Tensor]:
        """Return gate_up, or both its parts, and down as a way stores them, and then the biases."""
        if way.parts == 2:
            return [self.w1, self.w2, self.w3]
        (E, d, h), layout = self.w1.shape, LAYOUTS[way.layout]
        place: dict[str, Any] = {"dtype": self.x.dtype, "device": self.x.device}
        gate_up, down = (torch.empty(shape, **place) for shape in layout.shapes(E, d, h, True))
        for part, weight in zip(_parts(way, gate_up, down), (self.w1, self.w2, self.w3), strict=True):
            part.copy_(weight)
        return [gate_up, down, *(torch.zeros(E, width, **place) for width in (2 * h, d) if way.biases)]

    def step(self, way: Way, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the output and the gradients of x, of the routing weights and of each weight."""
        leaves = [weight.detach().requires_grad_() for weight in weights]
        up, (down, *biases) = leaves[: way.parts], leaves[way.parts :]
        gate_up = up[0] if way.parts == 1 else (up[0], up[1])
        up_bias, down_bias = biases or (None, None)
        routed = self.x, gate_up, down, self.topk_index, self.topk_weights
        out = experts(*routed, activation=way.activation, layout=way.layout, gate_up_bias=up_bias, down_bias=down_bias)
        return [out.detach(), *torch.autograd.grad(out, [self.x, self.topk_weights, *leaves], self.d_out)]


def time_layouts(preset: str, config: MoEConfig, repetitions: int, device: Device) -> list[dict[str, Any]]:
    """Time the experts in each of ``WAYS``, interleaved: a `Row` as dict for each.

    ``preset`` is the layer's name in the rows.
    """
    scene = Scene(config, device)
    steps = {way: partial(scene.step, way, scene.weights(way)) for way in WAYS}
    samples = interleave({way: partial(_timed, step) for way, step in steps.items()}, repetitions, device)
    return [
        asdict(
            Row(
                kind="layouts",
                preset=preset,
                shape=config.sizes,
                dtype=config.dtype,
                **asdict(way),
                step_ms=samples[way].median,
                quartiles_ms=samples[way].quartiles,
                over_separate=samples[way].median / samples[WAYS[0]].median,
                peak_bytes=device.peak_bytes(step),
                **_error(scene, way, step()).columns,
            )
        )
        for way, step in steps.items()
    ]


def _timed(step: partial[list[Tensor]], number: int, lap: Lap) -> None:
    step()


def _error(scene: Scene, way: Way, found: Sequence[Tensor]) -> accuracy.Error:
    """The error beside the layer's own layout, biases aside."""
    own = Way(SEPARATE, way.activation)
    expected = scene.step(own, scene.weights(own))
    first, gradients = found[:3], found[3:]
    return accuracy.worst([*first, *(gradients if way.parts == 2 else _parts(way, *gradients[:2]))], expected)


def _parts(way: Way, gate_up: Tensor, down: Tensor) -> list[Tensor]:
    """Views of w1, w2 (E, d, h) and w3 (E, h, d) in weights of a layout, or in their gradients."""
    layout = LAYOUTS[way.layout]
    stored = [*layout.stored(gate_up), down]
    return [part.mT if layout.transposed else part for part in stored]
