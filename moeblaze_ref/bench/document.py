"""Writes what the pages of ``PAGES`` say of measurements, from the results, and draws the picture.

Measured numbers stand between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``, and this module writes them; a block
may stand in any page. The text around the blocks is written by hand: its numbers are definitions, sizes of the code,
and arithmetic on those and on vendors' figures. ``python -m moeblaze_ref.bench.document`` writes everything again.
"""

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moeblaze_ref.bench import KINDS, findings, growth_page, plots, report, results
from moeblaze_ref.core import documents

README = results.DOCS.parent / "README.md"
PAGES = (
    README,
    *(
        results.DOCS / f"{name}.md"
        for name in (
            "performance",
            "launch_plans",
            "layer_tables",
            "kernel_tables",
            "cublas_gap",
            "optimisation_log",
            "tiles",
        )
    ),
)
PICTURE = results.DOCS / "images" / "bench.png"
TRIALS = results.DOCS / "results" / "trials_h200.json"


def fill(text: str, found: results.Result | None) -> str:
    """Return the document with every block from ``<!-- begin NAME -->`` to ``<!-- end NAME -->`` regenerated.

    ``found`` is of the benchmark's file; the series, the counters and the trials have files of their own, which are
    read here.

    Raises
    ------
    ValueError
        If there is no block of that name.
    """
    of_found = {name: functools.partial(_made, maker, found) for name, maker in BLOCKS.items()}
    return documents.fill(text, of_found | OF_OTHER_FILES)


def _made(maker: Callable[[results.Result], str], found: results.Result | None) -> str:
    """Return ``maker(found)``, or nothing without results."""
    return maker(found) if found else ""


def _place(found: results.Result) -> str:
    """Return device, versions and commit, and the clocks of each run, as a list."""
    lines = documents.place(found)
    for number, run in enumerate(found["runs"]):
        ceilings = _ceilings([row for row in found["rows"] if row["run"] == number])
        times = "once" if run["repetitions"] == 1 else f"{run['repetitions']} repetitions"
        lines.append(
            f"- run {number}, {run['kind']}, {times}; clocks under load (SM, memory, and their maxima): {run['clocks']}"
            f"{'; ' + ceilings if ceilings else ''}"
        )
    return "\n".join(lines)


def _ceilings(rows: Sequence[dict[str, Any]]) -> str:
    """Return the range of each measured rate of the device."""
    said = (
        ("cublas_tflops", "dense product", "TFLOP/s"),
        ("hot_cublas_tflops", "interleaved", "TFLOP/s"),
        ("copy_gb_s", "copy", "GB/s"),
    )
    values = {key: sorted(row[key] for row in rows if key in row) for key, _, _ in said}
    return ", ".join(
        f"{name} {values[key][0]:,.0f} to {values[key][-1]:,.0f} {unit}" for key, name, unit in said if values[key]
    )


def _tables(kind: str, skewed: bool = False) -> Callable[[results.Result], str]:
    """Return the maker of one kind's tables, run by run, of runs with skewed routing or of the others."""

    def tables(found: results.Result) -> str:
        shown = {
            run: rows
            for run, rows in report.grouped(results.rows_of(found, kind), "run").items()
            if skewed == any(row.get("routing", "uniform") != "uniform" for row in rows)
        }
        return "\n\n".join(f"Run {run}:\n\n{report.markdown(rows)}" for run, rows in shown.items())

    return tables


# Verdicts on a trial. Its kernel works so now; it did, until something else replaced it; it does not; or it was never
# meant to, and shows what a part of the work costs.
VERDICTS = ("adopted", "replaced", "rejected", "measured")


def trials() -> list[dict[str, Any]]:
    """Return the trials on the Hopper kernels, each with both times, in the order of `VERDICTS`."""
    found = json.loads(TRIALS.read_text())["trials"]
    return sorted(found, key=lambda trial: VERDICTS.index(trial["verdict"]))


def change_of(trial: dict[str, Any]) -> float:
    """Return the change in percent of the time without it; below zero is faster."""
    return 100 * (trial["with_ms"] / trial["without_ms"] - 1)


def change_text(trial: dict[str, Any]) -> str:
    """`change_of` in whole percent, and whether both times are of one run."""
    return signed(change_of(trial)) + ("" if trial["same_run"] else " (two runs)")


def signed(percent: float) -> str:
    """Whole percent with a sign, zero without one."""
    return f"{round(percent):+d}%" if round(percent) else "0%"


