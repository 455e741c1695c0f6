"""Compare the timed layers' outputs and gradients with the oracle, in the run that times them.

Compared is the very step that is timed, all tokens and all experts, with two bounds each: one for a whole tensor, which
a single wrong row among thousands does not move, and one for its rows.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.nn import oracle
from moeblaze_ref.nn.routed_experts import RoutedExperts

# Plain torch loses up to 0.008 of a whole tensor in bfloat16, and 0.02 of the worst of thousands of rows: a router
# whose logits, of up to 16, are rounded to 8 bits moves the gates of two like experts by 0.016 at most, and a row by
# 0.03. `moeblaze check` has stricter bounds.
BOUND = 2.0**-6
ROW_BOUND = 3 * 2.0**-6
# Slopes that jump where a pre-activation is zero. A sum of d products in float32 is off by about sqrt(d) 2**-24 of its
# size, so a sign below four times that is decided by the order of the sum: either slope is right.
KINKED = ("relu", "reglu")
SIGN_ERROR = 2.0**-22  # of the root mean square of an expert's pre-activations, times sqrt(d)
ROWS = 4096  # of an expert, that the oracle computes at a time
ELEMENTS = 2**26  # that are compared at a time

Layer = Callable[[Tensor], tuple[Tensor, Tensor]]  # x (L, d) -> out (L, d), topk_experts (L, k)
Keeps = Callable[[Tensor], Tensor]  # topk_experts (L, k) -> which of them are computed, (L, k) bool


class Weights(NamedTuple):
    """The weights that a layer computes with."""

    leaves: Mapping[str, Tensor]  #: those that autograd differentiates, in the layer's own layouts
    #: Gradients of all leaves by name to gradients of wg, w1, w2 and w3 in the layouts of `RoutedExperts`.
    as_ours: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda gradients: gradients


def weights_of(parameters: RoutedExperts) -> Weights:
    """Our own weights, for a layer that computes with them."""
    return Weights(dict(parameters.named_parameters()))


class Error(NamedTuple):
    """The error of a tensor."""

    whole: float  #: ||found - expected|| / ||expected||; of integers, 0 if they are equal, else infinite
    #: Of the worst entry along the first dimension, such as a token's row or an expert's matrix: its
    #: ||found - expected|| over its ||expected||, or over the root of the mean square of all ||expected|| if that is
    #: larger, so that small entries need not be righter than others.
    row: float

    @property
    def columns(self) -> dict[str, Any]:
        """Return the errors as columns of a result row."""
        return {"error": self.whole, "row_error": self.row}


NOT_COMPARED: dict[str, Any] = {"error": None, "row_error": None}  # columns of what others are compared with


def worst_error(
    layer: Layer,
    parameters: RoutedExperts,
    x: Tensor,
    d_out: Tensor,
    keeps: Keeps | None = None,
    weights: Weights | None = None,
) -> Error:
    """Largest errors of a layer's output and gradients, and of its choice of experts.

    Parameters
    ----------
    layer : callable
        x to output and choice of experts, by the weights of ``parameters``.
    parameters : RoutedExperts
        Whose gradients are compared.
    x, d_out : Tensor (L, d)
        Input and gradient of the output.
    keeps : callable, optional
        Which choices a layer should compute that drops some: nothing is expected of the others, neither of the output
        nor of a gradient, and gates are not divided anew. Default: all.
    weights : Weights, optional
        Of a layer that computes with copies of ``parameters``. Default: ``parameters`` themselves.

    Returns
    -------
    Error
        Of out, d_x and the gradient of every weight; NaN if anything is NaN. The oracle computes in float32, with the
        layer's own choice of experts, of which the logits are compared with the k largest. d_x of a ``KINKED``
        activation is compared with the closest gradient that the undecided slopes allow.
    """
    found, chosen = _step(layer, weights or weights_of(parameters), x, d_out)
    kept = torch.ones_like(chosen, dtype=torch.bool) if keeps is None else keeps(chosen)
    reference = _Reference(parameters, x, d_out, chosen, kept)
    norms = {f"d_{name}": _Norms() for name in _matrices(parameters)}
    for expert, expected in enumerate(reference.weight_gradients()):
        for (name, of_one), gradient in zip(norms.items(), expected, strict=True):
            of_one.add(found[name][expert : expert + 1], gradient[None])
    d_x, d_wg = reference.router_gradients()
    pairs = [(found["out"], reference.out), (found["d_wg"], d_wg), reference.choice()]
    pairs.append((found["d_x"], reference.closest(found["d_x"], d_x)))
    return _largest([*(of_one.error() for of_one in norms.values()), *(_error(*pair) for pair in pairs)])


def _matrices(parameters: RoutedExperts) -> dict[str, Tensor]:
    """The experts' weights (E, ...) by name."""
    return {name: weight for name, weight in parameters.named_parameters() if name != "wg"}


