"""A layer that is checked, with the numbers of a case in its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.verify.layers import adapter as adapters
from moeblaze_ref.verify.layers import layouts
from moeblaze_ref.verify.layers.adapter import Adapter, Factory, Sizes
from moeblaze_ref.verify.layers.layouts import BUFFERS, Place
from moeblaze_ref.verify.layers.reference import Case, Results, in_float64


class Inputs(NamedTuple):
    """What a layer is called with."""

    x: Tensor  # (L, d)
    topk_index: Tensor | None = None  # (L, k)
    topk_weights: Tensor | None = None  # (L, k)

    def arguments(self) -> list[Tensor]:
        """Return those that are there."""
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
        """Make a layer, and find its weights."""
        adapter = adapters.make(factory, sizes, dtype, device)
        return cls(adapter, adapter.places(sizes), dtype, device)

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
        index = case.topk_index.to(self.device, self.adapter.index_dtype)
        return Inputs(x, index, self._leaf(case.topk_weights, self.gate_dtype))

    def _leaf(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(self.device, dtype, copy=True).requires_grad_()

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the output (L, d)."""
        out = self.adapter.module(*inputs.arguments())
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first

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

    @contextmanager
    def frozen(self, inputs: Inputs, trained: Sequence[str]) -> Iterator[None]:
        """Let those that are named alone want a gradient."""
        before = self.wanted(inputs)
        try:
            for name, tensor in before.items():
                tensor.requires_grad_(name in trained)
            yield
        finally:
            for tensor in before.values():
                tensor.requires_grad_()


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if gradient is None else gradient
