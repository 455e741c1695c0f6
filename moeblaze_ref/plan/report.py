"""A run's plan as tables for a terminal and as JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moeblaze_ref.core.units import GB, GIB
from moeblaze_ref.plan import account, recipes, shares
from moeblaze_ref.plan.advice import Change
from moeblaze_ref.plan.attention import kernels_of
from moeblaze_ref.plan.checkpoints import CHECKPOINTS
from moeblaze_ref.plan.flops import forward_flops
from moeblaze_ref.plan.proofs import proof
from moeblaze_ref.plan.run import Run, Stage
from moeblaze_ref.plan.skew import EVEN, Unevenness
from moeblaze_ref.plan.timeline import Instant

CAPACITIES = (24, 48, 80, 96, 141, 192)  # GB, as the makers of GPUs print them
OVERHEAD = 0.05  # of the peak: what an allocator adds, and the context of CUDA; an assumption


def as_json(
    run: Run, changes: Sequence[Change], uneven: Unevenness = EVEN, overhead: float = OVERHEAD
) -> dict[str, Any]:
    """The plan as plain data: what ``moeblaze plan --json`` prints.

    Returns
    -------
    dict
        {model, parameters, beside, gpus, step, recipe, ..., notes, stages: [{stage, layers, in_flight, resident, kept,
        host_bytes, peak: {phase, where, bytes, by_kind}, peaks: [one of each phase], known_by}], worst,
        with_overhead_bytes, changes: [{change, saved_bytes, cost}]}. Bytes are ints.
    """
    parallel, step = run.parallel, run.step
    return {
        "model": run.model.name,
        "parameters": account.parameters(run.model),
        "beside": dict(run.model.beside),
        "gpus": parallel.gpus,
        "parallel": {name: getattr(parallel, name) for name in parallel.__dataclass_fields__},
        "batch": step.batch,
        "sequence": step.sequence,
        "attention": step.attention,
        "recipe": run.recipe,
        "checkpoint": run.checkpoint,
        "offload": list(run.offload),
        "imbalance": run.imbalance,
        "imbalances": {"source": uneven.source, "layers": list(run.imbalances), "batch_peaks": uneven.peaks(run)},
        "bubble": parallel.bubble,
        "forward_flops": forward_flops(run.model, step),
        "notes": notes(run),
        "stages": [_stage_as_json(stage) for stage in run.stages],
        "worst": run.worst.number,
        "with_overhead_bytes": with_overhead(run, overhead),
        "changes": [{"change": one.what, "saved_bytes": one.saved, "cost": one.cost} for one in changes],
    }


def _stage_as_json(stage: Stage) -> dict[str, Any]:
    return {
        "stage": stage.number,
        "layers": [stage.first_layer, stage.first_layer + len(stage.model.layers)],
        "in_flight": stage.in_flight,
        "resident": dict(stage.resident),
        "gradients": sum(one.gradients for one in stage.work),
        "kept": dict(stage.kept),
        "host_bytes": stage.offloaded,
        "peak": _instant_as_json(stage.peak),
        "peaks": [_instant_as_json(instant) for instant in stage.peaks.values()],
        "known_by": {kind: proof(stage.run, kind) for kind in stage.by_kind},
    }


def _instant_as_json(instant: Instant) -> dict[str, Any]:
    return {"phase": instant.phase, "where": instant.where, "bytes": instant.bytes, "by_kind": dict(instant.held)}


def with_overhead(run: Run, overhead: float = OVERHEAD) -> int:
    """Bytes that a GPU must have: the worst stage's peak, and what is assumed for the allocator."""
    return int(run.worst.peak.bytes * (1 + overhead))


def notes(run: Run) -> list[str]:
    """Return the notes that a reader of the numbers needs."""
    found = [f"Not planned: {name}, {count:,} parameters." for name, count in run.model.beside]
    if run.step.sequence > run.model.longest:
        found.append(
            f"Warning: sequence is {run.step.sequence}, but the model's positions end at {run.model.longest} "
            "(max_position_embeddings)."
        )
    return [*run.model.notes, *found]


def tables(
    run: Run, changes: Sequence[Change], uneven: Unevenness = EVEN, overhead: float = OVERHEAD
) -> RenderableType:
    """The plan of the fullest GPU, what fits where, the stages of a pipeline, and the changes; for 100 columns."""
    remarks = (_assumptions(run, uneven, overhead), *notes(run))
    return Group(
        _headline(run),
        peak_table(run),
        *(Padding(Text(sentence), (0, 0, 1, 1)) for sentence in fits(run, uneven, overhead)),
        *([stages_table(run)] if run.parallel.pipeline > 1 else []),
        changes_table(changes),
        *(Padding(Text(remark), (0, 0, 1, 1)) for remark in remarks),
    )


def _headline(run: Run) -> Text:
    parallel, step = run.parallel, run.step
    return Text(
        f"\n{run.model.name}: {account.parameters(run.model):,} parameters; {step.batch} x {step.sequence:,} tokens a "
        f"micro batch, {parallel.micro_batches} a step, on {parallel.gpus:,} GPU{'s' * (parallel.gpus > 1)}; "
        f"{recipes.RECIPES[run.recipe].says}"
    )


