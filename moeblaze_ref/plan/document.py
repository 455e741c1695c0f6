"""Fills what docs/huggingface.md says of measured models from the record of ``plan.measure_experts``.

``python -m moeblaze_ref.plan.document`` writes it again.
"""

from typing import Any

from moeblaze_ref.core import documents, records
from moeblaze_ref.core.paths import DOCS

DOCUMENT = DOCS / "huggingface.md"
RECORD = DOCS / "results" / "experts_h200.json"
KEYS = ("rows", "measured", "cases", "device", "versions", "commit")
HEADINGS = ("model", "tokens", "experts", "step ms", "peak MiB", "loss")


def fill(text: str) -> str:
    """Return the page with its block written anew.

    Raises
    ------
    ValueError
        If the file is no record of the command.
    """
    return documents.fill(text, {"experts": lambda: block(records.read(RECORD, KEYS))})


def block(record: dict[str, Any]) -> str:
    """A row for each model, length and implementation, the worse of its runs, and the record's origin."""
    rows = [cells(row) for row in record["rows"]]
    cases = f"{record['measured']} of {len(record['cases'])} cases have been measured."
    return "\n\n".join([cases, documents.table(HEADINGS, rows, words=3), "\n".join(documents.place(record))])


def cells(row: dict[str, Any]) -> list[str]:
    """A line of ``HEADINGS``; what failed has its message in the place of its times."""
    names = [row["model"], f"{row['sequence']:,}", row["experts"]]
    if row["problem"]:
        return [*names, row["problem"], "", ""]
    return [*names, f"{max(row['step_ms']):.1f}", f"{row['peak_bytes'] / 2**20:,.0f}", f"{row['loss']:.3f}"]


if __name__ == "__main__":
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))
