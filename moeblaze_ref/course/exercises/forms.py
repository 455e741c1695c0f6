"""The form of what a reader constructs."""

from typing import Any

import numpy as np


def whole_numbers(name: str, said: Any, shape: tuple[int | None, ...]) -> np.ndarray:
    """An answer as an int array of a shape, in which None stands for any size but none.

    Raises
    ------
    ValueError, TypeError
        If it has another form.
    """
    try:
        found = np.array(said)
    except ValueError:  # NumPy's message is of arrays
        raise ValueError(f"{name} has rows of different lengths, but they must have one length") from None
    if found.size == 0:
        raise ValueError(f"{name} is empty, but it must hold at least one whole number")
    if found.dtype.kind not in "iu" or found.ndim != len(shape):
        raise TypeError(f"{name} must be a list of whole numbers with {len(shape)} dimension(s)")
    if any(wanted not in (None, size) for wanted, size in zip(shape, found.shape, strict=True)):
        wanted = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} has shape {found.shape}, but it must be {str(wanted).replace(repr('any'), 'any')}")
    return found
