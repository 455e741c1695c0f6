"""Random inputs of every stage, of order 1 as in a layer."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import dispatch
from moeblaze_ref.bench import routing
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime.torch_bridge import Bridge


def _random(shape: str, dtype: str | None = None, fan_in: str = "", gated: bool = False) -> cached_property[Any]:
    """A random array of these sizes, such as "Rh", in the layer's dtype; None if only a gated layer has it."""

    def make(self: "Inputs") -> Array | None:
        c = self.config
        if gated and not c.gated:
            return None
        options = {"device": self._device, "dtype": getattr(torch, dtype or c.dtype)}
        numbers = torch.randn(*(getattr(c, size) for size in shape), **options)
        return self._bridge.array(numbers.mul_(getattr(c, fan_in) ** -0.5) if fan_in else numbers)

    return cached_property(make)


class Inputs:
    """Inputs of one layer's stages as arrays that ``bridge`` makes on the device; each is made on first use."""

    x = _random("Ld")
    d_out = _random("Ld")
    a = _random("Rh")  # also in the place of d_a
    b = _random("Rh", gated=True)  # also in the place of d_b
    y_swi = _random("Rh")  # also in the place of gate * y_swi
    y = _random("Rd")
    wg = _random("dE", fan_in="d")
    w1 = _random("Edh", fan_in="d")
    w2 = _random("Edh", fan_in="d", gated=True)
    w3 = _random("Ehd", fan_in="h")
    gates = _random("Lk", "float32")  # also in the place of d_gates

    def __init__(self, config: MoEConfig, bridge: Bridge, device: torch.device):
        self.config, self._bridge, self._device = config, bridge, device
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """One of the arrays below as a torch tensor, its own memory; made once, since no graph may hold the making."""
        if name not in self._tensors:
            self._tensors |= self._bridge.by_name({name: getattr(self, name)})
        return self._tensors[name]

    @cached_property
    def logits(self) -> Array:
        """(L, E) float32; also in the place of d_logits."""
        return self._bridge.array(routing.wanted_logits(self.config.L, self.config.E, "uniform", self._device))

    @cached_property
    def topk_experts(self) -> Array:
        """(L, k) int32."""
        return self._bridge.array(torch.topk(self.tensor("logits"), self.config.k).indices.int().contiguous())

    @cached_property
    def dispatch(self) -> Dispatch:
        """The dispatch of `topk_experts`."""
        with self._bridge.running():
            return dispatch.build.unchecked(self.topk_experts, self.config.E, executor=self._bridge.executor)

    @cached_property
    def position_of_slot(self) -> Tensor:
        """token_index_map of `dispatch`, (R,) int64, as torch's indexing takes it."""
        return self._bridge.by_name(self.dispatch.arrays())["token_index_map"].long()
