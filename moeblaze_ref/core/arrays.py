"""Queries of an array that work alike for numpy, CuPy and torch. No other module handles their differences.

A variable ``own`` is an array with what its own library adds to `Array`.
"""

import functools
import math
import sys
from types import ModuleType
from typing import Any

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
    own: Any = array
    if hasattr(own, "data_ptr"):  # torch's: the module does without importing torch
        address: int = 0 if hasattr(own, "fake_mode") else own.data_ptr()  # `has_values`, without a call
    else:
        address = own.ctypes.data if hasattr(own, "ctypes") else own.data.ptr
    return address


def strides_of(array: Array) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis."""
    own: Any = array
    return tuple(step * own.itemsize for step in own.stride()) if hasattr(own, "stride") else tuple(own.strides)


def pitch_of(rows: Array) -> int:
    """Elements from one row of a matrix to the next; of a single row its width, whatever its stride."""
    count, width = rows.shape
    if count < 2:
        return int(width)
    own: Any = rows
    return int(own.stride(0) if hasattr(own, "stride") else own.strides[0] // own.itemsize)


def part_of(array: Array, axis: int, first: int, count: int) -> Array:
    """A view of some elements along an axis. Torch without CUDA has no slices of a GPU's tensor without memory."""
    own: Any = array
    if hasattr(own, "narrow"):
        part: Array = own.narrow(axis, first, count)
    else:
        part = own[(*[slice(None)] * (axis % own.ndim), slice(first, first + count))]
    return part


def with_gaps(rows: Array, width: int) -> Array:
    """New rows (..., pitch) as rows (..., width) with gaps between them; of torch the same tensor, and no view of it.

    A view would keep the memory: autograd frees a saved tensor's, but not that of the tensor it is a view of.
    """
    own: Any = rows
    if hasattr(own, "as_strided_"):
        own.as_strided_((*own.shape[:-1], width), own.stride())
        return rows
    return part_of(rows, -1, 0, width)


def whole_rows(rows: Array) -> Array:
    """A matrix (rows, width) with gaps between its rows, together with the gaps: (rows, pitch).

    Kernels that take 16 bytes at a time can then read it. What is laid out otherwise stays as it is, for a launch to
    refuse.
    """
    if is_contiguous(rows):
        return rows
    own: Any = rows
    (count, width), itemsize = own.shape, own.dtype.itemsize
    if hasattr(own, "as_strided"):
        pitch, step = own.stride()
        end = (own.storage_offset() + count * pitch) * itemsize
        fits = step == 1 and end <= own.untyped_storage().nbytes()
    else:
        pitch, step = (stride // itemsize for stride in own.strides)
        fits = step == 1 and address_of(own) + count * pitch * itemsize <= _end_of_memory(own)
    if not fits or pitch < width or pitch * itemsize % 16:
        return rows
    if hasattr(own, "as_strided"):
        whole: Array = own.as_strided((count, pitch), (pitch, 1))
    else:
        whole = library_of(own).lib.stride_tricks.as_strided(own, (count, pitch))
    return whole


def _end_of_memory(array: Array) -> float:
    """The address behind what numpy or CuPy has allocated for an array; infinity if someone else has."""
    own: Any = array
    while isinstance(own.base, type(own)):
        own = own.base
    owned = getattr(own.flags, "owndata", False)
    return address_of(own) + int(own.nbytes) if owned else float("inf")


def is_contiguous(array: Array) -> bool:
    """Return True if the array is C-contiguous: laid out row by row, without gaps."""
    own: Any = array
    found: bool = own.is_contiguous() if hasattr(own, "is_contiguous") else own.flags.c_contiguous
    return found


def is_writable(array: Array) -> bool:
    """Return True if the array may be written. Only numpy's arrays can be read-only."""
    return getattr(getattr(array, "flags", None), "writeable", True)


def take_columns(array: Array, columns: Array) -> Array:
    """``array[i, columns[i, j]]`` (n, k) of an array (n, m)."""
    own: Any = array
    own_columns: Any = columns
    if hasattr(own, "gather"):
        taken: Array = own.gather(1, own_columns.long())
    else:
        taken = library_of(own).take_along_axis(own, own_columns.astype("int64"), axis=1)
    return taken


def copy_of(array: Array) -> Any:
    """A new array of the same values."""
    own: Any = array
    return own.clone() if hasattr(own, "clone") else own.copy()


def library_of(array: Array) -> ModuleType:
    """numpy or cupy: whose array it is. CuPy's do not say it by ``__array_namespace__``."""
    return sys.modules[type(array).__module__.partition(".")[0]]
