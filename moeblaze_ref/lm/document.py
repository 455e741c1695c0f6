"""Fills what docs/training.md says of measurements from the records of ``moeblaze evidence``, and draws their pictures.

``python -m moeblaze_ref.lm.document`` writes everything again.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from moeblaze_ref.core import documents
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.lm import EVIDENCE, evidence, evidence_plots, report

DOCUMENT = DOCS / "training.md"
# Of each block, whose name is the kind of evidence or begins with it.
RECORDS = {kind: DOCS / "results" / f"train_{kind}_h200.json" for kind in EVIDENCE}
RECORDS |= {f"{kind}_tiny": DOCS / "results" / f"train_{kind}_tiny_cpu.json" for kind in ("free", "curves")}
# What a reader who does not see the pictures is told.
PICTURED = {
    "replayed": "Loss of moeblaze and of the oracle at each step, and their gap, with the oracle's choices replayed",
    "free": "Gap of the loss to the oracle's and tokens with other experts at each step, every router by itself",
    "curves": "Training and validation loss of every run, and how far above the oracle's each is",
    "memory": "Peak bytes of a step at growing numbers of tokens, and the largest step that each layer trains",
}


def fill(text: str, paths: Mapping[str, Path] = RECORDS) -> str:
    """The document with every block written anew.

    Parameters
    ----------
    text : str
    paths : mapping
        Of each block's record, which need not be there yet.

    Raises
    ------
    ValueError
        If there is no block of that name, or a file is no record of the kind.
    """
    return documents.fill(text, {name: partial(_block, kind_of(name), path) for name, path in paths.items()})


def kind_of(block: str) -> str:
    """The kind of evidence that a block is filled from: free of ``free_tiny``."""
    return block.partition("_")[0]


def picture_of(path: Path) -> Path:
    """Where the picture of a record lies: beside the others of the documents."""
    return path.parents[1] / "images" / f"{path.stem}.png"


def _block(kind: str, path: Path) -> str:
    """What a record says, its picture, and where it was measured; nothing while there is none."""
    if not path.exists():
        return ""
    found = evidence.load(path, kind)
    picture = f"![{PICTURED[kind]}](images/{picture_of(path).name})"
    return "\n\n".join([report.summary(found), picture, "\n".join(documents.place(found))])


def write():
    """The document, and a picture of every record."""
    DOCUMENT.write_text(fill(DOCUMENT.read_text(), RECORDS))
    for name, path in RECORDS.items():
        if path.exists():
            evidence_plots.write(evidence.load(path, kind_of(name)), picture_of(path), force=True)


if __name__ == "__main__":
    write()
