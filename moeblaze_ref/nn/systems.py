"""The ways of running an MoE layer, by name, as torch modules: one argument swaps them in a model.

All have the parameters of `RoutedExperts`, so a state of one is a state of any other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.nn.torch_capacity import CapacityMoE, DynamicCapacityMoE
from moeblaze_ref.nn.torch_layer import MoELayer, MoEModule, MoEOutput
from moeblaze_ref.nn.torch_memory_optimized import MemoryOptimizedMoE
from moeblaze_ref.nn.torch_sequential import SequentialMoE

# (d, h, E, k, activation) -> the layer
MoEFactory = Callable[[int, int, int, int, str], nn.Module]

SYSTEMS: dict[str, MoEFactory] = {
    "oracle": oracle.OracleMoE,  # plain torch, nothing dropped
    "sequential": SequentialMoE,  # plain torch, one expert after another
    "capacity": CapacityMoE,  # C rows an expert: dropped beyond, padded below
    "dynamic_capacity": DynamicCapacityMoE,  # as many rows as the fullest expert has, nothing dropped
    "megablocks": BlockSparseMoE,  # whole blocks an expert, nothing dropped
    "megablocks_memory_optimized": MemoryOptimizedMoE,  # the same, the activation computed again
    "moeblaze": MoELayer,  # no routed buffer
}


def system(name: str, **options: Any) -> MoEFactory:
    """Return the factory of a system's layers.

    Parameters
    ----------
    name : str
        One of ``SYSTEMS``.
    **options
        Of its constructor, such as ``capacity_factor``.

    Returns
    -------
    callable
        Takes d, h, E, k and the activation.

    Raises
    ------
    ValueError
        If there is no such system; the message proposes the nearest name.
    """
    return partial(SYSTEMS[checks.check_name("system", name, SYSTEMS)], **options)


def run(layer: nn.Module, x: Tensor, topk_experts: Tensor | None = None) -> MoEOutput:
    """Run any system's layer on x (L, d), under its router's choice or a replayed one (L, k) int32."""
    if isinstance(layer, MoEModule):
        output: MoEOutput = layer(x, topk_experts)
        return output
    out, routing = layer(x, topk_experts)
    losses = oracle.load_balancing_loss(routing), oracle.router_z_loss(routing)
    return MoEOutput(out, *losses, routing.topk_experts.int())
