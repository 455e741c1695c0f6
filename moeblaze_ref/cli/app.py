"""The ``moeblaze`` command and its subcommands."""

import functools
import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeblaze_ref.backends.registry import BACKENDS, CHECKED, ORACLE, STAGES
from moeblaze_ref.bench import KINDS
from moeblaze_ref.cli import terminal
from moeblaze_ref.core import figures, progress, provenance, records, source_hashes
from moeblaze_ref.core.config import POLICIES, PRESETS
from moeblaze_ref.lm import EVIDENCE, LAYERS
from moeblaze_ref.lm import PRESETS as TRAINED
from moeblaze_ref.runtime.simt import cache
from moeblaze_ref.verify import in_subprocess

app = typer.Typer(
    help="The Mixture-of-Experts memory wall: a reference that proves itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)

OF_A_KERNEL = "A kernel of your own"  # the panel of check's options that --kernel makes sense of

Force = Annotated[
    bool, typer.Option("--force", help="Replace a file that is there even if this command did not write it.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def file(text: str) -> Path:
    """Parse an option that names a file to write."""
    try:
        return records.file_named(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def stdout() -> Console:
    """Console for tables. Uses COLUMNS, or a fixed width when the output is a pipe."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a wrong name, size or path into an error message without a traceback, and exit with status 2."""
    with _one_line(ValueError, TypeError, OSError, cache.SimtUnavailable):
        yield


def cache_errors() -> AbstractContextManager[None]:
    """Turn an unusable cache of compiled kernels into an error message without a traceback."""
    return _one_line(cache.SimtUnavailable)


@contextmanager
def _one_line(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        print_error(str(error))
        raise typer.Exit(2) from None


def print_error(message: str):
    """In red, on stderr, as it is: an array's [3] is no markup."""
    Console(stderr=True).print(f"error: {message}", style="red", highlight=False, soft_wrap=True, markup=False)


@app.command()
def doctor():
    """Say which backends run here, and what to install for those that do not."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("backend", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("how, or why not")
    backends = (*BACKENDS.values(), ORACLE)
    statuses = {backend.name: backend.status() for backend in backends}
    for backend in backends:
        status = statuses[backend.name]
        verdict = Text("yes", style="green") if status.available else Text("no", style="yellow")
        remedy = f"\nto mend: {status.remedy}" if status.remedy else ""
        table.add_row(backend.name, verdict, f"{backend.description}: {status.detail}{remedy}")
    stdout().print(table)
    if statuses["simt"].available:
        stdout().print(_what_the_cache_holds(), highlight=False, soft_wrap=True, markup=False)


def _what_the_cache_holds() -> str:
    """Return one line on the compiled kernels, or why there is nothing to say of them."""
    try:
        return cache.summary()
    except cache.SimtUnavailable as error:
        return str(error)


@app.command()
def check(
    context: typer.Context,
    stage: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(STAGES)}; repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CHECKED)}; repeatable.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Check the torch layers against autograd instead.")
    ] = False,
    large: Annotated[
        bool, typer.Option("--large", help="Check sizes past 2**31 elements instead: some blocks of each kernel.")
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Count the checks of each option, stage and backend; run none.")
    ] = False,
    every_shape: Annotated[bool, typer.Option("--all", help="List every shape, not the worst alone.")] = False,
    record: Annotated[
        Path | None, typer.Option(help="Also write the rows here, with GPU, versions, commit.", parser=file)
    ] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="FILE.cu:name, or module:function for Numba. --stage then names its task: combine, expert_up.d_w, ...",
            rich_help_panel=OF_A_KERNEL,
        ),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Blocks, as 'ceil(L h / 256), E'.", rich_help_panel=OF_A_KERNEL)
    ] = None,
    block: Annotated[str | None, typer.Option(help="Threads of a block.", rich_help_panel=OF_A_KERNEL)] = None,
    shared_bytes: Annotated[str | None, typer.Option(help="Dynamic ones.", rich_help_panel=OF_A_KERNEL)] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            help="Such as 'written <= 4 R h' or 'read of x <= 4 R d'; repeatable.", rich_help_panel=OF_A_KERNEL
        ),
    ] = None,
    activation: Annotated[str | None, typer.Option(help="Default: swiglu.", rich_help_panel=OF_A_KERNEL)] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: float32.", rich_help_panel=OF_A_KERNEL)] = None,
    define: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, a constant of a .cu file; repeatable.", rich_help_panel=OF_A_KERNEL),
    ] = None,
    timeout: Annotated[
        int, typer.Option(help="Seconds until a kernel counts as endless.", min=1, rich_help_panel=OF_A_KERNEL)
    ] = 600,
    force: Force = False,
    as_json: AsJson = False,
):
    """Cross-check every stage of every backend, or check a kernel of yours; exit with status 1 on any failure."""
    from moeblaze_ref.verify import check as cross_check
    from moeblaze_ref.verify import large as large_cases

    if coverage:
        _coverage(context, as_json)
    options = {"grid": grid, "block": block, "shared_bytes": shared_bytes, "budgets": budget, "activation": activation}
    options = {name: value for name, value in (options | {"dtype": dtype, "constants": define}).items() if value}
    if kernel is not None and gradients:
        with user_errors():
            raise ValueError("--gradients checks the torch layers, --kernel one kernel: leave one of them out")
    if kernel is not None:
        _check_kernel(kernel, stage or [], backend or [], options, timeout, record, force, as_json)
    with user_errors():
        command = _name_of_check(gradients, large)
        if record:
            provenance.check_place(record, command, force)
        if options:
            raise ValueError(f"{', '.join(options)}: only a kernel has these; name it with --kernel")
        if large and (gradients or kernel):
            raise ValueError("--large checks our kernels at large sizes: leave --gradients and --kernel out")
        if gradients and stage:
            raise ValueError("--gradients checks the whole torch layer: leave --stage out")
        if large:
            jobs = large_cases.plan(stage or STAGES, backend or tuple(large_cases.PARTS))
        elif gradients:
            jobs = cross_check.plan_gradients(backend or tuple(cross_check.LAYER_DEVICES))
        else:
            jobs = cross_check.plan(stage or STAGES, backend or CHECKED)
    with cache_errors():
        rows = progress.run_with_bar("cross-checking", jobs)
    if as_json:
        print(json.dumps([row.as_dict() for row in rows], indent=2))
    else:
        stdout().print(terminal.check_table(rows, every_shape))
        stdout().print(terminal.verdict(rows))
    if record:
        with user_errors():
            parts = source_hashes.of_backends(row.backend for row in rows if row.available)
            provenance.record(record, command, {"rows": [row.as_dict() for row in rows]}, force, parts)
    raise typer.Exit(0 if cross_check.passed(rows) else 1)


def _name_of_check(gradients: bool, large: bool) -> str:
    """Return what a record of ``check`` is called by its options."""
    return "check" + " --gradients" * gradients + " --large" * large


def _coverage(context: typer.Context, as_json: bool):
    """The ``check`` of the check: which options its cases switch on."""
    from moeblaze_ref.verify import coverage

    with user_errors():
        if given := [name for name in _given(context) if name not in ("--coverage", "--json")]:
            raise ValueError(f"--coverage counts every stage of every backend: leave {', '.join(given)} out")
    table = list(coverage.lines())
    gaps = coverage.gaps(table)
    if as_json:
        print(json.dumps([asdict(line) for line in table], indent=2))
    else:
        stdout().print(terminal.coverage_table(table))
        legend = [f"{cell}: {reason}" for cell, reason in coverage.REASONS.items()]
        others = [f"{name}, which no case chooses: {reason}" for name, reason in coverage.ELSEWHERE.items()]
        verdict = gaps or ["every option occurs wherever a stage reads it"]
        stdout().print(*legend, *others, *verdict, sep="\n", highlight=False)
    raise typer.Exit(1 if gaps else 0)


def _given(context: typer.Context) -> list[str]:
    """The options of a command that the command line names."""
    sources = {one.opts[0]: context.get_parameter_source(one.name) for one in context.command.params if one.name}
    return [option for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def _check_kernel(
    kernel: str,
    stages: list[str],
    backends: list[str],
    options: dict[str, Any],
    timeout: int,
    record: Path | None,
    force: bool,
    as_json: bool,
):
    """The ``check`` of one kernel from outside the project."""
    from moeblaze_ref.verify.checker.contracts import CONTRACTS

    with user_errors():
        if len(stages) != 1:
            raise ValueError(f"a kernel is checked as one task: --stage with one of {', '.join(CONTRACTS)}")
        if len(backends) > 1:
            raise ValueError(f"a kernel is checked on one backend, but {len(backends)} are named")
        if "constants" in options:
            options["constants"] = dict(_definition(text) for text in options["constants"])
        if record:
            provenance.check_place(record, "check --kernel", force)
        try:
            verdict = in_subprocess.examine(kernel, stages[0], timeout, backend=next(iter(backends), None), **options)
        except TimeoutError:
            print_error(f"{kernel} did not end within {timeout} seconds; --timeout sets another limit")
            raise typer.Exit(1) from None
        if record:
            provenance.record(record, "check --kernel", verdict.document, force)
    if as_json:
        print(json.dumps(verdict.document, indent=2))
    else:
        stdout().print(verdict.report, highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(1 if verdict.first_problem else 0)


def _definition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value.replace("-", "").isalnum()):
        raise ValueError(f"{text!r} must be NAME=VALUE, a number or a word")
    return name, value


@app.command()
def sanitize(
    record: Annotated[
        Path | None, typer.Option(help="Also write the findings here, with GPU, versions, commit.", parser=file)
    ] = None,
    force: Force = False,
):
    """Run every raw CUDA kernel under compute-sanitizer, on a GPU; exit with status 1 if it finds anything."""
    from moeblaze_ref.verify import sanitize as sanitizer

    with user_errors():
        jobs = sanitizer.plan()
        if record:
            provenance.check_place(record, "sanitize", force)
    findings = progress.run_with_bar("sanitizing", jobs)
    for finding in findings:
        shown = finding.report[-1:] if finding.ok else finding.report[:40]
        stdout().print(f"{finding.tool}: {'clean' if finding.ok else 'NOT CLEAN'}", *shown, sep="\n  ", markup=False)
    if record:
        with user_errors():
            provenance.record(record, "sanitize", {"tools": [asdict(finding) for finding in findings]}, force)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)


@app.command()
def bench(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    preset: Annotated[list[str] | None, typer.Option(help=f"all, or one of {', '.join(PRESETS)}; repeatable.")] = None,
    tokens: Annotated[int | None, typer.Option(help="L, in place of the preset's.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(POLICIES)}; repeatable.")] = None,
    system: Annotated[
        list[str] | None, typer.Option(help="Only these systems, such as moeblaze,megablocks; repeatable.")
    ] = None,
    routing: Annotated[str | None, typer.Option(help="uniform, or zipf beside uniform.")] = None,
    capacity_factor: Annotated[float | None, typer.Option(help="Of the system capacity; 1.25 by default.")] = None,
    stage: Annotated[list[str] | None, typer.Option(help="Only this stage of a step; repeatable.")] = None,
    version: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Only this version of the kernels, such as 2_tiled; repeatable."),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Of each row; medians are shown.")] = 15,
    record: Annotated[
        Path | None,
        typer.Option("--record", "--out", help="Also write the rows here, after those of earlier runs.", parser=file),
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Time the layer or its stages on a GPU, interleaved with plain torch; exit with status 1 if a result is wrong.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.bench import plan, report, results

    request = plan.Request(
        presets=_names(preset),
        tokens=tokens,
        policies=_names(policy),
        systems=_names(system),
        routing=routing,
        capacity_factor=capacity_factor,
        stages=_names(stage),
        versions=_names(version),
        repetitions=repetitions,
    )
    with user_errors():
        jobs = plan.jobs(kind, request)
        device = plan.gpu()
        if record:
            results.check_place(record, force)
        rows = progress.run_with_bar("timing", [functools.partial(job, device=device) for job in jobs])
    result = results.result(kind, rows, device.clocks(), plan.repetitions(kind, request))
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        stdout().print(report.table(rows))
    if record:
        with user_errors():
            results.add(record, result, force)
    raise typer.Exit(1 if report.wrong(rows) else 0)


def _names(repeated: list[str] | None) -> tuple[str, ...]:
    """The names of a repeatable option, each of which may be a list with commas; none twice."""
    return tuple(dict.fromkeys(",".join(repeated).split(","))) if repeated else ()


@app.command()
def paper(
    item: Annotated[list[str] | None, typer.Argument(help="Such as moeblaze-fig3; all of them by default.")] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="Measure the items on this GPU first.")] = False,
    record: Annotated[Path | None, typer.Option(help="With --gpu: add the runs to this file.", parser=file)] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the items' pictures into this folder.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Compare each claim of the papers with its formula and with our measurements; exit with status 1 if one fails."""
    from moeblaze_ref.papers import command, report

    with user_errors():
        items = command.chosen(item or [], gpu, record, plot)
        if plot:
            command.check_plots(items, plot, record, force)
        recorded = command.measure(items, record, progress.bar, force) if gpu else command.Recorded()
        rows = [row for one in items for row in one.rows(recorded)]
    if as_json:
        print(json.dumps(report.as_json(items, rows), indent=1))
    else:
        stdout().print(report.table(items, rows, details=bool(item)))
    if plot:
        with user_errors():
            written = command.write_plots(items, recorded, plot, force)
        Console(stderr=True).print(f"plots: {', '.join(map(str, written)) or 'nothing is recorded'}", soft_wrap=True)
    raise typer.Exit(1 if command.failures(rows) else 0)


@app.command()
def tune(
    preset: Annotated[list[str] | None, typer.Option(help=f"all, or one of {', '.join(PRESETS)}; repeatable.")] = None,
    tokens: Annotated[int | None, typer.Option(help="L, in place of the preset's.")] = None,
    version: Annotated[
        list[str] | None,
        typer.Option("--kernel", help="Only this version of the kernels, such as 2_tiled; repeatable."),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Of each tile; medians are shown.")] = 5,
    record: Annotated[
        Path | None,
        typer.Option(help="Also write the table here, in the place of what it says of this class of GPU.", parser=file),
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
    if as_json:
        print(json.dumps(run, indent=1))
    else:
        stdout().print(tuning.table(times))
    if record:
        with user_errors():
            tuning.add(record, run, force)


@app.command()
def memory(
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "conf4",
    tokens: Annotated[int | None, typer.Option(help="L, in place of the preset's.")] = None,
    system: Annotated[list[str] | None, typer.Option(help="Only this system; repeatable.")] = None,
    activation: Annotated[str | None, typer.Option(help="In place of the preset's.")] = None,
    capacity_factor: Annotated[float, typer.Option(help="Of the padded system.")] = 1.25,
    block: Annotated[int, typer.Option(help="Of megablocks: rows and columns of a block.")] = 128,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run the layers, on a GPU if there is one, and see what is kept.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Write the two plots into this folder.")] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Show where the activation bytes of one MoE layer go, tensor by tensor, for every system."""
    from moeblaze_ref.core.config import preset as find_preset
    from moeblaze_ref.memory import report
    from moeblaze_ref.memory.accounting import SYSTEMS, Assumptions, accounts
    from moeblaze_ref.memory.measured import measure_here

    with user_errors():
        config = find_preset(preset).config
        changes = {"L": tokens, "activation": activation}
        config = config.replace(**{name: value for name, value in changes.items() if value is not None})
        assumptions = Assumptions(capacity_factor=capacity_factor, block=block)
        found = accounts(config, system or tuple(SYSTEMS), assumptions)
        notes = report.preset_notes(preset)
        if plots:
            figures.check(plots, terminal.MEMORY_PLOTS, force)
    measurements = measure_here(found) if measure else ()
    if as_json:
        print(json.dumps(report.as_json(preset, config, found, notes, measurements), indent=2))
    else:
        stdout().print(report.tables(config, found, notes, measurements))
    if plots:
        with user_errors():
            written = figures.save_all(terminal.memory_figures(config, found, assumptions), plots, force)
        Console(stderr=True).print(f"plots: {', '.join(map(str, written))}", soft_wrap=True)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="Folder of the run: its checkpoint and its log.")],
    preset: Annotated[str, typer.Option(help="; ".join(f"{name}: {what}" for name, what in TRAINED.items()))] = "tiny",
    layer: Annotated[str, typer.Option(help=f"What runs the MoE layers, one of {', '.join(LAYERS)}.")] = "moeblaze",
    policy: Annotated[str | None, typer.Option(help=f"Of moeblaze, one of {', '.join(POLICIES)}.")] = None,
    capacity_factor: Annotated[float | None, typer.Option(help="Of capacity.")] = None,
    steps: Annotated[int | None, typer.Option(help="In place of the preset's.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bfloat16, in place of the preset's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of text files, in place of Python's own.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights and of the order of the text.")] = 0,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the folder's checkpoint, if it has one.")
    ] = False,
):
    """Train a MoE language model on bytes; exit with status 1 if a loss is not finite. After a kill, --resume."""
    from moeblaze_ref.lm import command

    options = {"policy": policy, "capacity_factor": capacity_factor}
    changes = {"steps": steps, "precision": precision, "seed": seed}
    with user_errors(), finite_numbers(), stopped_by_hand():
        settings = command.settings(preset, layer, options, changes)
        lines = command.train(settings, out, data, device, resume)
    stdout().print(command.summary(lines, out), highlight=False, soft_wrap=True, markup=False)


@contextmanager
def finite_numbers() -> Iterator[None]:
    """Training that meets NaN or infinity has failed: print where, and exit with status 1."""
    try:
        yield
    except FloatingPointError as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None


@contextmanager
def stopped_by_hand() -> Iterator[None]:
    """Ctrl-C loses only what came after the last checkpoint: say so, and exit with its usual status."""
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print("stopped: --resume goes on from the last checkpoint", highlight=False)
        raise typer.Exit(130) from None


@app.command()
def evidence(
    kind: Annotated[str, typer.Argument(help="; ".join(f"{name}: {what}" for name, what in EVIDENCE.items()))],
    preset: Annotated[str, typer.Option(help=f"One of {', '.join(TRAINED)}.")] = "tiny",
    steps: Annotated[
        int | None, typer.Option(help="To compare, 200 by default; of curves, in place of the preset's.")
    ] = None,
    run: Annotated[
        list[str] | None, typer.Option(help="Of curves: train this run first, or go on with it; repeatable.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Of curves: the folder of the runs' folders.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of text files, in place of Python's own.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    record: Annotated[
        Path | None, typer.Option(help="Also write it here, with GPU, versions, commit.", parser=file)
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Compare training with our layer and training with plain torch; exit with status 1 if they differ."""
    from moeblaze_ref.lm import evidence as gathering
    from moeblaze_ref.lm import report

    request, command = gathering.Request(preset, steps, device, data, out, tuple(run or ())), f"evidence {kind}"
    with user_errors(), finite_numbers():
        records.check_distinct({"--record": [record], "--out": gathering.files(request)})
        if record:
            provenance.check_place(record, command, force)
        found = gathering.gather(kind, request)
        if record:
            provenance.record(record, command, found, force)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        stdout().print(report.summary(found), highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(1 if found["passed"] is False else 0)


@app.command()
def trace(
    checkpoint: Annotated[Path, typer.Option(help="Of a training run: checkpoint.safetensors in its folder.")],
    out: Annotated[Path, typer.Option(help="The npz file to write.", parser=file)],
    data: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of text files, in place of Python's prose, code and tables; repeatable."),
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="At most so many of each kind of text; 40,960 by default.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    force: Force = False,
):
    """Write which experts a trained model chose, token by token, on the part of a text that training holds out."""
    from moeblaze_ref.lm import command

    with user_errors():
        text = command.trace(checkpoint, out, data or [], tokens, device, force)
    stdout().print(text, highlight=False, soft_wrap=True, markup=False)


@app.command()
def place(
    gpus: Annotated[int, typer.Option(help="G.")],
    trace: Annotated[
        Path | None, typer.Option(help="npz with topk (tokens, layers, k) int16, and seq (tokens,) to split by.")
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option(help="In place of a trace: LAYERSxExK, such as 58x256x8 and at most 128x1024x32, of Zipf's load."),
    ] = None,
    splits: Annotated[
        int, typer.Option(help="Random halves of the sequences to fit to and evaluate on; 0: the whole trace for both.")
    ] = 1,
    method: Annotated[
        list[str] | None,
        typer.Option(help="all, or some of contiguous, greedy, eplb, exflow, moetuner, joint, ...; repeatable."),
    ] = None,
    topology: Annotated[
        str, typer.Option(help="nvlink, two-nodes, or a .json with bandwidth (G, G) bytes/s and, measured, token_s.")
    ] = "nvlink",
    d: Annotated[int, typer.Option("--d", help="Model width: what a token's transfer and computation cost.")] = 2880,
    h: Annotated[int, typer.Option("--h", help="Expert width.")] = 2880,
    tokens: Annotated[int, typer.Option(help="Of the modelled step.")] = 16_384,
    num_experts: Annotated[int | None, typer.Option("--experts", help="E, where the trace does not say it.")] = None,
    model: Annotated[str | None, typer.Option(help="Name in the map, in place of the trace's.")] = None,
    experts_per_gpu: Annotated[
        str | None, typer.Option(help="MIN:MAX in a layer; as equal as can be by default, 1:E as MoETuner prints it.")
    ] = None,
    solver: Annotated[str, typer.Option(help="Of moetuner: cp_sat, highs, scip, gurobi.")] = "cp_sat",
    time_limit: Annotated[float, typer.Option(help="Seconds of each of moetuner's two programs.")] = 60.0,
    limit: Annotated[float, typer.Option(help="Of joint: a layer's fullest GPU over the mean.")] = 1.02,
    out: Annotated[
        Path | None, typer.Option(help="Write the map of the fastest method, fitted to split 0.", parser=file)
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write load_by_gpu.png into this folder, and load_against_crossings.png.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="Also write every split here, with versions and commit.", parser=file)
    ] = None,
    force: Force = False,
    as_json: AsJson = False,
):
    """Place experts on GPUs by MoETuner and the baselines, fitted to one half of a trace and evaluated on the other.

    Whatever is repeatable may also be one list with commas.
    """
    from moeblaze_ref.placement import bounds, joint, maps, methods, report, simulate
    from moeblaze_ref.placement.synthetic import trace_or_synthetic

    with user_errors():
        pictures = figures.pictures(plots, terminal.PLACEMENT_PLOTS)
        records.check_distinct({"--out": [out], "--record": [record], "--plots": pictures})
        chosen = methods.named(method or ["all"])
        routed = trace_or_synthetic(trace, synthetic, num_experts, model)
        on = simulate.cluster(topology, gpus, d, h)
        options = methods.Options(bounds.parse(experts_per_gpu), solver, time_limit, limit)
        jobs = methods.jobs(routed, on, chosen, splits, options, tokens)
        shown = (plots or record) and splits and "joint" in chosen
        curve = methods.curve(routed, on, options, tokens=tokens) if shown else []
        if out:
            records.check_writable(out, maps.load, force)
        if record:
            provenance.check_place(record, "place", force)
        if plots:
            figures.check(plots, terminal.PLACEMENT_PLOTS, force)
        trials = progress.run_with_bar("placing", jobs)
        rows = methods.medians(trials)
        if as_json:
            print(json.dumps([row.as_dict() for row in rows], indent=1))
        else:
            stdout().print(report.table(rows, report.evaluated_on(splits, gpus, tokens)))
        if out:
            maps.save(out, methods.fastest_map(trials), force)
        along = dict(zip(joint.LIMITS, progress.run_with_bar("the curve", curve), strict=False))
        if plots:
            written = figures.save_all(terminal.placement_figures(trials, list(along.values())), plots, force)
            Console(stderr=True).print(f"plots: {', '.join(map(str, written))}", soft_wrap=True)
        if record:
            named = trace.name if trace else f"synthetic {synthetic}"
            asked = {"trace": named, "model": routed.model, "gpus": gpus, "topology": topology, "d": d, "h": h}
            asked |= {"solver": solver, "time_limit": time_limit, "limit": limit}
            content = asked | report.content(rows, trials, along, tokens)
            provenance.record(record, "place", content, force, (source_hashes.PLACEMENT,))


@app.command()
def demo(
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 150,
    out: Annotated[Path, typer.Option(help="Folder for the plots.")] = Path("demo_output"),
    force: Force = False,
):
    """Train a tiny MoE language model, then check and account for the layers that it really has."""
    from moeblaze_ref.cli import demo as show

    with user_errors():
        rows = show.run(steps, out, stdout(), force)
    from moeblaze_ref.verify.check import passed

    raise typer.Exit(0 if passed(rows) else 1)
