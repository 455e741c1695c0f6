"""Fills the tables and the picture of docs/performance.md from the results: no figure in it is typed by hand.

``python -m moeblaze_ref.bench.document`` writes both again.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from moeblaze_ref.bench import KINDS, plots, report, results
from moeblaze_ref.bench.layer import OURS

DOCUMENT = results.DOCS / "performance.md"
PICTURE = results.DOCS / "images" / "bench.png"
TRIALS = results.DOCS / "results" / "trials_h200.json"
NOTHING = "*Not measured yet.*"

_BLOCK = re.compile(r"(<!-- begin (\w+) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def fill(text: str, found: results.Result | None) -> str:
    """The document with every block ``<!-- begin NAME -->`` to ``<!-- end NAME -->`` written anew.

    Parameters
    ----------
    text : str
    found : dict or None
        What `results.load` gives, or nothing yet.

    Raises
    ------
    ValueError
        If there is no block of that name.
    """

    def written(block: re.Match) -> str:
        start, name, end = block.groups()
        if name not in BLOCKS:
            raise ValueError(f"unknown block {name!r}. Valid: {', '.join(BLOCKS)}")
        text = BLOCKS[name](found) if found or BLOCKS[name] is _trials else ""
        return f"{start}{text or NOTHING}\n{end}"

    return _BLOCK.sub(written, text)


def _place(found: results.Result) -> str:
    """Where and when the numbers were taken."""
    lines = [f"- device: {found['device']}", f"- versions: {_list(found['versions'])}", f"- commit: {found['commit']}"]
    for number, run in enumerate(found["runs"]):
        ceilings = _ceilings([row for row in found["rows"] if row["run"] == number])
        lines.append(
            f"- run {number}, {run['kind']}, {run['repetitions']} repetitions; clocks under load (SM, memory, and their "
            f"maxima): {run['clocks']}; {ceilings}"
        )
    return "\n".join(lines)


def _list(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _ceilings(rows: Sequence[dict[str, Any]]) -> str:
    """The ranges of what rows say of the device."""
    said = (
        ("cublas_tflops", "dense product", "TFLOP/s"),
        ("hot_cublas_tflops", "in turns", "TFLOP/s"),
        ("copy_gb_s", "copy", "GB/s"),
    )
    values = {key: sorted(row[key] for row in rows) for key, _, _ in said}
    return ", ".join(
        f"{name} {values[key][0]:,.0f} to {values[key][-1]:,.0f} {unit}" for key, name, unit in said if values[key]
    )


def _tables(kind: str, skewed: bool = False) -> Callable[[results.Result], str]:
    """The tables of one kind, run after run: of the runs that have skewed routing, or of the others."""

    def tables(found: results.Result) -> str:
        by_run = defaultdict(list)
        for row in results.rows_of(found, kind):
            by_run[row["run"]].append(row)
        shown = {run: rows for run, rows in by_run.items() if skewed == any(map(_is_skewed, rows))}
        return "\n\n".join(f"Run {run}:\n\n{report.markdown(rows)}" for run, rows in shown.items())

    return tables


def _is_skewed(row: dict[str, Any]) -> bool:
    return row.get("routing", "uniform") != "uniform"


def _trials(_: results.Result | None) -> str:
    """What was tried on the Hopper kernels, and what it did: single trials, noted when they were made."""
    rows = [
        f"| {trial['trial']} | {trial['kernel']} | {trial['preset']} | {trial['without_ms']:.2f} | {trial['with_ms']:.2f} | "
        f"{trial['with_ms'] / trial['without_ms'] - 1:+.0%}{'' if trial['same_run'] else ' (two runs)'} | {trial['commit']} |"
        for trial in json.loads(TRIALS.read_text())["trials"]
    ]
    head = [
        "| what | kernel | preset | without, ms | with, ms | change | at commit |",
        "| --- | --- | --- | ---: | ---: | ---: | --- |",
    ]
    return "\n".join(head + rows)


def _spread(found: results.Result) -> str:
    """How many times as fast as each peer ours is, in every run that has both: smallest and largest."""
    ratios = defaultdict(list)
    for row in results.rows_of(found, "layer"):
        if row["system"] == OURS and not _is_skewed(row):
            for peer, ratio in row["ratio_to"].items():
                ratios[row["preset"], row["policy"], peer].append(ratio)
    lines = [
        f"| {' | '.join(names)} | {len(of_one)} | {min(of_one):.2f} | {max(of_one):.2f} |"
        for names, of_one in ratios.items()
    ]
    head = ["| preset | policy | times as fast as | runs | least | most |", "| --- | --- | --- | ---: | ---: | ---: |"]
    return "\n".join(head + lines) if lines else ""


BLOCKS: dict[str, Callable[[results.Result], str]] = {
    "trials": _trials,
    "place": _place,
    "spread": _spread,
    "skew": _tables("layer", skewed=True),
    **{kind: _tables(kind) for kind in KINDS},
}


def recorded() -> results.Result | None:
    """The results that are committed, if there are any."""
    return results.load(results.RECORDED) if results.RECORDED.exists() else None


def write():
    """The document, and the picture where there are results."""
    found = recorded()
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), found))
    if found and (rows := plots.pictured(results.rows_of(found, "layer"))):
        plots.time_and_memory(rows).savefig(PICTURE, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    write()
