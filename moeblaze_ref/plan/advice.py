"""Changes to a run, ranked by the bytes they free: a run is counted again with each change."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moeblaze_ref.core.config import ITEMSIZE
from moeblaze_ref.core.units import GB
from moeblaze_ref.plan.experts import GroupedExperts, MoEBlock
from moeblaze_ref.plan.flops import forward_flops, part_flops
from moeblaze_ref.plan.parts import Part
from moeblaze_ref.plan.recipes import RECIPES, weight_bytes
from moeblaze_ref.plan.run import OFFLOADS, Run
from moeblaze_ref.plan.shares import Parallel

TERA = 10**12
TWICE = "twice the GPUs"
OF_RECIPES = {
    "bf16-master": "products of 16 bits",
    "bf16": "no float32 weights: small changes are lost",
    "fp32": "products of 32 bits",
    "adamw8bit": "no float32 weights, and moments of 8 bits",
    "muon": "another optimizer",
}
LEAST = 0.001  # of the peak: what a change must free
IN_KERNEL = "none: the kernel computes probabilities again while it works"


@dataclass(frozen=True)
class Change:
    """A change of a run, and what it brings."""

    what: str  #: the options to type
    saved: int  #: bytes of the peak of the fullest GPU
    cost: str  #: what a GPU does more in a step


def changes(run: Run, most: int = 5, spread: Callable[[Run], Run] = lambda run: run) -> list[Change]:
    """The changes that lower the peak, the best first.

    Parameters
    ----------
    run : Run
    most : int
        Changes to return.
    spread : function, optional
        Gives a changed run with its own imbalances. Default: those of ``run``.

    Returns
    -------
    list of Change
    """
    before = run.worst.peak.bytes
    found = [Change(what, before - other.worst.peak.bytes, cost) for what, other, cost in _possible(run, spread)]
    return sorted((one for one in found if one.saved > LEAST * before), key=lambda one: -one.saved)[:most]


def _possible(run: Run, spread: Callable[[Run], Run]) -> Iterator[tuple[str, Run, str]]:
    """Yield each changed run that can be counted."""
    for what, fields, cost in _candidates(run):
        try:
            other = spread(replace(run, **fields))
            if other.worst:
                yield what, other, cost
        except ValueError:  # the model cannot be divided, checkpointed or computed so
            continue


def _candidates(run: Run) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield options, the fields of the run that they change, and their cost."""
    parallel, step = run.parallel, run.step
    if run.checkpoint == "none":
        yield "--checkpoint selective", {"checkpoint": "selective"}, _made_again(run)
    if run.checkpoint != "layer":
        yield "--checkpoint layer", {"checkpoint": "layer"}, _computed(run, _layers(run))
    if parallel.data > 1 and parallel.zero < 3:
        more = replace(parallel, zero=parallel.zero + 1)
        yield f"--zero {more.zero}", {"parallel": more}, _of_zero(run, more)
    if parallel.zero:
        more = replace(parallel, data=2 * parallel.data)
        yield f"--data {more.data}", {"parallel": more}, _of_data(run, more)
    if parallel.data == 1:
        more = replace(parallel, data=2, zero=3)
        yield "--data 2 --zero 3", {"parallel": more}, f"{TWICE}, {_received(run, more)}"
    more = replace(parallel, pipeline=2 * parallel.pipeline)
    yield f"--pipeline {more.pipeline}", {"parallel": more}, _of_pipeline(run, more)
    if _routed(run):
        more = replace(parallel, data=2 * parallel.data, expert=2 * parallel.expert)
        yield f"--data {more.data} --expert {more.expert}", {"parallel": more}, _of_experts(run, more)
    for name in RECIPES:
        yield f"--recipe {name}", {"recipe": name}, OF_RECIPES[name]
    for name in OFFLOADS:
        yield f"--offload {name}", {"offload": (*run.offload, name)}, _moved(run, name)
    if step.batch > 1:
        half = replace(step, batch=step.batch // 2)
        yield f"--batch {half.batch}", {"step": half}, _of_batch(run)
    if step.attention == "math":
        yield "--attention flash", {"step": replace(step, attention="flash")}, IN_KERNEL
    yield from _policies(run)


def _policies(run: Run) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield our layer with the two policies that keep least, if it can take the place of the experts.

    Under a checkpoint it would be computed twice with any policy.
    """
    if run.checkpoint != "none":
        return
    experts = [part for part in run.model.parts if isinstance(part, GroupedExperts)]
    costs = {"minimal": "none: Y_swi is computed again within a product"}
    costs["inputs"] = _computed(run, experts, 2 / 3)  # two of three products
    for policy, cost in costs.items():
        try:
            yield f"--experts moeblaze/{policy}", {"model": run.model.in_system("moeblaze", policy)}, cost
        except ValueError:
            return


def _layers(run: Run) -> list[Part]:
    return [part for layer in run.model.layers for part in layer]


def _computed(run: Run, parts: Sequence[Part], share: float = 1.0) -> str:
    """The cost of computing the forward of some parts once more, on each GPU."""
    flops = share * sum(part_flops(part, run.step) for part in parts)
    on_gpu = flops * run.parallel.micro_batches / (run.parallel.tensor * run.parallel.pipeline)
    return f"{on_gpu / TERA:,.1f} TFLOP more, {flops / (3 * forward_flops(run.model, run.step)):.0%}"


def _made_again(run: Run) -> str:
    """The cost of computing again what a layer keeps, but for its products."""
    works = [one for one in run.worst.work if one.layer is not None]
    products = [{tensor.name for tensor in one.part.products(one.step)} for one in works]
    again = sum(
        tensor.bytes
        for one, names in zip(works, products, strict=True)
        for tensor in one.kept
        if tensor.name not in names
    )
    return f"{again * run.parallel.micro_batches / GB:,.1f} GB of norms, activations and copies written again"


def _of_batch(run: Run) -> str:
    """The cost of as many tokens in twice as many micro batches: weights are read in each forward and backward."""
    read = 2 * run.parallel.micro_batches * run.worst.whole_weights
    return f"twice the micro batches for as many tokens: {read / GB:,.1f} GB more of weights read"


def _of_data(run: Run, parallel: Parallel) -> str:
    """The cost of more data-parallel GPUs: each gets a larger part of the gradients' sums and of the weights."""
    more = 1 / run.parallel.data - 1 / parallel.data
    trips = 2 * parallel.micro_batches + 1 if parallel.zero == 3 else 2
    return f"{TWICE}, {trips * more * run.worst.whole_weights / GB:,.1f} GB more of gradients and weights received"


def _of_pipeline(run: Run, parallel: Parallel) -> str:
    """The cost of more stages: what a stage sends on to its neighbours, and how long it waits."""
    neighbours = min(parallel.pipeline - 1, 2) - min(run.parallel.pipeline - 1, 2)
    sent = neighbours * parallel.micro_batches * run.worst.stream / GB
    return f"{TWICE}, {sent:,.2f} GB more sent; each stage waits {parallel.bubble:.0%} of a step"


def _routed(run: Run) -> list[GroupedExperts | MoEBlock]:
    return [part for part in run.model.parts if isinstance(part, GroupedExperts | MoEBlock)]


def _of_experts(run: Run, parallel: Parallel) -> str:
    """The cost of dividing the experts more: rows travel there and back, once more if a layer is computed again."""
    numbers = sum(int(run.step.L) * part.k * part.d for part in _routed(run))
    more = 1 / run.parallel.expert - 1 / parallel.expert  # of all rows that leave
    trips = 6 if run.checkpoint == "layer" else 4
    sent = trips * parallel.micro_batches * more * numbers / (parallel.tensor * parallel.pipeline)
    return f"{TWICE}, {sent * ITEMSIZE[RECIPES[run.recipe].dtype] / GB:,.1f} GB more of routed rows sent"


def _received(run: Run, parallel: Parallel) -> str:
    """Weights that the other GPUs hold: for each forward and backward."""
    recipe, weights = RECIPES[run.recipe], run.worst.weights
    away = sum(weight_bytes(recipe, one.count) * (1 - 1 / parallel.copies(one)) for one in weights)
    return f"{2 * parallel.micro_batches * away / GB:,.1f} GB of weights received"


def _of_zero(run: Run, parallel: Parallel) -> str:
    """The cost of ZeRO's next stage: sums of gradients for each micro batch, weights for each forward and backward."""
    batches = parallel.micro_batches
    if parallel.zero == 3:
        return _received(run, parallel)
    return "none" if parallel.zero == 1 or batches == 1 else f"gradients are summed {batches} times, not once"


def _moved(run: Run, name: str) -> str:
    """The cost of an offload: bytes to the host and back."""
    stage = run.worst
    number = stage.stepped_weights if name == "optimizer" else stage.kept.total() * run.parallel.micro_batches
    return f"{2 * number / GB:,.1f} GB to the host and back"
