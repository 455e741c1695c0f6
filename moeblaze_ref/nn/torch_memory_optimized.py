"""MegaBlocks with its flag ``memory_optimized_mlp`` for torch models: the activation is computed again.

Source: MegaBlocks (arXiv 2211.15841) and its published code, which has had the flag since August 2023, off by default.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.core.structures import EMPTY, Array
from moeblaze_ref.nn.torch_block_sparse import BlockSparseMoE, MegaBlocks
from moeblaze_ref.nn.torch_node import Backward, Forward
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems.layer import MoEWeights


def _tables(x: Tensor, wg: Tensor, experts: Tensor, padded_rows: Tensor, padded_offsets: Tensor) -> dict[str, Tensor]:
    """Return the published system's tables of the routing, and the probabilities."""
    row_order = padded_rows.argsort()  # (R,) slots in expert order
    row_experts = experts[row_order]
    ids = torch.arange(wg.shape[1], dtype=torch.int32, device=x.device)
    return {
        "row_order": row_order.int(),
        "row_experts": row_experts,
        "bins": torch.searchsorted(row_experts, ids, right=True, out_int32=True),  # the end of each expert's rows
        "padded_bins": padded_offsets[1:].clone(),  # a view would keep the whole
        # Autograd saves the probabilities for softmax. Our backward computes them again, and does not read these.
        "probs": torch.softmax((x @ wg).float(), dim=-1),
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


class _MemoryOptimized(MegaBlocks):
    """`MegaBlocks` that saves the tables in place of the bins, and no y_swi."""

    def forward(self, bridge: Bridge, x: Array, weights: MoEWeights, topk_experts: Array | None) -> Forward:
        result = super().forward(bridge, x, weights, topk_experts)
        saved = result.saved
        routing = [saved.pop(name) for name in ("token_expert_indices", "rows", "padded_offsets")]
        del saved["slots"], saved["y_swi"]
        saved |= _tables(*bridge.tensors([x, weights.wg]), *routing)
        return result

    def backward(self, bridge: Bridge, given: Backward) -> Sequence[Array | None]:
        arrays = given.arrays
        tables = [arrays.pop(name) for name in ("row_order", "row_experts", "bins", "padded_bins")]
        row_order, row_experts, ends, padded_ends = bridge.tensors(tables)
        bins = _bins(row_order, row_experts, ends, padded_ends, rows=len(arrays["x_rows"]))
        arrays.update(zip(bins, bridge.arrays(bins.values()), strict=True))
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
