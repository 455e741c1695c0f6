"""The batch that the ranks' tokens are together: what the router's losses are of."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeblaze_ref.backends.raw_cuda.gating import expert_shares
from moeblaze_ref.core.structures import Array
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.runtime.launch_plan import called
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems.layer import GatingStage, Stages, choose_in_steps


class BatchGating:
    """Gating of a rank's tokens, with the load-balancing loss of the whole batch.

    Each rank's value of a loss is a mean over its own tokens: times ``part``, they add up to the batch's.

    Parameters
    ----------
    gating : GatingStage
        The stage of this rank's tokens.
    bridge : Bridge
        To its arrays.
    ranks : RankGroup
    shares : Tensor (E,) float32, optional
        Each expert's part of the routed rows of all ranks. Default: they are counted when experts have been chosen.

    Attributes
    ----------
    shares : Tensor (E,) float32
    part : Tensor () float32
        This rank's part of the tokens of all; it is there once they have been counted.
    """

    def __init__(self, gating: GatingStage, bridge: Bridge, ranks: RankGroup, shares: Tensor | None = None):
        self._gating, self._bridge, self._ranks = gating, bridge, ranks
        self.shares = shares

    def within(self, stages: Stages) -> Stages:
        """The stages with this in place of their own."""
        stages = stages.with_gating(load_balancing_loss=self.load_balancing_loss, backward=self.backward)
        return stages._replace(choice=choose_in_steps)

    def load_balancing_loss(self, probs: Array, topk_experts: Array) -> Array:
        """Return this rank's E * sum_e f_e P_e: f_e of all ranks' rows, P_e of its own tokens."""
        self._count(topk_experts, probs.shape[1])
        return self._gating.load_balancing_loss(probs, topk_experts, self._bridge.array(self.shares))

    def backward(self, *operands: Array | float | bool) -> Array:
        """Return the stage's gradients, with the whole batch's expert fractions."""
        return self._gating.backward(*operands, shares=self._bridge.array(self.shares))

    def _count(self, topk_experts, num_experts):
        tokens = len(topk_experts)
        shares = self._bridge.tensor(expert_shares(topk_experts, num_experts, self._bridge.executor))
        rows = shares.double() * tokens if tokens else torch.zeros_like(shares, dtype=torch.float64)
        together = called(self._ranks, "total", pad(rows, (0, 1), value=tokens))
        rows, all_tokens = together.split([num_experts, 1])
        all_tokens = all_tokens.clamp(min=1).squeeze()
        self.shares, self.part = (rows / all_tokens).float(), (tokens / all_tokens).float()
