"""One expert after another for torch models: dense products in a Python loop, under autograd.

Source: MegaBlocks (arXiv 2211.15841), appendix A and figure 10, whose baseline computes the experts one by one.
"""

import torch
from torch import Tensor

from moeblaze_ref.nn import oracle, routers
from moeblaze_ref.nn.torch_layer import MoEModule, MoEOutput
from moeblaze_ref.systems.layer import MoEWeights


class SequentialMoE(MoEModule):
    """A mixture of experts that computes one expert after another: nothing is dropped, nothing is padded.

    Parameters and errors are those of `RoutedExperts`; the dtype is float64, float32, bfloat16 or float16.

    Notes
    -----
    The host waits for the device once an expert: it must know how many rows the expert has. Same input, same bits: a
    token occurs at most once in an expert's rows, so every addition into the output has one writer.
    ``memory.accounting`` states the bytes that autograd keeps.

    MegaBlocks, appendix A.
    """

    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def _run(self, x: Tensor, weights: MoEWeights[Tensor], topk_experts: Tensor | None) -> MoEOutput:
        routing = self.route(x, weights.wg, topk_experts)

        def run(rows: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
            return _one_after_another(rows, chosen, gates.to(x.dtype), weights, self.activation)

        out = routers.weighed(x, routing, self.router, run)
        loads = routers.loads_of(routing.topk_experts, weights.wg.shape[1])
        return MoEOutput(out, *routers.router_losses(routing, loads), routing.topk_experts.int())


def _one_after_another(
    x: Tensor, chosen: Tensor, gates: Tensor, weights: MoEWeights[Tensor], activation: str
) -> Tensor:
    """The gate-weighted sum (L, d) of the chosen (L, k) experts' outputs."""
    out = torch.zeros_like(x)
    for expert in range(weights.wg.shape[1]):
        token, choice = (chosen == expert).nonzero(as_tuple=True)  # here the host waits
        rows = x[token]  # (n, d)
        a = rows @ weights.w1[expert]  # (n, h)
        b = None if weights.w2 is None else rows @ weights.w2[expert]  # (n, h)
        y = oracle.activate(a, b, activation) @ weights.w3[expert]  # (n, d)
        out = out.index_add(0, token, y * gates[token, choice, None])
    return out
