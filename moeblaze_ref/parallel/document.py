"""Fills what docs/parallel.md says of measurements from the records of ``moeblaze_ref.cli.parallel_bench``.

``python -m moeblaze_ref.parallel.document`` writes everything again.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moeblaze_ref.core import documents, records
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.parallel import findings

DOCUMENT = DOCS / "parallel.md"
KEYS = ("rows", "gpus", "steps", "token_s", "bandwidth", "exchange_s", "rest_s", "device", "versions", "commit")
RECORDS = {
    f"{model}_x{gpus}": DOCS / "results" / f"ep_h200x{gpus}_{model}.json"
    for gpus in (2, 4)
    for model in ("gptoss", "mixtral")
}


def fill(text: str, paths: Mapping[str, Path] = RECORDS) -> str:
    """Return the document with the block of each record regenerated; those that are not there yet have empty blocks.

    Raises
    ------
    ValueError
        If there is no block of that name, or a file is no record of the benchmark.
    """
    return documents.fill(text, {name: partial(_block, path) for name, path in paths.items()})


def load(path: Path) -> dict[str, Any]:
    """A record of `moeblaze_ref.cli.parallel_bench`; errors as in `records.read`."""
    return records.read(path, KEYS)


def _block(path: Path) -> str:
    """Return the summary of a record and its origin; empty without a record."""
    if not path.exists():
        return ""
    found = load(path)
    return "\n\n".join([findings.summary(found), "\n".join(documents.place(found))])


if __name__ == "__main__":
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))
