"""Prepares launches and products for the C function that sends them (send.cpp)."""

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moeblaze_ref.runtime.launch_plan.events import MapOf, Matrix, Pointer, Product, Sent
from moeblaze_ref.runtime.parameters import ALIGNMENT, layout_of
from moeblaze_ref.runtime.simt import build

SOURCE = Path(__file__).with_name("send.cpp")
DTYPES = {"float16": 6, "bfloat16": 9}  # CUtensorMapDataType
PRODUCT_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType

# send.cpp, structs Pointer, Map, Launch, Matrix and Product.
_ADDRESS = [("place", "u8"), ("buffer", "u8"), ("offset", "u8")]
_SIZES = [("extents", "u8", 3), ("pitches", "u8", 2), ("box", "u4", 3), ("rank", "u4"), ("dtype", "i4")]
_LAUNCH = [("function", "u8"), ("grid", "u4", 3), ("block", "u4", 3), ("shared_bytes", "u4"), ("first", "u4")]
_POINTERS, _MAPS, _LAUNCHES = (np.dtype(fields, align=True) for fields in (_ADDRESS, _ADDRESS + _SIZES, _LAUNCH))
_MATRIX = np.dtype(
    [("buffer", "u8"), ("offset", "u8"), ("columns", "i4"), ("leading", "i4"), ("dtype", "i4")], align=True
)
_FACTORS = [(name, _MATRIX) for name in ("left", "right", "out")]
_PRODUCTS = np.dtype([*_FACTORS, ("sizes", "i4", 3), ("beta", "f4"), ("launches_before", "u8")], align=True)


class Driver(NamedTuple):
    """Addresses of the functions that a plan calls: two of the CUDA driver and one of cuBLAS."""

    launch_kernel: int  # cuLaunchKernel
    encode_tiled: int  # cuTensorMapEncodeTiled
    multiply: int  # cublasGemmEx
    blas_handle: Callable[[], int]  # of cuBLAS, for the current stream


class _Part(ctypes.Structure):
    """send.cpp, struct Part."""

    _fields_ = [(function, ctypes.c_uint64) for function in Driver._fields[:3]] + [
        (field, ctypes.c_uint64)
        for table in ("memory", "places", "launches", "pointers", "maps", "products")
        for field in (table, f"num_{table}")
    ]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled C function. Raises SimtUnavailable where there is no C++ compiler."""
    loaded = build.host_library(SOURCE.read_text())
    loaded.send_launches.argtypes = [ctypes.c_void_p] * 4
    return loaded


class Sender:
    """Launches and products that one call sends.

    Parameters
    ----------
    events : sequence of Launch or Product
    slots : mapping of int to (int, int)
        For each buffer its place among the addresses of a step, and where it begins there, in bytes.
    num_addresses : int
    driver : Driver
    """

    def __init__(
        self, events: Sequence[Sent], slots: Mapping[int, tuple[int, int]], num_addresses: int, driver: Driver
    ):
        memory, pointers, maps, products = b"", [], [], []
        places: list[int] = []
        rows: list[tuple[object, ...]] = []
        for launch in events:
            if isinstance(launch, Product):
                products.append(_product(launch, len(rows), slots))
                continue
            layout, offsets = layout_of(launch.parameters)
            rows.append((launch.function, launch.grid, launch.block, launch.shared_bytes, len(places)))
            places += [len(memory) + offset for offset in offsets]
            for place, argument in zip(places[-len(offsets) :], launch.arguments, strict=True):
                if isinstance(argument, Pointer):
                    pointers.append(_pointer(place, argument, slots))
                elif isinstance(argument, MapOf):
                    maps.append(_map(place, argument, slots))
            packed = struct.pack(layout, *map(_constant, launch.arguments))
            memory += packed + bytes(-len(packed) % ALIGNMENT)
        self._tables: list[np.ndarray] = [
            np.frombuffer(memory, np.uint8),
            np.array(places, np.uint64),
            np.array(rows, _LAUNCHES),
            np.array(pointers, _POINTERS),
            np.array(maps, _MAPS),
            np.array(products, _PRODUCTS),
        ]  # which the C function reads
        sized = [number for table in self._tables for number in (table.ctypes.data, len(table))]
        self._part = _Part(*driver[:3], *sized)
        self._handle: Callable[[], int] = driver.blas_handle if products else _no_handle
        self._address = ctypes.addressof(self._part)
        self._packed = struct.Struct(f"{num_addresses}Q").pack
        self._send: Callable[..., int] = library().send_launches
        self._names = [event.name for event in events]

    def send(self, addresses: Sequence[int], stream: int) -> None:
        """Launch on a stream, the current one, with the addresses of this step.

        Raises
        ------
        RuntimeError
            If the driver refuses a launch, or cuBLAS a product.
        """
        if error := self._send(self._address, self._packed(*addresses), stream, self._handle()):
            raise RuntimeError(f"the driver refused one of the kernels {', '.join(self._names)}: error {error}")


def _no_handle() -> int:
    return 0


def _product(product: Product, launches_before: int, slots: Mapping[int, tuple[int, int]]) -> tuple[object, ...]:
    """send.cpp, struct Product."""
    matrices = [_matrix(matrix, slots) for matrix in (product.left, product.right, product.out)]
    return *matrices, product.sizes, float(product.grows), launches_before


def _matrix(matrix: Matrix, slots: Mapping[int, tuple[int, int]]) -> tuple[int, int, int, int, int]:
    """send.cpp, struct Matrix."""
    _, slot, offset = _pointer(0, matrix.pointer, slots)
    return slot, offset, matrix.columns, matrix.leading, PRODUCT_DTYPES[matrix.dtype]


def _pointer(place: int, pointer: Pointer, slots: Mapping[int, tuple[int, int]]) -> tuple[int, int, int]:
    """send.cpp, struct Pointer."""
    slot, begin = slots[pointer.buffer]
    return place, slot, begin + pointer.offset


def _map(place: int, of: MapOf, slots: Mapping[int, tuple[int, int]]) -> tuple[object, ...]:
    """send.cpp, struct Map; a matrix is a stack of one."""
    rank = len(of.layout.shape)
    extents, pitches, box = ((*part, 0, 0)[:length] for part, length in zip(_parts_of(of), (3, 2, 3), strict=True))
    return *_pointer(place, of.pointer, slots), extents, pitches, box, rank, DTYPES[of.layout.dtype]


def _parts_of(of: MapOf) -> tuple[tuple[int, ...], ...]:
    return of.layout.extents, of.layout.pitches, of.box


def _constant(argument: object) -> object:
    """Return the placeholder in memory for an argument, until a step writes its address there or encodes its map."""
    if isinstance(argument, MapOf):
        return b""
    return 0 if isinstance(argument, Pointer) else argument
