"""An MoE layer in plain torch, written to be read: the results that every layer is compared with.

In float64 it is the specification. In the dtype of the layer it shows what plain torch loses there.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn import routers
from moeblaze_ref.nn.oracle import activate
from moeblaze_ref.verify.layers.adapter import Activation, Sizes, takes_gate
from moeblaze_ref.verify.layers.layouts import BUFFERS, Weights

Results = dict[str, Tensor]  # "out", and the gradient of each input and weight by its name; float64, on the CPU


class Spec(NamedTuple):
    """Specification of what the layer computes."""

    k: int
    router: Router | None  #: None if the routing is given
    activation: Activation
    weighs: str  #: "output" or "input"

    @property
    def gated(self) -> bool:
        """True if an expert has two up-projections."""
        return takes_gate(self.activation)


class Case(NamedTuple):
    """The numbers of one step: float64, each representable in the layer's dtype."""

    name: str
    sizes: Sizes
    x: Tensor  # (L, d)
    weights: Weights
    topk_index: Tensor  # (L, k) int64; of a router inside, what it chooses
    topk_weights: Tensor | None  # (L, k); None if the router is inside
    d_out: Tensor  # (L, d)

    def inputs(self) -> Results:
        """Return what the step is differentiated by."""
        given = {} if self.topk_weights is None else {"topk_weights": self.topk_weights}
        return {"x": self.x} | given | {name: w for name, w in self.weights.items() if name not in BUFFERS}

    def of_tokens(self, L: int) -> "Case":
        """The step of its first L tokens."""
        gates = None if self.topk_weights is None else self.topk_weights[:L]
        return self._replace(
            sizes=self.sizes._replace(L=L),
            x=self.x[:L],
            topk_index=self.topk_index[:L],
            topk_weights=gates,
            d_out=self.d_out[:L],
        )

    def _tensors(self) -> dict[str, Tensor]:
        """All its numbers."""
        return self.inputs() | self.weights | {"topk_index": self.topk_index, "d_out": self.d_out}

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return sum(tensor.numel() for tensor in self._tensors().values())

    def fingerprint(self) -> str:
        """A text that no case with other numbers has."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors().items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


def layer(spec: Spec, inputs: Weights, topk_index: Tensor, experts: "Experts | None" = None) -> Tensor:
    """Return the output (L, d), from x, the weights, and topk_weights if the routing is given."""
    return with_gates(spec, inputs, topk_index, gates_of(spec, inputs, topk_index), experts)


def with_gates(
    spec: Spec, inputs: Weights, topk_index: Tensor, gates: Tensor, experts: "Experts | None" = None
) -> Tensor:
    """The same for gates (L, k), however they came about."""
    out = (experts or one_after_another)(spec, inputs, topk_index, gates)
    return out + _shared_expert(spec, inputs) if _of_shared(inputs) else out


def _of_shared(inputs: Weights) -> Weights:
    """The weights of the shared expert."""
    return {role: inputs[f"shared_{role}"] for role in PER_EXPERT if f"shared_{role}" in inputs}


def _shared_expert(spec: Spec, inputs: Weights) -> Tensor:
    """Return the output (L, d) of the shared expert. A sigmoid of its own may multiply it, as in Qwen2-MoE."""
    x, gate = inputs["x"], inputs.get("shared_expert_gate")
    y = expert(spec, _of_shared(inputs), x)
    return y if gate is None else y * torch.sigmoid(x @ gate)


def gates_of(spec: Spec, inputs: Weights, topk_index: Tensor) -> Tensor:
    """Return the gates (L, k): the given ones, or the gates of the router inside."""
    return route(spec, inputs, topk_index).gates if spec.router else inputs["topk_weights"]


def route(spec: Spec, inputs: Weights, topk_index: Tensor | None = None) -> routers.Routing:
    """Return the routing of x by the router inside; topk_index (L, k) replays a choice."""
    assert spec.router is not None
    biases = inputs.get("router_bias"), inputs.get("selection_bias")
    return routers.route(inputs["x"], inputs["router"], spec.k, spec.router, *biases, topk_index)


Experts = Callable[[Spec, Weights, Tensor, Tensor], Tensor]


def one_after_another(spec: Spec, inputs: Weights, topk_index: Tensor, gates: Tensor) -> Tensor:
    """Each expert's rows, its two layers, and the weighted sum."""
    x = inputs["x"]
    out = torch.zeros_like(x)
    for e in topk_index.unique().tolist():
        token, choice = (topk_index == e).nonzero(as_tuple=True)
        gate = gates[token, choice, None].to(x.dtype)  # (n, 1)
        rows = x[token] * gate if spec.weighs == "input" else x[token]  # (n, d)
        y = expert(spec, of_expert(inputs, e), rows)
        out = out.index_add(0, token, y if spec.weighs == "input" else y * gate)
    return out


def row_by_row(spec: Spec, inputs: Weights, topk_index: Tensor, gates: Tensor) -> Tensor:
    """Each routed row with its own copy of an expert's weights, whose gradients are summed in their dtype."""
    return _weighted(spec, inputs, topk_index, gates).sum(1)


def _weighted(spec: Spec, inputs: Weights, topk_index: Tensor, gates: Tensor) -> Tensor:
    """The weighted output (L, k, d) of each choice."""
    gate = gates[..., None].to(inputs["x"].dtype)  # (L, k, 1)
    rows = inputs["x"][:, None].expand(-1, gates.shape[1], -1)  # (L, k, d)
    y = _choices(spec, inputs, topk_index, rows * gate if spec.weighs == "input" else rows)
    return y if spec.weighs == "input" else y * gate


