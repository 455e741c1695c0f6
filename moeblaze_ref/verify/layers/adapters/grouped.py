"""The layer in plain torch by grouped products: ``nn.torch_grouped``."""

from functools import partial

import torch

from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn import torch_grouped
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.verify.layers.adapter import ALIGNED, Adapter, Factory

LAYOUTS = {"wg": "router: d E", "w1": "gate: E d h", "w2": "up: E d h", "w3": "down: E h d"}
COMPILED = ("grouped_mm_compiled", "gather_sum_compiled")
DTYPES = (torch.bfloat16,)  #: in others torch.compile refuses torch's grouped_mm


def moe(name: str, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
    """Return one of ``torch_grouped.SYSTEMS``; it returns the choice of experts, too.

    What torch compiles has one backward: it reuses the memory that the backward reads.
    """
    parameters = RoutedExperts(d, h, E, k, "swiglu", device=device, dtype=dtype)
    run = torch_grouped.build(name, parameters)
    tensors = dict(parameters.named_parameters())
    return Adapter(
        run, LAYOUTS, Router(), tensors=tensors, multiple=ALIGNED, dtypes=DTYPES, retains=name not in COMPILED
    )


def factories() -> dict[str, Factory]:
    """Return the factories of the layers that run without compilation."""
    return {f"torch/{name}": partial(moe, name) for name in ("grouped_mm", "gather_sum")}


def compiled() -> dict[str, Factory]:
    """Return the factories of the compiled layers, which are faster only on a GPU."""
    return {f"torch/{name}": partial(moe, name) for name in COMPILED}
