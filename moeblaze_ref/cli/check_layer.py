"""``moeblaze check --layer``: whether an MoE layer, of the project or of anyone, computes what it should."""

import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from moeblaze_ref.cli.shared import print_error, print_text, stdout, user_errors
from moeblaze_ref.core import checks, progress, provenance, source_hashes
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.units import KIB

ALL = "all"
COMMAND = "check --layer"
DTYPES = ("float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")
CODE = (source_hashes.LAYERS, source_hashes.CHECKS)


class Row(NamedTuple):
    """The verdict on a layer in one dtype, or why there is none."""

    layer: str
    dtype: str | None
    right: bool
    bug_class: str  #: nothing if the layer is right
    largest_error: float | None  #: in units of its bound; None if it is infinite, or nothing was computed
    deterministic: bool | None  #: the same bits in two runs
    graphs: bool  #: a CUDA graph held a step
    large: tuple[str, ...]  #: cases of more than 2**31 elements that the device had room for
    first_problem: str
    not_supported: tuple[str, ...] = ()  #: ways of running it that the layer refuses, as its adapter says
    kept_bytes: int | None = None  #: of a step of ``bench.layer_bytes.SIZES``, as ``LayerBytes`` says
    peak_bytes: int | None = None
    closest: str = ""
    account_bytes: int | None = None
    refused: bool = False  #: nothing was checked, since something given is not as it must be
    step_ms: float | None = None  #: of a step of ``bench.layer_times.SIZES``, as ``LayerTimes`` says
    plain_ms: float | None = None
    what: str = ""  #: is wrong, in a few words: the class of the bug, or what the layer did in place of computing


class Terms(NamedTuple):
    """Settings of a check of layers. An empty list of dtypes stands for each dtype that a layer takes."""

    dtypes: list[str]
    device: str
    seeds: int
    seconds: int
    large: bool


class Kept(NamedTuple):
    """Where the verdicts go besides the screen."""

    record: Path | None
    resume: bool  # go on with the record that is there
    force: bool  # replace another file


def check_layers(names: Iterable[str], terms: Terms, jobs: int, kept: Kept, as_json: bool) -> int:
    """Check layers, each in a process of its own, and some at a time; return the exit status."""
    timed = terms.device == "cuda"
    with user_errors():
        for dtype in terms.dtypes:
            checks.check_name("dtype", dtype, DTYPES)
        check_device(terms.device)
        if timed and jobs > 1:
            raise ValueError(f"jobs is {jobs}, but it must be 1 with device cuda: layers are timed there")
        chosen = each(names, terms.device)
        rows = _begun(kept, terms)
    there = {row.layer for row in rows}
    work = [functools.partial(rows_of, name, *terms, timed) for name in chosen if name not in there]
    for found in progress.each_with_bar("checking layers", work, min(jobs, len(work)) or 1):
        rows += found
        _save(kept, terms, rows)
    rows = [row for name in chosen for row in rows if row.layer == name]
    if as_json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        show(rows)
    return _status(rows)


def _asked(terms: Terms) -> dict[str, Any]:
    """Return the settings that a record stores."""
    return {"seeds": terms.seeds, "dtypes": terms.dtypes, "layers_on": terms.device, "large": terms.large}


def _begun(kept: Kept, terms: Terms) -> list[Row]:
    """The verdicts that a record has already, once it is known that it can be written."""
    if not kept.resume:
        if kept.record:
            provenance.check_place(kept.record, COMMAND, kept.force)
        return []
    found = provenance.resumed(kept.record, COMMAND, _asked(terms), CODE)
    return [Row(**row) for row in found["rows"] if row["dtype"]]


def _save(kept: Kept, terms: Terms, rows: Iterable[Row]) -> None:
    """Write the rows that there are so far: many seeds take hours."""
    if kept.record:
        with user_errors():
            content = _asked(terms) | {"rows": [row._asdict() for row in rows]}
            provenance.record(kept.record, COMMAND, content, kept.force, CODE)


def _status(rows: Iterable[Row]) -> int:
    """Return 1 if a layer is wrong, else 2 if one could not be checked, else 0."""
    failed = [row for row in rows if not row.right]
    if any(not row.refused for row in failed):
        return 1
    return 2 if failed else 0


def check_device(device: str, gpus: int = 1) -> None:
    """Raise ValueError if the machine has no such device, or fewer than so many GPUs."""
    if checks.check_name("device", device, DEVICES) != "cuda":
        return
    there = cuda_device_count()
    if there == 0:
        raise ValueError("device is cuda, but this machine has no CUDA device")
    if there < gpus:
        raise ValueError(f"gpus is {gpus}, but it must be at most {there}, the GPUs of this machine")


def each(names: Iterable[str], device: str) -> list[str]:
    """Return every name, checked; ``all`` stands for what runs on the device."""
    from moeblaze_ref.verify.layers import adapters

    every = adapters.factories() | (adapters.on_gpu() if device == "cuda" else {})
    chosen: list[str] = []
    for name in names:
        if name != ALL:
            adapters.check_name(name)
        chosen += every if name == ALL else (name,)
    return chosen


