"""Observe a kernel in Numba's simulator: each access to an array, and the order of a block's threads."""

import contextlib
import functools
import math
import sys
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba.cuda.np.numpy_support import as_dtype
from numba.cuda.simulator import kernelapi
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray
from numba.cuda.simulator.kernel import BlockManager, BlockThread
from numba.cuda.types.abstract import Type

from moeblaze_ref.runtime.poison import poison

NATURAL, REVERSE, TURNS = range(3)  # the orders of a block's threads; in the last they alternate at every write
ATTRIBUTES = ("shape", "size", "ndim", "dtype", "strides", "itemsize", "nbytes")  # what a kernel may ask of an array
_WHOLE = (int, np.integer)
_ATOMICS = tuple(lock for lock in vars(kernelapi).values() if isinstance(lock, type(threading.Lock())))


@dataclass
class Accesses:
    """Elements that threads asked for, of one array; a list, since appending is atomic and counting is not."""

    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)


class CountingArray(FakeCUDAArray):
    """A device array of the simulator that notes each access, and names itself if one is out of bounds.

    A negative index is refused: Numba counts it from the end, but CUDA C++ does not. So is what takes the array as a
    whole, as numpy's functions do: no kernel on a GPU has them, and their reads would not be counted.

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
        _count(reads=1)
        return part

    def __setitem__(self, index, value):
        _pause()
        size = np.size(self._at(index))
        self.accesses.writes.append(size)
        _count(writes=size)
        super().__setitem__(index, value)

    def __getattr__(self, name):
        return super().__getattr__(self.allowed(name))

    def allowed(self, name: str) -> str:
        """The name of an attribute that a kernel may ask for.

        Raises
        ------
        TypeError
            If it is none of ``ATTRIBUTES``.
        """
        if name not in ATTRIBUTES:
            raise TypeError(f"{self.name} is used as a whole ({name}), but a kernel reads and writes single elements")
        return name

    def _at(self, index):
        try:
            _refuse_negative(index)
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


def _refuse_negative(index):
    for axis, part in enumerate(index if isinstance(index, tuple) else (index,)):
        if isinstance(part, _WHOLE) and part < 0:
            raise IndexError(f"index {part} on axis {axis} is negative")


def _attribute(array: FakeWithinKernelCUDAArray, name: str):
    """An attribute of an array in a kernel; a device array has others, whose reads would not be counted."""
    return getattr(array._item, array._item.allowed(name))


def _shared_array(shared: kernelapi.FakeCUDAShared, shape, dtype, alignment=None) -> FakeWithinKernelCUDAArray:
    """``cuda.shared.array``, watched: of a fixed size it is told from others by the line that asks, as Numba does."""
    _begin_block(shared, tuple(_current().blockIdx))
    dtype = _numpy_dtype(dtype)
    if shape == 0:
        array = np.frombuffer(shared._dynshared.data, dtype, shared._dynshared_size // dtype.itemsize)
    else:
        caller = sys._getframe(1)
        place = caller.f_code, caller.f_lineno
        if place not in shared._allocations:
            shared._allocations[place] = poison(np.empty(shape, dtype))
        array = shared._allocations[place]
    return FakeWithinKernelCUDAArray(CountingArray(array, "an array in shared memory"))


def _begin_block(shared: Any, block: tuple[int, ...]):
    """A block finds poison in its shared memory, not zeros, nor what the block before has left."""
    if getattr(shared, "block", None) != block:
        shared.block = block
        shared._allocations.clear()
        poison(shared._dynshared[: shared._dynshared_size // 2 * 2].view(np.uint16))


def _local_array(local: kernelapi.FakeCUDALocal, shape, dtype, alignment=None) -> np.ndarray:
    """``cuda.local.array``, poisoned."""
    return poison(np.empty(shape, _numpy_dtype(dtype)))


def _numpy_dtype(dtype) -> np.dtype:
    return as_dtype(dtype) if isinstance(dtype, Type) else np.dtype(dtype)


class BarrierMissed(Exception):
    """Some thread of a block met a barrier that another did not: the simulator goes on, a GPU may wait for ever."""


class _Turn(BlockThread):
    """A thread of a block. It stops at a barrier, at its end and, if ``often``, before a write.

    It is never started as a thread of Python: a `_Carrier` runs it.
    """

    def __init__(self, *args: Any, often: bool):
        super().__init__(*args)
        self.often, self.waits, self.ended = often, False, False
        self.barriers = self.reads = self.writes = 0
        self.carrier: Any = None  # the `_Carrier` that runs it, once it has begun

    def run(self):
        try:
            super().run()
        except BaseException as error:  # such as KeyboardInterrupt, which the simulator takes for an end like any other
            place = f"tid={list(self.threadIdx)} ctaid={list(self.blockIdx)}"
            self.exception = RuntimeError(f"{place}: the kernel raises {type(error).__name__}"), error.__traceback__
        self.ended = True

    def syncthreads(self):
        self.barriers += 1
        self.waits = True
        self._hold()

    def pause(self):
        """Let the others read what a write is about to change, unless it is part of an atomic operation."""
        if self.often and not any(lock.locked() for lock in _ATOMICS):
            self._hold()

    def _hold(self):
        """Stop until the block goes on with this thread. Python calls a thread's own ``_stop`` in forked processes."""
        self.carrier.stop()
        if self.abort:
            raise RuntimeError("another thread has failed")