def _step(layer, weights, x, d_out) -> tuple[dict[str, Tensor], Tensor]:
    """Output and gradients by name, and the choice of experts."""
    x = x.detach().requires_grad_()
    out, chosen = layer(x)
    d_x, *d_leaves = torch.autograd.grad(out, [x, *weights.leaves.values()], d_out)
    gradients = weights.as_ours(dict(zip(weights.leaves, d_leaves, strict=True)))
    found = {f"d_{name}": gradient for name, gradient in gradients.items()}
    return found | {"d_x": d_x, "out": out.detach()}, chosen


class _Reference:
    """The oracle's step in float32, an expert at a time and ``ROWS`` of its rows at a time: so it fits beside a layer.

    Of the choices (L, k) those count that are ``kept``. ``out`` (L, d) is whole, as everything else, once
    `weight_gradients` has come to its end.
    """

    def __init__(self, parameters: RoutedExperts, x: Tensor, d_out: Tensor, chosen: Tensor, kept: Tensor):
        self._parameters, self._x, self._d_out, self._kept = parameters, x.detach(), d_out, kept.flatten()
        self._leaves = leaves = [tensor.detach().float().requires_grad_() for tensor in (x, parameters.wg)]
        self._routing = oracle.route(leaves[0], leaves[1], parameters.k, parameters.renormalize, chosen)
        self._gates = self._routing.gates.detach().flatten()  # (R,)
        self._d_gates = torch.zeros_like(self._gates)
        self.out, self._d_x, self._slack = (torch.zeros_like(self._leaves[0], requires_grad=False) for _ in range(3))

    def choice(self) -> tuple[Tensor, Tensor]:
        """Logits (L, k) of the chosen experts in falling order, and the k largest."""
        logits = self._routing.logits.detach()
        chosen = logits.gather(1, self._routing.topk_experts)
        return chosen.sort(dim=1, descending=True).values, logits.topk(self._parameters.k).values

    def weight_gradients(self) -> Iterator[list[Tensor]]:
        """Yield the gradients of each expert's w1, w2 if there is one, and w3; sum up everything else on the way."""
        order = oracle.expert_order(self._routing.topk_experts, self._parameters.wg.shape[1])
        matrices = _matrices(self._parameters)
        for expert, slots in enumerate(order.slot.split(order.lengths)):
            weights = {name: all_[expert].detach().float().requires_grad_() for name, all_ in matrices.items()}
            sums = [torch.zeros_like(weight, requires_grad=False) for weight in weights.values()]
            for few in slots[self._kept[slots]].split(ROWS):
                for total, gradient in zip(sums, self._rows(few, weights), strict=True):
                    total += gradient
            yield sums

    def _rows(self, slots: Tensor, weights: dict[str, Tensor]) -> list[Tensor]:
        """The weights' gradients by some of an expert's rows, which are a layer of one expert by themselves."""
        token = slots // self._parameters.k
        rows, gates = self._x[token].float().requires_grad_(), self._gates[slots, None].requires_grad_()
        alone = oracle.Routing(gates, gates, torch.zeros_like(slots)[:, None], gates)
        of_one = {name: weight[None] for name, weight in weights.items()}
        out = oracle.experts(rows, alone, of_one["w1"], of_one.get("w2"), of_one["w3"], self._parameters.activation)
        leaves = [rows, gates, *weights.values()]
        d_rows, d_gates, *d_weights = torch.autograd.grad(out, leaves, self._d_out[token].float())
        self.out.index_add_(0, token, out.detach())
        self._d_x.index_add_(0, token, d_rows)
        if self._parameters.activation in KINKED:
            self._slack.index_add_(
                0, token, _slack(rows.detach(), gates.detach() * self._d_out[token].float(), weights)
            )
        self._d_gates[slots] = d_gates[:, 0]
        return d_weights

    def router_gradients(self) -> tuple[Tensor, Tensor]:
        """d_x (L, d), by the experts and by the router, and d_wg (d, E)."""
        gates = self._routing.gates
        d_x, d_wg = torch.autograd.grad(gates, self._leaves, self._d_gates.view_as(gates))
        return self._d_x + d_x, d_wg

    def closest(self, found: Tensor, d_x: Tensor) -> Tensor:
        """Return the d_x (L, d) closest to ``found`` (L, d) that some choice of the undecided slopes gives."""
        return found.float().clamp(d_x - self._slack, d_x + self._slack)


