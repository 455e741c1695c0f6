"""What Numba's simulator can see beyond results: each access of a kernel to an array in global memory."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray
from numba.cuda.simulator.kernel import BlockThread


@dataclass
class Accesses:
    """Elements that threads asked for, of one array; a list, since appending is atomic and counting is not."""

    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


class CountingArray(FakeCUDAArray):
    """A device array of the simulator that notes each access, and names itself if one is out of bounds.

    Parameters
    ----------
    array : ndarray
    name : str
        For messages.
    accesses : Accesses, optional
        Where to note; a new one by default.
    """

    def __init__(self, array: np.ndarray, name: str = "the array", accesses: Accesses | None = None):
        super().__init__(array)
        self.name, self.accesses = name, accesses or Accesses()

    def __getitem__(self, index):
        part = self._at(index)
        if isinstance(part, np.ndarray):
            return CountingArray(part, self.name, self.accesses)  # nothing is read yet
        self.accesses.reads.append(1)
        return part

    def __setitem__(self, index, value):
        self.accesses.writes.append(np.size(self._at(index)))
        super().__setitem__(index, value)

    def _at(self, index):
        try:
            return self._ary[index]
        except IndexError as error:
            shape = ", ".join(map(str, self._ary.shape))
            raise IndexError(f"out-of-bounds access to {self.name}, which has shape ({shape}): {error}") from None

    @property
    def read_bytes(self) -> int:
        """Bytes that threads asked to read."""
        return sum(self.accesses.reads) * self._ary.itemsize

    @property
    def written_bytes(self) -> int:
        """Bytes that threads asked to write."""
        return sum(self.accesses.writes) * self._ary.itemsize


class BarrierMissed(Exception):
    """Some thread of a block met a barrier that another did not: the simulator goes on, a GPU may wait for ever."""


@contextlib.contextmanager
def barriers_for_all(threads: int) -> Iterator[None]:
    """Launches inside, of blocks of so many threads, whose barriers are met by every thread of a block.

    Raises
    ------
    BarrierMissed
        At the end, if some are not.
    """
    met: list[tuple[tuple[int, ...], int]] = []  # block and thread; appending is atomic, as above
    wait = BlockThread.syncthreads

    def noted(thread):
        block = thread.blockIdx
        met.append(((block.x, block.y, block.z), thread.thread_id))
        wait(thread)

    BlockThread.syncthreads = noted
    try:
        yield
    finally:
        BlockThread.syncthreads = wait
    times = Counter(met)
    for block in sorted({block for block, _ in met}):
        most, least = (choose(range(threads), key=lambda thread: times[block, thread]) for choose in (max, min))
        if times[block, most] != times[block, least]:
            raise BarrierMissed(
                f"block {block}: thread {most} reaches cuda.syncthreads() {times[block, most]} times and thread "
                f"{least} {times[block, least]} times; every thread of a block must reach every barrier"
            )
