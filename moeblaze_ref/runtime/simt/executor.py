"""The SIMT executor: runs raw CUDA kernels on the CPU and counts what they ask of memory."""

import ctypes
import functools
import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.array_utils import byte_bounds

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import whole_rows
from moeblaze_ref.runtime.poison import POISON, poison
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.source import (
    MAX_SHARED_BYTES,
    MAX_STATIC_SHARED_BYTES,
    Edition,
    KernelSource,
    Module,
    Size,
    check_shared,
    edition,
)
from moeblaze_ref.runtime.tensor_map import BYTES, ITEMSIZE, Layout, TensorMap

ALIGNMENT = 256  # bytes, as a GPU's allocator gives
MAX_WORKERS = 24  # each maps up to 1,024 stacks with their guards; Linux allows a process 65,530 mappings
GUARD_BYTES = 16 << 20  # unmapped by any buffer, so that a wild access lands in none


class KernelFault(RuntimeError):
    """A kernel did what a GPU would not survive; the message names kernel, block and thread."""


@dataclass(frozen=True)
class Traffic:
    """Accesses of one launch to one global buffer.

    Bytes are those that threads request, not DRAM traffic; sectors are the distinct 32-byte
    sectors of each warp access, so 32 * sectors / bytes is 1 for perfectly coalesced access.
    """

    read_bytes: int
    written_bytes: int
    read_sectors: int
    written_sectors: int


@dataclass(frozen=True)
class SharedTraffic:
    """Accesses of one launch to shared memory; conflicts are passes beyond the fewest possible."""

    read_bytes: int
    written_bytes: int
    wavefronts: int
    bank_conflicts: int


@dataclass(frozen=True)
class Work:
    """How the threads of one launch divided its work."""

    accesses: int  #: to global and shared memory, by the thread that makes the most
    barriers: int  #: that the threads of a block pass, of the block that has the most
    threads: int  #: of the grid, that write to memory
    exchanges: int  #: between a warp's lanes, by the thread that takes part in the most
    waits: int  #: at mbarriers, by all threads
    copied: int  #: bytes of cp.async, by all threads
    under_way: int  #: of these, bytes that had not arrived after a wait of their thread, over all waits


