"""``moeblaze check`` and ``moeblaze sanitize``: whether the kernels are right."""

import functools
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moeblaze_ref.backends.registry import CHECKED, STAGES
from moeblaze_ref.cli.check_layer import Kept, Terms, check_layers
from moeblaze_ref.cli.shared import (
    MOST_SECONDS,
    AsJson,
    Force,
    Resume,
    cache_errors,
    print_error,
    print_text,
    stdout,
    to_file,
    user_errors,
)
from moeblaze_ref.core import progress, provenance, source_hashes
from moeblaze_ref.verify import in_subprocess

SECONDS = 600  # of a check of one kernel, or one layer
kernel_option = functools.partial(typer.Option, rich_help_panel="A kernel of your own")  # refused without --kernel
either_option = functools.partial(typer.Option, rich_help_panel="A kernel or a layer of your own")
layer_option = functools.partial(typer.Option, rich_help_panel="A layer of your own")  # refused without --layer


def check(
    context: typer.Context,
    stage: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(STAGES)}; repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CHECKED)}; repeatable.")] = None,
    gradients: Annotated[
        bool, typer.Option("--gradients", help="Check the torch layers against autograd instead.")
    ] = False,
    large: Annotated[
        bool,
        typer.Option(
            "--large", help="Check sizes past 2**31 elements instead: some blocks of each kernel. With --layer: also."
        ),
    ] = False,
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Count the checks of each option, stage and backend; run none.")
    ] = False,
    every_shape: Annotated[bool, typer.Option("--all", help="List every shape, not only the worst.")] = False,
    record: Annotated[Path | None, to_file(help="Also write the rows here, with GPU, versions, commit.")] = None,
    kernel: Annotated[
        str | None,
        kernel_option(
            help="FILE.cu:name, or module:function for Numba. --stage then names its task: combine, expert_up.d_w, ..."
        ),
    ] = None,
    grid: Annotated[str | None, kernel_option(help="Blocks of the grid, as 'ceil(L h / 256), E'.")] = None,
    block: Annotated[str | None, kernel_option(help="Threads of a block.")] = None,
    shared_bytes: Annotated[str | None, kernel_option(help="Bytes of dynamic shared memory, as '4 * 256'.")] = None,
    budget: Annotated[
        list[str] | None,
        kernel_option(
            help="A limit, such as 'read of x <= 4 R d' or 'threads >= R h'; repeatable. It limits read, written, "
            "sectors or conflicts, how threads divide the work (accesses, barriers, threads), or their means "
            "(exchanges, waits, copied)."
        ),
    ] = None,
    activation: Annotated[str | None, kernel_option(help="Activation of the cases; swiglu by default.")] = None,
    dtype: Annotated[
        str | None,
        either_option(help="Dtype of the cases. Default: float32 for a kernel; each dtype of its adapter for a layer."),
    ] = None,
    define: Annotated[list[str] | None, kernel_option(help="NAME=VALUE, a constant of a .cu file; repeatable.")] = None,
    timeout: Annotated[
        int | None,
        either_option(
            help=f"Seconds until a kernel or layer counts as endless. Default: {SECONDS}.", min=1, max=MOST_SECONDS
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        layer_option(
            help="MODULE:FACTORY, the name of a layer that the package knows, or all of these; repeatable. "
            "docs/check_a_layer.md says what a factory returns."
        ),
    ] = None,
    seeds: Annotated[
        int | None, layer_option(help="Times that each case is run with other numbers. Default: 1.", min=1, max=1000)
    ] = None,
    device: Annotated[str | None, layer_option(help="Device of the layer: cpu (the default) or cuda.")] = None,
    jobs: Annotated[int | None, layer_option(help="Layers that are checked at a time. Default: 1.", min=1)] = None,
    resume: Resume = False,
    force: Force = False,
    as_json: AsJson = False,
):
    """Cross-check every stage of every backend, or check a kernel or a layer of yours.

    The exit status is 1 on any failure, and 2 for what cannot be checked.
    """
    from moeblaze_ref.cli import terminal
    from moeblaze_ref.verify import check as cross_check
    from moeblaze_ref.verify import large as large_cases

    if coverage:
        raise typer.Exit(_show_coverage(context, as_json))
    if layer:
        terms = Terms([] if dtype is None else [dtype], device or "cpu", seeds or 1, timeout or SECONDS, large)
        raise typer.Exit(_check_layers(context, layer, terms, jobs or 1, Kept(record, resume, force), as_json))
    with user_errors():
        if given := [name for name in _given(context) if name in ("--seeds", "--device", "--jobs", "--resume")]:
            raise ValueError(f"only a check of a layer takes {', '.join(given)}: add --layer")
    options: dict[str, Any] = {
        "grid": grid,
        "block": block,
        "shared_bytes": shared_bytes,
        "budgets": budget,
        "activation": activation,
    }
    options |= {"dtype": dtype, "constants": define, "timeout": timeout}
    options = {name: value for name, value in options.items() if value}
    with user_errors():
        if kernel is not None and gradients:
            raise ValueError("--gradients checks the torch layers, --kernel one kernel: leave one of them out")
        if large and (gradients or kernel is not None):
            raise ValueError("--large checks our kernels at large sizes: leave --gradients and --kernel out")
        if gradients and stage:
            raise ValueError("--gradients checks the whole torch layer: leave --stage out")
        if options and kernel is None:
            flags = [name for name in _given(context) if name in _OF_ONE]
            of_both = {*flags} <= {*_OF_LAYERS}
            what, option = ("one kernel or a layer", "--kernel or --layer") if of_both else ("one kernel", "--kernel")
            raise ValueError(f"only a check of {what} takes {', '.join(flags)}: add {option}")
    if kernel is not None:
        raise typer.Exit(_check_kernel(kernel, stage or [], backend or [], options, record, force, as_json))
    command = "check" + " --gradients" * gradients + " --large" * large
    with user_errors():
        if record:
            provenance.check_place(record, command, force)
        if large:
            work = large_cases.plan(stage or STAGES, backend or tuple(large_cases.PARTS))
        elif gradients:
            work = cross_check.plan_gradients(backend or tuple(cross_check.LAYER_DEVICES))
        else:
            work = cross_check.plan(stage or STAGES, backend or CHECKED)
    with cache_errors():
        rows = progress.run_with_bar("cross-checking", work)
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


