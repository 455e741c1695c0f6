"""Results of the checker: the first element that differs, the counts, and the verdict on each case."""

import html
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moeblaze_ref.runtime.poison import POISON
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import relative_error
from moeblaze_ref.verify.checker.budgets import MEANS
from moeblaze_ref.verify.checker.contracts import AXES, SLOT_ORDER, Arrays, Problem

COUNTED_BY = "counted in the process that ran the kernel: one that is made to deceive can forge these numbers"
Counts = dict[str, dict[str, int]]  # quantity, such as "written", then tensor


@dataclass(frozen=True)
class Difference:
    """The first wrong element, in row-major order, of the first wrong output."""

    tensor: str
    index: tuple[int, ...]
    place: dict[str, int | list[int]]  #: as `place_of` has it
    found: float | int | None  #: None if it still holds poison: never written, or made of what was not
    expected: float | int
    differing: int  #: elements of the tensor that differ
    elements: int  #: elements of the tensor

    def __str__(self):
        return self.sentence("must be")

    def sentence(self, other: str) -> str:
        """Return a sentence: the position, the value found, and what it ``other`` ("must be") expected."""
        element = f"{self.tensor}[{', '.join(map(str, self.index))}]"
        found = "is never written (or made of what was not)" if self.found is None else f"is {_number(self.found)}"
        place = ", ".join(f"{name} {number}" for name, number in self.place.items())
        count = f"{self.differing:,} of {self.elements:,} elements differ"
        return f"{element} {found}, but {other} {_number(self.expected)}{place and f' ({place})'}; {count}"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def first_difference(problem: Problem, found: Arrays, baseline: Arrays) -> Difference | None:
    """Return the first element outside the project's bounds, or None.

    Found is what the kernel wrote, over poison. The baseline is plain torch's results in the same dtype, for the narrow
    ones.
    """
    for name, expected in problem.expected.items():
        if name not in found:
            continue
        dtype = str(found[name].dtype)
        bound = _bound(name, dtype, problem.expected, baseline)
        wrong = wrong_elements(found[name], expected, dtype, bound)
        if wrong.any():
            return _element(name, problem, found[name], expected, wrong)
    return None


def first_other_bits(problem: Problem, found: Arrays) -> Difference | None:
    """Return the first element whose bits are not the exact result's, rounded to float32 and then to the dtype."""
    right = {name: exact.astype(np.float32) for name, exact in problem.expected.items() if name in found}
    return unlike(problem, found, {name: array.astype(found[name].dtype) for name, array in right.items()})


def _bound(name: str, dtype: str, expected: Arrays, baseline: Arrays) -> float:
    if dtype in comparisons.BOUNDS or name in baseline:
        return comparisons.bound_of(name, expected, dtype, baseline)
    return comparisons.SMALL_TENSOR_BOUNDS[dtype]


def wrong_elements(found: np.ndarray, expected: np.ndarray, dtype: str, bound: float) -> np.ndarray:
    """The elements that no rounding explains, or the furthest ones if only the norm of the error is above the bound."""
    wrong = _unexplained(found, expected, dtype)
    if wrong.any() or relative_error(found, expected) <= bound:
        return wrong
    return _furthest(found, expected)


def _unexplained(found: np.ndarray, expected: np.ndarray, dtype: str) -> np.ndarray:
    """Elements that were never written, or are off by more than a few roundings of their size.

    The norm over a tensor hides one wrong element among thousands. An element's size is its own, or the tensor's
    root mean square if that is larger, since sums of that size round before they cancel.
    """
    exact = expected.astype(np.float64)
    root_mean_square = np.linalg.norm(exact) / max(exact.size, 1) ** 0.5
    size = np.maximum(np.abs(exact), root_mean_square)
    allowed = (comparisons.BOUNDS | comparisons.SMALL_TENSOR_BOUNDS)[dtype]
    return ~(np.abs(found.astype(np.float64) - exact) <= allowed * size) | never_written(found)


