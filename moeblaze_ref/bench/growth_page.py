"""Write docs/growth.md and its pictures from the records of ``moeblaze bench growth``; without one there is no page.

The page lists every GPU that has a record, docs/results/growth_GPU.json. `document.write` calls `write`.
"""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from moeblaze_ref.bench import plots, report, results
from moeblaze_ref.bench.growth import AXES, COMPILED, SKEW
from moeblaze_ref.bench.timed_systems import OURS
from moeblaze_ref.core import documents, figures
from moeblaze_ref.core.paths import DOCS

NAME = "growth"  # of the page
BEFORE = "Performance <performance>\n"  # in the index, what the page stands behind
HEAD = f"""# How the cost of a step grows

The curves show one training step of a layer, forward and backward: bf16, SwiGLU, policy `minimal`. Along each curve one
size changes, and the others stay fixed. `moeblaze bench growth` measures them, and `make docs` writes this page.

- **Ours** and **torch.compile** are steps as launched. The baseline is `{COMPILED}`, the strongest in plain
  torch. [Performance](performance.md) describes both. torch.compile recompiles for each shape, so it has fewer points.
- **As a CUDA graph** is the same step replayed without the host. We did not time large layers this way.
- **Roofline** is the least time that the hardware allows, at the rates of the same run. The weights of experts without
  tokens need not be read, but their gradients are written.
- **Skew** is the exponent of Zipf's law: the popularity of the expert of rank n is proportional to 1 / n to that power.
  At 0 all experts are equally popular.
- At each point the systems run interleaved, and the table shows the median. If a record has several runs, the run in
  which ours took longest counts.
"""


Row = dict[str, Any]  # as of `growth.Row`


class Measured(NamedTuple):
    """The rows measured at one value of an axis."""

    value: float
    ours: Row
    compiled: Row | None  #: None where torch.compile was not timed


def records(docs: Path = DOCS) -> list[Path]:
    """Return the records in a folder of documents, one for each GPU."""
    return sorted((docs / "results").glob(f"{NAME}_*.json"))


def measured(found: results.Result) -> dict[str, list[Measured]]:
    """Return what a record has at each value of each axis, in rising order, in the run that is worst for ours."""
    axes: dict[str, list[Measured]] = {}
    for (axis, value), rows in report.grouped(results.rows_of(found, "growth"), "axis", "value").items():
        runs = [{row["system"]: row for row in of_run} for of_run in report.grouped(rows, "run").values()]
        worst = max(runs, key=lambda run: run[OURS]["step_ms"] or float("inf"))
        axes.setdefault(axis, []).append(Measured(value, worst[OURS], worst.get(COMPILED)))
    return {axis: sorted(axes[axis], key=lambda one: one.value) for axis in AXES if axis in axes}


def curves(axis: Sequence[Measured]) -> dict[str, dict[float, float]]:
    """Return the curves of an axis as `plots.growth` draws them, without those that have no point."""
    ours = {one.value: one.ours for one in axis}
    compiled = {one.value: one.compiled for one in axis if one.compiled}
    found = {
        "roofline": _column(ours, "roofline_ms"),
        "ours": _column(ours, "step_ms"),
        "ours as a CUDA graph": _column(ours, "graph_ms"),
        "torch.compile": _column(compiled, "step_ms"),
        "torch.compile as a CUDA graph": _column(compiled, "graph_ms"),
    }
    return {name: curve for name, curve in found.items() if curve}


def _column(rows: dict[float, Row], name: str) -> dict[float, float]:
    return {value: row[name] for value, row in rows.items() if row[name] is not None}


def pictures(record: Path) -> dict[str, Figure]:
    """Return a picture of each axis of a record, by its name without an ending."""
    return {
        picture_name(record, axis): plots.growth(curves(points), AXES[axis].what, axis != SKEW)
        for axis, points in measured(results.load(record)).items()
    }


