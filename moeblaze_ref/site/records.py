"""The page of results: what each file of docs/results holds, on what it was taken, and which page shows it."""

import json
from pathlib import Path
from typing import Any

from moeblaze_ref import documents

_DOCS = Path(__file__).parents[2] / "docs"
_INTRODUCTION = """# Results

Every measured number of these pages comes from a file in `docs/results/`, written by the command that measured it and
never by hand. This page is made from those files: {count} of them. A test compares the pages with what the files say.
"""


def page() -> str:
    """The page in Markdown."""
    files = sorted((_DOCS / "results").glob("*.json"))
    rows = [_row(path, json.loads(path.read_text())) for path in files]
    table = documents.table(["file", "rows", "device", "commit", "shown on"], rows, words=5)
    return f"{_INTRODUCTION.format(count=len(files))}\n{table}\n"


def _row(path, found):
    return [f"`{path.name}`", _rows(found), found.get("device", ""), str(found.get("commit", ""))[:7], _shown_on(path)]


def _rows(found: dict[str, Any]) -> str:
    """How many rows a record has, if it is a list of rows."""
    return str(len(found["rows"])) if "rows" in found else ""


def _shown_on(path):
    """The documents that name a file or show its picture, as links."""
    pages = [page for page in sorted(_DOCS.glob("*.md")) if path.stem in page.read_text()]
    return ", ".join(f"[{page.stem}]({page.name})" for page in pages)
