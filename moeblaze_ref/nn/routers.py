"""Every `Router` in plain torch, differentiated by autograd: choice, gates, and the update of the selection bias.

Source: MoEBlaze (arXiv 2601.05296), section 2, for the softmax router; ``core.routers`` says what each model does.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.core.routers import Router


class Routing(NamedTuple):
    """The router's decision for every token."""

    logits: Tensor  # (L, E), with the logit bias if there is one
    probs: Tensor  # (L, E) softmax of the logits, or sigmoids over their sum
    topk_experts: Tensor  # (L, k) int64, best first, ties to the lower expert id
    gates: Tensor  # (L, k) weights of the chosen experts


def top_k(logits: Tensor, k: int) -> Tensor:
    """Ids of the k largest logits of each row, ties to the lower id (torch.topk does not promise it)."""
    order = torch.sort(logits.detach(), dim=-1, descending=True, stable=True).indices  # (L, E)
    return order[:, :k].clone()  # a view, even a contiguous one, would keep all of `order` alive


def choose(
    logits: Tensor,
    k: int,
    router: Router,
    selection_bias: Tensor | None = None,
    topk_experts: Tensor | None = None,
) -> Routing:
    """Return the routing that a router makes of logits; gates and probabilities are differentiable.

    Parameters
    ----------
    logits : Tensor (L, E)
        With the logit bias, if the router has one.
    k : int
        Experts per token.
    router : Router
    selection_bias : Tensor (E,), optional
        Added to the scores for the choice alone.
    topk_experts : Tensor (L, k), optional
        A choice to replay in place of the router's own.

    Raises
    ------
    ValueError
        If k of the experts cannot be chosen, or the selection bias is missing, superfluous or of another shape.
    """
    router.check_sizes(logits.shape[1], k)
    _check_bias("selection_bias", selection_bias, router, logits.shape[1])
    scores = torch.sigmoid(logits) if router.scores == "sigmoid" else torch.softmax(logits, dim=-1)  # (L, E)
    if topk_experts is None:
        chosen = top_k(_compared(logits, scores, router, selection_bias), k)
    else:
        chosen = topk_experts.long()
    probs = scores / scores.sum(dim=-1, keepdim=True) if router.scores == "sigmoid" else scores
    return Routing(logits, probs, chosen, _gates(logits, scores, chosen, router))


def _check_bias(name: str, bias: Tensor | None, router: Router, num_experts: int) -> None:
    """Check that the bias (E,) is there exactly if the router adds one."""
    router.check_bias(name, bias)
    if bias is not None:
        checks.check_shape(name, bias, {"E": num_experts})


