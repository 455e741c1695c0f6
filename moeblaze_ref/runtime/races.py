"""Races of a recorded launch: accesses of two threads to one place, of which one writes, and that nothing orders.

Two accesses are ordered if a barrier of the block lies between them, or if the lanes of one warp have met between them.
Blocks are never ordered. Two atomics do not race.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from moeblaze_ref.runtime.record import ACCESSES, LANES, LaunchRecord
from moeblaze_ref.runtime.simt.symbols import Frame

LOAD, _, ATOMIC = ACCESSES
BARRIER = "__syncthreads"  # and those that count or vote
# Other text that orders threads, in a kernel or in a header that it uses. The race check does not follow it.
OTHER_ORDER = re.compile(r"__threadfence|mbarrier|cp_async|wgmma|\bvolatile\b")


class Access(NamedTuple):
    """An access of one thread."""

    block: int
    thread: int
    barriers: int  #: that the thread had passed
    meeting: int  #: how often the lanes of its warp had met
    kind: int  #: one of `record.ACCESSES`
    instruction: int


class Race(NamedTuple):
    """Two accesses to one place that nothing orders; at least one writes."""

    element: str  #: such as ``counts[3]``
    accesses: tuple[Access, Access]
    frames: tuple[tuple[Frame, ...], tuple[Frame, ...]]  #: their lines, as of `record.Step`

    def sentence(self) -> str:
        """Return what the two threads do."""
        one, other = self.accesses
        first, second = (f"thread {access.thread} of block {access.block}" for access in self.accesses)
        return (
            f"race on {self.element}: {first} ({ACCESSES[one.kind]}) and {second} ({ACCESSES[other.kind]}) access it, "
            f"and no barrier orders them"
        )


def races(record: LaunchRecord) -> list[Race]:
    """Return one race of each pair of instructions that race.

    A kernel that orders its threads by other means than barriers, such as fences or mbarriers, has none here.
    """
    if any(OTHER_ORDER.search(text) for text in record.sources.values()):
        return []
    found: dict[tuple[int, ...], Race] = {}
    for (_, where, offset, size), accesses in _by_place(record).items():
        for pair in _unordered(list(accesses)):
            frames = record.frames[pair[0].instruction], record.frames[pair[1].instruction]
            element = record.regions[where].element(offset, size)
            found.setdefault(tuple(sorted(access.instruction for access in pair)), Race(element, pair, frames))
    return list(found.values())


_Place = tuple[int, int, int, int]  # the block if the memory is its own, the region, byte offset and bytes
_Pair = tuple[Access, Access]


def _by_place(record: LaunchRecord) -> dict[_Place, dict[Access, None]]:
    """The distinct accesses to each place, in the order in which they came."""
    records = record.records
    units = {int(where): _unit(records[records["where"] == where]) for where in np.unique(records["where"])}
    barriers = {place for place, chain in record.frames.items() if chain[0].function.startswith(BARRIER)}
    passed: dict[tuple[int, int], int] = defaultdict(int)
    found: dict[_Place, dict[Access, None]] = defaultdict(dict)
    names = ("block", "thread", "meeting", "access", "instruction", "where", "offset", "bytes")
    columns = (records[name].tolist() for name in names)
    for block, thread, meeting, kind, instruction, where, offset, size in zip(*columns, strict=True):
        space = record.regions[where].space
        if kind and space != "nowhere":
            access = Access(block, thread, passed[block, thread], meeting, kind, instruction)
            memory = block if space == "shared" else -1
            for begin in range(offset, offset + size, units[where]):
                found[memory, where, begin, units[where]][access] = None
        passed[block, thread] += instruction in barriers
    return found


def _unit(records: np.ndarray) -> int:
    """The largest number of bytes that divides every access and its offset."""
    return int(np.gcd.reduce(np.concatenate([records["offset"], records["bytes"].astype(np.uint64)]))) or 1


def _unordered(accesses: list[Access]) -> Iterator[_Pair]:
    """Yield pairs of accesses to one place that race: at most one between blocks, and one between two barriers."""
    if len({access.block for access in accesses}) > 1:
        yield from _first_pair(accesses, lambda one, other: one.block != other.block)
    intervals: dict[tuple[int, int], list[Access]] = defaultdict(list)
    for access in accesses:
        intervals[access.block, access.barriers].append(access)
    for interval in intervals.values():
        yield from _first_pair(interval, _unordered_in_block)


def _unordered_in_block(one: Access, other: Access) -> bool:
    same_warp = one.thread // LANES == other.thread // LANES
    return one.thread != other.thread and not (same_warp and one.meeting != other.meeting)


def _first_pair(accesses: list[Access], unordered: Callable[[Access, Access], bool]) -> list[_Pair]:
    """The first pair that nothing orders and of which one writes; none of two atomics."""
    if {access.kind for access in accesses} in ({LOAD}, {ATOMIC}):
        return []
    writes = [access for access in accesses if access.kind != LOAD]
    pairs = ((one, other) for one in writes for other in accesses if not one.kind == other.kind == ATOMIC)
    return [*itertools.islice((pair for pair in pairs if unordered(*pair)), 1)]
