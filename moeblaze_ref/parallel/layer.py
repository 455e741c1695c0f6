"""The MoE layer whose experts are on several ranks.

A token's row travels once to every rank that has one of its experts, with its choice of experts and its gates; the rank
runs those that it has, by the stages of the single-device layer, and sends one row back: their weighted sum. Which rows
go to which rank is a dispatch whose experts are the ranks. A slot without a row, since its expert is elsewhere or its
rank has the row already, is ``EMPTY`` (`raw_cuda.dispatch.build_part`). Rows are padded if the layer has a capacity.

Sources: GShard (arXiv 2006.16668), section 3.1, for all-to-all between ranks that share a layer's experts; MoETuner
(arXiv 2502.06643) for maps of experts to ranks, different from layer to layer; MoEBlaze (arXiv 2601.05296), section 4,
for the index structures.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.raw_cuda.dispatch import build_open, build_part
from moeblaze_ref.backends.raw_cuda.parallel import Limit
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.torch_layer import DTYPES, KernelMoE
from moeblaze_ref.nn.torch_node import Backward, Forward, System, has_backward
from moeblaze_ref.parallel.batch import BatchGating
from moeblaze_ref.parallel.copies import Holders, SharedExperts
from moeblaze_ref.parallel.ranks import RankGroup, Ranks
from moeblaze_ref.parallel.state import keep_by_expert
from moeblaze_ref.parallel.trip import Capacity, Trip, check_capacity, counts_within
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.runtime.launch_plan import called
from moeblaze_ref.runtime.torch_bridge import Bridge
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
    placement : Placement or Copies
        Which rank has which expert; a rank may have none. Of an expert with copies a token uses the one that
        `placement.copies.choose` names.
    layer : int
        Which layer of the placement this is.
    ranks : RankGroup, optional
        Default: `Ranks` of all of ``torch.distributed``.
    capacity : Capacity, optional
        Room for the rows, such as `parallel.capacity.capacity_of` takes it from a trace. The host then never waits in a
        step. Default: the host learns in each forward how many rows come.

    Attributes
    ----------
    experts : list of int
        Those of this rank.
    executor : str or None
        As in `MoELayer`.
    capacity : Capacity or None
        May be changed, on all ranks alike.
    overflowed : Tensor () bool
        A forward on this rank had too little room, since it was last set to False. The output of such a forward is NaN,
        on each rank whose tokens lack a row: `parallel.overflow.repeat_on_overflow` runs the step again.

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
    and d_wg is summed over the ranks here. So nothing is left to average over the ranks of the group. Of an expert with
    copies the gradients are summed over the ranks that hold it, in the order of ranks. All copies get the same bits: by
    the same optimizer they stay alike. At the start they have the weights of the first.

    Within a mesh, give the layer the ranks of one axis: ``Ranks(mesh["ep"].get_group())``. Over the other axis, of data
    parallelism, nothing is summed here: average all gradients over it, as ``DistributedDataParallel`` does with
    ``process_group=mesh["dp"].get_group()``. The two losses are those of the tokens of one group.

    ``state_dict`` has this rank's experts under their ids, and ``load_state_dict`` takes them so: see
    `parallel.state`.

    All ranks make the same calls, forward and backward, and want the same gradients. Without a capacity the host waits
    for the device once a forward: it must know how many rows come. What a rank keeps for the backward is what
    `MoELayer` keeps for as many tokens as came, their rows too; with a capacity, for as many as there is room for.
    Partial sums travel in the dtype of x.
    """

    overflowed: Tensor

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        placement: Placement | Copies,
        layer: int = 0,
        activation: str = "swiglu",
        policy: str = "minimal",
        renormalize: bool = False,
        ranks: RankGroup | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        capacity: Capacity | None = None,
    ):
        ranks = ranks or Ranks()
        checks.check_type("placement", placement, Placement, Copies)
        checks.check_int("layer", layer, 0, placement.layers - 1)
        placement.check_fits(placement.layers, E)
        if placement.num_gpus != ranks.size:
            raise ValueError(f"the map is for {placement.num_gpus} GPUs, but the group has {ranks.size} ranks")
        experts = placement.hosts(layer)[ranks.rank]
        super().__init__(d, h, E, k, activation, renormalize, device, dtype, hosted=len(experts))
        self.policy = checks.check_name("policy", policy, POLICIES)
        self.ranks, self.experts = ranks, experts
        self.capacity = check_capacity(capacity)
        self.register_buffer("overflowed", torch.zeros((), dtype=torch.bool, device=self.wg.device), persistent=False)
        copies = placement if isinstance(placement, Copies) else Copies.of(placement)
        held, device = copies.held[layer], self.wg.device
        self.holders = Holders(held, copies.num_nodes, ranks.rank, device)
        self.shared = SharedExperts(ranks, held, device) if self.holders.any_copied else None
        mine = {"d": d, "h": h, "E": E, "k": k, "activation": activation, "renormalize": renormalize}
        mine |= {"dtype": self.wg.dtype, "capacity.rows": 0 if capacity is None else capacity.rows}
        _check_alike(ranks, mine, _digest(held, copies.num_nodes, layer), device)
        self._agree()
        keep_by_expert(self)

    @torch.no_grad()
    def _agree(self):
        """Give every rank the router of rank 0, and every holder of an expert the weights of the first."""
        self.ranks.spread(self.wg)
        if self.shared is not None:
            for weight in self.weights[1:]:
                if weight is not None:
                    self.shared.spread(weight)

    @torch.no_grad()
    def take(self, whole: RoutedExperts):
        """Copy this rank's part of the parameters from a layer that has all experts."""
        self.wg.copy_(whole.wg)
        for mine, theirs in zip(self.weights[1:], whole.weights[1:], strict=True):
            if mine is not None:
                assert theirs is not None  # as w2 is, of an activation without it
                mine.copy_(theirs[self.experts])

    @property
    def has_launch_plans(self) -> bool:
        """True if calls may replay launch plans on a GPU: with room for their rows they do not wait for the host."""
        return self.capacity is not None

    def _system(self, x: Tensor, weights: MoEWeights[Tensor]) -> System[MoEWeights[Array]]:
        policy = self.policy if has_backward(x, weights) else "inputs"
        return _OverRanks(
            self.k,
            self.activation,
            policy,
            self.renormalize,
            self.ranks,
            self.holders,
            self.shared,
            self.capacity,
            self.overflowed,
        )

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, policy={self.policy}, experts={self.experts} of rank {self.ranks.rank}"


