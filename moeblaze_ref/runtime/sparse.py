"""Kernels on arrays larger than the machine's memory: an executor that runs a few blocks of one launch.

An array of many GiB is a reservation of addresses: the operating system gives memory for the pages that are touched
alone. A `Launch` says which blocks of a grid run, which elements of the arguments have values, and which of them the
blocks write, with what they write there. Any access to another element is a `KernelFault`. So an index that lost its
upper 32 bits is seen, wherever it leads.
"""

import ctypes
import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np

from moeblaze_ref.runtime.poison import poison
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule, Staged, array_of, copy_separately
from moeblaze_ref.runtime.source import Size

LARGE_BYTES = 1 << 20  # from here on an array is reserved
GAP = 1 << 36  # bytes on either side of an array: an index without its upper 32 bits does not reach another one
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)  # named since Python 3.13

ZEROS = None  # in place of values: zeros, for which the operating system needs no memory until they are written
Parts = Sequence[tuple[Any, Any]]  # slices of an array, and the values there


@dataclass(frozen=True, eq=False)
class Launch:
    """A launch of which a few blocks run.

    Parameters
    ----------
    kernel : str
        Its name. Launches of other kernels are left out.
    blocks : callable
        Takes the grid (x, y, z) and returns the blocks (x, y, z) that run.
    given : dict
        By the name of an argument, the parts that have values when the kernel starts: slices, and the values there, or
        `ZEROS`.
    expected : dict
        The same of what the blocks leave there. They may access these parts too, and nothing else. NaN stands for an
        element that no block writes.
    where : dict
        Arguments by name. Launches of the kernel with other values are left out.
    """

    kernel: str
    blocks: Callable[[Size], Sequence[Size]]
    given: Mapping[str, Parts]
    expected: Mapping[str, Parts]
    where: dict[str, Any] = field(default_factory=dict)

    def is_one(self, kernel: str, arguments: dict[str, Any]) -> bool:
        """Return True if a call of ``kernel`` with these arguments is this launch."""
        return kernel == self.kernel and all(arguments[name] == value for name, value in self.where.items())

    def lay_out(self, opened: Callable[[str, Any], np.ndarray]) -> None:
        """Give the arguments their values, and what is only written poison; ``opened`` opens a part of an argument."""
        for name, parts in self.expected.items():
            for place, _ in parts:
                part = opened(name, place)
                if name not in self.given:
                    part[...] = poison(np.empty((), part.dtype))
        for name, parts in self.given.items():
            for place, values in parts:
                part = opened(name, place)
                if values is not ZEROS:
                    part[...] = values

    def errors(self, arrays: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the largest error of each output over its parts."""
        return {
            name: max(error(arrays[name][place], values) for place, values in parts)
            for name, parts in self.expected.items()
        }


class Reservation:
    """Addresses for an array, of which the parts that are opened may be accessed."""

    def __init__(self, shape: tuple[int, ...], dtype: str):
        size = math.prod(shape) * np.dtype(dtype).itemsize
        memory = np.frombuffer(mmap.mmap(-1, size + 2 * GAP, flags=_FLAGS), np.uint8)
        self.array = memory[GAP : GAP + size].view(dtype).reshape(shape)
        self._open: dict[int, int] = {}  # address and bytes

    def holds(self, array: np.ndarray) -> bool:
        """Return True if the array is the reserved one, or a part of it."""
        begin = self.array.ctypes.data
        return begin <= array.ctypes.data < begin + self.array.nbytes

    def open(self, part: np.ndarray) -> None:
        """Allow accesses to a part of the array."""
        for run in _runs(part):
            address = run.ctypes.data
            self._open[address] = max(run.nbytes, self._open.get(address, 0))

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Address and bytes of what is open, in order; neighbours are one range."""
        begin = end = self.array.ctypes.data
        for address, size in sorted(self._open.items()):
            if address > end:
                yield begin, end - begin
                begin = address
            end = max(end, address + size)
        yield begin, end - begin


def _runs(part: np.ndarray) -> Iterator[np.ndarray]:
    """The part, cut where its elements do not follow each other."""
    if part.flags.c_contiguous:
        yield part
    else:
        for i in range(len(part)):
            yield from _runs(part[i] if part.ndim > 1 else part[i : i + 1])


@dataclass
class _Reserved(Staged):
    """A reserved array, where it lies."""

    reservation: Reservation

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield the open ranges of the array: a name, the address and the bytes of each."""
        array = self.reservation.array
        for address, size in self.reservation.ranges():
            first = (address - array.ctypes.data) // array.itemsize
            if size:
                yield self.name if size == array.nbytes else f"{self.name} from element {first} on", address, size


class SparseExecutor(SimtExecutor):
    """Runs a few blocks of one launch, on arrays most of which are not there.

    Parameters
    ----------
    launch : Launch
    multiprocessors : int
        Blocks of a kernel whose blocks stay until all its work is done.

    Attributes
    ----------
    errors : dict
        Of each output, its relative error, or the elements that differ if they are integers.
    """

    def __init__(self, launch: Launch, multiprocessors: int = 4):
        super().__init__()
        self.launch, self.multiprocessors = launch, multiprocessors
        self.errors: dict[str, float] = {}
        self._reservations: list[Reservation] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A new array: poisoned, or only reserved if it is large."""
        if math.prod(shape) * np.dtype(dtype).itemsize < LARGE_BYTES:
            return super().empty(shape, dtype)
        self._reservations.append(Reservation(shape, dtype))
        return self._reservations[-1].array

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
        """A new array of one value; a large one has none."""
        array = self.empty(shape, dtype)
        if self.reservation_of(array) is None:
            array.fill(value)
        return array

    def load(self, file: str, text: str | None = None, **constants: Any) -> "SparseModule":
        """Compile a kernel file, as `SimtExecutor.load`."""
        module = super().load(file, text, **constants)
        return SparseModule(self, (module.source, module.built))

    def recording(self) -> NoReturn:
        """Refused: a few blocks say nothing of the traffic of a launch."""
        raise ValueError("this executor runs a few blocks of a launch, so it counts nothing")

    @property
    def worst(self) -> float:
        """The largest of the errors."""
        return max(self.errors.values())

    def reservation_of(self, array: np.ndarray) -> Reservation | None:
        """The reservation that an array is a part of, or None."""
        return next((each for each in self._reservations if each.holds(array)), None)


class SparseModule(SimtModule):
    """A compiled kernel file of which a few blocks run."""

    _executor: SparseExecutor

    def launch(
        self,
        kernel: str,
        grid: int | tuple[int, ...],
        block: int | tuple[int, ...],
        shared_bytes: int = 0,
        **arguments: Any,
    ) -> None:
        """Run the chosen blocks and note the errors of what they leave; leave a launch of another kernel out."""
        asked = self._executor.launch
        if not asked.is_one(kernel, arguments):
            return
        found = {name: array_of(value) for name, value in arguments.items()}
        arrays = {name: array for name, array in found.items() if array is not None}
        asked.lay_out(lambda name, place: self._opened(arrays[name], place))
        super().launch(kernel, grid, block, shared_bytes, **arguments)
        self._executor.errors = asked.errors(arrays)

    def _opened(self, array: np.ndarray, place: Any) -> np.ndarray:
        """A part of an argument, which the kernel may access from now on."""
        reservation = self._executor.reservation_of(array)
        part: np.ndarray = array[place]
        if reservation is not None:
            reservation.open(part)
        return part

    def _place_separately(self, kernel: str, items: list[Staged]) -> list[Staged]:
        """Small arrays are copied as ever; large ones stay."""
        small, large = [], []
        for item in items:
            reservation = self._executor.reservation_of(item.original)
            if reservation is None:
                small.append(item)
            else:
                large.append(_Reserved(item.names, item.original, False, item.original, reservation))
        return copy_separately(small) + large

    def _blocks(self, grid: Size) -> dict[str, Any]:
        """The numbers of the chosen blocks."""
        x, y, _ = grid
        numbers = sorted(at[0] + x * (at[1] + y * at[2]) for at in self._executor.launch.blocks(grid))
        return {"num_blocks": len(numbers), "blocks": (ctypes.c_uint64 * len(numbers))(*numbers)}


def error(found: np.ndarray, expected: Any) -> float:
    """The relative error of an array, or how many of its integers differ; where NaN is expected, poison is right."""
    expected = np.broadcast_to(expected, found.shape)
    if found.dtype.kind in "iu":
        return float((found != expected).sum())
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    written = ~np.isnan(expected)
    if not np.isnan(found[~written]).all():
        return math.inf
    size = np.linalg.norm(expected[written])
    return float(np.linalg.norm(found[written] - expected[written]) / (size or 1.0))
