"""What each floating-point stage must equal: plain torch in float64, differentiated by autograd.

A comparison runs one stage of one backend on a case and yields (direction, found, expected),
where found and expected map names to arrays. The oracle starts from the same rounded numbers
that the stage was given, so only the stage's own rounding counts.
"""

from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from moeblaze_ref import oracle
from moeblaze_ref.cases import Case, relative_error
from moeblaze_ref.numpy_ref.dispatch import build_by_sort

Arrays = dict[str, np.ndarray | None]
Comparison = tuple[str, Arrays, Arrays]


def worst_error(found: Arrays, expected: Arrays) -> float:
    """The largest relative error over the tensors; NaN wins over every number."""
    return float(np.max([relative_error(found[name], expected[name]) for name in expected]))


def _leaf(array: np.ndarray | None) -> Tensor | None:
    """A float64 tensor that autograd differentiates by."""
    return None if array is None else torch.tensor(array, dtype=torch.float64, requires_grad=True)


def _array(tensor: Tensor | None, dtype=np.float64) -> np.ndarray | None:
    return None if tensor is None else tensor.detach().numpy().astype(dtype)


def _present(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Those that the activation has: an ungated layer lacks b and w2."""
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _arrays(**tensors: Tensor | None) -> Arrays:
    return {name: _array(tensor) for name, tensor in _present(**tensors).items()}


def _gradients(
    outputs: dict[str, Tensor], d_outputs: dict[str, np.ndarray | float], inputs: dict[str, Tensor]
) -> Arrays:
    """``d_<name>`` of every input by autograd, from the gradients of the outputs."""
    cotangents = [torch.tensor(d_outputs[name], dtype=torch.float64) for name in outputs]
    found = torch.autograd.grad(list(outputs.values()), list(inputs.values()), cotangents, retain_graph=True)
    return {f"d_{name}": gradient.numpy() for name, gradient in zip(inputs, found, strict=True)}


def _random(shape: tuple[int, ...], dtype, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def compare_gating(stage: ModuleType, case: Case) -> Iterator[Comparison]:
    """Choice, probabilities and gates; gradients of the logits through the gates and both losses."""
    logits = case.logits
    leaf = _leaf(logits)
    routing = oracle.decide(leaf, case.k)
    found = stage.forward(logits, case.k)
    names = ("probs", "gates", "topk_experts")
    yield (
        "forward",
        {name: getattr(found, name) for name in names},
        {name: _array(getattr(routing, name)) for name in names},
    )
    if case.L == 0:
        return  # the mean over no tokens has no gradient
    d_gates = _random(tuple(routing.gates.shape), logits.dtype, seed=1)
    chosen = _array(routing.probs, logits.dtype), case.topk_experts
    outputs = {
        "gates": routing.gates,
        "load_balancing_loss": oracle.load_balancing_loss(routing),
        "router_z_loss": oracle.router_z_loss(routing),
    }
    d_logits = (
        stage.backward(d_gates, *chosen)
        + stage.load_balancing_loss_backward(*chosen)
        + stage.router_z_loss_backward(logits)
    )
    d_outputs = {"gates": d_gates, "load_balancing_loss": 1.0, "router_z_loss": 1.0}
    yield "backward", {"d_logits": d_logits}, _gradients(outputs, d_outputs, {"logits": leaf})


def compare_expert_up(stage: ModuleType, case: Case) -> Iterator[Comparison]:
    """a, b and y_swi; gradients of x, w1 and w2 from those of a and b."""
    topk_experts, (_, w1, w2, _) = case.topk_experts, case.weights
    dispatch = build_by_sort(topk_experts, case.E)
    inputs = _present(x=_leaf(case.x), w1=_leaf(w1), w2=_leaf(w2))
    order = oracle.expert_order(torch.from_numpy(topk_experts).long(), case.E)
    a, b = oracle.expert_up(inputs["x"], order, inputs["w1"], inputs.get("w2"))
    y_swi = oracle.activate(a, b, case.activation)
    yield (
        "forward",
        dict(zip(("a", "b", "y_swi"), stage.forward(case.x, w1, w2, dispatch, case.activation), strict=True)),
        _arrays(a=a, b=b, y_swi=y_swi),
    )
    d_a = _random(tuple(a.shape), case.x.dtype, seed=2)
    d_b = None if b is None else _random(tuple(b.shape), case.x.dtype, seed=3)
    yield (
        "backward",
        dict(zip(("d_x", "d_w1", "d_w2"), stage.backward(d_a, d_b, case.x, w1, w2, dispatch), strict=True)),
        _gradients(_present(a=a, b=b), {"a": d_a, "b": d_b}, inputs),
    )


def _hidden(case: Case) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """a, b (R, h) and gates (L, k) of a case, rounded to its dtype: the down-projection's inputs."""
    x, wg, w1, w2, _ = (_leaf(array) for array in (case.x, *case.weights))
    topk_experts = torch.from_numpy(case.topk_experts).long()
    a, b = oracle.expert_up(x, oracle.expert_order(topk_experts, case.E), w1, w2)
    gates = oracle.route(x, wg, case.k, topk_experts=topk_experts).gates
    return _array(a, case.x.dtype), _array(b, case.x.dtype), _array(gates, case.x.dtype)


def compare_expert_down(stage: ModuleType, case: Case) -> Iterator[Comparison]:
    """y from y_swi; gradients of a, b, the gates and w3 from that of the layer's output."""
    topk_experts, w3 = case.topk_experts, case.weights.w3
    dispatch = build_by_sort(topk_experts, case.E)
    order = oracle.expert_order(torch.from_numpy(topk_experts).long(), case.E)
    a, b, gates = _hidden(case)
    inputs = _present(a=_leaf(a), b=_leaf(b), gates=_leaf(gates), w3=_leaf(w3))
    exact_y_swi = oracle.activate(inputs["a"], inputs.get("b"), case.activation)
    y_swi = _array(exact_y_swi, case.x.dtype)
    yield (
        "forward",
        {"y": stage.forward(y_swi, w3, dispatch)},
        _arrays(y=oracle.expert_down(_leaf(y_swi), order, inputs["w3"])),
    )
    out = oracle.combine(oracle.expert_down(exact_y_swi, order, inputs["w3"]), inputs["gates"], order)
    names = ("d_a", "d_b", "d_gates", "d_w3")
    yield (
        "backward",
        dict(zip(names, stage.backward(case.d_out, gates, a, b, w3, dispatch, case.activation), strict=True)),
        _gradients({"out": out}, {"out": case.d_out}, inputs),
    )


def compare_combine(stage: ModuleType, case: Case) -> Iterator[Comparison]:
    """The output from y and the gates; gradients of both."""
    topk_experts = case.topk_experts
    dispatch = build_by_sort(topk_experts, case.E)
    order = oracle.expert_order(torch.from_numpy(topk_experts).long(), case.E)
    y = _random((topk_experts.size, case.x.shape[1]), case.x.dtype, seed=4)
    gates = _hidden(case)[2]
    inputs = {"y": _leaf(y), "gates": _leaf(gates)}
    out = oracle.combine(inputs["y"], inputs["gates"], order)
    yield "forward", {"out": stage.forward(y, gates, dispatch)}, _arrays(out=out)
    yield (
        "backward",
        dict(zip(("d_y", "d_gates"), stage.backward(case.d_out, y, gates, dispatch), strict=True)),
        _gradients({"out": out}, {"out": case.d_out}, inputs),
    )


def compare_layer(stage: ModuleType, case: Case) -> Iterator[Comparison]:
    """The whole layer's output and every gradient, on the case's own choice of experts."""
    result = stage.forward(case.x, case.weights, case.k, case.activation)
    x, wg, w1, w2, w3 = (_leaf(array) for array in (case.x, *case.weights))
    routing = oracle.route(x, wg, case.k, topk_experts=torch.from_numpy(case.topk_experts))
    out = oracle.experts(x, routing, w1, w2, w3, case.activation)
    yield "forward", {"out": result.out}, _arrays(out=out)
    inputs = _present(x=x, wg=wg, w1=w1, w2=w2, w3=w3, gates=routing.gates)
    expected = _gradients({"out": out}, {"out": case.d_out}, inputs)
    found = stage.backward(case.d_out, result.saved, case.weights)
    yield "backward", {name: getattr(found, name) for name in expected}, expected


COMPARE: dict[str, Callable[[ModuleType, Case], Iterator[Comparison]]] = {
    "gating": compare_gating,
    "expert_up": compare_expert_up,
    "expert_down": compare_expert_down,
    "combine": compare_combine,
    "layer": compare_layer,
}
