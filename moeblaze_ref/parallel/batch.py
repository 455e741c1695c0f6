"""The batch that the ranks' tokens are together: what the router's losses are of."""

from torch import Tensor

from moeblaze_ref.backends.raw_cuda import parallel as kernels
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

    def weighed(self, load_balancing_loss: Array, router_z_loss: Array) -> Tensor:
        """Both losses (2,) of the whole batch, from this rank's values () of them."""
        of_rank = load_balancing_loss, router_z_loss, self._bridge.array(self.part)
        losses = kernels.weigh_losses(*of_rank, self._bridge.executor)
        return called(self._ranks, "total", self._bridge.tensor(losses))

    def _count(self, topk_experts: Array, num_experts: int) -> None:
        tokens, executor = len(topk_experts), self._bridge.executor
        shares = expert_shares(topk_experts, num_experts, executor)
        rows = self._bridge.tensor(kernels.batch_rows(shares, tokens, executor))
        together = self._bridge.array(called(self._ranks, "total", rows))
        self.shares, self.part = self._bridge.tensors(kernels.batch_shares(together, tokens, executor))
