"""The command of a measurement that needs a GPU and writes a record: ``python -m MODULE --record FILE``."""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from moeblaze_ref.core import provenance, records

Rows = list[dict[str, Any]]


def run(command: str, description: str, measure: Callable[..., Rows], cases: Sequence[Any], parts: tuple[str, ...]):
    """Read the command line, measure each case in a process of its own, print its rows, and write the record.

    The record is written after each case, and ``--resume`` goes on with what it lacks.

    Parameters
    ----------
    command, parts
        As in `provenance.record`.
    description : str
        For ``--help``.
    measure : callable
        Returns the rows of a case; can be pickled.
    cases : sequence
        What ``measure`` is called with: one argument.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--record", required=True, help="write the record here")
    parser.add_argument("--resume", action="store_true", help="go on with the record")
    parser.add_argument("--force", action="store_true", help="replace a file there that is no record")
    given = parser.parse_args()
    try:
        path = records.file_named(given.record)
        provenance.check_place(path, command, given.force)
        asked = {"cases": [str(case) for case in cases]}
        found = provenance.resumed(path, command, asked, parts) if given.resume else {}
        rows, before = found.get("rows", []), found.get("measured", 0)
        for measured, more in enumerate(_rows(measure, cases[before:]), start=before + 1):
            rows = rows + more
            provenance.record(path, command, asked | {"measured": measured, "rows": rows}, given.force, parts)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _rows(measure: Callable[..., Rows], cases: Sequence[Any]) -> Iterator[Rows]:
    """The rows of each case."""
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for case in cases:
            found = pool.apply(measure, (case,))
            print(*map(json.dumps, found), sep="\n", flush=True)
            yield found
