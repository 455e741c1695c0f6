"""The MoE layer whose experts are on several ranks.

A token's row travels once to every rank that has one of its experts, with its choice of experts and its gates; the rank
runs those that it has, by the stages of the single-device layer, and sends one row back: their weighted sum. Which rows
go to which rank is a dispatch whose experts are the ranks. A slot without a row, since its expert is elsewhere or its
rank has the row already, is ``EMPTY`` (`raw_cuda.dispatch.build_part`). Nothing is padded.

Sources: GShard (arXiv 2006.16668), section 3.1, for all-to-all between ranks that share a layer's experts; MoETuner
(arXiv 2502.06643) for maps of experts to ranks, different from layer to layer; MoEBlaze (arXiv 2601.05296), section 4,
for the index structures.
"""

import hashlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.torch_layer import (
    DTYPES,
    KernelMoE,
    MoEOutput,
    give_up,
    has_backward,
    is_the_last_backward,
    restored,
    wanted_by,
)
from moeblaze_ref.nn.torch_transforms import check_backward, refuse_forward_mode
from moeblaze_ref.parallel.batch import BatchGating
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.parallel.trip import Trip
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.runtime.torch_bridge import bridge_to
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import MoEWeights


class ExpertParallelMoE(KernelMoE):
    """`torch_layer.MoELayer` with its experts on the ranks of a process group, as an ``nn.Module``.

    Every rank calls it with tokens of its own, as many as it likes, none too. The output is that of its tokens; the
    losses are those of all ranks' tokens together, the same on every rank.

    Parameters
    ----------
    d, h, E, k, activation, policy, renormalize, device, dtype
        As in `MoELayer`. Parameters are wg (d, E), which every rank has alike (rank 0's is taken), and w1, w2 and w3 of
        this rank's experts alone, in the order of their ids.
    placement : Placement
        Which rank has which expert; a rank may have none.
    layer : int
        Which layer of the placement this is.
    ranks : Ranks, optional
        Default: all of ``torch.distributed``.

    Attributes
    ----------
    experts : list of int
        Those of this rank.
    executor : str or None
        As in `MoELayer`.

    Raises
    ------
    ValueError, TypeError
        As `MoELayer`, or if the placement is for another number of experts or ranks, or has no such layer, or another
        rank has another placement, size, activation, dtype or kind of gates.
    RuntimeError
        If ``torch.distributed`` is not initialised.

    Notes
    -----
    Gradients are those of the single-device layer on all ranks' tokens, where each rank's loss is a sum over its own
    tokens plus, on every rank alike, multiples of the two losses: d_w1, d_w2 and d_w3 have what came from every rank,
    and d_wg is summed over the ranks here. So nothing is left to average over the ranks of the group.

    All ranks make the same calls, forward and backward, and want the same gradients. The host waits for the device once
    a forward: it must know how many rows come. What a rank keeps for the backward is what `MoELayer` keeps for as many
    tokens as came, their rows too. Partial sums travel in the dtype of x.
    """

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        placement: Placement,
        layer: int = 0,
        activation: str = "swiglu",
        policy: str = "minimal",
        renormalize: bool = False,
        ranks: Ranks | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        ranks = ranks or Ranks()
        checks.check_type("placement", placement, Placement)
        checks.check_int("layer", layer, 0, placement.layers - 1)
        placement.check_fits(placement.layers, E)
        if placement.num_gpus != ranks.size:
            raise ValueError(f"the map is for {placement.num_gpus} GPUs, but the group has {ranks.size} ranks")
        experts = placement.hosts(layer)[ranks.rank]
        super().__init__(d, h, E, k, activation, renormalize, device, dtype, hosted=len(experts))
        self.policy = checks.check_name("policy", policy, POLICIES)
        self.ranks, self.experts = ranks, experts
        here = torch.full((E,), EMPTY, dtype=torch.int32)
        here[experts] = torch.arange(len(experts), dtype=torch.int32)
        owners = torch.from_numpy(placement.assignment[layer].copy())
        self.register_buffer("owners", owners.to(device), persistent=False)  # (E,) int32: each expert's rank
        self.register_buffer("here", here.to(device), persistent=False)  # (E,) int32: its place on this rank, or EMPTY
        mine = {"d": d, "h": h, "E": E, "k": k, "activation": activation, "renormalize": renormalize}
        _check_alike(ranks, mine | {"dtype": self.wg.dtype}, _digest(placement, layer), self.wg.device)
        with torch.no_grad():
            ranks.spread(self.wg)

    @torch.no_grad()
    def take(self, whole: RoutedExperts):
        """This rank's part of the parameters of a layer that has all experts."""
        self.wg.copy_(whole.wg)
        for mine, theirs in zip(self.weights[1:], whole.weights[1:], strict=True):
            if mine is not None:
                mine.copy_(theirs[self.experts])

    def _run(self, x: Tensor, weights: MoEWeights, topk_experts: Tensor | None) -> MoEOutput:
        policy = self.policy if has_backward(x, weights) else "inputs"
        options = _Options(self.k, self.activation, policy, self.renormalize, self.ranks, self.owners, self.here)
        return self._apply_node(_ExpertParallel, options, x, *weights, topk_experts)

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, policy={self.policy}, experts={self.experts} of rank {self.ranks.rank}"


