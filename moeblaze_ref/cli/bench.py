"""``moeblaze bench`` and ``moeblaze tune``: times on a GPU."""

import functools
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.bench import KINDS
from moeblaze_ref.cli.shared import AsJson, Force, Presets, Tokens, each_name, print_note, show, to_file, user_errors
from moeblaze_ref.core import progress
from moeblaze_ref.core.config import POLICIES

Versions = Annotated[
    list[str] | None,
    typer.Option("--kernel", help="Only this version of the kernels, such as 2_tiled; repeatable."),
]


def bench(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    preset: Presets = None,
    tokens: Tokens = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(POLICIES)}; repeatable.")] = None,
    system: Annotated[
        list[str] | None, typer.Option(help="Only these systems, such as moeblaze,megablocks; repeatable.")
    ] = None,
    routing: Annotated[
        str | None, typer.Option(help="Routing to time: uniform, or zipf, which is timed beside uniform.")
    ] = None,
    capacity_factor: Annotated[
        float | None, typer.Option(help="Capacity factor, for the system capacity; 1.25 by default.")
    ] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage of a step; repeatable.")] = None,
    of: Annotated[
        list[str] | None, typer.Option(help="Only these axes of growth: L, E, h, k or skew; repeatable.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Seconds for the timed rounds of growth; 180 by default.")
    ] = None,
    version: Versions = None,
    repetitions: Annotated[int, typer.Option(help="How often to time each row; the tables show medians.")] = 15,
    record: Annotated[
        Path | None, to_file("--record", "--out", help="Also write the rows here, after those of earlier runs.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Time the layer or its stages on a GPU, interleaved with plain torch; exit with status 1 if a result is wrong.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.bench import plan, report, results

    request = plan.Request(
        presets=each_name(preset),
        tokens=tokens,
        policies=each_name(policy),
        systems=each_name(system),
        routing=routing,
        capacity_factor=capacity_factor,
        stages=each_name(stage),
        axes=each_name(of),
        seconds=seconds,
        versions=each_name(version),
        repetitions=repetitions,
    )
    with user_errors():
        jobs = plan.jobs(kind, request)
        device = plan.gpu()
        if record:
            results.check_place(record, force)
        rows = progress.run_with_bar("timing", [functools.partial(job, device=device) for job in jobs])
    result = results.result(kind, rows, device.clocks(), plan.repetitions(kind, request))
    show(as_json, result, functools.partial(report.tables, rows))
    for said in report.left_out(rows):
        print_note(said)
    if record:
        with user_errors():
            results.add(record, result, force)
    raise typer.Exit(1 if report.wrong(rows) else 0)


def tune(
    preset: Presets = None,
    tokens: Tokens = None,
    version: Versions = None,
    repetitions: Annotated[int, typer.Option(help="How often to time each tile; the table shows medians.")] = 5,
    record: Annotated[
        Path | None, to_file(help="Also write the tiles here, in place of those for this class of GPU.")
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Time every tile that a tensor-core kernel may have, on a GPU, and choose one for each kind of layer."""
    from moeblaze_ref.bench import plan, stages
    from moeblaze_ref.bench import tune as tuning

    presets, versions = (tuple(dict.fromkeys(names or ())) for names in (preset, version))
    with user_errors():
        jobs = tuning.jobs(presets, tokens, versions, repetitions)
        device = plan.gpu()
        if record:
            tuning.check_place(record, force)
    times = progress.run_with_bar("timing", [functools.partial(job, device=device) for job in jobs])
    run = tuning.run_of(times, device.clocks(), stages.executor_here().capability)
    show(as_json, run, functools.partial(tuning.table, times))
    if record:
        with user_errors():
            tuning.add(record, run, force)