@dataclass(frozen=True)
class LaunchReport:
    """The counts of one launch, buffer by buffer."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    buffers: dict[str, Traffic]
    shared: SharedTraffic
    work: Work

    @property
    def read_bytes(self) -> int:
        """Global bytes that threads asked to read."""
        return sum(traffic.read_bytes for traffic in self.buffers.values())

    @property
    def written_bytes(self) -> int:
        """Global bytes that threads asked to write."""
        return sum(traffic.written_bytes for traffic in self.buffers.values())

    @property
    def sectors(self) -> int:
        """32-byte sectors of all global accesses."""
        return sum(traffic.read_sectors + traffic.written_sectors for traffic in self.buffers.values())


class Dim(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]


class _Buffer(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p)] + [
        (name, ctypes.c_uint64)
        for name in ("address", "bytes", "read_bytes", "written_bytes", "read_sectors", "written_sectors")
    ]


class _Shared(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("read_bytes", "written_bytes", "wavefronts", "bank_conflicts")]


class _Work(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in Work.__annotations__]


class Recorder(ctypes.Structure):
    """simt_abi.h, struct SimtRecorder."""

    _fields_ = [
        ("block", ctypes.c_int64),
        ("warp", ctypes.c_int64),
        ("capacity", ctypes.c_uint64),
        ("seen", ctypes.c_uint64),
        ("records", ctypes.c_void_p),
    ]


class SimtLaunch(ctypes.Structure):
    """simt_abi.h, struct SimtLaunch."""

    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", Dim),
        ("block", Dim),
        ("dynamic_shared_bytes", ctypes.c_uint64),
        ("workers", ctypes.c_uint64),
        ("poison", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("checked", ctypes.c_uint64),
        ("counted", ctypes.c_uint64),
        ("num_buffers", ctypes.c_uint64),
        ("buffers", ctypes.POINTER(_Buffer)),
        ("num_blocks", ctypes.c_uint64),
        ("blocks", ctypes.POINTER(ctypes.c_uint64)),
        ("shared", _Shared),
        ("work", _Work),
        ("recorder", ctypes.POINTER(Recorder)),
        ("fault", ctypes.c_char * 1024),
    ]


@dataclass
class Staged:
    """One distinct array of a launch, copied to where nothing else is near."""

    names: list[str]
    original: np.ndarray
    writable: bool
    copy: np.ndarray

    @property
    def name(self) -> str:
        """The parameters that it is the argument of."""
        return " = ".join(self.names)

    def ranges(self) -> Iterator[tuple[str, int, int]]:
        """Yield the ranges that the kernel may access: a name, the address and the bytes of each."""
        yield self.name, self.copy.ctypes.data, self.copy.nbytes


class SimtExecutor:
    """Runs kernel files on the CPU, compiled by g++.

    Parameters
    ----------
    instrumented : bool
        Check every memory access, and count it inside `recording`. Arrays are then copied into
        guarded memory for the launch, so an access outside its buffer meets no other.
    workers : int, optional
        Operating-system threads; one per core by default.
    seed : int
        0 runs a block's threads in order; any other value in a random order that it decides.
    follows_edits : bool
        Look at every `load` whether the file or a header has changed since it was compiled.
    """

    name = "simt"
    capability = (8, 0)  # it runs newer kernels too, but is no faster for them
    multiprocessors = 4
    _lines = False  # kernels are compiled with the line of every instruction

    def __init__(
        self, instrumented: bool = True, workers: int | None = None, seed: int = 0, follows_edits: bool = True
    ):
        self.instrumented, self.follows_edits = instrumented, follows_edits
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.workers = checks.check_int("workers", workers or min(cores, MAX_WORKERS), at_least=1, at_most=MAX_WORKERS)
        self.seed = checks.check_int("seed", seed, at_least=0, at_most=2**63)
        self._recordings: list[list[LaunchReport]] = []

    def empty(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """A new array, poisoned."""
        return poison(np.empty(shape, dtype))

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
        """A new array of one value."""
        return np.full(shape, value, dtype)

    def cast(self, array: np.ndarray, dtype: str) -> np.ndarray:
        """The array in another dtype; itself if it has it."""
        return array.astype(dtype, copy=False)

    def assign(self, target: np.ndarray, source: np.ndarray) -> None:
        """Write the elements of an array into another one of its shape and dtype."""
        target[...] = source

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        """The array itself."""
        return array

    def matmul(self, left: np.ndarray, right: np.ndarray, dtype: str) -> np.ndarray:
        """The dense product, summed in float32 and rounded once, by numpy's own library."""
        product: np.ndarray = left.astype(np.float32) @ right.astype(np.float32)
        return product.astype(dtype)

    def add_product(self, total: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """Add the dense product to ``total`` in place; the sum is float32 and is rounded once."""
        total[...] = total.astype(np.float32) + self.matmul(left, right, "float32")
        return total

    def check(self, file: str) -> None:
        """The header of ``kernels_cuda/<file>`` names the SIMT executor; otherwise a ValueError says so."""
        KernelSource.read(file, {}).check_simt()

    def tensor_map(self, array: np.ndarray, box: tuple[int, ...]) -> TensorMap:
        """Boxes of the array as a kernel takes them."""
        return TensorMap(array, box)

    def load(self, file: str, text: str | None = None, **constants: Any) -> "SimtModule":
        """Compile ``kernels_cuda/<file>`` (or ``text`` in its place) with these constants."""
        key = file, text, tuple(sorted(constants.items())), self.instrumented, self._lines
        return SimtModule(self, _compile(*key, edition(file, text) if self.follows_edits else None))

    @contextmanager
    def recording(self) -> Iterator[list[LaunchReport]]:
        """Collect the report of every launch made inside the ``with`` block."""
        if not self.instrumented:
            raise ValueError("this executor is not instrumented, so it counts nothing")
        reports: list[LaunchReport] = []
        self._recordings.append(reports)
        try:
            yield reports
        finally:
            self._recordings = [kept for kept in self._recordings if kept is not reports]

    def _start(self, module: "SimtModule", launch: SimtLaunch, staged: list["Staged"]) -> None:
        """Run a launch to its end, or to its fault."""
        if build.runtime_library().simt_launch(ctypes.byref(launch)):
            raise KernelFault(launch.fault.decode())

    def _record(self, report: LaunchReport) -> None:
        for reports in self._recordings:
            reports.append(report)


@functools.cache
def _compile(
    file: str,
    text: str | None,
    constants: tuple[tuple[str, Any], ...],
    instrumented: bool,
    lines: bool,
    edition: Edition | None,
) -> tuple[KernelSource, ctypes.CDLL]:
    """The compiled file, once for each of its editions."""
    source = KernelSource.read(file, dict(constants), text)
    source.check_simt()
    built = build.build_kernels(
        source.file, source.text, list(source.kernels), source.include_dirs, source.constants, instrumented, lines
    )
    return source, built


def _static_shared_bytes(source: KernelSource, kernel: str) -> int:
    """Static shared memory of one kernel: that of the file built for it alone, where the linker drops all others'."""
    built = build.build_kernels(source.file, source.text, [kernel], source.include_dirs, source.constants)
    return build.static_shared_bytes(built, kernel)


class SimtModule(Module):
    """A compiled kernel file."""

    def __init__(self, executor: SimtExecutor, compiled: tuple[KernelSource, ctypes.CDLL]):
        source, self.built = compiled
        super().__init__(source)
        self._executor = executor

    def _run(self, kernel: str, grid: Size, block: Size, shared_bytes: int, values: Sequence[Any]) -> None:
        self._check_shared(kernel, shared_bytes)
        staged = self._stage(kernel, values) if self._executor.instrumented else []
        buffers = _register(staged)
        moved = {place_of(item.original): item.copy for item in staged}
        holders = [_held(value, moved) for value in values]  # alive until the launch has ended
        launch = self._describe(kernel, grid, block, shared_bytes, _pack(holders), buffers)
        self._executor._start(self, launch, staged)
        for item in staged:
            if item.writable:
                np.copyto(item.original, item.copy)
        if launch.counted:
            self._executor._record(_report(launch, kernel, grid, block, buffers))

    def _check_shared(self, kernel: str, dynamic_bytes: int) -> None:
        """A GPU would give a block of the kernel its shared memory."""
        all_kernels = build.static_shared_bytes(self.built, kernel)
        if all_kernels > MAX_STATIC_SHARED_BYTES or all_kernels + dynamic_bytes > MAX_SHARED_BYTES:
            check_shared(self.source.file, kernel, _static_shared_bytes(self.source, kernel), dynamic_bytes)

    def _stage(self, kernel: str, values: Sequence[Any]) -> list[Staged]:
        """Copy every distinct array into guarded memory."""
        staged: dict[tuple[int, int], Staged] = {}
        for parameter, value in zip(self.source.kernels[kernel], values, strict=True):
            array = array_of(value)
            if array is None:
                continue
            item = staged.setdefault(place_of(array), Staged([], array, False, array))
            item.names.append(parameter.name)
            item.writable |= parameter.writable
        return self._place_separately(kernel, list(staged.values()))

    def _place_separately(self, kernel: str, items: list[Staged]) -> list[Staged]:
        """Give each array a copy, far from the others."""
        return copy_separately(_without_overlap(kernel, items))

    def _describe(
        self,
        kernel: str,
        grid: Size,
        block: Size,
        shared_bytes: int,
        pointers: ctypes.Array[ctypes.c_void_p],
        buffers: ctypes.Array[_Buffer],
    ) -> SimtLaunch:
        return SimtLaunch(
            kernel=kernel.encode(),
            entry=build.entry(self.built, kernel),
            arguments=pointers,
            grid=Dim(*grid),
            block=Dim(*block),
            dynamic_shared_bytes=shared_bytes,
            workers=self._executor.workers,
            poison=POISON,
            seed=self._executor.seed,
            checked=self._executor.instrumented,
            counted=bool(self._executor._recordings),
            num_buffers=len(buffers),
            buffers=buffers,
            **self._blocks(grid),
        )

    def _blocks(self, grid: Size) -> dict[str, Any]:
        """Which blocks of the grid run; all of them."""
        return {}


def array_of(value: Any) -> np.ndarray | None:
    """The array that an argument gives the kernel, itself or in a tensor map: of a matrix, with its rows' gaps."""
    array = value.array if isinstance(value, TensorMap) else value
    if not isinstance(array, np.ndarray):
        return None
    return np.asarray(whole_rows(array)) if isinstance(value, TensorMap) and array.ndim == 2 else array


def place_of(array: np.ndarray) -> tuple[int, int]:
    """Address and bytes of an array: an empty one may have the address of another."""
    return array.ctypes.data, array.nbytes


def _without_overlap(kernel: str, items: list[Staged]) -> list[Staged]:
    not_empty = sorted((item for item in items if item.original.size), key=lambda item: place_of(item.original))
    for left, right in itertools.combinations(not_empty, 2):
        between = byte_bounds(left.original)[1] > right.original.ctypes.data  # as the halves of a tensor may lie
        if between and np.shares_memory(left.original, right.original):
            raise ValueError(
                f"arguments {left.names[0]} and {right.names[0]} of kernel {kernel} overlap in memory without "
                f"being the same array"
            )
    return items


def copy_separately(items: list[Staged]) -> list[Staged]:
    """Give each array a copy in one mapping, far from its neighbours; unused pages cost nothing."""
    places, end = [], GUARD_BYTES
    for item in items:
        places.append(end)
        end += -(-item.original.nbytes // ALIGNMENT) * ALIGNMENT + GUARD_BYTES
    arena = np.frombuffer(mmap.mmap(-1, end), np.uint8)
    for item, place in zip(items, places, strict=True):
        memory = arena[place : place + item.original.nbytes]
        item.copy = memory.view(item.original.dtype).reshape(item.original.shape)
        np.copyto(item.copy, item.original)
    return items


def _register(staged: list[Staged]) -> ctypes.Array[_Buffer]:
    rows = [(name.encode(), address, size) for item in staged for name, address, size in item.ranges()]
    return _array_type(_Buffer, len(rows))(*sorted(rows, key=lambda row: row[1]))


def _pack(holders: list[np.ndarray]) -> ctypes.Array[ctypes.c_void_p]:
    """The void** that the kernel's entry unpacks: the address of each argument's value."""
    return _array_type(ctypes.c_void_p, len(holders))(*(holder.ctypes.data for holder in holders))


@functools.cache  # ctypes forgets them, and a type is a cycle that only the garbage collector frees
def _array_type(element: type[_Buffer] | type[ctypes.c_void_p], length: int) -> type[ctypes.Array[Any]]:
    return element * length


def _held(value: Any, moved: dict[tuple[int, int], np.ndarray]) -> np.ndarray:
    """An argument's value in memory; an array is its address, or that of its copy."""
    array = array_of(value)
    if array is None:
        return np.array([value])
    array = moved.get(place_of(array), array)
    if not isinstance(value, TensorMap):
        return np.array([array.ctypes.data], np.uint64)
    return _encoded(array[..., : value.array.shape[-1]], value.box)


def _encoded(array: np.ndarray, box: tuple[int, ...]) -> np.ndarray:
    """simt_abi.h, struct SimtTensorMap, where a kernel's argument of that alignment may lie."""
    layout = Layout.of(array)
    fields = [layout.address, len(layout.shape)]
    for part in (layout.extents, (ITEMSIZE, *layout.pitches), box):
        fields += [*part, 1][:3]  # a matrix is a stack of one
    memory = np.zeros(2 * BYTES, np.uint8)
    start = -memory.ctypes.data % BYTES
    words = memory[start : start + BYTES].view(np.uint64)
    words[: len(fields)] = fields
    return words


def _report(launch: SimtLaunch, kernel: str, grid: Size, block: Size, buffers: ctypes.Array[_Buffer]) -> LaunchReport:
    traffic = {
        row.name.decode(): Traffic(row.read_bytes, row.written_bytes, row.read_sectors, row.written_sectors)
        for row in buffers
    }
    return LaunchReport(
        kernel, grid, block, traffic, SharedTraffic(*_values(launch.shared)), Work(*_values(launch.work))
    )


def _values(counts: ctypes.Structure) -> list[int]:
    return [getattr(counts, name) for name, *_ in counts._fields_]
