"""Ask confined processes, and make a report of what they answer."""

import json
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from moeblaze_ref.verify import guard, in_subprocess
from moeblaze_ref.verify.checker.report import Difference, wrong_elements
from moeblaze_ref.verify.comparisons import BOUNDS
from moeblaze_ref.verify.in_subprocess import Verdict
from moeblaze_ref.verify.torch_cells import messages

Arrays = dict[str, np.ndarray]
FORGED = "the answer has written into the pipe of the process that runs it"


class Row(NamedTuple):
    """One case of a report."""

    case: str
    counted: str  #: what was counted or measured, and what is allowed
    problem: str  #: what is wrong, in a sentence; empty if nothing is


class Project(Protocol):
    """A project: what the reader's code is run on, and what is right."""

    defines: str  #: the function or class that the reader's code defines
    refused: tuple[str, ...]  #: names that the code must do without

    def rows(self, cell: Any, session: "Session") -> Iterable[Row]:
        """Run a reader's `torch_cells.Cell` on every case, and compare."""


class Session:
    """The processes of one check.

    Parameters
    ----------
    limits : guard.Limits
        Of each process.
    stop : iterable of Connection
        As of `in_subprocess.confined`.
    """

    def __init__(self, limits: guard.Limits, stop: Iterable[Connection] = ()):
        self._limits, self._stop = limits, tuple(stop)
        self._refused: dict[str, None] = {}  # by the system, of the confinement

    def ask(self, work: Callable[[guard.Send], None], answers: int) -> list[dict[str, Any]]:
        """Do the work in a confined process, and return so many of its answers.

        Raises
        ------
        ValueError
            If the reader's code raised: the message is its own.
        TimeoutError, ChildProcessError
            If it took too long or too much, ended its process, or wrote into the process' pipe.
        """
        ended = in_subprocess.confined(work, self._limits, self._stop)
        self._refused |= dict.fromkeys(ended.refused)
        found = [_read(line) for line in ended.sent.splitlines()]
        for one in found:
            if "error" in one:
                raise ValueError(str(one["error"]))
        if len(found) < answers:
            raise ChildProcessError(
                f"the answer ended the process that ran it, {in_subprocess.how_it_ended(ended.status)}"
            )
        return found[:answers]

    def verdict(self, rows: Iterable[Row]) -> Verdict:
        """The report of all cases."""
        rows = list(rows)
        width = max(len(row.case) for row in rows)
        lines = [f"{'WRONG' if row.problem else 'right'}   {row.case:{width}}   {row.counted}".rstrip() for row in rows]
        if self._refused:
            lines.append(f"this system did not confine the answer fully. It refuses: {'; '.join(self._refused)}")
        first = next((f"{row.case}: {row.problem}" for row in rows if row.problem), "")
        return Verdict(first, "\n".join(lines), {})


def _read(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ChildProcessError(FORGED)
    return found


def tensor(value: Any) -> np.ndarray:
    """A tensor of an answer.

    Raises
    ------
    ChildProcessError
        If it is none.
    """
    try:
        return messages.decoded(value)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ChildProcessError(FORGED) from None


def difference(found: Arrays, expected: Arrays) -> str:
    """Return a sentence on the first wrong element of the first wrong tensor, or an empty text.

    The bound is that of the checker for float32; ``expected`` is float64.
    """
    for name, right in expected.items():
        if (shape := found[name].shape) != right.shape:
            return f"{name} has shape {shape}, but it must be {right.shape}"
        if found[name].dtype != np.float32:
            return f"{name} has dtype {found[name].dtype}, but it must be float32"
        wrong = wrong_elements(found[name], right, "float32", BOUNDS["float32"])
        if wrong.any():
            index = tuple(int(axis[0]) for axis in wrong.nonzero())
            values = found[name][index].item(), right[index].item()
            return str(Difference(name, index, {}, *values, int(wrong.sum()), wrong.size))
    return ""
