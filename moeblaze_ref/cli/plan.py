"""``moeblaze plan``: every byte of a model's training step, from its config.json."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import AsJson, Force, print_plots, show, user_errors

PLOTS = ("plan_timeline", "plan_by_kind")


def plan(
    config: Annotated[str, typer.Argument(help="A config.json, or the name of a model that the package carries.")],
    batch: Annotated[int, typer.Option(help="Sequences of a micro batch, for each data-parallel GPU.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 4096,
    recipe: Annotated[str, typer.Option(help="bf16-master, bf16, fp32, adamw8bit or muon.")] = "bf16-master",
    experts: Annotated[
        str, typer.Option(help="torch, moeblaze/POLICY, megablocks, megablocks_memory_optimized or sonicmoe.")
    ] = "torch",
    attention: Annotated[str, typer.Option(help="flash, cudnn, efficient, math, cpu-flash or cpu-math.")] = "flash",
    checkpoint: Annotated[str, typer.Option(help="none, layer or selective.")] = "none",
    offload: Annotated[
        list[str] | None, typer.Option(help="optimizer or activations: held by the host; repeatable.")
    ] = None,
    data: Annotated[int, typer.Option(help="Data-parallel GPUs.")] = 1,
    zero: Annotated[
        int, typer.Option(help="ZeRO stage: GPUs divide 0 nothing, 1 states, 2 also gradients, 3 also weights.")
    ] = 0,
    expert: Annotated[int, typer.Option(help="GPUs that divide the experts; divides data * tensor.")] = 1,
    tensor: Annotated[int, typer.Option(help="Tensor-parallel GPUs, which also divide sequences.")] = 1,
    pipeline: Annotated[int, typer.Option(help="Stages of the pipeline (1F1B).")] = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro batches of a step.")] = 1,
    trace: Annotated[Path | None, typer.Option(help="A routing trace: how unevenly GPUs get rows.")] = None,
    zipf: Annotated[float | None, typer.Option(help="Zipf's exponent of the experts' popularity.")] = None,
    overhead: Annotated[float, typer.Option(help="Assumed for the allocator, as a part of the peak.")] = 0.05,
    sweep: Annotated[
        str | None, typer.Option(help="batch or sequence: also plot the peak against it, one line a policy.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(help="Write the plots into this folder.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Count every byte of a training step of a whole model, and say what would help most."""
    from moeblaze_ref.core import checks
    from moeblaze_ref.plan import advice, configs, report, skew, sweeps
    from moeblaze_ref.plan.parts import Step
    from moeblaze_ref.plan.run import Run
    from moeblaze_ref.plan.shares import Parallel

    def spread(other: Run) -> Run:
        return skew.of_run(other, trace, zipf).worst(other)

    with user_errors():
        parallel = Parallel(data, expert, tensor, pipeline, zero, micro_batches)
        model = configs.with_experts(configs.find(config), experts)
        step = Step(batch, sequence, attention=attention)
        even = Run(model, step, recipe, parallel, checkpoint, tuple(offload or ()))
        if expert == 1 and (trace is not None or zipf is not None):
            raise ValueError("--trace and --zipf need several GPUs that share the experts: give --expert of at least 2")
        uneven = skew.of_run(even, trace, zipf)
        run = uneven.worst(even)
        checks.check_within("overhead", overhead, 0, 1)
        if sweep:
            checks.check_name("sweep", sweep, sweeps.AXES)
            if not plots:
                raise ValueError("--sweep draws a plot: it needs a folder, --plots")
        if plots:
            _check_folder(plots, sweep, force)
        found = advice.changes(run, spread=spread)
    shown = functools.partial(report.tables, run, found, uneven, overhead)
    show(as_json, report.as_json(run, found, uneven, overhead), shown, indent=2)
    if plots:
        _write(run, sweep, spread, plots, force)


def _check_folder(folder, sweep, force):
    from moeblaze_ref.core import figures

    figures.check(folder, (*PLOTS, *([f"plan_by_{sweep}"] if sweep else [])), force)


def _write(run, sweep, spread, folder, force):
    from moeblaze_ref.core import figures

    with user_errors():
        written = figures.save_all(drawn(run, sweep, spread), folder, force)
    print_plots(written)


def drawn(run, sweep, spread) -> dict:
    """Return the plots of a run, Matplotlib's figures, by their names."""
    from moeblaze_ref.plan import plots, sweeps

    found = dict(zip(PLOTS, (plots.over_time(run), plots.by_kind(run)), strict=True))
    if sweep:
        found[f"plan_by_{sweep}"] = plots.swept(sweep, sweeps.sweep(run, sweep, spread))
    return found
