"""Deadlines of searches. A deadline that ends a search remembers it: another run of the search may find another map."""

import time

import numpy as np


class Deadline:
    """The moment at which a search ends, and whether it ended one.

    Parameters
    ----------
    seconds : float
        From now on; by default there is no end.
    """

    def __init__(self, seconds: float = np.inf):
        self.at = time.perf_counter() + seconds  #: of `time.perf_counter`
        self.cut = False  #: whether the clock ended a search, so that another run may find another map

    def left(self) -> float:
        """Seconds that are left; below 0 once it is over."""
        return self.at - time.perf_counter()

    def keep_back(self, seconds: float) -> None:
        """End searches so much earlier, for what follows them."""
        self.at -= seconds

    def over(self, at: float | None = None) -> bool:
        """Look at the clock: whether the moment, or that of a part of the search, has passed. This is remembered."""
        passed = time.perf_counter() > (self.at if at is None else at)
        self.cut = self.cut or passed
        return passed
