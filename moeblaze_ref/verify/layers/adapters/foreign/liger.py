"""Liger-Kernel's experts in Triton: liger-kernel 0.8.5."""

import torch
from torch import Tensor

from moeblaze_ref.verify.layers.adapter import Adapter, leaves


def experts(*, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
    """Return ``LigerFusedMoEFunction`` as experts that are called with a routing."""
    from liger_kernel.ops import LigerFusedMoEFunction

    weights = leaves(dtype, device, gate_up=(E, 2 * h, d), down=(E, d, h))

    def run(x: Tensor, topk_index: Tensor, topk_weights: Tensor) -> Tensor:
        out: Tensor = LigerFusedMoEFunction.apply(x, *weights.values(), topk_index, topk_weights)
        return out

    layouts = {"gate_up": "gate_up: E 2h d", "down": "down: E d h"}
    return Adapter(run, layouts, tensors=weights, index_dtype=torch.int32)