def picture_name(record: Path, axis: str) -> str:
    """Return the name of the picture of one axis."""
    return f"{record.stem}_{axis}"


def page(paths: Sequence[Path]) -> str:
    """Return the text of the page."""
    found = {path: results.load(path) for path in paths}
    places = [f"{documents.device(one)}:\n\n" + "\n".join(documents.place(one)) for one in found.values()]
    parts = [HEAD, *(_device(path, one) for path, one in found.items()), "## Where the numbers come from", *places]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _device(path: Path, found: results.Result) -> str:
    axes = measured(found)
    return "\n\n".join([f"## On {documents.device(found)}", *(_axis(path, *axis) for axis in axes.items())])


def _axis(path: Path, axis: str, points: Sequence[Measured]) -> str:
    what = AXES[axis].what
    picture = f"![A step's milliseconds against the {what}](images/{picture_name(path, axis)}.png)"
    return "\n\n".join([f"### {what[0].upper()}{what[1:]}", _layer(axis, points[0].ours), picture, _said(points),
                        _table(axis, points)])  # fmt: skip


def _layer(axis: str, row: Row) -> str:
    sizes = [f"{name} = {size:,}" for name, size in row["shape"].items() if name != axis]
    return f"The layer has {', '.join(sizes)}."


def _said(points: Sequence[Measured]) -> str:
    """Return the range of the roofline's share and of the speed over torch.compile, as sentences."""
    shares = [_share(one.ours) for one in points if one.ours["step_ms"]]
    ratios = [ratio for one in points if (ratio := _ratio(one, "step_ms"))]
    said = f"Ours reaches {min(shares):.0f} to {max(shares):.0f}% of the roofline." if shares else "No point fits."
    if ratios:
        said += f" It is {report.ratio(min(ratios))} to {report.ratio(max(ratios))} times as fast as torch.compile."
    return textwrap.fill(said, 120)


def _share(row: Row) -> float:
    return 100 * row["roofline_ms"] / row["step_ms"]


def _ratio(one: Measured, column: str) -> float | None:
    ours, compiled = (row[column] if row else None for row in (one.ours, one.compiled))
    return compiled / ours if ours and compiled else None


def _table(axis: str, points: Sequence[Measured]) -> str:
    names = [axis, "roofline, ms", "ours, ms", "% of roofline", "ours as graph, ms"]
    names += ["torch.compile, ms", "as graph, ms", "times as fast", "as graphs"]
    return documents.table(names, [_cells(one) for one in points], words=0)


def _cells(one: Measured) -> list[str]:
    ours, compiled = one.ours, one.compiled
    share = f"{_share(ours):.0f}" if ours["step_ms"] else ""
    ratios = [report.ratio(ratio) if (ratio := _ratio(one, name)) else "" for name in ("step_ms", "graph_ms")]
    mine = [f"{one.value:,}", _ms(ours["roofline_ms"]), _step(ours), share, _ms(ours["graph_ms"])]
    return [*mine, *([_step(compiled), _ms(compiled["graph_ms"])] if compiled else ["", ""]), *ratios]


def _step(row: Row) -> str:
    return _ms(row["step_ms"]) or "does not fit"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def link() -> str:
    """Return the sentence that leads to the page, or says that there is none."""
    if records():
        return f"[How the cost of a step grows]({NAME}.md) has curves against L, E, h, k and skew."
    return "How the cost of a step grows with L, E, h, k and skew is not measured yet."


def write(docs: Path = DOCS) -> None:
    """Write the page, its pictures and its line in the index, if there is a record."""
    paths = records(docs)
    if not paths:
        return
    (docs / f"{NAME}.md").write_text(page(paths))
    index = docs / "index.md"
    index.write_text(listed(index.read_text()))
    for path in paths:
        figures.save_all(pictures(path), docs / "images")


def listed(index: str) -> str:
    """Return the index with a line for the page."""
    return index if f"\n{NAME}\n" in index else index.replace(BEFORE, f"{BEFORE}{NAME}\n")
