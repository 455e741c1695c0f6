"""torchtitan's layer without parallelism: torchtitan 0.3.0."""

import torch
from torch import Tensor, nn

from moeblaze_ref.core.routers import Router
from moeblaze_ref.verify.layers.adapter import ALIGNED, Adapter

LAYOUTS = {
    "moe.router.gate.weight": "router: E d",
    "moe.routed_experts.inner_experts.w1_EFD": "gate: E h d",
    "moe.routed_experts.inner_experts.w3_EFD": "up: E h d",
    "moe.routed_experts.inner_experts.w2_EDF": "down: E d h",
}


class _Flat(nn.Module):
    """Called with tokens (L, d), a batch of one sequence."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe = moe

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.moe(x[None])[0]
        return out


def moe(*, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
    """Return the layer with softmax scores that are not renormalised, and no selection bias."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    config = MoE.Config(
        num_experts=E,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=d, hidden_dim=h, num_experts=E),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=E, top_k=k),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=E, gate=Linear.Config(in_features=d, out_features=E), top_k=k, score_func="softmax"
        ),
        load_balance_coeff=None,
    )
    with torch.device(device):
        layer = _Flat(config.build().to(dtype))
    return Adapter(layer, LAYOUTS, Router(float32_product=True), multiple=ALIGNED, dtypes=(torch.bfloat16,))