def _trials() -> str:
    """Return the table of `trials`."""
    rows = [
        f"| {trial['verdict']} | {trial['trial']} | {trial['kernel']} | {trial['preset']} | {trial['without_ms']:.2f} "
        f"| {trial['with_ms']:.2f} | {change_text(trial)} | {trial['commit']} |"
        for trial in trials()
    ]
    head = [
        "| verdict | what | kernel | preset | without, ms | with, ms | change | at commit |",
        "| --- | --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    return "\n".join(head + rows)


def _spread(found: results.Result) -> str:
    """Return the table of the least and the largest speed over each baseline."""
    columns = ["preset", "policy", "times as fast as", "runs", "least", "most"]
    rows = [
        [*names, str(len(of_one)), report.ratio(min(of_one)), report.ratio(max(of_one))]
        for names, of_one in findings.beside_baselines(found).items()
    ]
    return documents.table(columns, rows, words=3) if rows else ""


def _of_file(path: Path, maker: Callable[[results.Result], str]) -> Callable[[], str]:
    """Return the maker of a block from a file of results, which need not exist yet."""
    return lambda: _made(maker, results.load(path) if path.exists() else None)


def _with_place(kind: str) -> Callable[[results.Result], str]:
    """Return the maker of a file's metadata and tables, a table for each run and preset."""

    def tables(found: results.Result) -> str:
        tools = [f"- {tool}" for tool in dict.fromkeys(row["tool"] for row in found["rows"] if "tool" in row)]
        by_preset = report.grouped(results.rows_of(found, kind), "run", "preset")
        shown = [f"Run {run}, {preset}:\n\n{report.markdown(rows)}" for (run, preset), rows in by_preset.items()]
        return "\n\n".join(["\n".join([_place(found), *tools]), *shown])

    return tables


def _of_gpus(stem: str, maker: Callable[[results.Result], str]) -> Callable[[], str]:
    """Return the maker of a block from the records of all GPUs, docs/results/STEM_GPU.json; there may be none."""

    def block() -> str:
        paths = sorted((results.DOCS / "results").glob(f"{stem}_*.json"))
        return "\n\n".join(maker(results.load(path)) for path in paths)

    return block


def _launches(found: results.Result) -> str:
    """Return where a record was measured, and its tables, kind by kind, of all runs."""
    of_kinds = report.grouped(found["rows"], "run", "kind")
    return "\n\n".join([_place(found), *map(report.markdown, of_kinds.values())])


# Kinds of records that have files of their own.
OWN_FILES = ("ladder", "host", "launched", "first_step", "layouts", "growth", "counters")
BLOCKS: dict[str, Callable[[results.Result], str]] = {
    "place": _place,
    "headline": findings.headline,
    "inputs": findings.inputs,
    "peaks": findings.peaks,
    "summary": findings.summary,
    "spread": _spread,
    "host": findings.host,
    "skew": _tables("layer", skewed=True),
    **{kind: _tables(kind) for kind in KINDS if kind not in OWN_FILES},
}
# Blocks of other files than that of the benchmark.
OF_OTHER_FILES: dict[str, Callable[[], str]] = {
    "trials": _trials,
    "systems": _of_file(results.SYSTEMS, _with_place("layer")),
    "ladder": _of_file(results.LADDER, _with_place("ladder")),
    "series": _of_gpus("ladder", lambda found: f"{_place(found)}\n\n{findings.series(found)}"),
    "counters": _of_file(results.COUNTERS, _with_place("counters")),
    "why": _of_file(results.COUNTERS, findings.why),
    "facts": _of_file(results.COUNTERS, findings.facts),
    "tiles": findings.chosen_tiles,
    "growth": growth_page.link,
    "launches": _of_gpus("host", _launches),
    "layouts": _of_gpus("layouts", _launches),
    "best": _of_gpus("layer", lambda found: f"{_place(found)}\n\n{findings.best(found)}"),
}


def grown(paths: Sequence[Path]) -> str:
    """Return the page on growth with its findings below the title."""
    title, _, rest = growth_page.page(paths).partition("\n\n")
    found = "\n\n".join(
        findings.growth(growth_page.measured(record), documents.device(record)) for record in map(results.load, paths)
    )
    return f"{title}\n\n{found}\n\n{rest}"


def recorded() -> results.Result | None:
    """Load the committed results; None if there are none."""
    return results.load(results.RECORDED) if results.RECORDED.exists() else None


def write():
    """Write every page, and the pictures where there are results."""
    found = recorded()
    for page in PAGES:
        page.write_text(fill(page.read_text(), found))
    growth_page.write()
    if paths := growth_page.records():
        (results.DOCS / f"{growth_page.NAME}.md").write_text(grown(paths))
    if found and (rows := plots.pictured(results.rows_of(found, "layer"))):
        plots.time_and_memory(rows).savefig(PICTURE, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    write()
