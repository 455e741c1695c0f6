"""Liger-Kernel's experts in Triton: liger-kernel 0.8.5."""

import torch
from torch import Tensor

from moeblaze_ref.verify.layers.adapter import Adapter


def experts(*, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
    """Return ``LigerFusedMoEFunction`` as experts that are called with a routing."""
    from liger_kernel.ops import LigerFusedMoEFunction

    leaves = {
        "gate_up": torch.zeros(E, 2 * h, d, dtype=dtype, device=device, requires_grad=True),
        "down": torch.zeros(E, d, h, dtype=dtype, device=device, requires_grad=True),
    }

    def run(x: Tensor, topk_index: Tensor, topk_weights: Tensor) -> Tensor:
        out: Tensor = LigerFusedMoEFunction.apply(x, leaves["gate_up"], leaves["down"], topk_index, topk_weights)
        return out

    layouts = {"gate_up": "gate_up: E 2h d", "down": "down: E d h"}
    return Adapter(run, layouts, tensors=leaves, index_dtype=torch.int32)
