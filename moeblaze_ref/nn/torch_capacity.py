"""Fixed expert capacity for torch models: the system before MegaBlocks, in plain torch under autograd.

Sources: GShard (arXiv 2006.16668), section 2.2 and algorithm 1; Switch Transformer (arXiv 2101.03961), section 2.2;
Tutel (arXiv 2206.03382) for a row number per slot in place of one-hot masks (L, E, C). The definition, and what it
means that a slot is dropped, is in ``numpy_ref.capacity``.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.types import Device

from moeblaze_ref.core.routers import Router, Shared
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.nn import oracle, routers
from moeblaze_ref.nn.torch_layer import MoEModule, MoEOutput
from moeblaze_ref.systems import capacity
from moeblaze_ref.systems.layer import MoEWeights


class CapacityMoE(MoEModule):
    """A mixture of experts with C rows for each: rows over C are dropped, rows below it padded.

    Parameters
    ----------
    d, h, E, k, activation, renormalize, device, dtype, router, shared
        As in `RoutedExperts`; the router weighs outputs, and the dtype is float64, float32, bfloat16 or float16.
    capacity_factor : float or str
        C as a multiple of L * k / E; E / k drops nothing, whatever the routing. "max" is Tutel's dynamic capacity: C
        is the most rows that any expert has in this forward, so nothing is dropped.
    drop_policy : str
        One of ``capacity.DROP_POLICIES``.

    Attributes
    ----------
    dropped_slots, lost_tokens : Tensor (), int64, or None before the first forward
        Routed rows that the last forward dropped, and tokens that lost all of their k: on the device of x, so that the
        host waits for it only when it reads them.

    Raises
    ------
    ValueError
        If a size or the factor is not above 0, k > E, or a name is unknown.
    TypeError
        If a size is no integer, the factor neither a number nor "max", or the dtype is not allowed.

    Notes
    -----
    The host waits for the device to check a routing that is given, and with ``capacity_factor="max"`` once a forward,
    for C; else C depends on L alone, and the host never waits. Same input, same
    bits: rows are gathered by sorted indices, and every sum runs in a fixed order, in the backward too. Gates keep
    their values when another slot of their token is dropped.
    """

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        capacity_factor: float | str = capacity.DEFAULT_FACTOR,
        drop_policy: str = "by_gate",
        device: Device = None,
        dtype: torch.dtype | None = None,
        router: Router | str | None = None,
        shared: Shared | None = None,
    ):
        super().__init__(d, h, E, k, activation, renormalize, device, dtype, router=router, shared=shared)
        capacity.check_options(capacity_factor, drop_policy)
        self.capacity_factor, self.drop_policy = capacity_factor, drop_policy
        self.dropped_slots: Tensor | None = None
        self.lost_tokens: Tensor | None = None

    def _run(self, x: Tensor, weights: MoEWeights[Tensor], topk_experts: Tensor | None) -> MoEOutput:
        E = weights.wg.shape[1]
        routing = self.route(x, weights.wg, topk_experts)
        rows_of_expert = self._rows_of_expert(routing.topk_experts, E)
        capacity.check_capacity(rows_of_expert, E)
        bins = fill(routing, E, rows_of_expert, self.drop_policy)
        x_rows = _take(x, bins.slots // self.k)  # (E, C, d); EMPTY is its own quotient
        y = padded_experts(x_rows, weights, self.activation)  # (E, C, d)
        out = combine(y, bins, routing.gates)  # (L, d)
        lost = bins.rows == EMPTY  # (L, k)
        self.dropped_slots, self.lost_tokens = lost.sum(), lost.all(dim=1).sum()
        return MoEOutput(out, *routers.router_losses(routing, bins.lengths), routing.topk_experts.int())

    def _checked_router(self, router: Router | str | None, renormalize: bool, num_experts: int) -> Router:
        checked = super()._checked_router(router, renormalize, num_experts)
        if checked.weighs != "output":
            kind = type(self).__name__
            raise ValueError(f"weighs is {checked.weighs!r}, but {kind} takes 'output' alone, as GShard and Switch do")
        return checked

    def _rows_of_expert(self, topk_experts: Tensor, num_experts: int) -> int:
        """C for this choice (L, k) of experts."""
        if self.capacity_factor != capacity.MAX:
            return capacity.expert_capacity(topk_experts.numel(), num_experts, self.capacity_factor)
        bounds = _bounds(topk_experts.flatten().sort().values, num_experts)
        return int(bounds.diff().max())  # here the host waits

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        return f"{super().extra_repr()}, capacity_factor={self.capacity_factor}, drop_policy={self.drop_policy}"


class DynamicCapacityMoE(CapacityMoE):
    """`CapacityMoE` with ``capacity_factor="max"``: Tutel's dynamic capacity, the smallest that drops nothing.

    Other parameters and errors are those of `CapacityMoE`. The host waits for the device once a forward. MegaBlocks,
    section 3, compares with it.
    """

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        router: Router | str | None = None,
        shared: Shared | None = None,
    ):
        options: dict[str, Any] = {"device": device, "dtype": dtype, "router": router, "shared": shared}
        super().__init__(d, h, E, k, activation, renormalize, capacity.MAX, **options)


# Who has which row ----------------------------------------------------------------------------------------------------


class Bins(NamedTuple):
    """`structures.CapacityBins` as torch indexes with it, and how long the experts' queues were."""

    slots: Tensor  # (E, C) int32, EMPTY where a row is padding
    rows: Tensor  # (L, k) int32, EMPTY where a slot is dropped
    lengths: Tensor  # (E,) int64, routed rows, dropped rows included


