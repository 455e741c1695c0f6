"""A matrix as Hopper's copy engine takes it: the kernel's argument for a parameter of type ``TensorMap``."""

from dataclasses import dataclass

import numpy as np

from moeblaze_ref import doors
from moeblaze_ref.structures import Array

DTYPES = ("float16", "bfloat16")
RANKS = (2, 3)
ROW_BYTES = 128  # of a box: a row of the 128-byte swizzle
ALIGNMENT = 16  # bytes, of the matrix and of its rows
MAX_BOX = 256  # elements along an axis
BYTES = 128  # of the encoded map, whoever encodes it


@dataclass(frozen=True, eq=False)
class TensorMap:
    """An array, and the box of it that one copy moves into shared memory, with the 128-byte swizzle.

    Parameters
    ----------
    array : array
        (rows, columns) or (matrices, rows, columns), float16 or bfloat16, C-contiguous, not empty. Its address
        and its rows are multiples of 16 bytes.
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

    def __post_init__(self):
        name = "array of the TensorMap"
        rank = getattr(self.array, "ndim", None)
        doors.check_array(name, self.array, rank=rank, dtypes=DTYPES)
        if rank not in RANKS:
            raise ValueError(f"{name} has shape {tuple(self.array.shape)}, but it must have 2 or 3 dimensions")
        if not self.array.size:
            raise ValueError(f"{name} has shape {tuple(self.array.shape)}, but the copy engine takes no empty array")
        _check_aligned(f"address of the {name}", self.address)
        _check_aligned(f"row of the {name}, in bytes,", self.strides[0])
        self._check_box()

    def _check_box(self):
        if len(self.box) != self.array.ndim:
            raise ValueError(f"box of the TensorMap is {self.box}, but the array has {self.array.ndim} dimensions")
        for axis, extent in enumerate(self.box):
            doors.check_int(f"box[{axis}] of the TensorMap", extent, at_least=1, at_most=MAX_BOX)
        if self.box[0] * self.array.itemsize != ROW_BYTES:
            raise ValueError(
                f"box[0] of the TensorMap is {self.box[0]}, but a row of the 128-byte swizzle has "
                f"{ROW_BYTES // self.array.itemsize} elements"
            )

    @property
    def address(self) -> int:
        """Where the array lies, on its device."""
        return self.array.ctypes.data if isinstance(self.array, np.ndarray) else self.array.data.ptr

    @property
    def extents(self) -> tuple[int, ...]:
        """Elements of the array along each axis, innermost first."""
        return tuple(self.array.shape[::-1])

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one row to the next and, of three dimensions, from one matrix to the next."""
        return tuple(self.array.strides[-2::-1])


def _check_aligned(name: str, number: int):
    if number % ALIGNMENT:
        raise ValueError(f"{name} is {number}, but the copy engine needs a multiple of {ALIGNMENT}")
