"""Tables and the picture of placement over time: what `moeblaze replay` and `moeblaze shift` print and record."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from moeblaze_ref.core import documents
from moeblaze_ref.core.drawing import dress, panels
from moeblaze_ref.memory.plots import GREY
from moeblaze_ref.placement.plots import COLORS

Found = Mapping[str, Any]
Columns = Mapping[str, Callable[[Found], str]]

# Of `over_time.summary`. A column in which every cell is empty is left out.
STREAM: Columns = {
    "method": lambda row: row["method"],
    "new map after": lambda row: after(row["every"]),
    "dispatch": lambda row: row["dispatch"] or "",
    "load": lambda row: f"{row['load']:.3f}",
    "fullest batch": lambda row: f"{row['worst_load']:.3f}",
    "D": lambda row: f"{row['distinct_gpus']:.3f}",
    "N": lambda row: _nodes(row, f"{row['distinct_nodes']:.3f}"),
    "step ms": lambda row: f"{row['ms']:.3f}",
    "moves ms": lambda row: f"{row['moves_ms']:.3f}" if row["moved"] else "",
    "together ms": lambda row: f"{row['total_ms']:.3f}" if row["moved"] else "",
    "experts moved": lambda row: f"{row['moved']:,}" if row["moved"] else "",
}
# Of `over_time.Loss`.
SHIFT: Columns = {
    "method": lambda row: row["method"],
    "fitted to": lambda row: row["fitted"],
    "evaluated on": lambda row: row["evaluated"],
    "load": lambda row: f"{row['load']:.3f}",
    "lost load": lambda row: f"{row['lost_load']:+.3f}",
    "D": lambda row: f"{row['distinct_gpus']:.3f}",
    "lost D": lambda row: f"{row['lost_gpus']:+.3f}",
    "N": lambda row: _nodes(row, f"{row['distinct_nodes']:.3f}"),
    "lost N": lambda row: _nodes(row, f"{row['lost_nodes']:+.3f}"),
    "step ms": lambda row: f"{row['ms']:.3f}",
    "lost time": lambda row: f"{row['lost_share']:+.2%}",
}
WORDS = ("method", "new map after", "dispatch", "fitted to", "evaluated on")


def after(every: int | None) -> str:
    """Say after how many tokens a map is fitted anew."""
    return "never" if every is None else f"{every:,} tokens"


def _nodes(row, cell):
    return "" if row["distinct_nodes"] == 1 else cell


def cells(columns: Columns, rows: Iterable[Found]) -> dict[str, list[str]]:
    """The cells of each column that is not empty."""
    rows = list(rows)
    found = {name: [cell(row) for row in rows] for name, cell in columns.items()}
    return {name: column for name, column in found.items() if any(column)}


def table(columns: Columns, rows: Iterable[Found], caption: str) -> Table:
    """A table for a terminal, with a caption."""
    found = cells(columns, rows)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for name in found:
        shown.add_column(name, justify="left" if name in WORDS else "right", no_wrap=True)
    for line in zip(*found.values(), strict=True):
        shown.add_row(*line)
    return shown


def markdown(columns: Columns, rows: Iterable[Found]) -> str:
    """The same table for a page."""
    found = cells(columns, rows)
    names = [*found]
    return documents.table(names, zip(*found.values(), strict=True), words=sum(name in WORDS for name in names))


def pays(rows: Sequence[Found]) -> str:
    """Say in how many rows new maps gain time, and in how many they gain more than the moves cost; or nothing."""
    never = {(row["method"], row["dispatch"]): row for row in rows if row["every"] is None}
    renewed = [row for row in rows if row["every"] is not None]
    if not renewed:
        return ""
    kept = [never[row["method"], row["dispatch"]] for row in renewed]
    faster = sum(row["ms"] < stays["ms"] for row, stays in zip(renewed, kept, strict=True))
    paid = sum(row["total_ms"] < stays["total_ms"] for row, stays in zip(renewed, kept, strict=True))
    best = max(stays["ms"] - row["ms"] for row, stays in zip(renewed, kept, strict=True))
    least = min(row["moves_ms"] for row in renewed)
    return (
        f"New maps shorten the step in {faster} of {len(renewed)} rows, by at most {best:.3f} ms. The moves add at "
        f"least {least:.3f} ms a batch. With the moves, {paid or 'no'} {'row has' if paid < 2 else 'rows have'} a "
        f"shorter step than the map that stays."
    )


def gains(rows: Sequence[Found]) -> str:
    """Say how much load each dispatch adds to even shares or takes from them: a sentence a method."""
    said = []
    for even in (row for row in rows if row["dispatch"] == "even" and row["every"] is None):
        others = [row for row in rows if row["method"] == even["method"] and row["every"] is None and row is not even]
        changes = [f"{row['load'] - even['load']:+.3f} under `{row['dispatch']}`" for row in others]
        if changes:
            said.append(f"Load of `{even['method']}` beside even shares: {', '.join(changes)}.")
    return " ".join(said)


def largest_loss(rows: Sequence[Found]) -> str:
    """Name the shift that loses the most time, and what it loses."""
    worst = max(rows, key=lambda row: row["lost_share"])
    return (
        f"`{worst['method']}` loses most time when it is fitted to *{worst['fitted']}* and evaluated on "
        f"*{worst['evaluated']}*. Its load changes by {worst['lost_load']:+.3f}, and its step by "
        f"{worst['lost_share']:+.2%}."
    )


def load_by_batch(found: Found) -> Figure:
    """The load of each batch of a record of `moeblaze replay`: a panel a method, a line for each time between maps.

    Of several dispatches the first is drawn. Vertical lines mark where the stream changes its kind of text.
    """
    names = list(dict.fromkeys(row["method"] for row in found["streams"]))
    figure, shown = panels(10, 2.4 * len(names), len(names), 1, squeeze=False, sharex=True)
    for axes, method in zip(shown[:, 0], names, strict=True):
        of_method = [row for row in found["streams"] if row["method"] == method]
        rows = [row for row in of_method if row["dispatch"] == of_method[0]["dispatch"]]
        for row, color in zip(rows, COLORS, strict=False):
            numbers = [batch["first"] for batch in row["batches"]]
            axes.plot(numbers, [batch["load"] for batch in row["batches"]], color=color, label=after(row["every"]))
        for first, kind in found["changes"]:
            if numbers[0] < first <= numbers[-1]:
                axes.axvline(first, color=GREY, linewidth=0.8, zorder=0.5)
                axes.annotate(f" {kind}", (first, 1), xycoords=("data", "axes fraction"), va="top", color=GREY)
        dress(axes, "fullest GPU / mean", method)
    lines, labels = shown[0, 0].get_legend_handles_labels()
    figure.legend(lines, labels, frameon=False, title="new map after", ncols=len(COLORS), loc="outside upper center")
    shown[-1, 0].set_xlabel("token of the stream")
    return figure
