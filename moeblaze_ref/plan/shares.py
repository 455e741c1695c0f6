"""The part of a model, and of a step, that one GPU of many holds.

Data-parallel groups hold copies of a model. Tensor parallelism divides heads, widths and the vocabulary; where it
divides nothing, it divides the tokens of a sequence (sequence parallelism). Experts are divided among
GPUs of the data-parallel and tensor-parallel groups. A pipeline divides the layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from moeblaze_ref.core import checks
from moeblaze_ref.plan.checkpoints import Checkpointed
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.experts import ExpertParallelBlock, GroupedExperts
from moeblaze_ref.plan.parts import Embedding, Head, Part, Step, Weight

MOST = 10**6  # GPUs of a group, and micro batches
ZERO = {
    0: "each GPU holds everything",
    1: "divides the optimizer's states and the float32 weights",
    2: "divides also the gradients",
    3: "divides also the weights, which are gathered layer by layer (FSDP2)",
}


@dataclass(frozen=True)
class Parallel:
    """How many GPUs divide what.

    Parameters
    ----------
    data, tensor, pipeline : int
        GPUs in a group of each kind; their product is the number of GPUs.
    expert : int
        GPUs that divide the experts; divides data * tensor.
    zero : int
        What the data-parallel group divides, one of ``ZERO``.
    micro_batches : int
        Forwards and backwards before the optimizer's step.

    Raises
    ------
    ValueError, TypeError
        If a number is no integer of at least 1, if zero is none of 0 to 3, or if expert does not divide data * tensor.
    """

    data: int = 1
    expert: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "expert", "tensor", "pipeline", "micro_batches"):
            checks.check_int(name, getattr(self, name), at_least=1, at_most=MOST)
        checks.check_int("zero", self.zero, at_least=0, at_most=max(ZERO))
        if self.zero and self.data == 1:
            raise ValueError(f"zero is {self.zero}, but data is 1: ZeRO divides among 2 or more data-parallel GPUs")
        if (self.data * self.tensor) % self.expert:
            raise ValueError(
                f"expert is {self.expert}, but it must divide data * tensor, {self.data} * {self.tensor}: "
                "the GPUs that hold one stage of the pipeline divide the experts"
            )

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline

    def copies(self, weight: Weight) -> int:
        """GPUs that hold the same weight, and may divide it among each other."""
        return self.data * self.tensor // self.expert if weight.of_experts else self.data

    def held(self, weight: Weight, from_zero: int) -> int:
        """Numbers that a GPU holds of a weight, of its gradient or of a state, which ZeRO divides from a stage on.

        Stages 1 and 2 divide all numbers evenly, as the flat buffers of Megatron and DeepSpeed do. Stage 3 divides rows
        as FSDP2 does: the first GPU has the most. FSDP2 leaves buffers whole.
        """
        if self.zero < from_zero or not weight.trained:
            return weight.count
        copies = self.copies(weight)
        return rows_of(weight, copies) if self.zero == 3 else -(-weight.count // copies)

    def in_flight(self, stage: int) -> int:
        """Micro batches of which a stage holds what is kept, one forward and one backward in turn (1F1B)."""
        return min(self.pipeline - stage, self.micro_batches)

    @property
    def bubble(self) -> float:
        """The part of a step's time in which a stage waits, if all stages take as long."""
        return (self.pipeline - 1) / (self.micro_batches + self.pipeline - 1)


def rows_of(weight: Weight, gpus: int, rank: int = 0) -> int:
    """Numbers of a weight that FSDP2 gives a rank: as many rows as the others have, or those that are left."""
    rows = weight.dims[0]
    most = -(-rows // gpus)
    return min(most, max(0, rows - rank * most)) * (weight.count // rows)


def stages(model: Model, parallel: Parallel) -> tuple[Model, ...]:
    """The model of each stage of the pipeline: the layers in their order, the first stages with one more.

    If the head's weight is the embedding, the first stage and the last one have a copy each.

    Raises
    ------
    ValueError
        If there are more stages than layers.
    """
    count, layers = parallel.pipeline, len(model.layers)
    if count > layers:
        raise ValueError(f"pipeline is {count}, but {model.name} has {layers} layers, and each stage needs one")
    sizes = [layers // count + (stage < layers % count) for stage in range(count)]
    ends = list(accumulate(sizes))
    return tuple(
        replace(
            model,
            before=_untied(model.before, count) if stage == 0 else model.everywhere,
            layers=model.layers[end - size : end],
            after=_untied(model.after, count) if stage == count - 1 else (),
        )
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


def _untied(parts: Sequence[Part], stages: int) -> tuple[Part, ...]:
    """Return parts of which, with several stages, none shares a weight with another stage."""
    tied = (Embedding, Head) if stages > 1 else ()
    return tuple(replace(part, tied=False) if isinstance(part, tied) else part for part in parts)


def on_one_gpu(model: Model, parallel: Parallel, imbalances: Sequence[float]) -> Model:
    """The model with the share of each part that one GPU of a stage has.

    If several GPUs divide the experts, those here get so many times an even share of the routed rows, layer by layer.

    Raises
    ------
    ValueError
        If heads, widths, experts or the vocabulary cannot be divided so.
    """

    def share(parts: Sequence[Part]) -> tuple[Part, ...]:
        return tuple(part.share(parallel.tensor, parallel.expert) for part in parts)

    def share_unevenly(parts: Sequence[Part], imbalance: float) -> tuple[Part, ...]:
        return share(parts) if parallel.expert == 1 else tuple(uneven(part, imbalance) for part in share(parts))

    return replace(
        model,
        before=share(model.before),
        layers=tuple(map(share_unevenly, model.layers, imbalances)),
        after=share(model.after),
    )


def uneven(part: Part, imbalance: float) -> Part:
    """Return a part whose experts get so many times their even share of rows."""
    if isinstance(part, Checkpointed):
        return replace(part, parts=tuple(uneven(one, imbalance) for one in part.parts))
    return replace(part, imbalance=imbalance) if isinstance(part, GroupedExperts | ExpertParallelBlock) else part


def step_of(part: Part, step: Step, parallel: Parallel) -> Step:
    """The step that a part of one GPU sees: all tokens, or its share of each sequence.

    Raises
    ------
    ValueError
        If the sequence cannot be divided so.
    """
    return step.divided(parallel.tensor) if part.by_token else step


def layer_of(model: Model) -> Iterator[tuple[int | None, Part]]:
    """Yield each part with the number of its layer, None before and after the layers."""
    yield from ((None, part) for part in model.before)
    yield from ((number, part) for number, layer in enumerate(model.layers) for part in layer)
    yield from ((None, part) for part in model.after)
