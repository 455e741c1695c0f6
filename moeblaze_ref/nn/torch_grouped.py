"""The same layer in plain torch, by grouped matrix products over sorted rows: what ours is timed against.

Nothing here waits for the device: the sizes of the groups stay there, as offsets. Two ways are written:

- `index_add_layer`, the way that is read most often: autograd differentiates everything, gates weight the expert
  outputs, and a token's rows are summed by atomic additions;
- `gather_sum_layer`, the strongest that we found in plain torch: gates weight the hidden activations, so that no expert
  output is kept, and every sum over a token's experts, forward or backward, is a gather and a sum.

One product for both projections, by weights laid side by side, was tried and is slower: eager torch copies the halves
together again in the backward. So was another order of the weights in memory, which made no difference.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.nn.oracle import activate
from moeblaze_ref.nn.routed_experts import RoutedExperts


class Order(NamedTuple):
    """The routed rows grouped by expert."""

    token: Tensor  #: (R,) int64, of each row
    slot: Tensor  #: (R,) int64, of each row, in the row-major (L, k) choices
    row: Tensor  #: (R,) int64, of each slot: the inverse of `slot`
    ends: Tensor  #: (E,) int32, where each expert's rows end


def sort_rows(topk_experts: Tensor, num_experts: int) -> Order:
    """Group the choices (L, k) by a stable sort; their numbers are found by bisection, without a look from the host."""
    experts, slot = torch.sort(topk_experts.flatten(), stable=True)
    numbers = torch.arange(max(slot.numel(), num_experts), device=slot.device)
    row = torch.empty_like(slot).scatter_(0, slot, numbers[: slot.numel()])
    ends = torch.searchsorted(experts, numbers[:num_experts].to(experts.dtype), right=True, out_int32=True)
    return Order(slot // topk_experts.shape[1], slot, row, ends)


def index_add_layer(x: Tensor, weights: tuple[Tensor, ...], k: int, activation: str) -> tuple[Tensor, Tensor]:
    """One layer, as it is mostly written.

    Parameters
    ----------
    x : Tensor (L, d), bfloat16 (float16 and float32 too where grouped_mm takes them)
    weights : tuple of Tensor
        wg (d, E), w1 and w2 (E, d, h), w3 (E, h, d); w2 is None for the ungated activations.
    k : int
    activation : str

    Returns
    -------
    out : Tensor (L, d)
    topk_experts : Tensor (L, k) int64
    """
    gates, topk_experts = _route(x, weights[0], k)
    order = sort_rows(topk_experts, weights[0].shape[1])
    routed = x.index_select(0, order.token)  # (R, d)
    y = _grouped_mm(_hidden(routed, weights, order, activation), weights[3], order)  # (R, d)
    weighted = y * _gate_of_row(gates, order, y)
    return torch.zeros_like(x).index_add(0, order.token, weighted), topk_experts


def gather_sum_layer(x: Tensor, weights: tuple[Tensor, ...], k: int, activation: str) -> tuple[Tensor, Tensor]:
    """One layer, without atomic additions and without a kept expert output; as `index_add_layer`."""
    gates, topk_experts = _route(x, weights[0], k)
    order = sort_rows(topk_experts, weights[0].shape[1])
    routed = _GatherTokens.apply(x, order.token, order.row, k)  # type: ignore[no-untyped-call]  # (R, d)
    y_swi = _hidden(routed, weights, order, activation)  # (R, h)
    y = _grouped_mm(y_swi * _gate_of_row(gates, order, y_swi), weights[3], order)  # (R, d)
    return _SumOfSlots.apply(y, order.token, order.row, k), topk_experts  # type: ignore[no-untyped-call]


def _route(x: Tensor, wg: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Gates (L, k) float32 and the choice (L, k)."""
    gates, chosen = torch.topk(torch.softmax((x @ wg).float(), dim=-1), k)
    return gates, chosen


def _hidden(routed: Tensor, weights: tuple[Tensor, ...], order: Order, activation: str) -> Tensor:
    """act(a) * b, (R, h)."""
    _, w1, w2, _ = weights
    a = _grouped_mm(routed, w1, order)
    return activate(a, None if w2 is None else _grouped_mm(routed, w2, order), activation)


def _grouped_mm(rows: Tensor, weights: Tensor, order: Order) -> Tensor:
    return F.grouped_mm(rows, weights, offs=order.ends)


def _gate_of_row(gates: Tensor, order: Order, like: Tensor) -> Tensor:
    """(R, 1), in the dtype of what it weights."""
    return gates.flatten()[order.slot, None].to(like.dtype)


def _sum_of_slots(rows: Tensor, row_of_slot: Tensor, k: int) -> Tensor:
    """Each token's k rows, gathered and summed: (L, d)."""
    return rows.index_select(0, row_of_slot).view(-1, k, rows.shape[1]).sum(dim=1)


class _GatherTokens(torch.autograd.Function):
    """x (L, d) to its routed rows (R, d); autograd's own backward would add atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, row_of_slot: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        ctx.k = k
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Any, ...]:
        (row_of_slot,) = ctx.saved_tensors
        return _sum_of_slots(d_rows, row_of_slot, ctx.k), None, None, None


class _SumOfSlots(torch.autograd.Function):
    """Routed rows (R, d) to the sums of their tokens (L, d)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, row_of_slot: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(token)
        return _sum_of_slots(rows, row_of_slot, k)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        return d_out.index_select(0, *ctx.saved_tensors), None, None, None


# Every baseline: the function, and the options of torch.compile, or None to run it as it is.
SYSTEMS: dict[str, tuple[Callable[..., tuple[Tensor, Tensor]], dict[str, Any] | None]] = {
    "grouped_mm": (index_add_layer, None),
    "grouped_mm_compiled": (index_add_layer, {}),
    "gather_sum": (gather_sum_layer, None),
    "gather_sum_compiled": (gather_sum_layer, {}),
    "gather_sum_autotuned": (gather_sum_layer, {"mode": "max-autotune-no-cudagraphs"}),
}


def build(system: str, parameters: RoutedExperts) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Return a baseline as a function of x, on the weights of ``parameters``; compiled anew for each shape."""
    layer, options = SYSTEMS[system]
    if options is not None:
        layer = torch.compile(layer, dynamic=False, fullgraph=True, **options)
    return lambda x: layer(x, parameters.weights, parameters.k, parameters.activation)