def _furthest(found: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The elements that are furthest off."""
    error = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return error == error.max()


def _element(name: str, problem: Problem, found: np.ndarray, expected: np.ndarray, wrong: np.ndarray) -> Difference:
    index = tuple(int(axis[0]) for axis in wrong.nonzero())
    value = None if never_written(found)[index] else found[index].item()
    place = place_of(name, index, problem)
    return Difference(name, index, place, value, expected[index].item(), int(wrong.sum()), wrong.size)


def unlike(problem: Problem, found: Arrays, again: Arrays) -> Difference | None:
    """The first element of which two runs on the same input wrote other bits; the second run's is the expected one."""
    for name, array in again.items():
        bits = [part.view(f"u{part.itemsize}") for part in (found[name], array)]
        differs = bits[0] != bits[1]
        if differs.any():
            return _element(name, problem, found[name], array, differs)
    return None


def never_written(array: np.ndarray) -> np.ndarray:
    """Return True where an array still holds poison."""
    words = np.ascontiguousarray(array).view(np.uint16).reshape(*array.shape, array.itemsize // 2)
    return (words == POISON).all(axis=-1)


def place_of(name: str, index: tuple[int, ...], problem: Problem) -> dict[str, int | list[int]]:
    """The row in expert order, token, slot and expert that an element belongs to, or all experts of its token."""
    routes, axes = problem.dispatch, dict(zip(AXES[name], index, strict=True))
    if name in SLOT_ORDER:
        axes = dict(zip("Lk", divmod(axes["R"], routes.k), strict=True))
    if "R" in axes:
        row = axes["R"]
        expert = int(np.searchsorted(routes.expert_token_offsets, row, side="right")) - 1
        return {"row": row, "token": int(routes.expert_token_indices[row]), "expert": expert}
    if "k" in axes:
        expert = int(routes.token_expert_indices[axes["L"] * routes.k + axes["k"]])
        return {"token": axes["L"], "slot": axes["k"], "expert": expert}
    meanings = {"L": "token", "E": "expert", "E+1": "expert"}
    place: dict[str, Any] = {meanings[axis]: i for axis, i in axes.items() if axis in meanings}
    if place.keys() == {"token"}:
        place["experts"] = problem.case.topk_experts[place["token"]].tolist()
    return place


@dataclass(frozen=True)
class Result:
    """One case."""

    case: str  #: its sizes, and what is hard about it
    problem: str  #: what is wrong, in a sentence; empty if the kernel is right
    difference: Difference | None  #: the element that shows it
    counts: Counts  #: bytes and sectors by quantity and tensor; empty where nothing counts
    missed: dict[str, str] = field(default_factory=dict)  #: of each level what is over its budgets; empty if nothing is

    @property
    def ok(self) -> bool:
        """True if the kernel is right in this case."""
        return not self.problem

    @property
    def totals(self) -> dict[str, int]:
        """The counts over all tensors, by quantity; empty after a fault."""
        return {quantity: sum(tensors.values()) for quantity, tensors in self.counts.items()}


@dataclass(frozen=True)
class Report:
    """The checker's verdict on a kernel, case by case."""

    task: str
    kernel: str
    backend: str
    dtype: str
    launch: str  #: grid, block and shared bytes as formulas, and who stated them
    #: Quantities that the backend counts in the process that runs the kernel. The kernel can forge them.
    quantities: tuple[str, ...]
    results: list[Result]  #: the last one if a case faults: the check ends there
    #: Why sizes past 2**31 elements were not checked; empty if they were, or if the caller chose the cases.
    unchecked: str

    @property
    def ok(self) -> bool:
        """True if there was at least one case and the kernel is right in all."""
        return bool(self.results) and all(result.ok for result in self.results)

    @property
    def first_problem(self) -> str:
        """The first case that is wrong, and how; empty if none is. A case over its budgets counts after all others."""
        failed = [result for result in self.results if not result.ok]
        wrong = [result for result in failed if result.difference or not result.counts]  # a fault leaves no counts
        return next((f"{result.case}: {result.problem}" for result in wrong or failed), "")

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON takes it; numbers that JSON lacks become strings."""
        return {"ok": self.ok} | _json(asdict(self)) | {"counted_by": COUNTED_BY if self.quantities else None}

    def __str__(self):
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.task}: {self.kernel}, {self.dtype}, on {self.backend}"
        yield f"launch: {self.launch}"
        shown = self._shown()
        rows = [["", "", *shown]]
        for result in self.results:
            totals = [f"{result.totals[name]:,}" if result.totals else "" for name in shown]
            rows.append(["right" if result.ok else "WRONG", result.case, *totals])
        right, case, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        for verdict, name, *numbers in rows:
            counts = (f"   {number:>{width}}" for number, width in zip(numbers, widths, strict=True))
            yield f"{verdict:{right}}   {name:{case}}{''.join(counts)}".rstrip()
        yield self.first_problem or f"right in all {len(self.results)} cases"
        if self.unchecked:
            yield f"not checked past 2**31 elements, because {self.unchecked}"
        if self.quantities:
            yield COUNTED_BY
        else:
            yield f"nothing is counted on {self.backend}: check on simt for bytes, sectors and budgets"

    def _shown(self) -> list[str]:
        """The quantities with a column: of those of ``MEANS`` the ones that some case has."""
        found = {name for result in self.results for name, total in result.totals.items() if total}
        return [name for name in self.quantities if name not in MEANS or name in found]

    def _repr_html_(self):
        return f"<pre>{html.escape(str(self))}</pre>"


class Wrong(AssertionError):
    """The checked kernel is wrong; the message says how, ``report`` has every case."""

    def __init__(self, report: Report):
        self.report = report
        super().__init__(f"{report.kernel} is not {report.task}: {report.first_problem}")


def _json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return str(value) if isinstance(value, float) and not np.isfinite(value) else value
