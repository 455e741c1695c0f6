"""Queries of an array that work alike for numpy, CuPy and torch. No other module handles their differences."""

import functools
import math
import sys
from types import ModuleType

from moeblaze_ref.core.structures import Array

# numpy and torch spell a dtype's name anew each time, and a step asks hundreds of times.
_name_of = functools.cache(lambda dtype: str(dtype).removeprefix("torch."))


def dtype_of(array: Array) -> str:
    """The name of an array's dtype, as numpy spells it."""
    return _name_of(array.dtype)


def size_of(array: Array) -> int:
    """Elements."""
    return math.prod(array.shape)


def has_values(array: Array) -> bool:
    """Return True if the array has memory. A tensor of torch's FakeTensorMode has none."""
    return not hasattr(array, "fake_mode")


def address_of(array: Array) -> int:
    """Where an array begins, on its device; 0, which every alignment divides, if it has no memory."""
    if hasattr(array, "data_ptr"):  # torch's: the module does without importing torch
        address: int = 0 if hasattr(array, "fake_mode") else array.data_ptr()  # `has_values`, without a call
    else:
        address = array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr
    return address


def strides_of(array: Array) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis."""
    return tuple(step * array.itemsize for step in array.stride()) if hasattr(array, "stride") else tuple(array.strides)


def pitch_of(rows: Array) -> int:
    """Elements from one row of a matrix to the next; of a single row its width, whatever its stride."""
    count, width = rows.shape
    if count < 2:
        return int(width)
    return int(rows.stride(0) if hasattr(rows, "stride") else rows.strides[0] // rows.itemsize)


def part_of(array: Array, axis: int, first: int, count: int) -> Array:
    """A view of some elements along an axis. Torch without CUDA has no slices of a GPU's tensor without memory."""
    if hasattr(array, "narrow"):
        return array.narrow(axis, first, count)
    part = [slice(None)] * array.ndim
    part[axis] = slice(first, first + count)
    return array[tuple(part)]


def with_gaps(rows: Array, width: int) -> Array:
    """New rows (..., pitch) as rows (..., width) with gaps between them; of torch the same tensor, and no view of it.

    A view would keep the memory: autograd frees a saved tensor's, but not that of the tensor it is a view of.
    """
    if hasattr(rows, "as_strided_"):
        return rows.as_strided_((*rows.shape[:-1], width), rows.stride())
    return part_of(rows, -1, 0, width)


def whole_rows(rows: Array) -> Array:
    """A matrix (rows, width) with gaps between its rows, together with the gaps: (rows, pitch).

    Kernels that take 16 bytes at a time can then read it. What is laid out otherwise stays as it is, for a launch to
    refuse.
    """
    if is_contiguous(rows):
        return rows
    (count, width), itemsize = rows.shape, rows.dtype.itemsize
    if hasattr(rows, "as_strided"):
        pitch, step = rows.stride()
        end = (rows.storage_offset() + count * pitch) * itemsize
        fits = step == 1 and end <= rows.untyped_storage().nbytes()
    else:
        pitch, step = (stride // itemsize for stride in rows.strides)
        fits = step == 1 and address_of(rows) + count * pitch * itemsize <= _end_of_memory(rows)
    if not fits or pitch < width or pitch * itemsize % 16:
        return rows
    if hasattr(rows, "as_strided"):
        return rows.as_strided((count, pitch), (pitch, 1))
    return library_of(rows).lib.stride_tricks.as_strided(rows, (count, pitch))


def _end_of_memory(array: Array) -> float:
    """The address behind what numpy or CuPy has allocated for an array; infinity if someone else has."""
    while isinstance(array.base, type(array)):
        array = array.base
    owned = getattr(array.flags, "owndata", False)
    return address_of(array) + array.nbytes if owned else float("inf")


def is_contiguous(array: Array) -> bool:
    """Return True if the array is C-contiguous: laid out row by row, without gaps."""
    found: bool = array.is_contiguous() if hasattr(array, "is_contiguous") else array.flags.c_contiguous
    return found


def is_writable(array: Array) -> bool:
    """Return True if the array may be written. Only numpy's arrays can be read-only."""
    return getattr(getattr(array, "flags", None), "writeable", True)


def take_columns(array: Array, columns: Array) -> Array:
    """``array[i, columns[i, j]]`` (n, k) of an array (n, m)."""
    if hasattr(array, "gather"):
        return array.gather(1, columns.long())
    return library_of(array).take_along_axis(array, columns.astype("int64"), axis=1)


def library_of(array: Array) -> ModuleType:
    """numpy or cupy: whose array it is. CuPy's do not say it by ``__array_namespace__``."""
    return sys.modules[type(array).__module__.partition(".")[0]]