class _Carrier(threading.Thread):
    """A thread of Python that runs threads of a block one after another, until one of them stops before its end.

    A thread of Python takes long to start. Most threads of a block never wait, so they need none of their own.
    """

    def __init__(self, ahead: deque[_Turn]):
        super().__init__(daemon=True)
        self.ahead, self.turn = ahead, ahead[0]  # turns that have not begun, and the running one
        self.resumed, self.stopped = threading.Lock(), threading.Lock()  # held until it may go, until it has stopped
        self.resumed.acquire()
        self.stopped.acquire()

    def run(self):
        while self.ahead and not self.turn.exception:
            self.turn = self.ahead.popleft()
            self.turn.carrier = self
            self.turn.run()
        self.stopped.release()

    def stop(self):
        """Let the block go on without this one until it is resumed."""
        self.stopped.release()
        self.resumed.acquire()

    def begin(self):
        """Run from the first of those ahead to the first stop; raises what the kernel raised."""
        self.start()
        self._await()

    def resume(self):
        """Run the thread that has stopped to its next stop; raises what the kernel raised."""
        self.turn.waits = False
        self.resumed.release()
        self._await()

    def _await(self):
        self.stopped.acquire()
        if self.turn.exception:
            error, where = self.turn.exception
            raise error.with_traceback(where)

    def give_up(self):
        """End the thread that has stopped."""
        self.turn.abort = True
        self.resumed.release()


def _current() -> Any:
    """The thread of a block that runs; outside of a launch the thread of Python."""
    thread = threading.current_thread()
    return thread.turn if isinstance(thread, _Carrier) else thread


def _pause():
    if isinstance(thread := _current(), _Turn):
        thread.pause()


def _count(reads: int = 0, writes: int = 0):
    if isinstance(thread := _current(), _Turn):
        thread.reads += reads
        thread.writes += writes


@dataclass
class Work:
    """How the threads of launches divided their work."""

    accesses: int = 0  #: to global and shared memory, by the thread that makes the most
    barriers: int = 0  #: that the threads of a block pass, of the block that has the most
    threads: int = 0  #: of the grid, that write to memory

    def add(self, threads: list[_Turn]):
        """Count a block that has run."""
        self.accesses = max(self.accesses, *(thread.reads + thread.writes for thread in threads))
        self.barriers = max(self.barriers, *(thread.barriers for thread in threads))
        self.threads += sum(thread.writes > 0 for thread in threads)