def _compared(logits: Tensor, scores: Tensor, router: Router, selection_bias: Tensor | None) -> Tensor:
    """Numbers (L, E) of which the k largest are chosen: -inf outside the groups that a token keeps."""
    compared = logits if router.compares_logits else scores
    compared = compared.detach() if selection_bias is None else compared.detach() + selection_bias
    if router.groups == 1:
        return compared
    num_tokens, num_experts = compared.shape
    grouped = compared.reshape(num_tokens, router.groups, num_experts // router.groups)
    best = grouped.amax(dim=-1) if router.group_score == "max" else grouped.topk(2, dim=-1).values.sum(dim=-1)
    lost = torch.ones_like(best, dtype=torch.bool).scatter(1, top_k(best, router.groups_kept), False)
    return grouped.masked_fill(lost[..., None], -torch.inf).flatten(1)


def _gates(logits: Tensor, scores: Tensor, chosen: Tensor, router: Router) -> Tensor:
    """The weights (L, k) of the chosen experts."""
    if router.scores == "softmax_of_chosen":
        gates = torch.softmax(logits.gather(1, chosen), dim=-1)
    else:
        gates = scores.gather(1, chosen)
    if router.renormalize:
        total = gates.sum(dim=-1, keepdim=True)
        gates = gates / (total + router.epsilon if router.epsilon else total)
    return gates if router.scale == 1.0 else gates * router.scale


def route(
    x: Tensor,
    wg: Tensor,
    k: int,
    router: Router,
    logit_bias: Tensor | None = None,
    selection_bias: Tensor | None = None,
    topk_experts: Tensor | None = None,
) -> Routing:
    """Return the routing of x (L, d) by wg (d, E); logits and gates are float32, or float64 for float64 inputs.

    logit_bias is (E,); the other arguments and errors are as in `choose`.
    """
    _check_bias("logit_bias", logit_bias, router, wg.shape[1])
    product = (_float32_product if router.float32_product else _product)(x, wg, logit_bias)  # (L, E)
    logits = product if product.dtype == torch.float64 else product.float()
    return choose(logits, k, router, selection_bias, topk_experts)


def _product(x: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
    """x wg, with the bias added before the sum is rounded to the dtype."""
    return x @ wg if bias is None else torch.addmm(bias.to(x.dtype), x, wg)


def _float32_product(x: Tensor, wg: Tensor, bias: Tensor | None) -> Tensor:
    """The product of float32 copies, under autocast too; float64 stays float64."""
    with torch.autocast(x.device.type, enabled=False):
        return _product(x, wg, bias) if x.dtype == torch.float64 else _product(x.float(), wg.float(), bias)


def weighed(x: Tensor, routing: Routing, router: Router, experts: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return the chosen experts' sum (L, d) for x (L, d), with the gates at the outputs or at the inputs.

    ``experts`` takes tokens, the ids of their experts and their gates. Where gates multiply the inputs, it is called
    with L * k tokens of one expert each.
    """
    if router.weighs == "output":
        return experts(x, routing.topk_experts, routing.gates)
    rows = (x[:, None] * routing.gates[..., None].to(x.dtype)).flatten(0, 1)  # (R, d)
    y = experts(rows, routing.topk_experts.reshape(-1, 1), torch.ones_like(routing.gates).reshape(-1, 1))  # (R, d)
    return y.reshape(*routing.gates.shape, x.shape[1]).sum(dim=1)


def loads_of(topk_experts: Tensor, num_experts: int) -> Tensor:
    """Tokens of each expert (E,), int64, counted in a choice (L, k)."""
    chosen = topk_experts.flatten()
    loads = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    return loads.index_add(0, chosen, torch.ones_like(chosen, dtype=torch.int64))


def router_losses(routing: Routing, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The load-balancing loss and the router z-loss; unlike the oracle's, 0 for no tokens.

    Balanced is what the router asks for: dropped slots count, or a full expert would look like a popular one.
    """
    tokens, num_experts = max(routing.probs.shape[0], 1), lengths.numel()
    share = lengths.to(routing.probs.dtype) / max(routing.topk_experts.numel(), 1)  # (E,)
    balance = num_experts * (share * routing.probs.sum(dim=0)).sum() / tokens
    return balance, torch.logsumexp(routing.logits, dim=-1).square().sum() / tokens


@torch.no_grad()
def update_selection_bias(bias: Tensor, loads: Tensor, rate: float) -> Tensor:
    """Return the selection bias for the next step: raised by ``rate`` for experts below the mean load, lowered above.

    Parameters
    ----------
    bias : Tensor (E,)
        Of this step.
    loads : Tensor (E,)
        Tokens of each expert in the whole batch, all ranks together.
    rate : float
        The bias update speed.

    Raises
    ------
    ValueError
        If the shapes disagree, or the rate is negative or not finite.

    Notes
    -----
    b + rate * sign(mean load - load): Auxiliary-Loss-Free Load Balancing (arXiv 2408.15664), algorithm 1; DeepSeek-V3
    (arXiv 2412.19437), section 2.1.2.
    """
    checks.check_shape("loads", loads, {"E": bias.shape[0]})
    checks.check_within("rate", rate, at_least=0.0)
    below_mean = loads.sum() - loads.numel() * loads  # E times the error: exact for integers
    return bias + rate * below_mean.sign().to(bias.dtype)