_CHOICES = {"activation": ACTIVATIONS, "renormalize": (False, True), "dtype": DTYPES}  # of which a rank tells its place


def _check_alike(ranks, mine, digest, device):
    """All ranks have the same layer and map: otherwise they would send rows where nobody expects them."""
    told = [_CHOICES[name].index(value) if name in _CHOICES else value for name, value in mine.items()]
    first, *others = ranks.every(torch.tensor([*told, digest], device=device)).tolist()
    for rank, other in enumerate(others, start=1):
        for name, here, there in zip(mine, first, other, strict=False):
            if here != there:
                here, there = [_CHOICES[name][value] if name in _CHOICES else value for value in (here, there)]
                raise ValueError(
                    f"{name} is {here} on rank 0 and {there} on rank {rank}, but all ranks need the same layer"
                )
        if other[-1] != first[-1]:
            raise ValueError(
                f"the placement of rank {rank} is not that of rank 0, but all ranks need the same map and layer: make "
                f"it on one rank, and send it to the others"
            )


def _digest(placement, layer):
    """Of the map and the layer, 7 bytes."""
    found = hashlib.blake2b(repr((placement.assignment.shape, layer)).encode(), digest_size=7)
    found.update(placement.assignment.tobytes())
    return int.from_bytes(found.digest())


class _Options(NamedTuple):
    """What the layer is told besides tensors that have gradients."""

    k: int
    activation: str
    policy: str
    renormalize: bool
    ranks: Ranks
    owners: Tensor
    here: Tensor


