"""Record each access of a launch's threads: the SIMT executor with a recorder.

Recorded is what the executor counts: every access to global and shared memory, with its line of the source. Beside
them stand the operations that touch no such memory: waits, exchanges between lanes, what a thread asks of Hopper's
engines. Local arrays are not recorded, since which of them stay in registers differs from compiler to compiler, nor
are the bytes that the engines move by themselves.
"""

import ctypes
import heapq
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt import symbols
from moeblaze_ref.runtime.simt.executor import Dim, Recorder, SimtExecutor, SimtLaunch, SimtModule, Staged
from moeblaze_ref.runtime.simt.symbols import Frame, SharedArray
from moeblaze_ref.runtime.source import KernelSource

LANES = 32
SECTOR_BYTES, LINE_BYTES = 32, 128
BANKS, WORD_BYTES = 32, 4
DEFAULT_LIMIT = 200_000  # records of 48 bytes

# simt_abi.h, struct SimtRecord.
RECORD = np.dtype(
    [
        ("block", np.uint64),
        ("offset", np.uint64),
        ("instruction", np.uint64),
        ("thread", np.uint32),
        ("bytes", np.uint32),
        ("access", np.uint32),
        ("where", np.int32),
        ("meeting", np.uint64),
    ]
)
STATIC_SHARED, DYNAMIC_SHARED, NOWHERE = -1, -2, -3  # enum SimtSpace
ACCESSES = {1: "load", 2: "store", 3: "atomic"}  # enum SimtAccess
# Headers whose functions are single instructions.
WRAPPERS = ("include/ptx.cuh", *(f"include/hopper/{part}.cuh" for part in ("barrier", "tma", "wgmma", "stmatrix")))


