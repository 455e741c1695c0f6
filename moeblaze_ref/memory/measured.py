"""Compare the measured bytes of the layers that run here with their accounts."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import Account, uniform_counts
from moeblaze_ref.nn.systems import SYSTEMS, system

CPU_FLOPS = 2 * 10**10  # of one forward: seconds of the SIMT executor, which runs some millions of FLOPs a millisecond

# By the name of the account: the system that it is of, and what its constructor must be told.
LAYERS: dict[str, tuple[str, Callable[[Account], dict[str, Any]]]] = {
    "conventional": ("oracle", lambda one: {}),
    "sequential": ("sequential", lambda one: {}),
    "capacity": ("capacity", lambda one: {"capacity_factor": one.assumptions.capacity_factor}),
    "dynamic_capacity": ("dynamic_capacity", lambda one: {}),
    "megablocks_memory_optimized": ("megablocks_memory_optimized", lambda one: {"block": one.assumptions.block}),
    "megablocks": ("megablocks", lambda one: {"block": one.assumptions.block}),
    "moeblaze": ("moeblaze", lambda one: {"policy": one.policy}),
}


class Measured(NamedTuple):
    """An account, and what its layer keeps of one forward."""

    account: Account
    kept_bytes: int | None  #: None if it was not run
    remark: str  #: why it was not run; empty if it was


def measured(one: Account, device: str = "cpu") -> Measured:
    """Run the layer of an account, on its configuration and its counts, and add up what autograd keeps.

    ``device`` is "cpu" or "cuda". Not run is what no layer here does, or does in this dtype, and on a CPU what takes
    more than ``CPU_FLOPS``.
    """
    remark = _obstacle(one, device)
    if remark:
        return Measured(one, None, remark)
    config, dtype = one.config, getattr(torch, one.config.dtype)
    x = torch.randn(config.L, config.d, device=device, dtype=dtype, requires_grad=True)
    name, options = LAYERS[one.system]
    router, shared = one.assumptions.router, one.assumptions.shared
    make = system(name, router=router, shared=shared, device=device, dtype=dtype, **options(one))
    layer = make(config.d, config.h, config.E, config.k, config.activation)
    if one.system == "conventional":  # keeps as much of any routing
        return Measured(one, measure.kept_bytes(layer, x), "")
    routing = measure.routing_of(one.assumptions.counts or uniform_counts(config), config.k).to(device)
    return Measured(one, measure.kept_bytes(layer, x, routing), "")


def measure_here(accounts: Sequence[Account]) -> list[Measured]:
    """`measured` of every account, on a GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return [measured(one, device) for one in accounts]


def _obstacle(one: Account, device: str) -> str:
    """Why the layer cannot be run; empty if it can."""
    if one.system not in LAYERS:
        return "no layer here computes it so"
    dtypes = getattr(SYSTEMS[LAYERS[one.system][0]], "dtypes", ())
    if dtypes and getattr(torch, one.config.dtype) not in dtypes:
        return f"the layer does not compute in {one.config.dtype}"
    if device == "cpu" and forward_flops(one) > CPU_FLOPS:
        return "too much work for a CPU"
    return ""


def forward_flops(one: Account) -> int:
    """FLOPs of the experts' products in a forward, 2*d*h a row and projection, the padding's too."""
    outputs = {tensor.name: math.prod(tensor.shape) for tensor in one.tensors}  # d of each row
    projections = 3 if one.config.gated else 2
    return 2 * projections * one.config.h * outputs.get("y_rows", outputs["y"])
