"""The ways of running an MoE layer, by name, as torch modules: one argument swaps them in a model.

All have the parameters of `RoutedExperts`, so a state of one is a state of any other.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moeblaze_ref import doors, oracle
from moeblaze_ref.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.torch_capacity import CapacityMoE
from moeblaze_ref.torch_layer import MoELayer, MoEModule

# (d, h, E, k, activation) -> the layer
MoEFactory = Callable[[int, int, int, int, str], nn.Module]

SYSTEMS: dict[str, MoEFactory] = {
    "oracle": oracle.OracleMoE,  # plain torch, nothing dropped
    "capacity": CapacityMoE,  # C rows an expert: dropped beyond, padded below
    "megablocks": BlockSparseMoE,  # whole blocks an expert, nothing dropped
    "moeblaze": MoELayer,  # no routed buffer
}


def system(name: str, **options: Any) -> MoEFactory:
    """What makes the layers of a system.

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
    return partial(SYSTEMS[doors.check_name("system", name, SYSTEMS)], **options)


def run(layer: nn.Module, x: Tensor) -> tuple[Tensor, oracle.Routing]:
    """The output of any system's layer for x (L, d), and the routing behind it.

    `MoEModule` returns the choice, without the (L, E) tensors that it need not keep: they are decided again in plain
    torch, where autograd follows them, for the choice that was made.
    """
    if not isinstance(layer, MoEModule):
        return layer(x)
    result = layer(x)
    return result.out, oracle.route(x, layer.wg, layer.k, layer.renormalize, result.topk_experts)