def peak_table(run: Run) -> Table:
    """One row for each kind of bytes on the fullest GPU: at the peak of the step, and at that of each phase."""
    stage = run.worst
    peak, phases = stage.peak, stage.peaks
    where = f"stage {stage.number}, " if run.parallel.pipeline > 1 else ""
    table = _table(f"At the peak of the fullest GPU: {where}{peak.phase}, {peak.where}; phases in GB")
    table.add_column("what")
    for name in ("bytes", "part", *phases):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("known by", no_wrap=True)
    for kind in sorted(stage.by_kind, key=lambda one: (-peak.held[one], -stage.by_kind[one])):
        number, of_phases = peak.held[kind], _in_gb(instant.held[kind] for instant in phases.values())
        table.add_row(kind, f"{number:,}", f"{number / peak.bytes:.1%}", *of_phases, proof(run, kind))
    table.add_section()
    together = _in_gb(instant.bytes for instant in phases.values())
    table.add_row("together", f"{peak.bytes:,}", "", *together, f"{peak.bytes / GIB:,.2f} GiB", style="bold")
    if stage.offloaded:
        table.add_row("in the host's memory", f"{stage.offloaded:,}")
    return table


def _in_gb(numbers: Iterable[int]) -> list[str]:
    return [f"{number / GB:,.3f}" for number in numbers]


def fits(run: Run, uneven: Unevenness, overhead: float) -> list[str]:
    """Sentences: what a GPU needs, which capacities are enough and, if batches differ, for how many of them."""
    needed = with_overhead(run, overhead)
    enough = [one for one in CAPACITIES if needed <= one * GB]
    least = f"{enough[0]} GB are enough" if enough else f"{CAPACITIES[-1]} GB are not enough"
    short = [f"{one} GB: {(needed - one * GB) / GB:,.1f} short" for one in CAPACITIES if one not in enough]
    found = [f"{needed / GB:,.1f} GB with {overhead:.0%} for the allocator: {least}. {'; '.join(short)}"]
    if len(uneven.shares) > 1:
        needs = [peak * (1 + overhead) for peak in uneven.peaks(run)]
        parts = (f"{one} GB {sum(need > one * GB for need in needs) / len(needs):.0%}" for one in CAPACITIES)
        found.append(f"Batches whose peak is above a capacity: {', '.join(parts)}.")
    return found


def stages_table(run: Run) -> Table:
    """One row for each stage of the pipeline."""
    table = _table(f"Stages of the pipeline; each waits {run.parallel.bubble:.1%} of a step (1F1B)")
    for name in ("stage", "layers", "in flight", "weights GB", "kept GB", "peak GB", "peak at"):
        table.add_column(name, justify="left" if name == "peak at" else "right")
    for stage in run.stages:
        first, count = stage.first_layer, len(stage.model.layers)
        table.add_row(
            str(stage.number),
            f"{first} to {first + count - 1}",
            str(stage.in_flight),
            f"{stage.resident['weights'] / GB:,.2f}",
            f"{stage.kept.total() / GB:,.2f}",
            f"{stage.peak.bytes / GB:,.2f}",
            f"{stage.peak.phase}, {stage.peak.where}",
        )
    return table


def changes_table(changes: Sequence[Change]) -> Table:
    """One row for each change, the best first."""
    table = _table("What would help most, each by itself")
    table.add_column("option", no_wrap=True)
    table.add_column("frees GB", justify="right", no_wrap=True)
    table.add_column("costs each GPU in a step")
    for one in changes:
        table.add_row(one.what, f"{one.saved / GB:,.1f}", one.cost)
    return table


def _assumptions(run: Run, uneven: Unevenness, overhead: float) -> str:
    step = replace(run.step, dtype=recipes.RECIPES[run.recipe].dtype)
    sentences = (
        f"Attention runs in: {', '.join(kernels_of(run.model.parts, step))}.",
        f"Checkpoints: {CHECKPOINTS[run.checkpoint]}.",
        f"ZeRO {run.parallel.zero}: {shares.ZERO[run.parallel.zero]}.",
        "Gradients have the weights' dtype and lie in the buffers that are sent. These buffers stay if ZeRO does not "
        "divide them. The optimizer runs in one kernel.",
        f"Routed rows are {uneven.source}; the fullest GPU gets {run.imbalance:.2f} times an even share"
        f"{_of_layers(run.imbalances)}.",
        f"The allocator's {overhead:.0%} are an assumption. GB is 1e9 bytes, GiB 2**30.",
    )
    return " ".join(sentences)


def _of_layers(imbalances: Sequence[float]) -> str:
    """Say between what the layers are, if they differ."""
    least, most = min(imbalances), max(imbalances)
    return "" if least == most else f", from {least:.2f} to {most:.2f} in a layer"


def _table(title: str) -> Table:
    return Table(
        title=Text(f"\n{title}"), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
