"""The timed systems by name, as layers that share one layer's weights.

These are ours, of `moeblaze_ref.nn.systems`, the baselines in plain torch, and the layers of other projects.

A fixed capacity drops what has no room, so it computes another function than the others: `kept_choices` says, by the
specification, which choices it computes, and it is compared with the oracle over those alone.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from moeblaze_ref.backends.numpy_ref import capacity as specification
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.bench import foreign
from moeblaze_ref.bench.accuracy import Layer
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.memory import waste
from moeblaze_ref.nn import oracle, systems, torch_grouped
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE
from moeblaze_ref.nn.torch_capacity import CapacityMoE
from moeblaze_ref.nn.torch_layer import MoEModule
from moeblaze_ref.systems import capacity

OURS = "moeblaze"
GRAPHED = "moeblaze_graphed"  # ours, whose forward and whose backward are a CUDA graph each
MODULES = tuple(reversed(systems.SYSTEMS))
OWN = (OURS, GRAPHED)  # the systems that have policies, and are no baselines
SYSTEMS = (*MODULES, GRAPHED, *torch_grouped.SYSTEMS, *foreign.SYSTEMS)
ALSO_CALLED = {"torch_grouped": "grouped_mm"}  # rows have the second name


def named(name: str) -> str:
    """The system of a name that a user gives; an unknown one is a ValueError that says which there are."""
    return ALSO_CALLED.get(name, checks.check_name("system", name, (*SYSTEMS, *ALSO_CALLED)))


def module_of(system: str, parameters: RoutedExperts, **options) -> nn.Module:
    """The layer of one of ``systems.SYSTEMS`` over the very weights of ``parameters``, with options of its own."""
    E, d, h = parameters.w1.shape
    make = systems.system(system, device="meta", dtype=parameters.w1.dtype, **options)
    module = make(d, h, E, parameters.k, parameters.activation)
    for name, parameter in parameters.named_parameters():
        setattr(module, name, parameter)
    return module


def layer_of(module: nn.Module) -> Layer:
    """A module of ``systems.SYSTEMS`` as the baselines are: output and choice of experts."""

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(module, MoEModule):
            result = module(x)
            return result.out, result.topk_experts
        out, routing = module(x)
        return out, routing.topk_experts

    return layer


def kept_choices(module: CapacityMoE, x: Tensor, chosen: Tensor) -> Tensor:
    """Return the choices that a `CapacityMoE` computes, by ``numpy_ref.capacity.fill``.

    Parameters
    ----------
    module : CapacityMoE
    x : Tensor (L, d)
    chosen : Tensor (L, k)

    Returns
    -------
    Tensor (L, k), bool
    """
    dispatch = build_by_sort(chosen.int().cpu().numpy(), module.wg.shape[1])
    gates = oracle.route(x, module.wg, module.k, module.renormalize, chosen).gates.detach()
    counts = np.diff(dispatch.expert_token_offsets).tolist()
    rows_of_expert = capacity.capacity_for(counts, module.capacity_factor)
    bins = specification.fill(dispatch, gates.cpu().numpy(), rows_of_expert, module.drop_policy)
    return torch.from_numpy(bins.rows != EMPTY).view(chosen.shape).to(chosen.device)


class Losses(NamedTuple):
    """Dropped rows, lost tokens and padding of a system; None for a system that never drops or pads."""

    dropped_rows: int | None = None
    lost_tokens: int | None = None
    padding_rows: int | None = None


def losses(module: nn.Module, config: MoEConfig, chosen: Tensor) -> Losses:
    """Return what the module's last forward dropped, lost and padded, from its expert counts."""
    counts = chosen.flatten().bincount(minlength=config.E).tolist()
    if isinstance(module, CapacityMoE):
        lost = waste.capacity_waste(config, counts, module.capacity_factor)
        lost_tokens = None if module.lost_tokens is None else int(module.lost_tokens)
        return Losses(lost.dropped_rows, lost_tokens, lost.padding_rows)
    if isinstance(module, BlockSparseMoE):
        padded = waste.megablocks_waste(config, counts, module.block)
        return Losses(padded.dropped_rows, 0, padded.padding_rows)
    return Losses()
