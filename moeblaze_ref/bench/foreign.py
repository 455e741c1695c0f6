"""Layers of other projects, on copies of our weights in their layouts: baselines for a training step on a GPU.

They are those of ``verify.layers.adapters.foreign``. A package is imported when its layer is built, so the project runs
without any of them.

Sources: MegaBlocks (arXiv 2211.15841); SonicMoE (arXiv 2512.14080).
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from moeblaze_ref.bench.accuracy import Layer, Weights
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.verify.layers import layouts
from moeblaze_ref.verify.layers.adapter import Adapter, Sizes
from moeblaze_ref.verify.layers.adapters.foreign import megablocks, sonicmoe
from moeblaze_ref.verify.layers.layouts import Place

GATED = {"wg": "router", "w1": "gate", "w2": "up", "w3": "down"}
UNGATED = {"wg": "router", "w1": "up", "w3": "down"}


class Baseline(NamedTuple):
    """A layer of another project."""

    layer: Layer  #: x (L, d) to output (L, d) and choice of experts (L, k)
    weights: Weights  #: its own, which hold the numbers of ours


def _with_our_weights(make: Callable[..., Adapter], parameters: RoutedExperts) -> Baseline:
    """A layer with the activation and the numbers of ``parameters``."""
    E, d, h = parameters.w1.shape
    like = {"dtype": parameters.w1.dtype, "device": str(parameters.w1.device)}
    adapter = make(d=d, h=h, E=E, k=parameters.k, activation=parameters.activation, **like)
    names = GATED if is_gated(parameters.activation) else UNGATED
    places = adapter.places(Sizes(1, d, h, E, parameters.k))
    layouts.scatter(places, {role: getattr(parameters, name) for name, role in names.items()})
    leaves = {place.name: tensor for place, tensor in places}
    return Baseline(adapter.module, Weights(leaves, partial(_as_ours, [place for place, _ in places], names)))


def _as_ours(places: list[Place], names: dict[str, str], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    by_role = layouts.gather([(place, gradients[place.name]) for place in places])
    return {name: by_role[role] for name, role in names.items()}


SYSTEMS: dict[str, Callable[[RoutedExperts], Baseline]] = {
    "megablocks_published": partial(_with_our_weights, megablocks.dmoe),
    "megablocks_published_memory_optimized": partial(
        _with_our_weights, partial(megablocks.dmoe, memory_optimized=True)
    ),
    "megablocks_published_block_sparse": partial(_with_our_weights, partial(megablocks.dmoe, products="sparse")),
    "sonicmoe": partial(_with_our_weights, sonicmoe.moe),
}
# Why a system that runs computes something else than the layer, by system and activation.
FAULTS = {
    ("megablocks_published_memory_optimized", "relu"): (
        "its backward writes d_y over y, from which torch's ReLU takes its slope"
    ),
}


def baseline(system: str, parameters: RoutedExperts) -> Baseline:
    """The layer of one of ``SYSTEMS`` on the weights of ``parameters``.

    Raises
    ------
    ValueError
        If its package cannot be imported; the message says which and why.
    """
    try:
        return SYSTEMS[system](parameters)
    except ImportError as error:
        raise ValueError(f"system {system}: {error}") from error
