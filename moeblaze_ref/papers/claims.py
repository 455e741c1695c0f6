"""One row for each claim of a paper, with a verdict that is computed from the paper's value and ours.

A formula that agrees with the paper needs no reason. One that does not agree needs a `Mistake`, which says what the
paper got wrong and what the formula gives in its place. Any other combination fails: a mistake of a value that agrees
is stale, a value that does not agree without a mistake is unexplained, and a value that is neither the paper's nor the
mistake's is a fault of our formula.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from math import inf, nextafter
from typing import Any

from moeblaze_ref.papers.results import Source


class Verdict(StrEnum):
    """Verdict of a row on its claim."""

    AGREES = "agrees"
    PAPER_ERROR = "the paper's error"
    DIFFERS = "ours differs"
    NOT_PRINTED = "not printed"
    NOT_REPRODUCED = "not reproduced"
    NOT_MEASURED = "not measured yet"
    FAILS = "FAILS"


@dataclass(frozen=True)
class PrintedNumber:
    """A number as a paper prints it, and the values that agree with it, in the unit of the value that is compared."""

    text: str  #: as printed, with its unit
    low: float
    high: float  #: both ends are included

    def holds(self, value: float) -> bool:
        """Return True if a value agrees; NaN never does."""
        return self.low <= value <= self.high


def exactly(number: float, text: str, digit: float = 1.0) -> PrintedNumber:
    """Return a printed number that agrees with every value that rounds to it at its last ``digit``."""
    return PrintedNumber(text, number - digit / 2, number + digit / 2)


def at_least(number: float, text: str) -> PrintedNumber:
    """Return a printed lower bound ("as high as 11")."""
    return PrintedNumber(text, number, inf)


def more_than(number: float, text: str) -> PrintedNumber:
    """Return a printed bound that is not reached itself ("over 4x")."""
    return at_least(nextafter(number, inf), text)


@dataclass(frozen=True)
class Mistake:
    """An error in a paper."""

    #: The formula's value in place of the printed one, as the row shows it. It is typed in, never computed: a row whose
    #: formula gives anything else fails.
    gives: str
    why: str  #: what is wrong


@dataclass(frozen=True)
class Row:
    """One claim."""

    item: str  #: id of the item of `papers.items.ITEMS` that it belongs to
    what: str  #: what the numbers are of
    printed: str = ""  #: the paper's value; empty if it prints none
    formula: str = ""  #: what the formula gives; empty if there is none
    ours: str = ""  #: what we measured, with its device; empty if nothing is measured
    verdict: Verdict = Verdict.AGREES
    why: str = ""  #: the reason of any verdict but "agrees"
    detail: bool = False  #: whether the row is left out of the table of all items
    sources: tuple[Source, ...] = ()  #: the runs that ``ours`` comes from

    def by(self, sources: Iterable[Source]) -> "Row":
        """Return the row with the runs that ``ours`` comes from."""
        return replace(self, sources=tuple(dict.fromkeys(sources)))

    @property
    def ours_with_runs(self) -> str:
        """Return our measured value with the short commits of each device."""
        commits: dict[str, list[str]] = {}
        for device, commit in self.sources:
            commits.setdefault(device, []).append(commit[:7])
        places = (f"{device} at {', '.join(dict.fromkeys(found))}" for device, found in commits.items())
        return f"{self.ours} ({'; '.join(places)})" if commits else self.ours

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain data."""
        sources = [source._asdict() for source in self.sources]
        return asdict(self) | {"verdict": str(self.verdict), "sources": sources}


def compared(
    what: str,
    printed: PrintedNumber,
    value: float,
    show: Callable[[float], str],
    mistake: Mistake | None = None,
) -> Row:
    """Compare a formula's value, which ``show`` writes, with what a paper prints.

    The row's item is still empty: `Item.rows` fills it in.
    """
    return stated(what, printed.text, printed.holds(value), show(value), mistake)


def measured(what: str, printed: PrintedNumber, values: Sequence[float], ours: str, differs: str) -> Row:
    """Compare values that we measured with a printed number; without values the row is not measured yet.

    The row agrees if all values do; ``differs`` says why one may not. ``ours`` has the values with their devices.
    """
    if not values:
        return not_measured(what, printed.text)
    return observed(what, printed.text, all(map(printed.holds, values)), ours, differs)


def observed(what: str, printed: str, holds: bool, ours: str, differs: str) -> Row:
    """Compare what we measured with a printed sentence, which ``holds`` or not; ``differs`` says why it may not."""
    verdict, why = (Verdict.AGREES, "") if holds else (Verdict.DIFFERS, differs)
    return Row("", what, printed, "", ours, verdict, why)


def beyond(row: Row) -> Row:
    """Return the row of a comparison that the paper does not make: it is not its error if its claim does not hold."""
    return replace(row, verdict=Verdict.DIFFERS) if row.verdict is Verdict.PAPER_ERROR else row


def stated(what: str, printed: str, holds: bool, formula: str, mistake: Mistake | None = None) -> Row:
    """Compare a printed definition or sentence, which ``holds`` or not, with what ``formula`` says in its place."""
    verdict, why = _verdict(holds, formula, mistake)
    return Row("", what, printed, formula, "", verdict, why)


def defect(what: str, printed: str, instead: str, why: str) -> Row:
    """Name a defect of a paper's text that has no value, such as a symbol that is never defined."""
    return Row("", what, printed, instead, "", Verdict.PAPER_ERROR, why)


def not_printed(what: str, formula: str, ours: str = "") -> Row:
    """Give the values of a bar whose number the paper does not print."""
    return Row("", what, "", formula, ours, Verdict.NOT_PRINTED, "a bar of a figure without a number", detail=True)


def contradicted(row: Row) -> Row:
    """Return the row as failed, since what we measured is not what its formula gives."""
    return replace(row, verdict=Verdict.FAILS, why="what we measured is not what the formula gives")


def not_measured(what: str, printed: str, why: str = "no recorded run") -> Row:
    """Name something that can be measured and was not yet, and what is missing."""
    return Row("", what, printed, verdict=Verdict.NOT_MEASURED, why=why)


def not_reproduced(what: str, printed: str, why: str, ours: str = "") -> Row:
    """Name a printed value that this project does not reproduce, and why."""
    return Row("", what, printed, "", ours, Verdict.NOT_REPRODUCED, why)


def _verdict(agrees: bool, formula: str, mistake: Mistake | None) -> tuple[Verdict, str]:
    if mistake is None:
        if agrees:
            return Verdict.AGREES, ""
        return Verdict.FAILS, "does not agree with the paper, and nothing explains it"
    if agrees:
        return Verdict.FAILS, f"explained as an error, but it agrees: {mistake.why}"
    if formula != mistake.gives:
        return Verdict.FAILS, f"the formula must give {mistake.gives}: {mistake.why}"
    return Verdict.PAPER_ERROR, mistake.why


def one_each(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each claim. Runs of a claim with a row each are shown together, and all of them must agree."""
    of_claim: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        of_claim.setdefault((row.what, row.printed), []).append(row)
    return [_together(found) for found in of_claim.values()]


def _together(rows: Sequence[Row]) -> Row:
    """Rows of one claim as one, which has the worst of their verdicts."""
    worst = max(rows, key=lambda row: [*Verdict].index(row.verdict))
    ours = "; ".join(dict.fromkeys(row.ours for row in rows))
    return replace(worst, ours=ours).by(source for row in rows for source in row.sources)


def failures(rows: Sequence[Row]) -> list[Row]:
    """Return the rows that fail."""
    return [row for row in rows if row.verdict is Verdict.FAILS]
