"""The layers of `nn.SYSTEMS`, which have one layout."""

from functools import partial
from typing import Any

import torch
from torch import nn

from moeblaze_ref.backends.raw_cuda.block_sparse import BLOCK as WHOLE_BLOCK
from moeblaze_ref.core.config import CLAMPED_SWIGLU, POLICIES
from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn.systems import SYSTEMS, run, system
from moeblaze_ref.nn.torch_experts import Experts
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.adapter import Adapter, Factory

LAYOUTS = {"layer.wg": "router: d E", "layer.w1": "gate: E d h", "layer.w2": "up: E d h", "layer.w3": "down: E h d"}


class _Output(nn.Module):
    """A layer that returns its output alone."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return run(self.layer, x).out


PLAIN = ("oracle", "sequential", "dynamic_capacity")  #: systems in plain torch, for any widths
BLOCK = 8  #: of the block-sparse layers where experts are smaller than a block


def of_system(name: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str, **options: Any) -> Adapter:
    """Return a layer of a system, with renormalised gates."""
    made = system(name, renormalize=True, device=device, dtype=dtype, **options)(d, h, E, k, "swiglu")
    multiple = 1 if name in PLAIN else BLOCK
    router = Router(renormalize=True)
    return Adapter(_Output(made), LAYOUTS, router, multiple=multiple, deterministic=True)


def block_sparse(name: str, *, h: int, **sizes: Any) -> Adapter:
    """Return one of MegaBlocks' systems, with blocks that divide the experts."""
    block = WHOLE_BLOCK if h % WHOLE_BLOCK == 0 else BLOCK
    return of_system(name, h=h, block=block, **sizes)


LAYOUTS_OF_EXPERTS = {
    "linear": {"gate_up": "gate_up: E 2h d", "down": "down: E d h"},
    "matmul": {"gate_up": "gate_up: E d 2h", "down": "down: E h d"},
    "interleaved": {"gate_up": "gate_up: E d h2", "down": "down: E h d"},
}


def experts(
    layout: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str, policy: str = "minimal"
) -> Adapter:
    """Return our experts without a router, with weights of one layout."""
    made = Experts(E, d, h, policy=policy, layout=layout, device=device, dtype=dtype)
    return Adapter(made, LAYOUTS_OF_EXPERTS[layout], multiple=BLOCK, deterministic=True)


def biased_experts(layout: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
    """Return the same with biases and gpt-oss's activation."""
    made = Experts(E, d, h, CLAMPED_SWIGLU, layout=layout, device=device, dtype=dtype, bias=True)
    columns = "h2" if layout == "interleaved" else "2h"
    biases = {"gate_up_bias": f"gate_up_bias: E {columns}", "down_bias": "down_bias: E d"}
    layouts = LAYOUTS_OF_EXPERTS[layout] | biases
    return Adapter(made, layouts, activation=ClampedSwiglu(), multiple=BLOCK, deterministic=True)


def factories() -> dict[str, Factory]:
    """Every layer of ours by name: the systems that drop nothing, and ours under each policy."""
    found: dict[str, Factory] = {f"moeblaze_ref/{name}": partial(of_system, name) for name in PLAIN}
    for name in SYSTEMS:
        if name.startswith("megablocks"):
            found[f"moeblaze_ref/{name}"] = partial(block_sparse, name)
    for layout in LAYOUTS_OF_EXPERTS:
        found[f"moeblaze_ref/experts/{layout}"] = partial(experts, layout)
        found[f"moeblaze_ref/experts/{layout} with biases"] = partial(biased_experts, layout)
    for policy in POLICIES:
        found[f"moeblaze_ref/{policy}"] = partial(of_system, "moeblaze", policy=policy)
    return found
