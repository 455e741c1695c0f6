"""Random inputs of every stage, of order 1 as in a layer."""

from functools import cached_property

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import dispatch
from moeblaze_ref.bench import routing
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime.torch_bridge import Bridge


class Inputs:
    """Inputs of one layer's stages; each array is made on first use.

    Parameters
    ----------
    config : MoEConfig
    bridge : Bridge
        To the arrays of the device.
    device : torch.device
    """

    def __init__(self, config: MoEConfig, bridge: Bridge, device: torch.device):
        self.config, self._bridge, self._device = config, bridge, device
        self._tensors: dict[str, Tensor] = {}

    def tensor(self, name: str) -> Tensor:
        """One of the arrays below as a torch tensor, its own memory; made once, since no graph may hold the making."""
        if name not in self._tensors:
            self._tensors |= self._bridge.by_name({name: getattr(self, name)})
        return self._tensors[name]

    def _random(self, *shape: int, dtype: str | None = None, fan_in: int = 1) -> Array:
        options = {"device": self._device, "dtype": getattr(torch, dtype or self.config.dtype)}
        return self._bridge.array(torch.randn(*shape, **options).mul_(fan_in**-0.5))

    @cached_property
    def x(self) -> Array:
        """(L, d)."""
        return self._random(self.config.L, self.config.d)

    @cached_property
    def d_out(self) -> Array:
        """(L, d)."""
        return self._random(self.config.L, self.config.d)

    @cached_property
    def a(self) -> Array:
        """(R, h); also in the place of d_a."""
        return self._random(self.config.R, self.config.h)

    @cached_property
    def b(self) -> Array | None:
        """(R, h), or None without a gate; also in the place of d_b."""
        return self._random(self.config.R, self.config.h) if self.config.gated else None

    @cached_property
    def y_swi(self) -> Array:
        """(R, h); also in the place of gate * y_swi."""
        return self._random(self.config.R, self.config.h)

    @cached_property
    def y(self) -> Array:
        """(R, d)."""
        return self._random(self.config.R, self.config.d)

    @cached_property
    def wg(self) -> Array:
        """(d, E)."""
        return self._random(self.config.d, self.config.E, fan_in=self.config.d)

    @cached_property
    def w1(self) -> Array:
        """(E, d, h)."""
        return self._random(self.config.E, self.config.d, self.config.h, fan_in=self.config.d)

    @cached_property
    def w2(self) -> Array | None:
        """(E, d, h), or None without a gate."""
        c = self.config
        return self._random(c.E, c.d, c.h, fan_in=c.d) if c.gated else None

    @cached_property
    def w3(self) -> Array:
        """(E, h, d)."""
        return self._random(self.config.E, self.config.h, self.config.d, fan_in=self.config.h)

    @cached_property
    def logits(self) -> Array:
        """(L, E) float32; also in the place of d_logits."""
        return self._bridge.array(routing.wanted_logits(self.config.L, self.config.E, "uniform", self._device))

    @cached_property
    def probs(self) -> Array:
        """(L, E) float32."""
        return self._bridge.array(torch.softmax(self.tensor("logits"), dim=1))

    @cached_property
    def topk_experts(self) -> Array:
        """(L, k) int32."""
        return self._bridge.array(torch.topk(self.tensor("logits"), self.config.k).indices.int().contiguous())

    @cached_property
    def gates(self) -> Array:
        """(L, k) float32; also in the place of d_gates."""
        return self._random(self.config.L, self.config.k, dtype="float32")

    @cached_property
    def dispatch(self) -> Dispatch:
        """The dispatch of `topk_experts`."""
        with self._bridge.running():
            return dispatch.build.unchecked(self.topk_experts, self.config.E, executor=self._bridge.executor)

    @cached_property
    def position_of_slot(self) -> Tensor:
        """token_index_map of `dispatch`, (R,) int64, as torch's indexing takes it."""
        return self._bridge.by_name(self.dispatch.arrays())["token_index_map"].long()