_CHOICES = {"activation": ACTIVATIONS, "renormalize": (False, True), "dtype": DTYPES}  # of which a rank tells its place


def _check_alike(ranks, mine, digest, device):
    """Check that all ranks have the same layer and map."""
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


def _digest(held, num_nodes, layer):
    """Return a digest of the layer's part of the map, 7 bytes."""
    found = hashlib.blake2b(repr((held.shape, num_nodes, layer)).encode(), digest_size=7)
    found.update(held.tobytes())
    return int.from_bytes(found.digest())


class _OverRanks(NamedTuple):
    """The raw CUDA layer over several ranks as a `System`."""

    k: int
    activation: str
    policy: str
    renormalize: bool
    ranks: RankGroup
    holders: Holders
    shared: SharedExperts | None
    capacity: Capacity | None
    overflowed: Tensor

    def forward(self, bridge: Bridge, x: Array, weights: MoEWeights[Array], topk_experts: Array | None) -> Forward:
        stages = raw_layer.stages_for(x, weights, bridge.executor)
        batch = BatchGating(stages.gating, bridge, self.ranks)
        choice = layer.choose(batch.within(stages), x, weights.wg, self.k, self.renormalize, topk_experts)
        chosen, gates, *losses = choice
        balance, z = batch.weighed(*losses).unbind()
        way = self.ranks, bridge, self.holders.visits(bridge, chosen, gates)
        room = None if self.capacity is None else (self.capacity, self.overflowed)
        trip, overflowed = (Trip.planned(*way), None) if room is None else Trip.within(*way, *room)
        sums, arrived = _visit(trip, stages, bridge, bridge.tensor(x), weights, self)
        out = trip.back(sums)
        if overflowed is not None:
            out.masked_fill_(overflowed, torch.nan)
        chosen = bridge.tensor(chosen)
        saved = {"chosen": chosen, "shares": batch.shares, "part": batch.part, **trip.tensors(), **arrived}
        return Forward(out, balance, z, chosen, saved, trip.counts if self.capacity is None else None)

    def backward(self, bridge: Bridge, given: Backward[MoEWeights[Array]]) -> Sequence[Array | None]:
        x, weights, arrays, wanted = given.x, given.weights, given.arrays, given.wanted
        chosen = arrays.pop("chosen")
        shares, part = bridge.tensors([arrays.pop("shares"), arrays.pop("part")])
        stages = raw_layer.stages_for(x, weights, bridge.executor)
        counts = given.counts if self.capacity is None else counts_within(self.capacity, self.ranks.size, self.k)
        trip = Trip.again(self.ranks, bridge, arrays, self.k, counts)
        d_sums = bridge.array(trip.there(bridge.tensor(given.d_out)))
        saved = layer.Saved.of(arrays.pop("rows"), arrays, *self[:4])
        experts = layer.expert_gradients(stages, d_sums, saved, weights, given.last, wanted)
        d_x, d_gates = [None if d is None else trip.back(bridge.tensor(d)) for d in (experts.d_x, experts.d_gates)]
        d_losses = {name: bridge.array(bridge.tensor(d_loss) * part) for name, d_loss in given.d_losses.items()}
        d_x, d_wg = bridge.tensors(
            layer.router_gradients(
                BatchGating(stages.gating, bridge, self.ranks, shares).within(stages),
                bridge.array(d_x),
                bridge.array(d_gates),
                x,
                weights.wg,
                chosen,
                self.renormalize,
                wanted=wanted,
                **d_losses,
            )
        )
        if d_wg is not None:
            d_wg = called(self.ranks, "total", d_wg.float()).to(d_wg.dtype)
        return *bridge.arrays([d_x, d_wg]), *self._over_holders(bridge, experts[2:5])

    def _over_holders(self, bridge, d_weights):
        """Sum the gradients of the experts with copies over the ranks that hold them."""
        if self.shared is None:
            return d_weights
        return [None if d is None else bridge.array(self.shared.sum(bridge.tensor(d))) for d in d_weights]


