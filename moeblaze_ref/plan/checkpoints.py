"""Activation checkpointing: a layer keeps little, and its backward begins with its forward once more."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from moeblaze_ref.core import checks
from moeblaze_ref.memory.accounting import Size, Tensor
from moeblaze_ref.plan.attention import SinkAttention
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.experts import GroupedExperts
from moeblaze_ref.plan.parts import Moment, Part, Step, Weight

CHECKPOINTS = {
    "none": "each part keeps what its backward needs",
    "layer": "a layer keeps its input",
    "selective": "a layer keeps its input, the outputs of its products, and the attention kernel's",
}


@dataclass(frozen=True)
class Checkpointed:
    """A layer under torch.utils.checkpoint, without reentrance."""

    parts: tuple[Part, ...]
    d: int
    tensor: int = 1  #: GPUs that divide its tokens
    selective: bool = False
    kind: ClassVar[str] = "checkpoints"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return the weights of its parts."""
        return tuple(weight for part in self.parts for weight in part.weights())

    def _step(self, part: Part, step: Step) -> Step:
        return step.divided(self.tensor) if part.by_token else step

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the input and, if it is selective, the products."""
        own = step.divided(self.tensor)
        products = (tensor for part in self.parts for tensor in part.products(self._step(part, step)))
        layer_input = Tensor("layer_input", (own.L, Size("d", self.d)), step.dtype)
        return (layer_input, *(products if self.selective else ()))

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return the moments of its parts, each of which frees what it would keep."""
        return tuple(
            Moment((*part.kept(own), *moment.beside))
            for part, own in ((part, self._step(part, step)) for part in self.parts)
            for moment in part.forward(own)
        )

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return the moments of the second forward, then those of the backward."""
        return tuple(self._moments(step))

    def _moments(self, step: Step) -> Iterator[Moment]:
        steps = [self._step(part, step) for part in self.parts]
        kept = [part.kept(own) for part, own in zip(self.parts, steps, strict=True)]
        # Tensors kept from the first forward are not computed again.
        gone = tuple(tensor.name for tensor in self.kept(step)[1:])
        for i, (part, own) in enumerate(zip(self.parts, steps, strict=True)):
            alive = tuple(tensor for rows in kept[: i + 1] for tensor in rows)
            yield from (Moment((*alive, *moment.beside), gone, gradients=0.0) for moment in part.forward(own))
        numbers, later = [sum(weight.count for weight in part.weights()) for part in self.parts], 0
        for i, (part, own) in reversed(list(enumerate(zip(self.parts, steps, strict=True)))):
            before = tuple(tensor for rows in kept[:i] for tensor in rows)
            for moment in part.backward(own):
                alive = tuple(tensor for tensor in kept[i] if tensor.name not in moment.freed)
                done = later + moment.gradients * numbers[i]
                yield Moment((*before, *alive, *moment.beside), gone, done / sum(numbers))
            later += numbers[i]

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing: a layer is no part of another."""
        return ()

    def share(self, tensor: int, expert: int) -> "Checkpointed":
        """Return the same with the share of each part."""
        return replace(self, parts=tuple(part.share(tensor, expert) for part in self.parts), tensor=tensor)


@dataclass(frozen=True)
class LayerArguments:
    """Arguments of the second call of checkpointed layers: they live as long as the graph, once for all layers."""

    masks: int = 0  #: tables of L * S numbers, added to logits
    kind: ClassVar[str] = "positions"
    by_token: ClassVar[bool] = False

    def weights(self) -> tuple[Weight, ...]:
        """Return nothing."""
        return ()

    def kept(self, step: Step) -> tuple[Tensor, ...]:
        """Return the tokens' positions, and the masks."""
        masks = (Tensor(f"mask_{i}", (step.L, step.S), step.dtype) for i in range(self.masks))
        return (Tensor("position_ids", (step.S,), "int64"), *masks)

    def forward(self, step: Step) -> tuple[Moment, ...]:
        """Return one moment."""
        return (Moment(),)

    def backward(self, step: Step) -> tuple[Moment, ...]:
        """Return nothing."""
        return ()

    def products(self, step: Step) -> tuple[Tensor, ...]:
        """Return nothing."""
        return ()

    def share(self, tensor: int, expert: int) -> "LayerArguments":
        """Return the same."""
        return self


def checkpointed_model(model: Model, how: str) -> Model:
    """Return the model with its layers as one of ``CHECKPOINTS`` says.

    Raises
    ------
    ValueError
        If there is no such way, or torch refuses it for this model.
    """
    if checks.check_name("checkpoint", how, CHECKPOINTS) == "none":
        return model
    parts = [part for layer in model.layers for part in layer]
    if how == "selective" and any(isinstance(part, GroupedExperts) and part.clamped for part in parts):
        raise ValueError(
            "checkpoint is 'selective', but gpt-oss's experts add their biases to the products in place, and torch "
            "refuses to keep what changes: it must be 'none' or 'layer'"
        )
    masks = 2 if any(isinstance(part, SinkAttention) for part in parts) else 0
    layers = tuple((Checkpointed(layer, model.d, selective=how == "selective"),) for layer in model.layers)
    return replace(model, before=(*model.before, LayerArguments(masks)), layers=layers)
