"""A matrix as Hopper's copy engine takes it: the kernel's argument for a parameter of type ``TensorMap``."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import address_of, dtype_of, strides_of
from moeblaze_ref.core.structures import Array

DTYPES = ("float16", "bfloat16")
ITEMSIZE = 2  # bytes of an element of either
RANKS = (2, 3)
ROW_BYTES = 128  # of a box: a row of the 128-byte swizzle
ALIGNMENT = 16  # bytes, of the matrix and of its rows
MAX_BOX = 256  # elements along an axis
BYTES = 128  # of the encoded map, with every encoder


class Layout(NamedTuple):
    """Address, dtype, shape and strides of an array. An encoded map depends on these and on the box alone."""

    address: int  # on its device
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes from one element to the next along each axis

    @classmethod
    def of(cls, array: Array) -> "Layout":
        """Return the layout of an array."""
        return cls(address_of(array), dtype_of(array), tuple(array.shape), strides_of(array))

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements along each axis, innermost first."""
        return self.shape[::-1]

    @property
    def pitches(self) -> tuple[int, ...]:
        """Bytes from one row to the next and, of three dimensions, from one matrix to the next."""
        return self.strides[-2::-1]


@dataclass(frozen=True, eq=False)
class TensorMap:
    """An array, and the box of it that one copy moves into shared memory, with the 128-byte swizzle.

    Parameters
    ----------
    array : array
        (rows, columns) or (matrices, rows, columns), float16 or bfloat16, not empty; or some rows or columns of each
        matrix of such an array. Its address and its rows are multiples of 16 bytes.
    box : tuple of int
        Elements along each axis, innermost first: the innermost is 64 (128 bytes), the others are 1..256.

    Raises
    ------
    TypeError
        If the array is none, has another dtype, or a box's extent is no integer.
    ValueError
        If the array's rank, layout, size or alignment, or the box, is not as above.

    Notes
    -----
    Source: PTX ISA, "Tensors"; CUDA driver API, cuTensorMapEncodeTiled. What a box has beyond the array is zeros.
    """

    array: Array
    box: tuple[int, ...]
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        rank = getattr(self.array, "ndim", 0)
        checks.check_array("array of the TensorMap", self.array, rank, DTYPES, contiguous=False)
        object.__setattr__(self, "layout", Layout.of(self.array))  # the way to set a field of a frozen dataclass
        check_layout(self.layout, self.box)


class EncodedMap(NamedTuple):
    """A tensor map as the copy engine reads it. It does not keep the array alive: the caller of the launch must."""

    words: Any  # `BYTES` of them
    layout: Layout
    box: tuple[int, ...]


def check_layout(layout: Layout, box: tuple[int, ...]) -> None:
    """The copy engine takes such boxes of an array that lies so, float16 or bfloat16."""
    name = "array of the TensorMap"
    if len(layout.shape) not in RANKS:
        raise ValueError(f"{name} has shape {layout.shape}, but it must have 2 or 3 dimensions")
    if 0 in layout.shape:
        raise ValueError(f"{name} has shape {layout.shape}, but the copy engine takes no empty array")
    if layout.strides[-1] != ITEMSIZE:
        raise ValueError(f"{name} is not C-contiguous (strides {layout.strides}), but its rows must be without gaps")
    _check_aligned(f"address of the {name}", layout.address)
    for pitch in layout.pitches:
        _check_aligned(f"row of the {name}, in bytes,", pitch)
    _check_box(layout, box)


def _check_box(layout: Layout, box: tuple[int, ...]) -> None:
    if len(box) != len(layout.shape):
        raise ValueError(f"box of the TensorMap is {box}, but the array has {len(layout.shape)} dimensions")
    for axis, extent in enumerate(box):
        checks.check_int(f"box[{axis}] of the TensorMap", extent, at_least=1, at_most=MAX_BOX)
    if box[0] * ITEMSIZE != ROW_BYTES:
        raise ValueError(
            f"box[0] of the TensorMap is {box[0]}, but a row of the 128-byte swizzle has {ROW_BYTES // ITEMSIZE} "
            f"elements"
        )


def _check_aligned(name: str, number: int) -> None:
    if number % ALIGNMENT:
        raise ValueError(f"{name} is {number}, but the copy engine needs a multiple of {ALIGNMENT}")