def verdicts(name: str, dtypes: list[str], device: str, seeds: int, large: bool, timed: bool) -> Iterator[Any]:
    """Yield what begins, and for each dtype the verdict on a layer, its bytes and its times; runs in its process."""
    import torch

    from moeblaze_ref.bench.layer_bytes import bytes_of
    from moeblaze_ref.bench.layer_times import times_of
    from moeblaze_ref.verify.layers import adapters
    from moeblaze_ref.verify.layers.check import Verdict, check_in_steps

    torch.set_num_threads(1)
    chosen = [getattr(torch, dtype) for dtype in dtypes] or None
    factory = adapters.named(name)
    for event in check_in_steps(factory, chosen, device, seeds, large):
        if not isinstance(event, Verdict):
            yield event
            continue
        dtype = getattr(torch, event.dtype)
        yield f"{event.dtype}, bytes and times of a step"
        times = times_of(factory, dtype) if timed and event.ok else None
        yield event, bytes_of(factory, dtype, device), times


def rows_of(
    name: str, dtypes: list[str], device: str, seeds: int, seconds: int, large: bool = False, timed: bool = False
) -> Iterator[Row]:
    """Yield a row for each verdict; if the process ends early, a row that says how. Right layers may be timed, too."""
    from moeblaze_ref.verify.layers.isolated import isolated

    begun = "the start"
    try:
        for event in isolated(verdicts, name, dtypes, device, seeds, large, timed, seconds=seconds):
            if isinstance(event, str):
                begun = event
                continue
            verdict, used, times = event
            row = _row_of(name, verdict, used or ())
            yield row._replace(**times._asdict()) if times else row
    except TimeoutError:
        yield _failed(
            name,
            f"there is no verdict after {seconds} seconds, the start of Python included; it ended in: {begun}. "
            "--timeout allows more",
        )
    except ChildProcessError as error:
        yield _failed(name, f"{error}, in: {begun}")
    except (ValueError, TypeError) as error:
        yield _failed(name, str(error))._replace(refused=True)


def _row_of(name: str, verdict: Any, used: Iterable[Any]) -> Row:
    units = verdict.units if verdict.units < float("inf") else None
    first = "" if verdict.ok else str(verdict).partition("\n")[2]
    return Row(
        name,
        verdict.dtype,
        verdict.ok,
        verdict.bug_class,
        units,
        verdict.deterministic,
        verdict.graphs,
        verdict.large,
        first,
        verdict.not_supported,
        *used,
    )._replace(what="" if verdict.ok else verdict.what)


def _failed(name: str, problem: str) -> Row:
    return Row(name, None, False, "", None, None, False, (), problem)


def show(rows: list[Row]) -> None:
    """Print a table of the verdicts, then what is wrong, then bytes and times."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("layer", "dtype", "verdict", "largest error / bound", "same bits", "CUDA graph"):
        table.add_column(heading, justify="right" if "/" in heading else "left", no_wrap=heading == "layer")
    for row in rows:
        error = "" if row.largest_error is None else f"{row.largest_error:.3g}"
        same = "" if row.deterministic is None else ("yes" if row.deterministic else "no")
        table.add_row(row.layer, row.dtype or "", _verdict(row), error, same, "yes" if row.graphs else "")
    stdout().print(table)
    for row in rows:
        _show_reason(row)
    if measured := [row for row in rows if row.kept_bytes is not None]:
        stdout().print(_bytes_table(measured))
    if timed := [row for row in rows if row.step_ms is not None]:
        stdout().print(_times_table(timed))


def _show_reason(row: Row) -> None:
    """Print why a layer is wrong or has no verdict, and which ways of running it the layer refuses."""
    if row.dtype is None:
        print_error(f"{row.layer}: {row.first_problem}")
    elif not row.right:
        first = "the first wrong case: " if row.bug_class else ""
        print_text(f"{row.layer}, {row.dtype}: {first}{row.first_problem}")
    if row.not_supported:
        print_text(f"{row.layer}, {row.dtype}: not supported: {', '.join(row.not_supported)}")


def _bytes_table(rows: Iterable[Row]) -> Table:
    """Tabulate a step's kept and peak bytes, beside the account of the system that keeps most nearly as much."""
    from moeblaze_ref.bench.layer_bytes import SIZES

    table = Table(box=None, padding=(0, 2, 0, 0), title=f"bytes of a step, {SIZES}", title_justify="left")
    for heading in ("layer", "dtype", "kept KiB", "peak KiB", "account KiB", "of the closest system"):
        table.add_column(heading, justify="right" if "KiB" in heading else "left", no_wrap=heading == "layer")
    for row in rows:
        sizes = [
            "" if size is None else f"{size / KIB:,.1f}" for size in (row.kept_bytes, row.peak_bytes, row.account_bytes)
        ]
        table.add_row(row.layer, row.dtype, *sizes, row.closest)
    return table


def _times_table(rows: Iterable[Row]) -> Table:
    """How long a step takes, beside plain torch."""
    from moeblaze_ref.bench.layer_times import SIZES

    table = Table(box=None, padding=(0, 2, 0, 0), title=f"milliseconds of a step, {SIZES}", title_justify="left")
    for heading in ("layer", "dtype", "step ms", "plain torch ms"):
        table.add_column(heading, justify="right" if "ms" in heading else "left", no_wrap=heading == "layer")
    for row in rows:
        table.add_row(row.layer, row.dtype, *(f"{time:.3f}" for time in (row.step_ms, row.plain_ms)))
    return table


def _verdict(row: Row) -> str:
    if row.right:
        return "right"
    if row.dtype:
        return f"wrong: {row.what}"
    return "not checked" if row.refused else "no verdict"
