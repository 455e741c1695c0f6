"""Check that notebook files are as `outputs` writes them: canonical JSON, and nothing that differs from run to run.

``python -m moeblaze_ref.course.notebook.hygiene FILE...`` names each file that is not, and then exits with 1.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat

from moeblaze_ref.course.notebook import outputs


def faults(path: Path) -> Iterator[str]:
    """Yield what is wrong with a notebook's file, in words.

    Raises
    ------
    nbformat.reader.NotJSONError
        If it is no notebook.
    """
    text = path.read_text()
    notebook = nbformat.reads(text, as_version=4)
    if text != outputs.text(notebook):
        yield "is not canonical JSON"
    if notebook != outputs.settled(notebook):
        yield "has metadata, widgets or pictures that `make notebooks` leaves out"
    failed = [
        cell.id for cell in notebook.cells if any(output.output_type == "error" for output in cell.get("outputs", ()))
    ]
    if failed:
        yield f"has errors as outputs of {', '.join(failed)}"


def main(paths: list[str]) -> int:
    """Print the faults of these files and return the exit status."""
    found = [f"{path} {fault}" for path in paths for fault in faults(Path(path))]
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
