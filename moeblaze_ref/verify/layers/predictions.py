"""Predict the results of layers with known bugs: the reference with one change each, in float64.

A prediction takes a layer's specification and the numbers of a case. It yields the results of each form that the bug
can have. It yields none where the bug cannot have an effect.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn.routers import Routing
from moeblaze_ref.verify.layers import reference
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.layouts import Weights
from moeblaze_ref.verify.layers.reference import Case, Results, Spec

Prediction = Callable[[Spec, Case], Iterator[Results]]


def computed(spec: Spec, case: Case, **changes: Any) -> Results:
    """The results with some inputs or weights replaced by functions of all of them."""
    return reference.differentiated(
        case, lambda inputs: reference.layer(spec, inputs | {n: f(inputs) for n, f in changes.items()}, case.topk_index)
    )


# ---- weights that are read wrongly ---------------------------------------------------------


def swapped(spec: Spec, case: Case) -> Iterator[Results]:
    """Gate and up are exchanged."""
    if spec.gated:
        pairs = [("gate", "up")] + [("gate_bias", "up_bias")] * ("gate_bias" in case.weights)
        exchanged = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
        yield computed(spec, case, **{name: _other(source) for name, source in exchanged.items()})


def _other(name: str) -> Callable[[Weights], Tensor]:
    return lambda inputs: inputs[name]


def interleaved(spec: Spec, case: Case) -> Iterator[Results]:
    """Concatenated columns of gate and up are taken for alternating ones, or the reverse."""
    if spec.gated:
        for read in (_read_alternating, _read_halves):
            changes = {"gate": _part(read, "gate", "up", 0), "up": _part(read, "gate", "up", 1)}
            if "gate_bias" in case.weights:
                changes |= {f"{role}_bias": _part(read, "gate_bias", "up_bias", i) for i, role in enumerate(_GATE_UP)}
            yield computed(spec, case, **changes)


_GATE_UP = "gate", "up"


def _part(read: Callable[[Tensor, Tensor], list[Tensor]], a: str, b: str, i: int) -> Callable[[Weights], Tensor]:
    return lambda inputs: read(inputs[a], inputs[b])[i]


def _read_alternating(a: Tensor, b: Tensor) -> list[Tensor]:
    both = torch.cat([a, b], -1)
    return [both[..., 0::2], both[..., 1::2]]


def _read_halves(a: Tensor, b: Tensor) -> list[Tensor]:
    return list(torch.stack([a, b], -1).flatten(-2).chunk(2, -1))


def transposed(spec: Spec, case: Case) -> Iterator[Results]:
    """The memory of some weights is read as that of their transposes."""
    up = [role for role in _GATE_UP if role in case.weights]
    for roles in (["down"], up, [*up, "down"]):
        yield computed(spec, case, **{role: _misread(role) for role in roles})
        yield computed(spec, case, **{role: _misread_transposed(role) for role in roles})


def _misread(role: str) -> Callable[[Weights], Tensor]:
    """Stored in the axes of the reference, taken for transposed ones."""
    return lambda inputs: inputs[role].reshape(inputs[role].mT.shape).mT


def _misread_transposed(role: str) -> Callable[[Weights], Tensor]:
    """Stored transposed, taken for the axes of the reference."""
    return lambda inputs: inputs[role].mT.reshape(inputs[role].shape)


# ---- routers -------------------------------------------------------------------------------


def _with_router(spec: Spec, case: Case, chosen_anew: bool = False, **fields: Any) -> Iterator[Results]:
    """The results of another router; of its own choice, if that changes."""
    assert spec.router is not None
    try:
        other = spec._replace(router=replace(spec.router, **fields))
        index = case.topk_index
        if chosen_anew:
            index = reference.route(other, case.weights | {"x": case.x}).topk_experts
    except ValueError:  # no such router
        return
    yield reference.differentiated(case, lambda inputs: reference.layer(other, inputs, index))


def not_renormalized(spec: Spec, case: Case) -> Iterator[Results]:
    """The gates are not divided by the sum of the chosen ones."""
    if spec.router is not None and spec.router.renormalize:
        yield from _with_router(spec, case, renormalize=False, epsilon=0.0)
    elif spec.router is not None and spec.router.scores == "softmax_of_chosen":
        yield from _with_router(spec, case, scores="softmax")


def renormalized(spec: Spec, case: Case) -> Iterator[Results]:
    """The gates are divided by the sum of the chosen ones, as a softmax of the chosen logits does."""
    if spec.router is None:
        yield computed(spec, case, topk_weights=_divided_by_their_sum)
    elif not spec.router.renormalize and spec.router.scores != "softmax_of_chosen":
        yield from _with_router(spec, case, renormalize=True)


def _divided_by_their_sum(inputs: Weights) -> Tensor:
    return inputs["topk_weights"] / inputs["topk_weights"].sum(1, keepdim=True)


def softmax_twice(spec: Spec, case: Case) -> Iterator[Results]:
    """A softmax is taken of what a softmax has made: of all probabilities, of the chosen ones, or of the gates.

    Where the gates are divided by their sum, the first two are the same.
    """
    router = spec.router
    if router is None:
        yield _with_gates(spec, case, _softmax)
    elif router.scores != "sigmoid":
        yield _with_unscaled(spec, case, lambda routing: _softmax(_chosen(routing, routing.probs)))
        if _sum_to_one(router):
            yield _with_unscaled(spec, case, lambda routing: _softmax(routing.gates / router.scale))
        else:
            yield _with_unscaled(spec, case, lambda routing: _chosen(routing, _softmax(routing.probs)))


def _sum_to_one(router: Router) -> bool:
    """Return True if a token's gates sum to one, up to a factor, as with a softmax of the chosen logits."""
    return router.renormalize or router.scores == "softmax_of_chosen"


