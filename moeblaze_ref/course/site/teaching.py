"""Writes the minutes of each section into docs/teaching_notes.md, from the words of the notebooks.

``python -m moeblaze_ref.course.site.teaching`` writes them again. A notebook's minutes are those of the path; they are
divided among its sections by their words.
"""

import functools
import re
from pathlib import Path

import nbformat

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.course.notebook.outputs import NOTEBOOKS
from moeblaze_ref.course.site.path import reading_minutes

DOCUMENT = DOCS / "teaching_notes.md"
_HEADING = re.compile(r"^## (.*)$", re.MULTILINE)


def section_minutes(path: Path) -> dict[str, int]:
    """Return the minutes to read each section, by its heading; they add up to those of the notebook."""
    words = {"the beginning": 0}
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            before, *parts = _HEADING.split(cell.source)
            words[list(words)[-1]] += len(before.split())
            words |= {heading: len(text.split()) for heading, text in zip(parts[::2], parts[1::2], strict=True)}
    total, minutes = reading_minutes(path), {}
    read = 0
    for heading, count in words.items():
        begin, read = read, read + count
        minutes[heading] = round(read * total / sum(words.values())) - round(begin * total / sum(words.values()))
    return minutes


def _block(path: Path) -> str:
    rows = [[heading, str(minutes) if minutes else "under 1"] for heading, minutes in section_minutes(path).items()]
    return documents.table(["section", "minutes"], rows)


def page(text: str) -> str:
    """Return the page with its tables written anew."""
    blocks = {f"minutes_{path.stem[:2]}": functools.partial(_block, path) for path in sorted(NOTEBOOKS.glob("*.ipynb"))}
    return documents.fill(text, blocks)


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