class _ExpertParallel(torch.autograd.Function):
    """The raw CUDA layer over several ranks as one node of autograd's graph."""

    @staticmethod
    def forward(ctx, options, x, wg, w1, w2, w3, topk_experts):
        bridge = bridge_to(x.device)
        with bridge.running(), checks.trusted():
            array, *arrays, replayed = bridge.arrays([x, wg, w1, w2, w3, topk_experts])
            weights = MoEWeights(*arrays)
            stages = raw_layer.stages_for(array, weights, bridge.executor, None)
            batch = BatchGating(stages.gating, bridge, options.ranks)
            router = stages._replace(gating=batch)
            choice = layer.choose(router, array, weights.wg, options.k, options.renormalize, replayed)
            chosen, gates, *losses = bridge.tensors(choice)
            losses = options.ranks.total(torch.stack(losses) * batch.part).unbind()
            trip = Trip.planned(options.ranks, stages, bridge, chosen, options.owners)
            sums, arrived = _visit(trip, stages, bridge, x, chosen, gates, weights, options)
            out = trip.back(sums)
        kept = {"chosen": chosen, "shares": batch.shares, "part": batch.part, **trip.tensors(), **arrived}
        ctx.options, ctx.kept, ctx.counts = options, tuple(kept), trip.counts
        ctx.save_for_backward(x, wg, w1, w2, w3, *kept.values())
        ctx.mark_non_differentiable(chosen)
        ctx.set_materialize_grads(False)  # a loss that nobody uses costs nothing
        return out, *losses, chosen

    @staticmethod
    def backward(ctx, d_out, d_load_balancing_loss, d_router_z_loss, _):
        check_backward("ExpertParallelMoE", (d_out, d_load_balancing_loss, d_router_z_loss))
        x, *tensors = ctx.saved_tensors
        options, bridge, wanted = ctx.options, bridge_to(x.device), wanted_by(ctx)
        kept = dict(zip(ctx.kept, tensors[4:], strict=True))
        chosen, shares, part = [kept.pop(name) for name in ("chosen", "shares", "part")]
        with bridge.running(), checks.trusted():  # autograd vouches for what it kept, and for d_out's shape and dtype
            array, *arrays = bridge.arrays([x, *tensors[:4]])
            weights = MoEWeights(*arrays)
            stages = raw_layer.stages_for(array, weights, bridge.executor, None)
            trip = Trip.again(options.ranks, stages, bridge, kept, options.k, ctx.counts)
            d_sums = bridge.array(trip.there(torch.zeros_like(x) if d_out is None else d_out))
            arrived = {name: bridge.array(kept[name]) for name in kept.keys() - trip.tensors().keys()}
            saved = restored(options, arrived.pop("rows"), arrived)
            overwrite = is_the_last_backward()
            if overwrite:
                give_up([kept[name] for name in saved.intermediates])
            del tensors, kept, arrived
            experts = layer.expert_gradients(stages, d_sums, saved, weights, overwrite, wanted)
            d_x, d_gates = [None if d is None else trip.back(bridge.tensor(d)) for d in (experts.d_x, experts.d_gates)]
            d_x_router, d_wg = layer.router_gradients(
                stages._replace(gating=BatchGating(stages.gating, bridge, options.ranks, shares)),
                bridge.array(d_gates),
                array,
                weights.wg,
                bridge.array(chosen),
                options.renormalize,
                *[0.0 if d is None else bridge.array(d * part) for d in (d_load_balancing_loss, d_router_z_loss)],
                wanted,
            )
            d_x_router, d_wg, *d_experts = bridge.tensors([d_x_router, d_wg, *experts[2:5]])
        if d_x is not None:
            d_x += d_x_router
        if d_wg is not None:
            d_wg = options.ranks.total(d_wg.float()).to(d_wg.dtype)
        return None, d_x, d_wg, *d_experts, None

    @staticmethod
    def jvp(ctx, *_):
        refuse_forward_mode("ExpertParallelMoE")


def _visit(trip, stages, bridge, x, chosen, gates, weights, options):
    """The weighted sums of the rows that came here, in their order, and what is kept of them, by name."""
    k, num_experts = options.k, weights.w1.shape[0]
    rows = trip.there(x)
    slots = trip.there(torch.cat([chosen, gates.view(torch.int32)], dim=1))  # 2k words of a row
    here = options.here[slots[:, :k].long()]  # (rows, k)
    gates = slots[:, k:].contiguous().view(torch.float32)
    dispatch = stages.dispatch.build_part(bridge.array(here), num_experts, trip.counts.choices)
    sums, intermediates = layer.run_experts(
        stages, bridge.array(rows), weights, dispatch, bridge.array(gates), options.activation, options.policy
    )
    made = dispatch.arrays() | intermediates
    kept = dict(zip(made, bridge.tensors(made.values()), strict=True))
    return bridge.tensor(sums), {"rows": rows, "gates": gates, **kept}
