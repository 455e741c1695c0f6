"""``moeblaze league``: MoE layers of several projects beside each other, by the same measures."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moeblaze_ref.cli import check_layer
from moeblaze_ref.cli.shared import (
    MOST_SECONDS,
    AsJson,
    Force,
    Presets,
    Resume,
    Tokens,
    each_name,
    print_error,
    stdout,
    to_file,
    user_errors,
)
from moeblaze_ref.core import checks, provenance, records, source_hashes
from moeblaze_ref.core.config import PRESETS
from moeblaze_ref.core.units import MIB

COMMAND = "league"
DTYPE, DEVICE = "bfloat16", "cuda"  # of every layer
CODE = (*source_hashes.MEASURED, source_hashes.CHECKS)
# Tuning anew for each small case of a check would take half an hour.
UNTUNED = {"LIGER_FUSED_MOE_AUTOTUNE": "0", "MOEBLAZE_TUNE_SONICMOE": "0"}


def league(
    layer: Annotated[
        list[str] | None, typer.Option(help="Only this layer, as check --layer names it; repeatable.")
    ] = None,
    preset: Presets = None,
    tokens: Tokens = None,
    repetitions: Annotated[int, typer.Option(help="How often a run times each layer; there are two runs.", min=1)] = 9,
    seeds: Annotated[int, typer.Option(help="Times that each case of a check has other numbers.", min=1)] = 1,
    timeout: Annotated[
        int, typer.Option(help="Seconds until it stops a check, or the timing of a shape.", min=1, max=MOST_SECONDS)
    ] = 600,
    jobs: Annotated[int, typer.Option(help="Checks that run at a time.", min=1)] = 4,
    gpus: Annotated[int, typer.Option(help="GPUs that time shapes, each one at a time.", min=1)] = 1,
    large: Annotated[bool, typer.Option("--large", help="Also check sizes past 2**31 elements.")] = False,
    record: Annotated[Path | None, to_file("--record", help="Also write a record here.")] = None,
    resume: Resume = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Check the MoE layers of several projects on a GPU, and time them beside each other, interleaved."""
    from moeblaze_ref.bench import league as rules

    with user_errors():
        shapes = [checks.check_name("preset", name, PRESETS) for name in each_name(preset) or rules.SHAPES]
        if tokens is not None:
            checks.check_int("tokens", tokens, at_least=1)
        names = check_layer.each(layer or rules.LAYERS, DEVICE)
        _check_place(record, force)
        check_layer.check_device(DEVICE, gpus)
        asked: dict[str, Any] = {"layers": names, "tokens": tokens, "repetitions": repetitions}
        asked |= {"seeds": seeds, "large": large}
        content = _resumed(record, asked) if resume else asked | {"checks": [], "times": []}
    checked = {row["layer"] for row in content["checks"]}
    timed = {row["preset"] for row in content["times"]}
    with user_errors():
        for rows in _verdicts([name for name in names if name not in checked], seeds, timeout, jobs, large):
            found = content["checks"] + [row._asdict() for row in rows]
            content["checks"] = sorted(found, key=lambda row: names.index(row["layer"]))
            _save(record, content, force)
        verdicts = [check_layer.Row(**row) for row in content["checks"]]
        able = [name for name in names if any(row.layer == name and row.dtype for row in verdicts)]
        left = [name for name in shapes if name not in timed]
        for times in rules.timed_on(gpus, left, able, repetitions, timeout, tokens):
            content["times"] += rules.as_rows(times)
            _save(record, content, force)
    _print(verdicts, content, as_json)
    if not able:
        raise typer.Exit(2)


def _check_place(record: Path | None, force: bool) -> None:
    """Check that a record can be written; it is written again and again, so it must be a regular file."""
    if record:
        records.check_regular(record)
        provenance.check_place(record, COMMAND, force)


def _resumed(path: Path | None, asked: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a record made on this device, with these versions, this code and these options.

    If only the code of the check has changed, its verdicts are left out, and the times stay.
    """
    found = provenance.resumed(path, COMMAND, asked)
    same_check = found["code"].get(source_hashes.CHECKS) == source_hashes.hashes(CODE)[source_hashes.CHECKS]
    return asked | {"checks": found["checks"] if same_check else [], "times": found["times"]}


def _save(record: Path | None, content: dict[str, Any], force: bool) -> None:
    """Write what there is so far: a run takes long, and may be ended before its last check or shape."""
    if record:
        provenance.record(record, COMMAND, content, force, CODE)


def _verdicts(names: list[str], seeds: int, seconds: int, jobs: int, large: bool) -> Iterator[list[check_layer.Row]]:
    """Yield the verdicts on each layer as they come, each layer in a process of its own."""

    def of(name: str) -> list[check_layer.Row]:
        return list(check_layer.rows_of(name, [DTYPE], DEVICE, seeds, seconds, large))

    with _environment(UNTUNED), ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(of, name) for name in names]):
            yield done.result()


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment, which processes that start meanwhile inherit."""
    before = os.environ.copy()
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _print(verdicts: list[check_layer.Row], content: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(content, indent=2))
    else:
        check_layer.show(verdicts)
        _show(content["times"])


def _show(times: list[dict[str, Any]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("shape", "layer", "step ms", "kept MiB", "peak MiB"):
        table.add_column(heading, justify="left" if heading in ("shape", "layer") else "right", no_wrap=True)
    for row in times:
        if row["problem"]:
            continue
        step = f"{max(row['step_ms']):.2f}"
        kept, peak = (f"{row[name] / MIB:,.0f}" for name in ("kept_bytes", "peak_bytes"))
        table.add_row(row["preset"], row["layer"], step, kept, peak)
    stdout().print(table)
    for row in times:
        if row["problem"]:
            print_error(f"{row['preset']}, {row['layer']}: {row['problem']}")
