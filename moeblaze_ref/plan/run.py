"""A training run, with every setting that decides its bytes, and what one GPU of it holds."""

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import mean

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ITEMSIZE
from moeblaze_ref.plan import recipes, shares
from moeblaze_ref.plan.checkpoints import Checkpointed, checkpointed_model
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.experts import GroupedExperts, MoEBlock, Router
from moeblaze_ref.plan.parts import Part, Step, Weight
from moeblaze_ref.plan.shares import Parallel
from moeblaze_ref.plan.timeline import PHASES, Instant, Resident, Work, size_of, timeline

WEIGHTS, MASTER, STATES = "weights", "float32 weights", "optimizer states"
BUFFERS = "communication buffers"
OFFLOADS = ("optimizer", "activations")


@dataclass(frozen=True)
class Run:
    """A model, its step, and how the run is set up.

    Parameters
    ----------
    model : Model
    step : Step
        Of one micro batch, for one GPU of each data-parallel group.
    recipe : str
        One of ``recipes.RECIPES``.
    parallel : Parallel
    checkpoint : str
        One of ``checkpoints.CHECKPOINTS``.
    offload : tuple of str
        What lies in the host's memory, of ``OFFLOADS``.
    imbalances : tuple of float
        Rows that the fullest GPU's experts get, as multiples of an even share: one for each layer with experts, or
        fewer, each for as many layers in a row.

    Raises
    ------
    ValueError, TypeError
        If a name is unknown, or the model cannot be divided so.
    """

    model: Model
    step: Step
    recipe: str = "bf16-master"
    parallel: Parallel = Parallel()
    checkpoint: str = "none"
    offload: tuple[str, ...] = ()
    imbalances: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        checks.check_name("recipe", self.recipe, recipes.RECIPES)
        for name in self.offload:
            checks.check_name("offload", name, OFFLOADS)
        for one in self.imbalances:
            checks.check_within("imbalance", one, 0)

    @property
    def imbalance(self) -> float:
        """Rows that the fullest GPU's experts get in all layers together, as a multiple of an even share."""
        return mean(self.imbalances)

    @cached_property
    def stages(self) -> tuple["Stage", ...]:
        """The stages of the pipeline, each with the contents of one of its GPUs."""
        step = replace(self.step, dtype=recipes.RECIPES[self.recipe].dtype)
        whole = checkpointed_model(self.model, self.checkpoint)
        factors, models = self._factors, shares.stages(whole, self.parallel)
        firsts = accumulate((len(model.layers) for model in models), initial=0)
        return tuple(
            Stage(self, number, first, shares.on_one_gpu(model, self.parallel, factors[first:]), step)
            for number, (first, model) in enumerate(zip(firsts, models, strict=False))
        )

    @property
    def routed_layers(self) -> int:
        """Layers with routed experts."""
        return sum(map(_is_routed, self.model.layers))

    @property
    def _factors(self) -> list[float]:
        """The imbalance of each layer of the model; 1 where there are no routed experts."""
        routed = [_is_routed(layer) for layer in self.model.layers]
        before = accumulate(routed, initial=0)
        step = len(self.imbalances) / max(self.routed_layers, 1)
        return [
            self.imbalances[int(count * step)] if here else 1.0 for here, count in zip(routed, before, strict=False)
        ]

    @cached_property
    def worst(self) -> "Stage":
        """The stage whose GPUs need most memory."""
        return max(self.stages, key=lambda stage: stage.peak.bytes)


