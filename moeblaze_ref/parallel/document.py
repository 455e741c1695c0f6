"""Fills docs/parallel_measured.md from the records of ``cli.parallel_bench`` and ``parallel_host``.

``python -m moeblaze_ref.parallel.document`` writes everything again.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moeblaze_ref.core import documents, records
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.parallel import findings

DOCUMENT = DOCS / "parallel_measured.md"
KEYS = ("rows", "gpus", "steps", "token_s", "bandwidth", "exchange_s", "rest_s", "device", "versions", "commit")
HOST_KEYS = ("rows", "preset", "device", "versions", "commit")
RESULTS = DOCS / "results"
HOST = {"host": RESULTS / "ep_host_h200.json", "host_before": RESULTS / "ep_host_before_h200.json"}
MAPS = {f"{model}_x2_copies": RESULTS / f"ep_h200x2_{model}_copies.json" for model in ("gptoss", "mixtral")} | {
    f"{model}_x{gpus}": RESULTS / f"ep_h200x{gpus}_{model}.json" for gpus in (2, 4) for model in ("gptoss", "mixtral")
}
RECORDS = HOST | MAPS


def fill(text: str, paths: Mapping[str, Path] = RECORDS) -> str:
    """Return the document with the block of each record regenerated; those that are not there yet have empty blocks.

    Raises
    ------
    ValueError
        If there is no block of that name, or a file is no record of the benchmark.
    """
    blocks = {name: _host_block if name in HOST else _block for name in paths}
    return documents.fill(text, {name: partial(blocks[name], path) for name, path in paths.items()})


def load(path: Path) -> dict[str, Any]:
    """A record of `moeblaze_ref.cli.parallel_bench`; errors as in `records.read`."""
    return records.read(path, KEYS)


def load_host(path: Path) -> dict[str, Any]:
    """A record of `moeblaze_ref.cli.parallel_host`; errors as in `records.read`."""
    return records.read(path, HOST_KEYS)


def _block(path: Path) -> str:
    """Return the summary of a record and its origin; empty without a record."""
    if not path.exists():
        return ""
    found = load(path)
    return _with_origin(findings.summary(found), found)


def _host_block(path: Path) -> str:
    """Return the table of a record of the host's time and its origin; empty without a record."""
    if not path.exists():
        return ""
    found = load_host(path)
    return _with_origin(findings.host(found), found)


def _with_origin(said: str, found: Mapping[str, Any]) -> str:
    return "\n\n".join([said, "\n".join(documents.place(found))])


if __name__ == "__main__":
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))
