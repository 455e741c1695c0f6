"""Times of several contenders, interleaved in one run."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

WARM_UP = 2  # rounds that do not count

Lap = Callable[[], None]  # ends one part of the work and begins the next
Contender = Callable[[int, Lap], object]  # does its work on the inputs of this round, without waiting for it to end


class Clock(Protocol):
    """A clock of the device."""

    def settle(self) -> None:
        """Wait until the device has finished all work in its queue."""

    def mark(self) -> Any:
        """A moment: when the device comes to this point of its queue."""

    def milliseconds(self, start: Any, end: Any) -> float:
        """Milliseconds between two moments; waits for the second."""


@dataclass(frozen=True)
class Samples:
    """The measured times of one contender.

    Parameters
    ----------
    laps : tuple of tuple of float
        Milliseconds of each part of the work, one tuple a repetition.
    """

    laps: tuple[tuple[float, ...], ...]

    @property
    def totals(self) -> list[float]:
        """Milliseconds of each repetition."""
        return [sum(parts) for parts in self.laps]

    @property
    def median(self) -> float:
        """Median time of the whole work, in milliseconds."""
        return statistics.median(self.totals)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile, in milliseconds; a single repetition is both."""
        totals = self.totals
        if len(totals) == 1:
            return totals[0], totals[0]
        first, _, third = statistics.quantiles(totals, n=4, method="inclusive")
        return first, third

    def shared_by(self, calls: int) -> "Samples":
        """The same for one of so many calls that each repetition made."""
        return Samples(tuple(tuple(part / calls for part in parts) for parts in self.laps))

    def part(self, number: int) -> float:
        """Median of one part of the work, milliseconds."""
        return statistics.median(parts[number] for parts in self.laps)


def replayed(replay: Callable[[], None]) -> Contender:
    """Return a contender that replays the same work in every round."""
    return lambda number, lap: replay()


def interleave(contenders: Mapping[Any, Contender], repetitions: int, clock: Clock) -> dict[Any, Samples]:
    """Time every contender in each round, beginning with another one; the first ``WARM_UP`` rounds do not count.

    In a round each contender works twice, and the second time counts. So its own work sets the clocks of the device,
    not the work of its predecessor. The host is as far ahead of the device as in training: the device settles before
    each contender, so that none inherits a lead from a longer work.

    Parameters
    ----------
    contenders : mapping of name to Contender
        Each is called with a number by which it chooses among its inputs, and with a function that it may call to part
        its work. It must not wait for the device.
    repetitions : int
        Rounds that count.
    clock : Clock

    Returns
    -------
    dict of name to Samples
    """
    laps: dict[Any, list[tuple[float, ...]]] = {name: [] for name in contenders}
    for number in range(WARM_UP + repetitions):
        moments = {name: _moments(contenders[name], number, clock) for name in _from(number, contenders)}
        if number >= WARM_UP:
            for name, of_one in moments.items():
                laps[name].append(tuple(clock.milliseconds(*ends) for ends in pairwise(of_one)))
    return {name: Samples(tuple(of_one)) for name, of_one in laps.items()}


def _moments(contender: Contender, number: int, clock: Clock) -> list[Any]:
    """The beginning, the laps and the end of one contender's work, after a run-up on other inputs."""
    clock.settle()
    contender(number + 1, lambda: None)
    moments = [clock.mark()]
    contender(number, lambda: moments.append(clock.mark()))
    return [*moments, clock.mark()]


def _from(number: int, names: Iterable[Any]) -> list[Any]:
    """The names in order, beginning at another one each round."""
    names = list(names)
    first = number % len(names)
    return names[first:] + names[:first]
