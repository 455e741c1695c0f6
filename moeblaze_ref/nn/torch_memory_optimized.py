"""MegaBlocks with its flag ``memory_optimized_mlp`` for torch models: the activation is computed again.

Source: MegaBlocks (arXiv 2211.15841) and its published code, which has had the flag since August 2023, off by default.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.core.structures import EMPTY, Array
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE, MegaBlocks, MegaBlocksExperts
from moeblaze_ref.nn.torch_experts import ExpertOperands
from moeblaze_ref.nn.torch_node import Backward, Forward
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems.layer import MoEWeights


def _tables(experts: Tensor, padded_rows: Tensor, padded_offsets: Tensor) -> dict[str, Tensor]:
    """Return the published system's tables of the routing, from the chosen experts (R,) and the bins."""
    row_order = padded_rows.argsort()  # (R,) slots in expert order
    row_experts = experts[row_order]
    ids = torch.arange(len(padded_offsets) - 1, dtype=torch.int32, device=experts.device)
    return {
        "row_order": row_order.int(),
        "row_experts": row_experts,
        "bins": torch.searchsorted(row_experts, ids, right=True, out_int32=True),  # the end of each expert's rows
        "padded_bins": padded_offsets[1:].clone(),  # a view would keep the whole
    }


def _bins(row_order: Tensor, row_experts: Tensor, ends: Tensor, padded_ends: Tensor, rows: int) -> dict[str, Tensor]:
    """Return the choice of experts, and the bins of so many padded rows, from the tables."""
    order, experts = row_order.long(), row_experts.long()
    starts, padded_offsets = (F.pad(table, (1, 0)) for table in (ends, padded_ends))
    place = torch.arange(len(order), dtype=torch.int32, device=order.device) - starts[experts]  # in the expert's group
    row = padded_offsets[experts] + place  # (R,) padded rows in expert order
    slots = row_order.new_full((rows,), EMPTY)
    slots[row.long()] = row_order
    return {
        "token_expert_indices": torch.empty_like(row_experts).index_copy(0, order, row_experts),
        "padded_offsets": padded_offsets,
        "slots": slots,
        "rows": torch.empty_like(row).index_copy(0, order, row),
    }


def _keep_tables(saved: dict[str, Tensor], experts: Tensor) -> None:
    """Put the tables in the place of the bins, and keep no y_swi."""
    bins = [saved.pop(name) for name in ("rows", "padded_offsets")]
    del saved["slots"], saved["y_swi"]
    saved |= _tables(experts, *bins)


def _restore_bins(bridge: Bridge, arrays: dict[str, Array]) -> None:
    """Make the choice and the bins again, in the place of the tables."""
    tables = [arrays.pop(name) for name in ("row_order", "row_experts", "bins", "padded_bins")]
    row_order, row_experts, ends, padded_ends = bridge.tensors(tables)
    bins = _bins(row_order, row_experts, ends, padded_ends, rows=len(arrays["x_rows"]))
    arrays.update(zip(bins, bridge.arrays(bins.values()), strict=True))


class _MemoryOptimized(MegaBlocks):
    """`MegaBlocks` that saves the tables in place of the bins, and no y_swi."""

    def forward(self, bridge: Bridge, x: Array, weights: MoEWeights[Array], topk_experts: Array | None) -> Forward:
        result = super().forward(bridge, x, weights, topk_experts)
        _keep_tables(result.saved, result.saved.pop("token_expert_indices"))
        tokens, wg = bridge.tensors([x, weights.wg])
        # Autograd saves the probabilities for softmax. Our backward computes them again, and does not read these.
        result.saved["probs"] = torch.softmax((tokens @ wg).float(), dim=-1)
        return result

    def backward(self, bridge: Bridge, given: Backward[MoEWeights[Array]]) -> Sequence[Array | None]:
        _restore_bins(bridge, given.arrays)
        return super().backward(bridge, given)


class _MemoryOptimizedExperts(MegaBlocksExperts):
    """The same for a routing and gates that are given."""

    def forward(self, bridge: Bridge, x: Array, operands: ExpertOperands[Array], topk_experts: Array | None) -> Forward:
        result = super().forward(bridge, x, operands, topk_experts)
        (chosen,) = bridge.tensors([topk_experts])
        _keep_tables(result.saved, chosen.flatten())
        return result

    def backward(self, bridge: Bridge, given: Backward[ExpertOperands[Array]]) -> Sequence[Array | None]:
        _restore_bins(bridge, given.arrays)
        return super().backward(bridge, given)


class MemoryOptimizedMoE(BlockSparseMoE):
    """MegaBlocks with ``memory_optimized_mlp``: `BlockSparseMoE` that keeps what the published system keeps.

    Parameters and errors are those of `BlockSparseMoE`.

    Notes
    -----
    Kept are x, the probabilities, the gates, four tables of the routing, the topology, and the padded rows x_rows, a, b
    and y (``memory.accounting`` states the bytes). The backward computes y_swi again from a and b. That the tables are
    int32, and which they are, is our reading of the published structure. The forward multiplies x by the router once
    more for the probabilities, which only count as bytes here.

    Outputs and gradients are those of `BlockSparseMoE`, bit for bit.
    """

    _kind = _MemoryOptimized
    _kind_of_experts = _MemoryOptimizedExperts