@dataclass(frozen=True)
class Stage:
    """One GPU of a stage of the pipeline."""

    run: Run
    number: int
    first_layer: int  #: number of its first layer in the model
    model: Model  #: its share
    step: Step

    @property
    def routed_layers(self) -> int:
        """Its layers with routed experts."""
        first = self.first_layer
        return sum(map(_is_routed, self.run.model.layers[first : first + len(self.model.layers)]))

    @property
    def _recipe(self) -> recipes.Recipe:
        return recipes.RECIPES[self.run.recipe]

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """The weights here, before ZeRO divides them."""
        return tuple(weight for part in self.model.parts for weight in part.weights())

    def _counts(self, from_zero: int) -> Iterator[tuple[Weight, int]]:
        """Yield each weight and how many of its numbers lie here, if ZeRO divides from that stage on."""
        return ((weight, self.run.parallel.held(weight, from_zero)) for weight in self.weights)

    @cached_property
    def resident(self) -> Counter[str]:
        """Bytes, by kind, of what is there during the whole step on the GPU."""
        held: Counter[str] = Counter()
        for _, count in self._counts(from_zero=3):
            held[WEIGHTS] += recipes.weight_bytes(self._recipe, count)
        if "optimizer" not in self.run.offload:
            held += self.optimizer
        held[BUFFERS] += self.buffers
        return held

    @cached_property
    def optimizer(self) -> Counter[str]:
        """Bytes of the optimizer's states and float32 weights, wherever they lie."""
        held: Counter[str] = Counter()
        for weight, count in self._counts(from_zero=1):
            if weight.trained:
                held[MASTER] += recipes.master_bytes(self._recipe, count)
                held[STATES] += recipes.state_bytes(self._recipe, weight, count)
        return held

    def _gradients(self, part: Part) -> int:
        return sum(self._gradient(one) for one in part.weights())

    def _gradient(self, weight: Weight) -> int:
        return recipes.weight_bytes(self._recipe, self.run.parallel.held(weight, 2)) if weight.trained else 0

    def _staying(self, part: Part) -> int:
        """Bytes of gradients that are there in the forward too: those of earlier micro batches, or DDP's buckets."""
        parallel = self.run.parallel
        if parallel.micro_batches > 1:
            return self._gradients(part)
        sent = (one for one in part.weights() if parallel.copies(one) > 1 and parallel.zero < 2)
        return sum(map(self._gradient, sent))

    @cached_property
    def stream(self) -> int:
        """Bytes of the residual stream: one vector for each token of this GPU."""
        own = self.step.divided(self.run.parallel.tensor)
        return int(own.L) * self.model.d * ITEMSIZE[self.step.dtype]

    @cached_property
    def buffers(self) -> int:
        """Bytes of buffers that are allocated once: rows to and from experts, and a pipeline's inputs and outputs."""
        rows = max((self._routed_rows(part) for part in _inner(self.model.parts)), default=0)
        experts = 2 * rows * self.model.d * ITEMSIZE[self.step.dtype] if self.run.parallel.expert > 1 else 0
        ends = (self.number > 0) + (self.number < self.run.parallel.pipeline - 1)
        return experts + ends * (self.in_flight + 1) * self.stream

    def _routed_rows(self, part: Part) -> int:
        if not isinstance(part, GroupedExperts):
            return 0
        return int(part.rows(self.step.divided(self.run.parallel.tensor)))

    @property
    def in_flight(self) -> int:
        """Micro batches whose kept tensors are here at once."""
        return self.run.parallel.in_flight(self.number)

    @cached_property
    def work(self) -> tuple[Work, ...]:
        """Each part with its step, in the order of the forward."""
        parallel, gathered = self.run.parallel, self.gathered
        gradients = gathered if parallel.zero >= 2 else 0
        return tuple(
            Work(
                part,
                shares.step_of(part, self.step, parallel),
                None if layer is None else layer + self.first_layer,
                self._gradients(part),
                self._staying(part),
                self.stream + (gathered if parallel.zero == 3 else 0),
                2 * self.stream + gradients + (gathered if parallel.zero == 3 else 0),
            )
            for layer, part in shares.layer_of(self.model)
        )

    @cached_property
    def gathered(self) -> int:
        """Bytes of whole weights, or of their gradients, while ZeRO gathers them: two layers, and all beside layers."""
        layers = [self._divided(layer) for layer in self.model.layers]
        return 2 * max(layers) + self._divided((*self.model.before, *self.model.after))

    def _divided(self, parts: Sequence[Part]) -> int:
        """Bytes of the weights of which other GPUs have copies."""
        weights = (weight for part in parts for weight in part.weights() if self.run.parallel.copies(weight) > 1)
        return sum(recipes.weight_bytes(self._recipe, weight.count) for weight in weights)

    @cached_property
    def whole_weights(self) -> int:
        """Bytes of all weights of this GPU's share, before ZeRO divides them."""
        return sum(recipes.weight_bytes(self._recipe, weight.count) for weight in self.weights)

    @property
    def stepped_weights(self) -> int:
        """Bytes of the weights that the optimizer of this GPU changes: those whose states lie here."""
        counts = (count for weight, count in self._counts(from_zero=1) if weight.trained)
        return recipes.weight_bytes(self._recipe, sum(counts))

    @cached_property
    def offloaded(self) -> int:
        """Bytes in the host's memory."""
        optimizer = self.optimizer.total() if "optimizer" in self.run.offload else 0
        return optimizer + (self.in_flight * self.kept.total() if "activations" in self.run.offload else 0)

    @cached_property
    def kept(self) -> Counter[str]:
        """Bytes of one micro batch, by kind of part, that are kept from its forward to its backward."""
        held: Counter[str] = Counter()
        for one in self.work:
            held[one.part.kind] += size_of(one.kept)
        return held

    @cached_property
    def timeline(self) -> tuple[Instant, ...]:
        """The moments of the step when most micro batches are in flight."""
        offloads = "activations" in self.run.offload
        others = 0 if offloads else self.in_flight - 1
        waiting = Counter({kind: others * number for kind, number in self.kept.items()})
        numbers = [count for weight, count in self._counts(from_zero=1) if weight.trained]
        work = 0 if "optimizer" in self.run.offload else recipes.work_bytes(self._recipe, numbers)
        resident = Resident(self.resident, work, waiting, offloads)
        return tuple(timeline(self.work, resident))

    @cached_property
    def peaks(self) -> dict[str, Instant]:
        """The moment of each phase when most is held."""
        return {phase: self._fullest(one for one in self.timeline if one.phase == phase) for phase in PHASES}

    @property
    def by_kind(self) -> Counter[str]:
        """Bytes of each kind at the peak of the phase that has most of it."""
        return functools.reduce(operator.or_, (instant.held for instant in self.peaks.values()))

    @cached_property
    def peak(self) -> Instant:
        """The moment when most is held."""
        return self._fullest(self.peaks.values())

    @staticmethod
    def _fullest(instants: Iterable[Instant]) -> Instant:
        return max(instants, key=lambda instant: instant.bytes)


def _is_routed(layer: Sequence[Part]) -> bool:
    return any(isinstance(part, Router | MoEBlock) for part in layer)


def _inner(parts: Sequence[Part]) -> Iterator[Part]:
    """Yield parts, and those of a checkpointed layer in its place."""
    for part in parts:
        yield from part.parts if isinstance(part, Checkpointed) else (part,)
