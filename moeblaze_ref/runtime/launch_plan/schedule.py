"""The order in which a plan allocates, sends and frees. Its peak memory is at most that of the recorded call.

Neighbouring launches and products form a part, which one call of the C function sends. Memory that a part alone uses is
cut from one allocation, its arena. A plan allocates a part's memory before the part, and frees memory without a later
use after the part. So a longer part has more memory at one time: it ends where that would exceed the peak of the
recorded call.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from moeblaze_ref.runtime.launch_plan.events import Buffer, Event, Operation, in_blocks


@dataclass(frozen=True)
class Part:
    """Events that follow one another, and their memory.

    Parameters
    ----------
    events : sequence of Event
        Launches and products, or one operation.
    born, dropped : tuple of int
        Buffers that are allocated before it or by it, and that are freed after it.
    arena : dict of int to int
        Where buffers of this part alone begin in its arena, by their number.
    arena_bytes : int
    """

    events: Sequence[Event]
    born: tuple[int, ...]
    dropped: tuple[int, ...]
    arena: dict[int, int]
    arena_bytes: int


class Lives:
    """The first and the last event that uses each buffer.

    Parameters
    ----------
    events : sequence of Event
    lasting : collection of int
        Buffers that no event frees: results, and inputs that the caller keeps.
    """

    def __init__(self, events: Sequence[Event], lasting: Collection[int]):
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        for place, event in enumerate(events):
            for number in event.buffers():
                self.first.setdefault(number, place)
                self.last[number] = place
        self.last |= dict.fromkeys(lasting, len(events))

    def meet(self, one: int, other: int) -> bool:
        """Return True if two buffers live at the same time."""
        return self.first[one] <= self.last[other] and self.first[other] <= self.last[one]


def packed(numbers: Iterable[int], buffers: Sequence[Buffer], lives: Lives) -> tuple[dict[int, int], int]:
    """Return where each buffer begins in an arena, and the bytes of the arena.

    The largest is placed first. Each lies at the lowest place that no buffer has which lives at the same time.
    """
    places: dict[int, int] = {}
    size = {number: in_blocks(buffers[number].nbytes) for number in numbers}
    for number in sorted(size, key=lambda number: -size[number]):
        place = 0
        for other in sorted(places, key=lambda other: places[other]):
            if lives.meet(number, other) and places[other] < place + size[number]:
                place = max(place, places[other] + size[other])
        places[number] = place
    return places, max((place + size[number] for number, place in places.items()), default=0)


@dataclass
class Scheduler:
    """Cuts events into parts, from the first on.

    Parameters
    ----------
    events : sequence of Event
    buffers : sequence of Buffer
        The inputs, which are there, and the others, which the parts allocate.
    num_inputs : int
    lives : Lives
    peak : int
        The most bytes that the parts may have at one time, less those of inputs that they free.
    """

    events: Sequence[Event]
    buffers: Sequence[Buffer]
    num_inputs: int
    lives: Lives
    peak: int

    def parts(self) -> list[Part]:
        """The parts, each as long as the peak allows; one of a single event never exceeds it."""
        parts: list[Part] = []
        begin, live = 0, 0  # bytes before the part
        while begin < len(self.events):
            end = begin + 1
            part = self._part(begin, end)
            while self._may_join(begin, end):
                longer = self._part(begin, end + 1)
                if live + self._taken(longer) > self.peak:
                    break
                part, end = longer, end + 1
            parts.append(part)
            live += self._taken(part) - part.arena_bytes - self._bytes(part.dropped)
            begin = end
        return parts

    def _may_join(self, begin: int, end: int) -> bool:
        """Return True if the event at ``end`` may join a part that begins at ``begin``. Operations are never joined."""
        return end < len(self.events) and not any(isinstance(self.events[at], Operation) for at in (begin, end))

    def _part(self, begin: int, end: int) -> Part:
        events, first, last = self.events[begin:end], self.lives.first, self.lives.last
        used = dict.fromkeys(number for event in events for number in event.buffers())
        born = [number for number in used if number >= self.num_inputs and first[number] >= begin]
        sent = not isinstance(events[0], Operation)
        inside = [n for n in born if sent and last[n] < end and self.buffers[n].constant is None]
        arena, arena_bytes = packed(inside, self.buffers, self.lives)
        dropped = tuple(number for number in used if number not in arena and last[number] < end)
        return Part(events, tuple(n for n in born if n not in arena), dropped, arena, arena_bytes)

    def _taken(self, part: Part) -> int:
        """Bytes that a part allocates."""
        return part.arena_bytes + self._bytes(part.born)

    def _bytes(self, numbers: Iterable[int]) -> int:
        return sum(in_blocks(self.buffers[number].nbytes) for number in numbers)
