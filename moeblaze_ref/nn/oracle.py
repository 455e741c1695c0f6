"""The oracle: the MoE layer in plain torch, differentiated by autograd alone.

It is written the conventional way, with the routed-token buffer and every intermediate
that autograd wants to keep, so it is also the layer whose memory the project accounts for
under the policy `conventional`. Nothing here calls the project's own stages.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn import routers
from moeblaze_ref.nn.activations import activate as activate
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.nn.routers import Routing as Routing
from moeblaze_ref.nn.routers import choose
from moeblaze_ref.nn.routers import top_k as top_k


def decide(logits: Tensor, k: int, renormalize: bool = False, topk_experts: Tensor | None = None) -> Routing:
    """Routing from logits (L, E); ``topk_experts`` (L, k) replays a given choice instead of the top k."""
    return choose(logits, k, Router(renormalize=renormalize), topk_experts=topk_experts)


def route(x: Tensor, wg: Tensor, k: int, renormalize: bool = False, topk_experts: Tensor | None = None) -> Routing:
    """Softmax router on x (L, d), wg (d, E); logits and gates are float32, or float64 for float64 inputs."""
    return routers.route(x, wg, k, Router(renormalize=renormalize), topk_experts=topk_experts)


def load_balancing_loss(routing: Routing) -> Tensor:
    """Switch Transformer's E * sum_e f_e P_e: f_e the share of routed rows, P_e the mean probability."""
    num_experts = routing.probs.shape[1]
    counts = torch.bincount(routing.topk_experts.flatten(), minlength=num_experts)
    share = counts.to(routing.probs.dtype) / routing.topk_experts.numel()  # integers alone would divide in float32
    return num_experts * (share * routing.probs.mean(dim=0)).sum()


def router_z_loss(routing: Routing) -> Tensor:
    """ST-MoE's mean over tokens of logsumexp(logits)**2."""
    return torch.logsumexp(routing.logits, dim=-1).square().mean()


class ExpertOrder(NamedTuple):
    """The routed rows grouped by expert, ascending token inside an expert."""

    slot: Tensor  # (R,) int64, index into the row-major (L, k) choices
    token: Tensor  # (R,) int64
    lengths: list[int]  # rows of each expert


def expert_order(topk_experts: Tensor, num_experts: int) -> ExpertOrder:
    """Group the (L, k) choices by a stable sort."""
    chosen = topk_experts.flatten()  # (R,)
    slot = chosen.argsort(stable=True)
    return ExpertOrder(slot, slot // topk_experts.shape[1], torch.bincount(chosen, minlength=num_experts).tolist())


def _grouped_matmul(rows: Tensor, lengths: list[int], weights: Tensor) -> Tensor:
    """Each expert's group of rows times that expert's matrix."""
    return torch.cat([group @ weight for group, weight in zip(rows.split_with_sizes(lengths), weights, strict=True)])


def expert_up(x: Tensor, order: ExpertOrder, w1: Tensor, w2: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both projections (R, h) of the routed-token buffer; the second only for gated activations."""
    routed = x[order.token]  # (R, d): the routed-token buffer
    a = _grouped_matmul(routed, order.lengths, w1)  # (R, h)
    return a, None if w2 is None else _grouped_matmul(routed, order.lengths, w2)


def expert_down(y_swi: Tensor, order: ExpertOrder, w3: Tensor) -> Tensor:
    """Every routed row's expert output (R, d)."""
    return _grouped_matmul(y_swi, order.lengths, w3)


def combine(y: Tensor, gates: Tensor, order: ExpertOrder) -> Tensor:
    """The gate-weighted sum (L, d) of each token's expert outputs."""
    weighted = y * gates.flatten()[order.slot, None].to(y.dtype)  # (R, d)
    return y.new_zeros(gates.shape[0], y.shape[1]).index_add(0, order.token, weighted)


def experts(
    x: Tensor, routing: Routing, w1: Tensor, w2: Tensor | None, w3: Tensor, activation: str = "swiglu"
) -> Tensor:
    """The chosen experts' outputs, weighted by the gates and summed per token: (L, d)."""
    return chosen_experts(x, routing.topk_experts, routing.gates, w1, w2, w3, activation)


def chosen_experts(
    x: Tensor, topk_experts: Tensor, gates: Tensor, w1: Tensor, w2: Tensor | None, w3: Tensor, activation: str
) -> Tensor:
    """`experts` from the choice and the gates alone, both (L, k)."""
    order = expert_order(topk_experts, w1.shape[0])
    a, b = expert_up(x, order, w1, w2)
    y = expert_down(activate(a, b, activation), order, w3)
    return combine(y, gates, order)


class OracleMoE(RoutedExperts):
    """The oracle as a module, for models that train on plain torch."""

    def forward(self, x: Tensor, topk_experts: Tensor | None = None) -> tuple[Tensor, Routing]:
        """Output (L, d) for x (L, d), and the routing that produced it; topk_experts (L, k) replays a choice."""
        routing = self.route(x, self.wg, topk_experts)

        def run(rows: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
            return chosen_experts(rows, chosen, gates, self.w1, self.w2, self.w3, self.activation)

        return self.with_shared(x, routers.weighed(x, routing, self.router, run)), routing