def weighted_choices(spec: Spec, case: Case) -> Tensor:
    """Return each choice's contribution to the output: (L, k, d) float64."""
    inputs = case.inputs() | case.weights
    return _weighted(spec, inputs, case.topk_index, gates_of(spec, inputs, case.topk_index))


def _choices(spec: Spec, inputs: Weights, topk_index: Tensor, rows: Tensor) -> Tensor:
    """The output (L, k, d) of each choice for rows (L, k, d), before the gates multiply it."""
    copies = {name: w[topk_index.flatten()] for name, w in inputs.items() if name in PER_EXPERT}
    biases = {name: bias[:, None] for name, bias in copies.items() if name.endswith("bias")}
    return expert(spec, copies | biases, rows.reshape(-1, 1, rows.shape[-1])).view(rows.shape)


PER_EXPERT = ("gate", "gate_bias", "up", "up_bias", "down", "down_bias")


def of_expert(inputs: Weights, e: int) -> Weights:
    """Return the weights of one expert."""
    return {name: weight[e] for name, weight in inputs.items() if name in PER_EXPERT}


def expert(spec: Spec, w: Weights, rows: Tensor) -> Tensor:
    """One expert's output (n, d) for rows (n, d)."""
    a = _linear(rows, w["gate" if spec.gated else "up"], w.get("gate_bias" if spec.gated else "up_bias"))  # (n, h)
    b = _linear(rows, w["up"], w.get("up_bias")) if spec.gated else None  # (n, h)
    return _linear(_act(spec.activation, a, b), w["down"], w.get("down_bias"))


def _act(activation: Activation, a: Tensor, b: Tensor | None) -> Tensor:
    if isinstance(activation, str):
        return activate(a, b, activation)
    assert b is not None
    return activation(a, b)


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = rows @ weight
    return product if bias is None else product + bias


def weighed_twice(spec: Spec, inputs: Weights, topk_index: Tensor, gates: Tensor) -> Tensor:
    """A gate that multiplies the input and the output of an expert: no layer does that."""
    rows = inputs["x"][:, None] * gates[..., None]  # (L, k, d)
    return (_choices(spec, inputs, topk_index, rows) * gates[..., None]).sum(1)


PLAIN_WAYS = one_after_another, row_by_row


def results(
    spec: Spec, case: Case, dtype: torch.dtype, gate_dtype: torch.dtype, experts: Experts = one_after_another
) -> Results:
    """The output and every gradient, computed in a dtype by autograd."""
    return differentiated(case, lambda inputs: layer(spec, inputs, case.topk_index, experts), dtype, gate_dtype)


def differentiated(
    case: Case,
    forward: Callable[[Weights], Tensor],
    dtype: torch.dtype = torch.float64,
    gate_dtype: torch.dtype = torch.float64,
) -> Results:
    """The output of a function of inputs and weights by name, and its gradient by each of them."""
    dtypes = {"topk_weights": gate_dtype}
    leaves = {n: value.to(dtypes.get(n, dtype), copy=True).requires_grad_() for n, value in case.inputs().items()}
    buffers = {name: case.weights[name].to(dtype) for name in BUFFERS if name in case.weights}
    out = forward(leaves | buffers)
    gradients = torch.autograd.grad(out, list(leaves.values()), case.d_out.to(dtype), materialize_grads=True)
    return in_float64({"out": out} | dict(zip(leaves, gradients, strict=True)))


def exact(spec: Spec, case: Case) -> Results:
    """The output and every gradient in float64."""
    return results(spec, case, torch.float64, torch.float64)


def sizes(spec: Spec, case: Case) -> Results:
    """Return sizes of gradients that may vanish: what they would be if the terms of their sums did not cancel.

    The gradient of a gate is a sum of products; that of a router's logit is a difference of those.
    """
    inputs = case.inputs() | case.weights
    of_shared = _size_of_shared_gate(spec, inputs, case.d_out) if "shared_expert_gate" in inputs else {}
    return of_shared if spec.weighs == "input" else of_shared | _sizes_of_router(spec, case, inputs)


def _size_of_shared_gate(spec: Spec, inputs: Weights, d_out: Tensor) -> Results:
    gates = torch.sigmoid(inputs["x"] @ inputs["shared_expert_gate"])  # (L, 1)
    y = expert(spec, _of_shared(inputs), inputs["x"])
    return {"shared_expert_gate": inputs["x"].T @ (gates * (1 - gates) * (y * d_out).norm(dim=1, keepdim=True))}


def _sizes_of_router(spec: Spec, case: Case, inputs: Weights) -> Results:
    of_gates = (_outputs(spec, case, inputs) * case.d_out[:, None]).norm(dim=2)  # (L, k)
    if spec.router is None:
        return {"topk_weights": of_gates}
    of_choices = gates_of(spec, inputs, case.topk_index) * of_gates
    of_logits = of_gates.new_zeros(case.sizes.L, case.sizes.E).scatter_add(1, case.topk_index, of_choices)
    return {"router": case.x.T @ of_logits, "router_bias": of_logits.sum(0)}


def _outputs(spec: Spec, case: Case, inputs: Weights) -> Tensor:
    """The output (L, k, d) of each choice, before the gates multiply it; one expert after the other."""
    y = case.x.new_zeros(*case.topk_index.shape, case.sizes.d)
    for e in case.topk_index.unique().tolist():
        token, choice = (case.topk_index == e).nonzero(as_tuple=True)
        y[token, choice] = expert(spec, of_expert(inputs, e), case.x[token])
    return y


def in_float64(found: Mapping[str, Tensor]) -> Results:
    """Copy what was found to the CPU, in float64."""
    return {name: tensor.detach().to("cpu", torch.float64) for name, tensor in found.items()}
