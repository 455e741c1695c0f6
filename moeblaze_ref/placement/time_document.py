"""Blocks and pictures of the page on placement over time, from records of `moeblaze replay` and `moeblaze shift`."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from moeblaze_ref.core import documents, figures, records
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.placement import time_tables

STREAMS = ("stream_gptoss_8", "stream_lm_4", "dispatch_gptoss_8", "dispatch_gptoss_16")
SHIFTS = ("shift_gptoss_2x4", "shift_lm_4")
RECORDS = {f"time_{name}": DOCS / "results" / f"place_time_{name}.json" for name in STREAMS + SHIFTS}
DRAWN = ("time_stream_gptoss_8", "time_stream_lm_4")
# Text for a reader who does not see the pictures.
PICTURED = "Load of each batch over the stream, a panel a method, a line for each time between new maps"
ORIGIN = ("device", "versions", "commit")


def blocks() -> dict[str, Callable[[], str]]:
    """Return the functions that make the blocks of the page, by name; a block without a record is empty."""
    return {name: partial(block, name, path) for name, path in RECORDS.items()}


def block(name: str, path: Path) -> str:
    """The table of a record, its picture if it is drawn, and its origin."""
    if not path.exists():
        return ""
    table = _shift(path) if name.startswith("time_shift") else _stream(name, path)
    return "\n\n".join([table, "\n".join(documents.place(records.read(path, ORIGIN)))])


def _stream(name: str, path: Path) -> str:
    found = records.read(path, (*ORIGIN, "streams"))
    shown = f"![{PICTURED}](images/{documents.picture_of(path).name})" if name in DRAWN else ""
    rows = found["streams"]
    parts = [time_tables.markdown(time_tables.STREAM, rows), time_tables.pays(rows), time_tables.gains(rows), shown]
    return "\n\n".join(filter(None, parts))


def _shift(path: Path) -> str:
    """The pairs of different kinds, each beside the map that was fitted to what it is evaluated on."""
    lost = records.read(path, (*ORIGIN, "losses"))["losses"]
    shifted = [row for row in lost if row["fitted"] != row["evaluated"]]
    return f"{time_tables.markdown(time_tables.SHIFT, shifted)}\n\n{time_tables.largest_loss(shifted)}"


def draw() -> None:
    """Write the picture of each stream of which there is a record."""
    for path in (RECORDS[name] for name in DRAWN):
        if path.exists():
            found = records.read(path, ("streams", "changes"))
            drawn = time_tables.load_by_batch(found)
            figures.save(drawn, documents.picture_of(path).parent, path.stem, force=True)