def _softmax(values: Tensor) -> Tensor:
    """The softmax of each row."""
    return torch.softmax(values, 1)


def _chosen(routing: Routing, values: Tensor) -> Tensor:
    """The values (L, k) of the chosen experts, of those (L, E) of all."""
    return values.gather(1, routing.topk_experts)


def wrong_scale(spec: Spec, case: Case) -> Iterator[Results]:
    """The factor of the gates is missing, or there twice."""
    if spec.router is not None and spec.router.scale != 1.0:
        for scale in (1.0, spec.router.scale**2):
            yield from _with_router(spec, case, scale=scale)


def wrong_groups(spec: Spec, case: Case) -> Iterator[Results]:
    """Groups of experts are compared by another score, or not at all."""
    if spec.router is not None and spec.router.groups > 1:
        other = {"max": "top2", "top2": "max"}[spec.router.group_score]
        yield from _with_router(spec, case, chosen_anew=True, group_score=other)
        yield from _with_router(spec, case, chosen_anew=True, groups=1, groups_kept=1)


def biased_gates(spec: Spec, case: Case) -> Iterator[Results]:
    """The selection bias is in the gates too."""
    router = spec.router
    if router is None or not router.selection_bias:
        return

    def forward(inputs: Weights) -> Tensor:
        scores = reference.route(spec._replace(router=_scores_of(router)), inputs, case.topk_index).gates
        gates = scores + case.weights["selection_bias"][case.topk_index]
        if router.renormalize:
            gates = gates / (gates.sum(1, keepdim=True) + router.epsilon)
        return reference.with_gates(spec, inputs, case.topk_index, gates * router.scale)

    yield reference.differentiated(case, forward)


def bias_ignored(spec: Spec, case: Case) -> Iterator[Results]:
    """The choice is that without the selection bias, or with it subtracted."""
    if spec.router is None or not spec.router.selection_bias:
        return
    for times in (0.0, -1.0):
        biased = case.weights | {"selection_bias": times * case.weights["selection_bias"]}
        index = reference.route(spec, biased | {"x": case.x}).topk_experts
        yield reference.differentiated(case, partial(reference.layer, spec, topk_index=index))


def _scores_of(router: Router) -> Router:
    return replace(router, renormalize=False, epsilon=0.0, scale=1.0)


def _with_gates(spec: Spec, case: Case, change: Callable[[Tensor], Tensor]) -> Results:
    """The results with gates (L, k) that are a function of the right ones."""

    def forward(inputs: Weights) -> Tensor:
        gates = reference.gates_of(spec, inputs, case.topk_index)
        return reference.with_gates(spec, inputs, case.topk_index, change(gates))

    return reference.differentiated(case, forward)