@dataclass(frozen=True)
class Region:
    """Memory that records are offsets into: a launch's array, or the shared memory of a block.

    Parameters
    ----------
    name : str
    space : str
        "global", "shared", or "nowhere" for an address at which the launch has no memory.
    dtype : numpy.dtype, optional
        Of an array of the launch.
    shape : tuple of int
        Of an array of the launch.
    parts : tuple of SharedArray
        The arrays that static shared memory holds.
    """

    name: str
    space: str
    dtype: np.dtype | None = None
    shape: tuple[int, ...] = ()
    parts: tuple[SharedArray, ...] = ()

    def element(self, offset: int, size: int) -> str:
        """``x[3, 0]``; what has no shape is counted in elements of ``size`` bytes."""
        if self.space == "nowhere":
            return "out of bounds"
        if self.dtype is not None and self.shape:
            index = np.unravel_index(offset // self.dtype.itemsize, self.shape)
            return f"{self.name}[{', '.join(map(str, index))}]"
        part = self.part(offset)
        return f"{part.name}[{(offset - part.begin) // size}]"

    def part(self, offset: int) -> SharedArray:
        """The array of static shared memory at an offset; without one, the whole region."""
        inside = (part for part in self.parts if part.begin <= offset < part.begin + part.bytes)
        return next(inside, SharedArray(self.name, 0, 0))


@dataclass(frozen=True, eq=False)
class Step:
    """A joint step of lanes of one warp: an access of one instruction, or an operation.

    Parameters
    ----------
    operation : str
        "load", "store", "atomic"; without a memory access the function's name, such as "__syncthreads".
    frames : tuple of Frame
        The line, and those of the functions inlined around it, from the inside out.
    records : ndarray (n,), RECORD
        One of each lane that takes part.
    regions : dict
        By the number that a record has as ``where``.
    """

    operation: str
    frames: tuple[Frame, ...]
    records: np.ndarray
    regions: dict[int, Region]

    @property
    def frame(self) -> Frame:
        """The line that is shown."""
        return self.frames[0]

    @cached_property
    def lanes(self) -> np.ndarray:
        """Lanes that take part, (n,), in order of their records."""
        return self.records["thread"].astype(int) % LANES

    @property
    def region(self) -> Region:
        """Where the first lane's access goes."""
        return self.regions[int(self.records["where"][0])]

    @property
    def outside(self) -> list[int]:
        """Lanes whose access is out of bounds, which is where the launch ended."""
        lanes: list[int] = self.lanes[(self.records["where"] == NOWHERE) & (self.records["bytes"] > 0)].tolist()
        return lanes

    @property
    def is_access(self) -> bool:
        """Return whether the step asks for memory."""
        return bool(self.records["bytes"].any())

    @property
    def bytes(self) -> int:
        """Bytes that the lanes ask for."""
        return int(self.records["bytes"].sum())

    def units(self, size: int) -> np.ndarray:
        """Distinct (region, unit) that the lanes touch, (m, 2), of memory cut into units of ``size`` bytes.

        What is out of bounds touches none.
        """
        touched = {
            (where, unit)
            for where, offset, width in self._places()
            for unit in _units(offset, width, size)
            if where != NOWHERE
        }
        return np.array(sorted(touched), np.int64).reshape(-1, 2)

    @property
    def sectors(self) -> int:
        """Distinct 32-byte sectors."""
        return len(self.units(SECTOR_BYTES))

    @property
    def fewest_sectors(self) -> int:
        """Sectors that the distinct bytes would fill, side by side."""
        return -(-len(self.units(1)) // SECTOR_BYTES)

    @property
    def lines(self) -> int:
        """Distinct lines of 128 bytes."""
        return len(self.units(LINE_BYTES))

    @cached_property
    def _bank_groups(self) -> list[list[tuple[int, int]]]:
        """Distinct (region, word) of each group of lanes that asks for up to 128 bytes of shared memory."""
        width = max(int(self.records["bytes"].max()), WORD_BYTES)
        groups: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for lane, (where, offset, size) in zip(self.lanes.tolist(), self._places(), strict=True):
            groups[lane * width // LINE_BYTES].update((where, word) for word in _units(offset, size, WORD_BYTES))
        return [sorted(words) for words in groups.values()]

    @cached_property
    def passes(self) -> tuple[int, ...]:
        """Passes over the banks, of each group of lanes that asks for up to 128 bytes of shared memory."""
        return tuple(max(_words_of_banks(words).values()) for words in self._bank_groups)

    @property
    def conflicts(self) -> int:
        """Passes beyond the one that each group needs."""
        return sum(self.passes) - len(self.passes)

    @property
    def busy_banks(self) -> set[int]:
        """Banks that are in conflict: they serve several words of one group, one after another."""
        return {bank for words in self._bank_groups for bank, count in _words_of_banks(words).items() if count > 1}

    def pass_of_words(self) -> dict[tuple[int, int], int]:
        """Which pass, from 0 on, is the first that serves each (region, word)."""
        found: dict[tuple[int, int], int] = {}
        begin = 0
        for words, passes in zip(self._bank_groups, self.passes, strict=True):
            for number, (where, word) in enumerate(words):
                earlier = sum(before % BANKS == word % BANKS for _, before in words[:number])
                found.setdefault((where, word), begin + earlier)
            begin += passes
        return found

    def elements(self) -> list[str]:
        """The element that each lane accesses, as ``x[3, 0]``, in order of the records."""
        return [self.regions[where].element(offset, size) for where, offset, size in self._places()]

    def _places(self) -> Iterable[tuple[int, int, int]]:
        """(region, offset, bytes) of each record."""
        return zip(*(self.records[name].tolist() for name in ("where", "offset", "bytes")), strict=True)


def _words_of_banks(words: Iterable[tuple[int, int]]) -> Counter[int]:
    return Counter(word % BANKS for _, word in words)


def _units(offset: int, size: int, unit: int) -> range:
    return range(offset // unit, (offset + size - 1) // unit + 1)


@dataclass(frozen=True, eq=False)
class LaunchRecord:
    """The records of one launch.

    Parameters
    ----------
    kernel : str
    grid, block : tuple of int
        In three dimensions.
    records : ndarray, RECORD
        In the order in which the threads ran.
    seen : int
        Records that there were; those beyond the limit are lost.
    regions : dict
        By the number that a record has as ``where``.
    frames : dict
        By the number that a record has as ``instruction``.
    sources : dict
        Texts of the files that the frames name.
    fault : str
        What ended the launch; empty if nothing did.
    """

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    records: np.ndarray
    seen: int
    regions: dict[int, Region]
    frames: dict[int, tuple[Frame, ...]]
    sources: dict[str, str]
    fault: str

    @property
    def note(self) -> str:
        """Say how many records are missing because the limit was reached; empty if none is."""
        kept = len(self.records)
        if kept == self.seen:
            return ""
        return (
            f"only the first {kept:,} of {self.seen:,} records of kernel {self.kernel} are kept, which is the limit: "
            f"record one block or warp, or allow more"
        )

    def outside(self, file: str) -> Frame | None:
        """Where in a file the access stands that no array holds, which ended the launch; None if none is kept."""
        wild = self.records[(self.records["where"] == NOWHERE) & (self.records["bytes"] > 0)]
        chain = self.frames[int(wild["instruction"][-1])] if len(wild) else ()
        return next((frame for frame in chain if frame.file == file), None)

    def warps(self) -> list[tuple[int, int]]:
        """Return (block, warp) of every warp that has records, in order."""
        found = np.stack([self.records["block"].astype(int), self.records["thread"].astype(int) // LANES], axis=1)
        return [(int(block), int(warp)) for block, warp in np.unique(found, axis=0)]

    def steps(self, block: int = 0, warp: int = 0) -> list[Step]:
        """Return the steps of one warp, in an order that agrees with each lane's own.

        The executor runs lanes one after another. This function joins accesses that a GPU issues together, as the
        executor counts them. One step is the n-th execution of one instruction by each lane since the lanes last met.

        Parameters
        ----------
        block, warp : int
            Number of the block in the grid, along x first, and of the warp in the block.

        Raises
        ------
        ValueError
            If nothing of that warp is recorded.
        """
        known = self.warps()
        if (block, warp) not in known:
            raise ValueError(
                f"block {block}, warp {warp} of kernel {self.kernel} is not recorded; recorded are (block, warp) = "
                f"{', '.join(map(str, known[:8])) or 'none'}{', ...' if len(known) > 8 else ''}"
            )
        mine = (self.records["block"] == block) & (self.records["thread"] // LANES == warp)
        records = self.records[mine]
        return [self._step(records[rows]) for rows in _together(records)]

    def _step(self, records: np.ndarray) -> Step:
        records = records[np.argsort(records["thread"], kind="stable")]
        frames, access = self.frames[int(records["instruction"][0])], int(records["access"][0])
        shown = _shown(frames, self.sources)
        operation = ACCESSES[access] if access else frames[max(shown - 1, 0)].function
        return Step(operation, frames[shown:], records, self.regions)


def _shown(frames: Sequence[Frame], sources: dict[str, str]) -> int:
    """Which frame a reader wants to see: the innermost of the kernels' own files that is not inside an instruction."""
    inside = _instructions()
    own = (place for place, frame in enumerate(frames) if frame.file in sources and frame.function not in inside)
    return next(own, len(frames) - 1)


@cache
def _instructions() -> frozenset[str]:
    """Names of the functions that wrap single instructions."""
    text = "".join((kernels_dir() / file).read_text() for file in WRAPPERS)
    return frozenset(re.findall(r"^(?:__device__ __forceinline__|inline) [\w ]+?(\w+)\(", text, re.MULTILINE))


# The order of steps --------------------------------------------------------------------------------------------------


_Execution = tuple[int, ...]  # what a lane did since the lanes last met, and how often it had done it before


def _together(records: np.ndarray) -> list[list[int]]:
    """Rows of one warp's records that are one step, in the order of the steps."""
    turns: Counter[tuple[int, ...]] = Counter()
    rows_of: dict[_Execution, list[int]] = {}
    sequences: dict[int, list[_Execution]] = defaultdict(list)
    columns = (records[name].tolist() for name in ("thread", "meeting", "instruction", "access"))
    for row, (thread, *did) in enumerate(zip(*columns, strict=True)):
        step = *did, turns[thread, *did]
        turns[thread, *did] += 1
        rows_of.setdefault(step, []).append(row)
        sequences[thread].append(step)
    return [rows_of[step] for step in _merged(list(rows_of), sequences.values())]


def _merged(steps: list[_Execution], sequences: Iterable[list[_Execution]]) -> Iterable[_Execution]:
    """The steps in an order that all sequences have; where two disagree, the step that came first goes first."""
    number = {step: place for place, step in enumerate(steps)}
    followers: dict[_Execution, list[_Execution]] = defaultdict(list)
    before: Counter[_Execution] = Counter()
    for one, next_one in itertools.chain.from_iterable(map(itertools.pairwise, sequences)):
        followers[one].append(next_one)
        before[next_one] += 1
    ready = [number[step] for step in steps if not before[step]]
    left = dict.fromkeys(range(len(steps)))
    while left:
        place = heapq.heappop(ready) if ready else next(iter(left))
        if place not in left:
            continue
        del left[place]
        yield steps[place]
        for follower in followers[steps[place]]:
            before[follower] -= 1
            if not before[follower]:
                heapq.heappush(ready, number[follower])


# The executor --------------------------------------------------------------------------------------------------------


class RecordingExecutor(SimtExecutor):
    """The SIMT executor, which keeps what the threads of each launch did; one launch after another in ``launches``.

    A launch that ends in a fault is there too, up to the access that is the fault.

    Parameters
    ----------
    block, warp : int, optional
        Number of the only block, and of the only warp in a block, to be recorded; all by default.
    limit : int
        Records that are kept of a launch; `LaunchRecord.note` says what is lost.
    seed : int
        As of `SimtExecutor`.

    Raises
    ------
    ValueError, TypeError
        If a number is negative or none.
    SimtUnavailable
        At a launch: if addr2line or nm is missing.
    """

    _lines = True

    def __init__(self, block: int | None = None, warp: int | None = None, limit: int = DEFAULT_LIMIT, seed: int = 0):
        super().__init__(workers=1, seed=seed)
        self._block, self._warp = (
            -1 if number is None else checks.check_int(name, number, at_least=0)
            for name, number in (("block", block), ("warp", warp))
        )
        self._limit = checks.check_int("limit", limit, at_least=1)
        self.launches: list[LaunchRecord] = []

    def _start(self, module: SimtModule, launch: SimtLaunch, staged: list[Staged]) -> None:
        records = np.empty(self._limit, RECORD)
        recorder = Recorder(self._block, self._warp, self._limit, 0, records.ctypes.data)
        launch.recorder = ctypes.pointer(recorder)
        try:
            super()._start(module, launch, staged)
        finally:
            self.launches.append(_read(module, launch, staged, records[: recorder.seen].copy(), recorder.seen))


def _read(module: SimtModule, launch: SimtLaunch, staged: list[Staged], records: np.ndarray, seen: int) -> LaunchRecord:
    regions = {
        place: Region(" = ".join(item.names), "global", item.copy.dtype, item.copy.shape)
        for place, item in enumerate(staged)
    }
    regions[STATIC_SHARED] = Region("shared memory", "shared", parts=symbols.shared_arrays(module.built._name))
    regions[DYNAMIC_SHARED] = Region("dynamic shared memory", "shared")
    regions[NOWHERE] = Region("no array", "nowhere")
    found = symbols.frames(module.built, np.unique(records["instruction"]).tolist())
    frames = {place: tuple(_named(frame, module.source) for frame in chain) for place, chain in found.items()}
    return LaunchRecord(
        launch.kernel.decode(),
        _three(launch.grid),
        _three(launch.block),
        records,
        seen,
        regions,
        frames,
        _sources(frames.values(), module.source),
        launch.fault.decode(),
    )


def _three(size: Dim) -> tuple[int, int, int]:
    return size.x, size.y, size.z


def _named(frame: Frame, source: KernelSource) -> Frame:
    """The frame with its file as kernels name it: ``dispatch/1_dense_map.cu``, ``include/common.cuh``."""
    if frame.file == source.file or frame.file.endswith(f"/{source.file}"):
        return frame._replace(file=source.file)
    path = Path(frame.file)
    return (
        frame._replace(file=path.relative_to(kernels_dir()).as_posix()) if path.is_relative_to(kernels_dir()) else frame
    )


def _sources(chains: Iterable[tuple[Frame, ...]], source: KernelSource) -> dict[str, str]:
    """Texts of the kernel file and of those of its headers that a frame names."""
    named = {frame.file for chain in chains for frame in chain}
    headers = {file: kernels_dir() / file for file in named if not Path(file).is_absolute()}
    texts = {file: path.read_text() for file, path in headers.items() if path.is_file()}
    return {**texts, source.file: source.text}