def _show_coverage(context: typer.Context, as_json: bool) -> int:
    """Print which options the cases of ``check`` switch on; return the exit status."""
    from moeblaze_ref.cli import terminal
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
    return 1 if gaps else 0


_OF_ONE = "--grid --block --shared-bytes --budget --activation --dtype --define --timeout".split()
_OF_LAYERS = "--layer --dtype --device --seeds --timeout --large --jobs --record --resume --force --json".split()


def _check_layers(
    context: typer.Context,
    names: list[str],
    terms: Terms,
    jobs: int,
    kept: Kept,
    as_json: bool,
) -> int:
    """Check layers; return the exit status."""
    with user_errors():
        if others := [name for name in _given(context) if name not in _OF_LAYERS]:
            raise ValueError(f"--layer checks whole layers: leave {', '.join(others)} out")
    return check_layers(names, terms, jobs, kept, as_json)


def _given(context: typer.Context) -> list[str]:
    """The options of a command that the command line names."""
    sources = {one.opts[0]: context.get_parameter_source(one.name) for one in context.command.params if one.name}
    return [option for option, source in sources.items() if source and source.name == "COMMANDLINE"]


def _check_kernel(
    kernel: str,
    stages: list[str],
    backends: list[str],
    options: dict[str, Any],
    record: Path | None,
    force: bool,
    as_json: bool,
) -> int:
    """Check one kernel from outside the project; return the exit status."""
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
        timeout = options.pop("timeout", SECONDS)
        try:
            verdict = in_subprocess.examine(kernel, stages[0], timeout, backend=next(iter(backends), None), **options)
        except TimeoutError:
            print_error(f"{kernel} did not end within {timeout} seconds; --timeout sets another limit")
            return 1
        if record:
            provenance.record(record, "check --kernel", verdict.document, force)
    if as_json:
        print(json.dumps(verdict.document, indent=2))
    else:
        print_text(verdict.report)
    return 1 if verdict.first_problem else 0


def _definition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value.replace("-", "").isalnum()):
        raise ValueError(f"{text!r} must be NAME=VALUE, a number or a word")
    return name, value


def sanitize(
    part: Annotated[
        list[str] | None, typer.Option(help="A part of the kernels, such as a stage; repeatable. Default: all.")
    ] = None,
    record: Annotated[Path | None, to_file(help="Also write the findings here, with GPU, versions, commit.")] = None,
    force: Force = False,
):
    """Run every raw CUDA kernel under compute-sanitizer, on a GPU; exit with status 1 if it finds anything."""
    from moeblaze_ref.verify import sanitize as sanitizer

    with user_errors():
        rounds = sanitizer.rounds(part or ())
        if record:
            provenance.check_place(record, "sanitize", force)
    # Side by side: each job keeps the GPU idle most of the time, while it compiles or looks at what ran.
    cores = os.cpu_count() or 1
    findings = [
        finding
        for title, jobs in rounds.items()
        for finding in progress.run_with_bar(title, jobs, min(len(jobs), cores))
    ]
    for finding in findings:
        shown = finding.report[-1:] if finding.ok else finding.report[:40]
        said = f"{finding.tool}, {finding.part}: {'clean' if finding.ok else 'NOT CLEAN'}"
        stdout().print(said, *shown, sep="\n  ", markup=False)
    if record:
        with user_errors():
            provenance.record(record, "sanitize", {"tools": [asdict(finding) for finding in findings]}, force)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)
