"""A layer that is checked, with the numbers of a case in its parameters."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.core import checks
from moeblaze_ref.verify.layers import adapter as adapters
from moeblaze_ref.verify.layers import layouts
from moeblaze_ref.verify.layers.adapter import Adapter, Factory, Sizes
from moeblaze_ref.verify.layers.faults import LayerFault, faults_of_a_layer
from moeblaze_ref.verify.layers.layouts import BUFFERS, Place
from moeblaze_ref.verify.layers.reference import Case, Results, in_float64


class Inputs(NamedTuple):
    """Arguments of a layer."""

    x: Tensor  # (L, d)
    topk_index: Tensor | None = None  # (L, k)
    topk_weights: Tensor | None = None  # (L, k)

    def arguments(self) -> list[Tensor]:
        """Return the arguments that are not None."""
        return [tensor for tensor in self if tensor is not None]

    def leaves(self) -> dict[str, Tensor]:
        """Return what may have a gradient, by name."""
        return {name: t for name, t in self._asdict().items() if t is not None and t.is_floating_point()}


class CheckedLayer(NamedTuple):
    """A layer of some sizes."""

    adapter: Adapter
    places: list[tuple[Place, Tensor]]
    dtype: torch.dtype
    device: str

    @classmethod
    def make(cls, factory: Factory, sizes: Sizes, dtype: torch.dtype, device: str) -> "CheckedLayer":
        """Make a layer, and find its weights.

        Raises
        ------
        LayerFault
            If the factory raises an error, or what it makes does not fit the layouts; so do the other methods if the
            layer raises one.
        """
        try:
            adapter = adapters.make(factory, sizes, dtype, device)
            return cls(adapter, adapter.places(sizes), dtype, device)
        except (ValueError, TypeError) as error:
            raise LayerFault(str(error), "cannot be made") from error

    @property
    def gate_dtype(self) -> torch.dtype:
        """The dtype of routing weights that are given."""
        return self.adapter.gate_dtype or self.dtype

    def load(self, case: Case) -> Inputs:
        """Write the weights of a case into the layer; return new inputs that want a gradient."""
        layouts.scatter(self.places, case.weights)
        x = self._leaf(case.x, self.dtype)
        if case.topk_weights is None:
            return Inputs(x)
        index = case.topk_index.to(self.device, self.adapter.index_dtype, copy=True)
        return Inputs(x, index, self._leaf(case.topk_weights, self.gate_dtype))

    def _leaf(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self.device, dtype, copy=True).requires_grad_()

    def forward(self, inputs: Inputs, module: Callable[..., Any] | None = None) -> Tensor:
        """Return the output (L, d) of the layer, or of a module in place of it."""
        with faults_of_a_layer(self.device):
            return _checked((self.adapter.module if module is None else module)(*inputs.arguments()), inputs.x)

    def wanted(self, inputs: Inputs) -> dict[str, Tensor]:
        """Return what wants a gradient: inputs by name, and parameters by their names."""
        trained = {place.name: t for place, t in self.places if not set(place.layout.roles) & set(BUFFERS)}
        return {name: tensor for name, tensor in (inputs.leaves() | trained).items() if tensor.requires_grad}

    def gradients(self, out: Tensor, d_out: Tensor, inputs: Inputs, retain_graph: bool = False) -> Results:
        """Return the gradient of each input and weight that wants one, by autograd."""
        return self.by_role(self.raw_gradients(out, d_out, inputs, retain_graph), inputs)

    def raw_gradients(
        self, out: Tensor, d_out: Tensor, inputs: Inputs, retain_graph: bool = False
    ) -> dict[str, Tensor | None]:
        """The same as they are: by the names of parameters, on the device; None where autograd has none."""
        wanted = self.wanted(inputs)
        if not out.requires_grad:
            raise LayerFault("the output has no gradient: it is detached from x and from the weights", "no gradient")
        with faults_of_a_layer(self.device):
            found = torch.autograd.grad(out, list(wanted.values()), d_out, retain_graph, allow_unused=True)
        return dict(zip(wanted, found, strict=True))

    def by_role(self, gradients: Mapping[str, Tensor | None], inputs: Inputs) -> Results:
        """Return gradients of parameters by role; None is a gradient of zeros."""
        leaves = inputs.leaves()
        present = [(place, t) for place, t in self.places if place.name in gradients]
        parts = [(place, _or_zeros(gradients[place.name], t)) for place, t in present]
        of_inputs = {name: _or_zeros(g, leaves[name]) for name, g in gradients.items() if name in leaves}
        return in_float64(of_inputs | layouts.gather(parts))

    def d_out(self, case: Case) -> Tensor:
        """Return the gradient of the output."""
        return case.d_out.to(self.device, self.dtype)

    def step(self, case: Case, inputs: Inputs | None = None) -> Results:
        """Run a step: the output and every gradient."""
        inputs = self.load(case) if inputs is None else inputs
        out = self.forward(inputs)
        return in_float64({"out": out}) | self.gradients(out, self.d_out(case), inputs)

    def check_unchanged(self, case: Case) -> None:
        """Run a step; raise a `LayerFault` that names a tensor that has other bits after it."""
        inputs, d_out = self.load(case), self.d_out(case)
        given = {name: tensor for name, tensor in inputs._asdict().items() if tensor is not None}
        given |= {"the gradient of the output": d_out} | {place.name: tensor for place, tensor in self.places}
        before = {name: tensor.detach().clone() for name, tensor in given.items()}
        self.raw_gradients(self.forward(inputs), d_out, inputs)
        for name, tensor in given.items():
            if not torch.equal(tensor, before[name]):
                raise LayerFault(f"it changes {name}", f"changes {name}")

    @contextmanager
    def frozen(self, inputs: Inputs, trained: Sequence[str]) -> Iterator[None]:
        """Let only the named tensors want a gradient."""
        before = self.wanted(inputs)
        try:
            for name, tensor in before.items():
                tensor.requires_grad_(name in trained)
            yield
        finally:
            for tensor in before.values():
                tensor.requires_grad_()


def _checked(out: Any, x: Tensor) -> Tensor:
    """Return the output, of the shape, dtype and device of x; under autocast it may have that dtype."""
    first = out[0] if isinstance(out, tuple) and out else out
    if not isinstance(first, Tensor):
        must = "it must be a tensor, or a tuple that begins with it"
        raise LayerFault(f"the output is {checks.kind(first)}, but {must}", "type of the output")
    if first.shape != x.shape:
        shapes = f"{tuple(first.shape)}, but it must be {tuple(x.shape)}"
        raise LayerFault(f"the output has shape {shapes}", "shape of the output")
    allowed = [x.dtype]
    if torch.is_autocast_enabled(x.device.type):
        allowed.append(torch.get_autocast_dtype(x.device.type))
    if first.dtype not in allowed:
        raise LayerFault(f"the output has {first.dtype}, but x has {x.dtype}", "dtype of the output")
    if first.device != x.device:
        raise LayerFault(f"the output is on {first.device}, but x is on {x.device}", "device of the output")
    return first


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