def _with_unscaled(spec: Spec, case: Case, gates: Callable[[Routing], Tensor]) -> Results:
    """The results with gates (L, k) that a function makes of the right routing, and the router's factor scales."""
    assert spec.router is not None
    scale = spec.router.scale

    def forward(inputs: Weights) -> Tensor:
        routing = reference.route(spec, inputs, case.topk_index)
        return reference.with_gates(spec, inputs, case.topk_index, gates(routing) * scale)

    return reference.differentiated(case, forward)


def detached(spec: Spec, case: Case) -> Iterator[Results]:
    """No gradient goes through the gates."""
    yield _with_gates(spec, case, Tensor.detach)


def divisor_detached(spec: Spec, case: Case) -> Iterator[Results]:
    """No gradient goes through the sum that the gates are divided by: the sum of chosen scores.

    Probabilities and exponentials of the logits give the same gates, and another gradient each.
    """
    router = spec.router
    if router is not None and _sum_to_one(router):
        for scores in (torch.sigmoid,) if router.scores == "sigmoid" else (_softmax, _exponentials):
            yield _with_unscaled(spec, case, partial(_divided, scores=scores, epsilon=router.epsilon))


def _divided(routing: Routing, scores: Callable[[Tensor], Tensor], epsilon: float) -> Tensor:
    """The scores (L, k) of the chosen experts over their sum, through which no gradient goes."""
    chosen = _chosen(routing, scores(routing.logits))
    return chosen / (chosen.sum(1, keepdim=True).detach() + epsilon)


def _exponentials(logits: Tensor) -> Tensor:
    """The exponentials of logits (L, E), of which the largest of a row is one."""
    return torch.exp(logits - logits.detach().amax(1, keepdim=True))


def other_gates(spec: Spec, case: Case) -> Iterator[Results]:
    """A choice has the gate of another one: the ids are sorted without their gates, or the reverse."""
    of_all = case.topk_index.reshape(1, -1).sort(stable=True, dim=1).indices  # as rows are sorted by expert
    of_token = case.topk_index.argsort(1)
    for order in (of_all, of_token):
        for taken in (order.argsort(1), order):
            yield _with_gates(spec, case, partial(_taken, order=taken))


def _taken(gates: Tensor, order: Tensor) -> Tensor:
    """The gates (L, k) in the order of each row of ``order``: of all choices, or of those of each token."""
    return gates.view_as(order).gather(1, order).view_as(gates)


def other_side(spec: Spec, case: Case) -> Iterator[Results]:
    """The gate multiplies the expert's input where it should multiply the output, or the reverse, or both."""
    other = {"input": "output", "output": "input"}[spec.weighs]
    yield computed(spec._replace(weighs=other), case)

    def both(inputs: Weights) -> Tensor:
        gates = reference.gates_of(spec, inputs, case.topk_index)
        return reference.with_gates(spec, inputs, case.topk_index, gates, reference.weighed_twice)

    yield reference.differentiated(case, both)


# ---- experts -------------------------------------------------------------------------------


def bias_omitted(spec: Spec, case: Case) -> Iterator[Results]:
    """Some biases of experts are not added."""
    there = [name for name in case.weights if name in ("gate_bias", "up_bias", "down_bias")]
    for roles in [there, ["down_bias"], ["gate_bias", "up_bias"]] if there else []:
        yield computed(spec, case, **{role: _zeros(role) for role in roles if role in there})


def _zeros(name: str) -> Callable[[Weights], Tensor]:
    return lambda inputs: torch.zeros_like(inputs[name]) + 0 * inputs[name]


def bias_not_weighted(spec: Spec, case: Case) -> Iterator[Results]:
    """The bias of the down projection is added without the gate."""
    if "down_bias" in case.weights and spec.weighs == "output":

        def forward(inputs: Weights) -> Tensor:
            out = reference.layer(spec, inputs | {"down_bias": _zeros("down_bias")(inputs)}, case.topk_index)
            return out + inputs["down_bias"][case.topk_index].sum(1)

        yield reference.differentiated(case, forward)


