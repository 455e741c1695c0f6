"""Memory that the steps of a check share: each step's arrays overwrite those of the step before.

In training an optimizer overwrites the weights, and an allocator hands the same addresses out again. A stage that finds
packed weights again by their address and shape is wrong there, so a check must let it be wrong.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class StepMemory:
    """Arrays on a backend: the n-th that a step gives lies where the n-th of the step before lay.

    Parameters
    ----------
    to_backend : callable
        Moves a numpy array to the backend. It may return the array itself.
    """

    def __init__(self, to_backend: Callable[[np.ndarray], Any]):
        self._to_backend = to_backend
        self._held: list[Any] = []
        self._placed: dict[int, tuple[np.ndarray, Any]] = {}  # of this step, by id; the array keeps its id its own

    def begin_step(self):
        """Let the arrays of the next step overwrite those of this one."""
        self._placed = {}

    def place(self, array: np.ndarray) -> Any:
        """Return an array on the backend with these numbers: the same one if the step has given this array before."""
        if id(array) not in self._placed:
            self._placed[id(array)] = array, self._overwritten(len(self._placed), array)
        return self._placed[id(array)][1]

    def _overwritten(self, number: int, array: np.ndarray) -> Any:
        """Return the held array of this number with these numbers; a new one if none has its shape and dtype."""
        held = self._held[number] if number < len(self._held) else None
        if held is None or (held.shape, held.dtype) != (array.shape, array.dtype):
            held = self._to_backend(np.array(array, order="C"))
            self._held[number : number + 1] = [held]
        elif isinstance(held, np.ndarray):
            np.copyto(held, array)
        else:
            held.set(array)  # an array of CuPy
        return held
