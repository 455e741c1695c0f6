"""Expected results of each stage of a step, by plain torch; every timed stage is compared with them.

No stage is left out. Matrix products are computed expert by expert, without groups' padding and without a fused kernel;
backward stages take random numbers where the layer would have a forward's, so each is held to its own definition.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.nn import oracle, torch_grouped
from moeblaze_ref.runtime.torch_bridge import Bridge

Tensors = tuple[Tensor, ...]


def results_of(stage: str, result: Any, bridge: Bridge) -> Tensors:
    """Our result of a stage as ``EXPECTED`` has it."""
    if stage == "dispatch":
        indices = result.expert_token_indices, result.token_index_map, result.expert_token_offsets[1:]
        return _present(*bridge.tensors(indices))
    arrays = result if isinstance(result, tuple) else (result,)
    tensors = _present(*bridge.tensors(arrays))
    if stage != "gating":
        return tensors
    probs, chosen, gates = tensors
    return probs, gates, probs.gather(1, chosen.long())  # equal logits may be chosen in either order


def _present(*tensors: Tensor | None) -> Tensors:
    """Return the tensors that the activation has: an ungated layer lacks b and d_b."""
    return tuple(tensor for tensor in tensors if tensor is not None)


def _order(inputs: Inputs) -> oracle.ExpertOrder:
    return oracle.expert_order(inputs.tensor("topk_experts"), inputs.config.E)


# The index work and what moves memory alone: these are timed too ------------------------------------------------------


def _gating(inputs: Inputs) -> Tensors:
    """Softmax and top k: the probabilities, and the gates twice, as `results_of` has them."""
    probs = torch.softmax(inputs.tensor("logits"), dim=1)
    gates = torch.topk(probs, inputs.config.k).values
    return probs, gates, gates


def _dispatch(inputs: Inputs) -> Tensors:
    """A stable sort of the ids, the inverse of its order, and the groups' ends."""
    order = torch_grouped.sort_rows(inputs.tensor("topk_experts"), inputs.config.E)
    return order.token, order.row, order.ends


def _combine(inputs: Inputs) -> Tensors:
    """The rows of each slot, gathered, weighted and summed."""
    rows = inputs.tensor("y").index_select(0, inputs.position_of_slot)
    gates = inputs.tensor("gates")[..., None].to(rows.dtype)  # (L, k, 1)
    return ((rows.view(*gates.shape[:2], -1) * gates).sum(dim=1),)


# Forward --------------------------------------------------------------------------------------------------------------


def _router(inputs: Inputs) -> Tensors:
    return (inputs.tensor("x").float() @ inputs.tensor("wg").float(),)


def expert_up(inputs: Inputs) -> Tensors:
    """a, b if there is a gate, and y_swi, each (R, h)."""
    x, w1, w2 = map(inputs.tensor, ("x", "w1", "w2"))
    a, b = oracle.expert_up(x, _order(inputs), w1, w2)
    return _present(a, b, oracle.activate(a, b, inputs.config.activation))


def _expert_down(inputs: Inputs) -> Tensors:
    return (oracle.expert_down(inputs.tensor("y_swi"), _order(inputs), inputs.tensor("w3")),)


# Backward -------------------------------------------------------------------------------------------------------------


def _d_hidden(inputs: Inputs) -> Tensors:
    """d_a, d_b and gate * y_swi (R, h), and d_gates (L, k)."""
    order, gates = _order(inputs), inputs.tensor("gates")
    a, b, d_out, w3 = map(inputs.tensor, ("a", "b", "d_out", "w3"))
    d_gates, made = torch.empty_like(gates), []
    for rows, slots, weight in zip(_groups(order), order.slot.split(order.lengths), w3, strict=True):
        d_y_swi = d_out[order.token[rows]].float() @ weight.float().T  # but for the gate
        gate = gates.flatten()[slots, None]
        leaves = [hidden[rows].float().requires_grad_() for hidden in _present(a, b)]
        y_swi = oracle.activate(leaves[0], leaves[1] if b is not None else None, inputs.config.activation)
        d_leaves = torch.autograd.grad(y_swi, leaves, gate * d_y_swi)
        y_swi = y_swi.detach()
        d_gates.view(-1)[slots] = (d_y_swi * y_swi).sum(dim=1)
        made.append([tensor.to(a.dtype) for tensor in (*d_leaves, gate * y_swi)])
    return *map(torch.cat, zip(*made, strict=True)), d_gates


def _groups(order: oracle.ExpertOrder) -> Iterable[slice]:
    """Each expert's rows."""
    ends = torch.tensor(order.lengths).cumsum(0).tolist()
    return [slice(end - length, end) for end, length in zip(ends, order.lengths, strict=True)]


def _d_x(inputs: Inputs) -> Tensors:
    order = _order(inputs)
    d_x = torch.zeros(inputs.config.L, inputs.config.d, device=order.token.device)
    for hidden, weights in (("a", "w1"), ("b", "w2"))[: 1 + inputs.config.gated]:
        for rows, weight in zip(_groups(order), inputs.tensor(weights), strict=True):
            d_x.index_add_(0, order.token[rows], inputs.tensor(hidden)[rows].float() @ weight.float().T)
    return (d_x,)


def _of_tokens(inputs: Inputs, name: str) -> Tensor:
    """The routed rows (R, d) of a tensor (L, d)."""
    return inputs.tensor(name)[_order(inputs).token]


def _weight_gradient(inputs: Inputs, left: Tensor, right: Tensor) -> Tensors:
    """The sum of each expert's outer products of rows: (E, columns of left, columns of right)."""
    return (torch.stack([left[rows].float().T @ right[rows].float() for rows in _groups(_order(inputs))]),)


def _gating_backward(inputs: Inputs) -> Tensors:
    logits = inputs.tensor("logits").clone().requires_grad_()
    routing = oracle.decide(logits, inputs.config.k, topk_experts=inputs.tensor("topk_experts"))
    return torch.autograd.grad(routing.gates, logits, inputs.tensor("gates"))


def _router_backward(inputs: Inputs) -> Tensors:
    d_logits, x, wg = (inputs.tensor(name).float() for name in ("logits", "x", "wg"))
    return d_logits @ wg.T, x.T @ d_logits


EXPECTED: dict[str, Callable[[Inputs], Tensors]] = {
    "router": _router,
    "gating": _gating,
    "dispatch": _dispatch,
    "expert_up": expert_up,
    "expert_down": _expert_down,
    "combine": _combine,
    "d_hidden": _d_hidden,
    "d_w3": lambda i: _weight_gradient(i, i.tensor("y_swi"), _of_tokens(i, "d_out")),
    "d_x": _d_x,
    "d_w1": lambda i: _weight_gradient(i, _of_tokens(i, "x"), i.tensor("a")),
    "d_w2": lambda i: _weight_gradient(i, _of_tokens(i, "x"), i.tensor("b")),
    "gating_backward": _gating_backward,
    "router_backward": _router_backward,
}
