"""Record the output of the launch in docs/cupy_by_hand.md on a GPU, by running the page's own code.

``python -m moeblaze_ref.course.site.cupy_by_hand --record docs/results/cupy_h100.json`` runs the code on a GPU, writes
the record, and writes all records into the page. Without ``--record`` the page is written from the records that are
there.
"""

import argparse
import contextlib
import io
import re
from pathlib import Path
from typing import Any

from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import documents, provenance, records
from moeblaze_ref.core.paths import DOCS

DOCUMENT, RESULTS = DOCS / "cupy_by_hand.md", DOCS / "results"
RECORDS = "cupy_*.json"
KEYS = ("printed", "device", "versions", "commit")
COMMAND = "site.cupy_by_hand"  # in its records
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[str]:
    """Return the Python code above the generated block: the inputs, then the launch."""
    return _BLOCK.findall(text.partition("<!-- begin gpu -->")[0])


def measure(text: str) -> dict[str, str]:
    """Run the code of the page on this machine's GPU; return {"printed": what it prints}.

    Raises
    ------
    RuntimeError
        If the backend ``cuda`` does not run here.
    """
    status = BACKENDS["cuda"].status()
    if not status.available:
        raise RuntimeError(f"nothing is recorded without a GPU and CuPy: {status.detail}")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec("".join(blocks(text)), {})
    return {"printed": printed.getvalue()}


def fill(text: str, results: Path = RESULTS) -> str:
    """Return the page with what every record of a folder says.

    Raises
    ------
    ValueError
        If a record lacks one of ``KEYS``.
    """
    found = [records.read(path, KEYS) for path in sorted(results.glob(RECORDS))]
    return documents.fill(text, {"gpu": lambda: "\n\n".join(map(_shown, found))})


def _shown(found: dict[str, Any]) -> str:
    return "\n".join([f"```text\n{found['printed']}```\n", *documents.place(found)])


def main():
    """The command."""
    parser = argparse.ArgumentParser(description="Write what the launch prints on a GPU into docs/cupy_by_hand.md.")
    parser.add_argument("--record", help="run the page's code first, and write what it prints here")
    parser.add_argument("--force", action="store_true", help="replace a file there that is no record")
    given = parser.parse_args()
    if given.record:
        try:
            record = records.file_named(given.record)
            provenance.check_place(record, COMMAND, given.force)
            provenance.record(record, COMMAND, measure(DOCUMENT.read_text()), given.force)
        except (RuntimeError, ValueError, OSError) as error:
            parser.error(str(error))
    DOCUMENT.write_text(fill(DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
