"""Count a model: its parameters, and what a forward keeps, by kind of part."""

from collections import Counter
from collections.abc import Iterator

from moeblaze_ref.memory.accounting import Tensor
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.parts import Part, Step


def parameters(model: Model) -> int:
    """Numbers that are trained."""
    return sum(weight.count for part in model.parts for weight in part.weights() if weight.trained)


def kept(model: Model, step: Step) -> Iterator[tuple[Part, Tensor]]:
    """Each tensor that the forward keeps for the backward, with the part that keeps it."""
    return ((part, tensor) for part in model.parts for tensor in part.kept(step))


def kept_bytes(model: Model, step: Step) -> Counter[str]:
    """Bytes of them, by kind of part."""
    found: Counter[str] = Counter()
    for part, tensor in kept(model, step):
        found[part.kind] += tensor.bytes
    return found
