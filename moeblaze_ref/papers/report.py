"""The claims as a table for a terminal and as JSON."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moeblaze_ref.papers.claims import Row, Verdict, failures
from moeblaze_ref.papers.item import Item

STYLES = {
    Verdict.AGREES: "green",
    Verdict.PAPER_ERROR: "magenta",
    Verdict.DIFFERS: "yellow",
    Verdict.FAILS: "bold red",
}


def table(items: Sequence[Item], rows: Sequence[Row], details: bool) -> RenderableType:
    """Return a table of the items' rows, with ``details`` or without, and the count of each verdict."""
    shown = [row for row in rows if details or not row.detail or row.verdict is Verdict.FAILS]
    parts = [_of_item(item, [row for row in shown if row.item == item.id]) for item in items]
    return Group(*parts, verdicts(rows))


def _of_item(item: Item, rows: Sequence[Row]) -> Table:
    assumed = f"\nour assumption: {item.assumption}" if item.assumption else ""
    found = Table(
        title=Text(f"\n{item.id} ({item.place}): {item.title}{assumed}"),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name, ratio in (("what", 5), ("paper", 3), ("formula", 3), ("ours", 4), ("verdict", 5)):
        found.add_column(name, ratio=ratio, overflow="fold")
    found.expand = True
    for row in rows:
        said = Text(str(row.verdict), style=STYLES.get(row.verdict, "dim"))
        cells = map(Text, (row.what, row.printed, row.formula, row.ours_with_runs))  # no markup: an array's [3] stays
        found.add_row(*cells, said.append(f": {row.why}" if row.why else "", style="default"))
    return found


def verdicts(rows: Sequence[Row]) -> Text:
    """Return one line: how many rows have each verdict. A bar without a printed number is no claim."""
    counted = Counter(row.verdict for row in rows)
    bars = counted.pop(Verdict.NOT_PRINTED, 0)
    claims = ", ".join(f"{verdict}: {counted[verdict]}" for verdict in Verdict if counted[verdict])
    shown = f"; bars without a printed number: {bars}" if bars else ""
    return Text(f"\nclaims: {len(rows) - bars} ({claims}){shown}", style="bold red" if failures(rows) else "bold green")


def as_json(items: Sequence[Item], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return each item with its rows as plain data."""
    return [
        {"item": item.id, "place": item.place, "title": item.title, "assumption": item.assumption}
        | {"rows": [row.as_dict() for row in rows if row.item == item.id]}
        for item in items
    ]