def _visit(trip, stages, bridge, x, weights, system):
    """The weighted sums of the rows that came here, in their order, and what is saved of them, by name."""
    choices, exact = trip.counts.choices, system.capacity is None
    rows, limit = trip.there(x), None if exact else Limit(choices, bridge.array(system.overflowed))
    here, gates, overflowed = system.holders.places(bridge, trip.words_there(), limit)
    dispatch = _dispatch(bridge, here, weights.w1.shape[0], choices, exact)
    sums, intermediates = layer.run_experts(
        stages, bridge.array(rows), weights, dispatch, gates, system.activation, system.policy
    )
    sums, gates, made = bridge.tensor(sums), bridge.tensor(gates), bridge.by_name(dispatch.arrays() | intermediates)
    if overflowed is not None:
        sums.masked_fill_(bridge.tensor(overflowed), torch.nan)
    return sums, {"rows": rows, "gates": gates, **made}


def _dispatch(bridge: Bridge, here: Array, num_experts: int, choices: int, exact: bool) -> Dispatch:
    """The dispatch to the experts of this rank, of so many choices; if the number is not exact, of at most as many."""
    if exact:
        return build_part.unchecked(here, num_experts, choices, bridge.executor)
    return build_open(here, num_experts, bridge.executor, choices if num_experts else 0)
