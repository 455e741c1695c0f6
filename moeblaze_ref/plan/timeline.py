"""Memory over the time of one training step, moment by moment.

Moments are those of each part in the forward, of each part in the backward, and the optimizer's step. At a moment of a
part everything that the part keeps is there, and what it needs for a while.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from moeblaze_ref.memory.accounting import Tensor
from moeblaze_ref.plan.parts import Part, Step

PASSING = "passing tensors"  # alive for a while, beside what is kept
GRADIENTS = "gradients"
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Instant:
    """What is alive at one moment of a step."""

    phase: str  #: one of ``PHASES``
    where: str  #: the part that works
    held: Counter[str]  #: bytes by kind: kinds of parts, ``GRADIENTS``, ``PASSING``, and what is always there

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.held.total()


@dataclass(frozen=True)
class Resident:
    """What is there during the whole step, and what the optimizer adds."""

    held: Counter[str]  #: bytes by kind: weights, the optimizer's states, ...
    bytes_per_gradient: int  #: of one number
    optimizer_work: int  #: bytes beside all this in the optimizer's step


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.bytes for tensor in tensors)


def timeline(parts: Sequence[Part], step: Step, resident: Resident, stream: int) -> Iterator[Instant]:
    """Yield the moments of a step, the gradients being none when it begins.

    Parameters
    ----------
    parts : sequence of Part
        In the order of the forward.
    step : Step
    resident : Resident
    stream : int
        Bytes of the residual stream, one vector a token, which goes from part to part.

    Yields
    ------
    Instant
    """
    held = Counter(resident.held)
    for part in parts:
        held[part.kind] += size_of(part.kept(step))
        for moment in part.forward(step):
            yield _instant("forward", part, held, size_of(moment.beside) + stream)
    for part in reversed(parts):
        kept = part.kept(step)
        gradients = resident.bytes_per_gradient * sum(weight.count for weight in part.weights() if weight.trained)
        for moment in part.backward(step):
            now = held.copy()
            now[part.kind] -= size_of([tensor for tensor in kept if tensor.name in moment.freed])
            now[GRADIENTS] += gradients * moment.gradients
            yield _instant("backward", part, now, size_of(moment.beside) + 2 * stream)
        held[part.kind] -= size_of(kept)
        held[GRADIENTS] += gradients
    yield Instant("optimizer", "all weights", held + Counter({PASSING: resident.optimizer_work}))


def _instant(phase: str, part: Part, held: Counter[str], passing: int) -> Instant:
    return Instant(phase, part.kind, held + Counter({PASSING: passing}))
