"""Poison: what memory holds before a kernel writes it."""

from typing import Any, TypeVar

Filled = TypeVar("Filled", bound=Any)  # an array of numpy or CuPy

# Repeated, it is NaN as float16, bfloat16, float32 and float64, and a negative integer that no
# index structure uses (-524297 as int32; not -1, which kernels use for "empty").
POISON = 0xFFF7


def poison(array: Filled) -> Filled:
    """Fill a numpy or CuPy array with `POISON`, in place; returns it."""
    if array.dtype.itemsize == 1:
        array.view("uint8").fill(POISON & 0xFF)
    elif array.size:
        array.reshape(-1).view("uint16").fill(POISON)  # one without dimensions cannot be viewed itself
    return array