@torch.no_grad()
def _slack(rows: Tensor, d_y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the largest change of an expert's row gradients (n, d) that undecided slopes allow.

    It is the sum over undecided pre-activations of what each adds to the gradient of its row, without signs. ``rows``
    and ``d_y`` (n, d) are the expert's input and the gradient of its output; only reglu has a w2.
    """
    a = rows @ weights["w1"]
    undecided = a.abs() <= SIGN_ERROR * math.sqrt(rows.shape[1]) * a.square().mean().sqrt()
    d_act = d_y @ weights["w3"].T
    if "w2" in weights:
        d_act *= rows @ weights["w2"]
    return (d_act * undecided).abs() @ weights["w1"].abs().T


# Errors ---------------------------------------------------------------------------------------------------------------


def worst(found: Iterable[Tensor], expected: Iterable[Tensor]) -> Error:
    """The largest errors of all pairs; NaN if one is NaN."""
    return _largest([_error(*pair) for pair in zip(found, expected, strict=True)])


def _largest(errors: Iterable[Error]) -> Error:
    return Error(*(max(parts, key=lambda part: (math.isnan(part), part)) for parts in zip(*errors, strict=True)))


def _error(found: Tensor, expected: Tensor) -> Error:
    if found.shape != expected.shape:
        raise ValueError(f"the result has shape {tuple(found.shape)}, but it must be {tuple(expected.shape)}")
    if not found.is_floating_point():
        off = 0.0 if torch.equal(found.to(expected.dtype), expected) else math.inf
        return Error(off, off)
    norms, entries = _Norms(), max(1, ELEMENTS * len(found) // found.numel())
    for pair in zip(found.split(entries), expected.split(entries), strict=True):
        norms.add(*pair)
    return norms.error()


class _Norms:
    """Squared norms of the errors and of what was expected, entry by entry along the first dimension."""

    def __init__(self):
        self._errors, self._expected = [], []

    def add(self, found: Tensor, expected: Tensor):
        """Some more entries of the tensor."""
        expected = expected.float()
        self._errors.append(_squares(found.float() - expected))
        self._expected.append(_squares(expected))

    def error(self) -> Error:
        """The error over all entries."""
        errors, expected = torch.cat(self._errors), torch.cat(self._expected)
        of_rows = errors / expected.clamp(min=expected.mean())
        return Error(float((errors.sum() / expected.sum()).sqrt()), float(of_rows.max().sqrt()))


def _squares(tensor: Tensor) -> Tensor:
    """The squared norm of each entry along the first dimension."""
    return tensor.reshape(len(tensor), -1).square().sum(dim=1)
