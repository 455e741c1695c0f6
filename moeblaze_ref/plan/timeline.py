"""Memory over the time of one training step, moment by moment.

Moments are those of each part in the forward, of each part in the backward, and the optimizer's step. At a moment of a
part everything that the part keeps is there, and what it needs for a while.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from moeblaze_ref.memory.accounting import Tensor
from moeblaze_ref.plan.parts import Moment, Part, Step

PASSING = "passing tensors"  # alive for a while, beside what is kept
GRADIENTS = "gradients"
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Instant:
    """The bytes that are alive at one moment of a step."""

    phase: str  #: one of ``PHASES``
    where: str  #: the part that works
    held: Counter[str]  #: bytes by kind: kinds of parts, ``GRADIENTS``, ``PASSING``, and what is always there

    @property
    def bytes(self) -> int:
        """All of them."""
        return self.held.total()


@dataclass(frozen=True)
class Work:
    """A part on one GPU, and the step that it sees."""

    part: Part
    step: Step
    layer: int | None  #: number of its layer; None before and after the layers
    gradients: int  #: bytes of its weights' gradients, as they are held
    staying: int  #: of these, bytes that are there from the start
    forward: int = 0  #: bytes beside its own tensors in the forward: the residual stream, gathered weights, ...
    backward: int = 0  #: the same in the backward

    @property
    def kept(self) -> tuple[Tensor, ...]:
        """The tensors that the part keeps."""
        return _kept(self.part, self.step)

    @property
    def where(self) -> str:
        """The part in words."""
        return self.part.kind if self.layer is None else f"{self.part.kind} of layer {self.layer}"


@dataclass(frozen=True)
class Resident:
    """The bytes that are there during the whole step."""

    held: Counter[str]  #: bytes by kind
    optimizer_work: int = 0  #: bytes beside all this in the optimizer's step
    waiting: Counter[str] = field(
        default_factory=Counter
    )  #: kept for other micro batches: gone when the optimizer runs
    offloads: bool = False  #: whether what is kept lies elsewhere, but for the part that works


@lru_cache(maxsize=256)  # the layers of a model are alike
def _kept(part: Part, step: Step) -> tuple[Tensor, ...]:
    return part.kept(step)


@lru_cache(maxsize=256)
def _moments(part: Part, step: Step, phase: str) -> tuple[Moment, ...]:
    return part.forward(step) if phase == "forward" else part.backward(step)


def size_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of some tensors."""
    return sum(tensor.bytes for tensor in tensors)


def timeline(work: Sequence[Work], resident: Resident) -> Iterator[Instant]:
    """Yield the moments of a step.

    Parameters
    ----------
    work : sequence of Work
        In the order of the forward.
    resident : Resident

    Yields
    ------
    Instant
    """
    held = resident.held + resident.waiting
    held[GRADIENTS] += sum(one.staying for one in work)
    for one in work:
        held[one.part.kind] += size_of(one.kept)
        for moment in _moments(one.part, one.step, "forward"):
            passing = Counter({PASSING: size_of(moment.beside) + one.forward})
            yield Instant("forward", one.where, held + passing)
        held[one.part.kind] -= size_of(one.kept) * resident.offloads
    for one in reversed(work):
        held[one.part.kind] += size_of(one.kept) * resident.offloads
        kept, gradients = one.kept, one.gradients - one.staying
        for moment in _moments(one.part, one.step, "backward"):
            now = held + Counter({PASSING: size_of(moment.beside) + one.backward})
            now[one.part.kind] -= size_of([tensor for tensor in kept if tensor.name in moment.freed])
            now[GRADIENTS] += int(gradients * moment.gradients)
            yield Instant("backward", one.where, now)
        held[one.part.kind] -= size_of(kept)
        held[GRADIENTS] += gradients
    held.subtract(resident.waiting)
    yield Instant("optimizer", "all weights", held + Counter({PASSING: resident.optimizer_work}))
