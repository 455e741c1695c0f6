"""Fills what the pages on training say of the records of ``moeblaze evidence``, and draws their pictures.

``python -m moeblaze_ref.lm.document`` writes everything again.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.lm import EVIDENCE, evidence, evidence_plots, report

PAGES = tuple(
    DOCS / name for name in ("training.md", "training_steps.md", "training_free_routing.md", "training_runs.md")
)
# The section of each kind.
SECTIONS = {
    "replayed": "training_steps.md#the-same-choices",
    "free": "training_free_routing.md#every-router-by-itself",
    "curves": "training_runs.md#whole-runs",
    "memory": "training.md#what-it-saves-in-a-model",
}
RESULTS = DOCS / "results"
RUNS = ("h200", "h100", "h100_2")  # the end of a record's name; further records of a device are numbered
# Of each block, whose name is the kind of evidence or begins with it: its records, in the order of the tables.
RECORDS = {kind: [RESULTS / f"train_{kind}_{run}.json" for run in RUNS] for kind in EVIDENCE}
RECORDS |= {f"{kind}_tiny": [RESULTS / f"train_{kind}_tiny_cpu.json"] for kind in ("free", "curves")}
# Text for a reader who does not see the pictures.
PICTURED = {
    "replayed": "Loss of moeblaze and of the oracle at each step, and their gap, with the oracle's choices replayed",
    "free": "Gap of the loss to the oracle's and tokens with other experts at each step, every router by itself",
    "curves": "Training and validation loss of every run, and how far above the oracle's each is",
    "memory": "Peak bytes of a step at growing numbers of tokens, and the largest step that each layer trains",
}


def fill(text: str, paths: Mapping[str, Sequence[Path]] = RECORDS) -> str:
    """Return the document with every block regenerated, from the records of each, which need not be there yet.

    Raises
    ------
    ValueError
        If there is no block of that name, or a file is no record of the kind.
    """
    blocks = {name: partial(_block, kind_of(name), given) for name, given in paths.items()}
    return documents.fill(text, blocks | {"verdicts": partial(_verdicts, paths)})


def _verdicts(paths: Mapping[str, Sequence[Path]]) -> str:
    """The verdict of every record on one page."""
    found = [evidence.load(path, kind_of(name)) for name, given in paths.items() for path in filter(Path.exists, given)]
    columns = ["evidence", "preset", "device", "commit", "verdict"]
    return documents.table(columns, map(_verdict, found), words=len(columns)) if found else ""


def _verdict(found: Mapping[str, Any]) -> list[str]:
    kind, preset = f"[{found['kind']}]({SECTIONS[found['kind']]})", found["preset"]
    return [kind, preset, documents.device(found), found["commit"][:7], report.RESULTS[found["passed"]]]


def kind_of(block: str) -> str:
    """The kind of evidence that a block is filled from: free of ``free_tiny``."""
    return block.partition("_")[0]


def _block(kind: str, paths: Sequence[Path]) -> str:
    """Return the summary of the records, with the picture and the place of each; empty without records."""
    found = {path: evidence.load(path, kind) for path in paths if path.exists()}
    if not found:
        return ""
    measured = map(_measured, found, documents.devices([*found.values()]), found.values())
    return "\n\n".join([report.summary(*found.values()), *measured])


def _measured(path: Path, device: str, found: Mapping[str, Any]) -> str:
    """The picture of a record, where it was measured, and the fingerprint of the text that was read."""
    picture = f"![{PICTURED[found['kind']]}; {device}](images/{documents.picture_of(path).name})"
    return "\n\n".join([picture, "\n".join([*documents.place(found), f"- text: {found['text']}"])])


def write():
    """Write every page, and a picture of every record."""
    for page in PAGES:
        page.write_text(fill(page.read_text(), RECORDS))
    for name, paths in RECORDS.items():
        for path in filter(Path.exists, paths):
            evidence_plots.write(evidence.load(path, kind_of(name)), documents.picture_of(path), force=True)


if __name__ == "__main__":
    write()