def _claims(routing: oracle.Routing, drop_policy: str) -> Tensor:
    """All slots (R,), those with the better claim first."""
    if drop_policy == "by_gate":  # a gate that is no number claims last, or one bad token would put out another's
        return routing.gates.detach().nan_to_num(nan=-torch.inf).flatten().argsort(descending=True, stable=True)
    choices = routing.topk_experts
    return torch.arange(choices.numel(), device=choices.device).view_as(choices).T.flatten()


def fill(routing: oracle.Routing, num_experts: int, rows_of_expert: int, drop_policy: str) -> Bins:
    """Which slots every expert keeps in its C rows, as ``numpy_ref.capacity.fill``; sorted and gathered, no scatter."""
    claims = _claims(routing, drop_policy)
    experts = routing.topk_experts.flatten()  # (R,)
    sorted_experts, order = experts[claims].sort(stable=True)
    queues = claims[order]  # (R,) slots by expert, the best claim first
    bounds = _bounds(sorted_experts, num_experts)
    first, end = bounds[:-1], bounds[1:]

    at = first[:, None] + torch.arange(rows_of_expert, device=experts.device)  # (E, C) into the queues
    at = torch.where(at < end[:, None], at, experts.numel())  # beyond its expert's queue: beyond them all
    slots = F.pad(queues, (0, 1), value=EMPTY)[at]
    place = queues.argsort() - first[experts]  # (R,) of each slot in the queue of its expert
    rows = torch.where(place < rows_of_expert, experts * rows_of_expert + place, EMPTY)
    # Autograd keeps what the embeddings are indexed with: int32, half of what torch's sorts return.
    return Bins(slots.int(), rows.view_as(routing.topk_experts).int(), end - first)


def _bounds(sorted_experts: Tensor, num_experts: int) -> Tensor:
    """Where the rows of each expert begin, and the last one's end, in the sorted (R,) choices: (E + 1,) int64."""
    return torch.searchsorted(sorted_experts, torch.arange(num_experts + 1, device=sorted_experts.device))


# Rows into bins and back ----------------------------------------------------------------------------------------------


def _take(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows of a matrix (n, d) by an index of any shape; zeros, which send no gradient, where it is ``EMPTY``.

    An embedding's gradient sorts its indices, and so sums in a fixed order on a GPU too.
    """
    return F.embedding(index.clamp(min=0), matrix).masked_fill_((index == EMPTY)[..., None], 0.0)


def padded_experts(x_rows: Tensor, weights: MoEWeights[Tensor], activation: str) -> Tensor:
    """Every expert's outputs (E, C, d) for its C rows of x_rows (E, C, d): products of one batch, padding included."""
    a = x_rows @ weights.w1  # (E, C, h)
    b = None if weights.w2 is None else x_rows @ weights.w2  # (E, C, h)
    y: Tensor = oracle.activate(a, b, activation) @ weights.w3
    return y


def combine(y: Tensor, bins: Bins, gates: Tensor) -> Tensor:
    """The gate-weighted sum (L, d) of each token's rows of y (E, C, d)."""
    taken = _take(y.flatten(0, 1), bins.rows)  # (L, k, d)
    return (gates.to(y.dtype)[:, None] @ taken)[:, 0]
