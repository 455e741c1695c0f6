"""Whether what is timed computes the layer: output and gradients against the oracle, in the run that times them."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from moeblaze_ref import oracle
from moeblaze_ref.routed_experts import RoutedExperts

BOUND = 2.0**-5  # far above what bfloat16 costs, far below any mistake; `moeblaze check` judges more strictly
TOKENS = 1024  # that the oracle computes

Layer = Callable[[Tensor], tuple[Tensor, Tensor]]  # x (L, d) -> out (L, d), topk_experts (L, k)
Results = dict[str, Tensor]


def worst_error(layer: Layer, parameters: RoutedExperts, x: Tensor, d_out: Tensor) -> float:
    """Largest relative error of a layer's output and gradients.

    Parameters
    ----------
    layer : callable
        x to output and choice of experts, by the weights of ``parameters``.
    parameters : RoutedExperts
        Whose gradients are compared.
    x, d_out : Tensor (L, d)
        Input and gradient of the output.

    Returns
    -------
    float
        The largest ||out - ref|| / ||ref|| of two steps: of all tokens, where out and d_x of the first ``TOKENS``
        are compared, and of those tokens alone, where every weight's gradient is too. NaN if anything is NaN. The
        oracle computes in float32, with the layer's own choice of experts.
    """
    few = slice(TOKENS)
    found, chosen = _step(layer, parameters, x, d_out)
    first = [found[name][few] for name in ("out", "d_x")]
    del found  # frees a set of weight gradients
    expected = _expected(parameters, x[few], d_out[few], chosen[few])
    of_all = worst(first, [expected[name] for name in ("out", "d_x")])
    found, chosen = _step(layer, parameters, x[few], d_out[few])
    of_few = worst(found.values(), _expected(parameters, x[few], d_out[few], chosen).values())
    return max(of_all, of_few, key=lambda error: (math.isnan(error), error))


def _step(layer, parameters, x, d_out) -> tuple[Results, Tensor]:
    """Output and gradients by name, and the choice of experts."""
    x = x.detach().requires_grad_()
    out, chosen = layer(x)
    return _results(out, {"x": x, **dict(parameters.named_parameters())}, d_out), chosen


def _expected(parameters, x, d_out, chosen) -> Results:
    """The same by the oracle."""
    leaves = {"x": x, **dict(parameters.named_parameters())}
    leaves = {name: tensor.detach().float().requires_grad_() for name, tensor in leaves.items()}
    x, wg, w1, w3 = (leaves[name] for name in ("x", "wg", "w1", "w3"))
    routing = oracle.route(x, wg, parameters.k, parameters.renormalize, chosen)
    out = oracle.experts(x, routing, w1, leaves.get("w2"), w3, parameters.activation)
    return _results(out, leaves, d_out.float())


def _results(out, leaves, d_out) -> Results:
    gradients = torch.autograd.grad(out, list(leaves.values()), d_out)
    return {"out": out.detach()} | {f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}


def worst(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The largest ||found - expected|| / ||expected|| of all pairs; of integers, 0 if they are equal, else infinite."""
    return float(torch.stack([_error(*pair) for pair in zip(found, expected, strict=True)]).max())


def _error(found: Tensor, expected: Tensor) -> Tensor:
    if found.shape != expected.shape:
        raise ValueError(f"the result has shape {tuple(found.shape)}, but it must be {tuple(expected.shape)}")
    if not found.is_floating_point():
        return torch.where((found == expected).all(), 0.0, torch.inf)
    return (found.float() - expected.float()).norm() / expected.float().norm()