def other_activation(spec: Spec, case: Case) -> Iterator[Results]:
    """Another of the known activations, or GELU by its formula with tanh."""
    for name in ACTIVATIONS:
        if name != spec.activation and is_gated(name) == spec.gated:
            yield computed(spec._replace(activation=name), case)
    if spec.gated:
        yield computed(spec._replace(activation=_geglu_by_tanh), case)


def _geglu_by_tanh(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def activation_constants(spec: Spec, case: Case) -> Iterator[Results]:
    """A parameter of the activation has another value: no clamp, no factor in the sigmoid."""
    if isinstance(spec.activation, ClampedSwiglu):
        for other in spec.activation.alternatives():
            yield computed(spec._replace(activation=other), case)


def shared_expert(spec: Spec, case: Case) -> Iterator[Results]:
    """The shared expert is missing, or counts twice, or its gate is ignored."""
    if "shared_down" in case.weights:
        for times in (0.0, 2.0):
            yield computed(spec, case, shared_down=_times("shared_down", times))
    if "shared_expert_gate" in case.weights:  # the sigmoid of zero is one half
        yield computed(
            spec, case, shared_expert_gate=_zeros("shared_expert_gate"), shared_down=_times("shared_down", 2.0)
        )


def _times(name: str, factor: float) -> Callable[[Weights], Tensor]:
    return lambda inputs: inputs[name] * factor


# ---- rows that are lost --------------------------------------------------------------------


def _masked(spec: Spec, case: Case, masks: Iterable[Tensor]) -> Iterator[Results]:
    """The results if only some choices (L, k) bool count: others have a gate of zero, which no gradient reaches."""
    for mask in masks:
        yield _with_gates(spec, case, mask.mul)


def _positions(case: Case) -> tuple[Tensor, Tensor]:
    """The place of each choice among its expert's rows, and how many rows the expert has: (L, k) each."""
    one_hot = torch.nn.functional.one_hot(case.topk_index.flatten(), case.sizes.E)  # (R, E)
    before = (one_hot.cumsum(0) - one_hot).gather(1, case.topk_index.flatten()[:, None])
    rows = one_hot.sum(0)[case.topk_index]
    return before.view(case.topk_index.shape), rows


def over_capacity(spec: Spec, case: Case) -> Iterator[Results]:
    """Rows beyond a capacity are dropped: one form for each capacity from 1 to the rows of the fullest expert."""
    position, rows = _positions(case)
    yield from _masked(spec, case, (position < capacity for capacity in range(1, int(rows.max()) + 1)))


def partial_tile(spec: Spec, case: Case) -> Iterator[Results]:
    """The rows of an expert's last tile are lost unless they fill it; or of a layer's last tile."""
    position, rows = _positions(case)
    yield from _masked(spec, case, (position < rows // tile * tile for tile in (8, 16, 32, 64, 128)))


def row_lost(spec: Spec, case: Case) -> Iterator[Results]:
    """The last row of each expert is lost, or the first; or that of all experts."""
    position, rows = _positions(case)
    first, last = position == 0, position == rows - 1
    used = case.topk_index.unique()
    yield from _masked(spec, case, (~last, ~first))
    of_all = last & (case.topk_index == used[-1]), first & (case.topk_index == used[0])
    yield from _masked(spec, case, (~row for row in of_all))


def expert_lost(spec: Spec, case: Case) -> Iterator[Results]:
    """The first or the last expert never runs."""
    yield from _masked(spec, case, (case.topk_index != e for e in (0, case.sizes.E - 1)))


def choice_lost(spec: Spec, case: Case) -> Iterator[Results]:
    """One choice of each token counts alone, or does not count: the first or the last, or that of the first expert."""
    k = case.sizes.k
    ones = [torch.arange(k) == chosen for chosen in (0, k - 1)]
    ones += [torch.arange(k) == extreme(1)[:, None] for extreme in (case.topk_index.argmin, case.topk_index.argmax)]
    masks = [mask.expand(case.topk_index.shape) for mask in ones]
    yield from _masked(spec, case, [*masks, *(~mask for mask in masks)])