def _run_threads(manager: BlockManager, block: tuple[int, ...], args: tuple[Any, ...], order: int) -> list[_Turn]:
    """Run the threads of a block one at a time, from stop to stop, and return them."""
    kernel = functools.partial(manager._f, *args)
    points = np.ndindex(*manager._block_dim)
    threads = [_Turn(kernel, manager, block, point, manager._debug, often=order == TURNS) for point in points]
    threads.sort(key=lambda thread: thread.thread_id, reverse=order == REVERSE)
    ahead = deque(threads)
    try:
        while ahead:
            _Carrier(ahead).begin()
        while alive := [thread for thread in threads if not thread.ended]:
            alive = [thread for thread in alive if not thread.waits] or alive  # a barrier opens if all are at it
            for thread in alive:
                thread.carrier.resume()
    finally:
        ahead.clear()
        for thread in threads:
            if thread.carrier and not thread.ended:
                thread.carrier.give_up()
    return threads


def _run_block(manager: BlockManager, block: tuple[int, ...], *args: Any):
    """Run a block as Numba's own simulator does, but for its scheduler, which polls the threads without a pause."""
    _run_threads(manager, block, args, NATURAL)


def _run_watched_block(manager: BlockManager, block: tuple[int, ...], *args: Any, order: int, work: Work):
    """Run a block whose threads must meet all barriers, and count what they do."""
    threads = _run_threads(manager, block, args, order)
    _check_barriers(block, sorted(threads, key=lambda thread: thread.thread_id))
    work.add(threads)


def _check_barriers(block: tuple[int, ...], threads: list[_Turn]):
    most, least = (choose(threads, key=lambda thread: thread.barriers) for choose in (max, min))
    if most.barriers != least.barriers:
        raise BarrierMissed(
            f"block {block}: thread {most.thread_id} reaches cuda.syncthreads() {most.barriers} times and thread "
            f"{least.thread_id} {least.barriers} times; every thread of a block must reach every barrier"
        )


def run_threads_one_at_a_time():
    """Let every launch from now on run a block's threads one after another, from barrier to barrier."""
    _replace({(BlockManager, "run"): _run_block, (kernelapi, "threading"): SimpleNamespace(current_thread=_current)})


def _replace(by: dict[tuple[Any, str], Any]) -> dict[tuple[Any, str], Any]:
    """Replace parts of the simulator, given by owner and name. Return the previous values."""
    before = {(owner, name): getattr(owner, name) for owner, name in by}
    for (owner, name), value in by.items():
        setattr(owner, name, value)
    return before


def _exp(value: Any, exact: Any = math.exp) -> Any:
    """``math.exp`` as on a GPU: that of a float32 is a float32, infinite above 88."""
    if not isinstance(value, np.float32):
        return exact(value)
    with np.errstate(over="ignore"):
        return np.exp(value)


@contextlib.contextmanager
def watched(order: int) -> Iterator[Work]:
    """Launches inside run a block's threads one at a time, NATURAL, REVERSE or TURNS, and watch their shared memory,
    which begins poisoned, as local arrays do. How the threads divide the work is counted in what it yields.

    Raises
    ------
    BarrierMissed
        By a launch of which some thread misses a barrier.
    """
    work = Work()
    ours = {
        (BlockManager, "run"): functools.partialmethod(_run_watched_block, order=order, work=work),
        (kernelapi.FakeCUDAShared, "array"): _shared_array,
        (kernelapi.FakeCUDALocal, "array"): _local_array,
        (FakeWithinKernelCUDAArray, "__array_ufunc__"): None,
        (FakeWithinKernelCUDAArray, "__getattr__"): _attribute,
        (math, "exp"): _exp,
    }
    numbas = _replace(ours)
    try:
        yield work
    finally:
        _replace(numbas)
