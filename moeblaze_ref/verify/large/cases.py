"""Large cases and their parts."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.structures import Dispatch
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.sparse import Launch, SparseExecutor

ALL = slice(None)
# Of a few results in float64 from the same, already rounded inputs.
BOUNDS = {"int32": 0.0, "uint32": 0.0, "float32": 1e-5, "float16": 2.0**-9, "bfloat16": 2.0**-6}


@dataclass(frozen=True, eq=False)
class Case:
    """A kernel at sizes of which some product passes 2**31."""

    #: Where the kernel belongs; the version of a file that all versions share is that of its file.
    stage: str
    version: str
    passes: str  #: the products that pass 2**31, with the shape
    dtype: str  #: of the outputs
    launch: Launch
    #: Takes an executor and calls the stage with arrays of that executor's, whose values `launch` gives: without its
    #: checks, which would read arrays that are not there.
    call: Callable[[Executor], Any]
    multiprocessors: int = 4  #: blocks of a kernel whose blocks stay

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.launch.kernel

    def run(self, make: Callable[..., SparseExecutor] = SparseExecutor) -> SparseExecutor:
        """Run the blocks; return the executor, which has the errors of the outputs.

        Raises
        ------
        KernelFault
            If a block leaves the elements that it is to access.
        """
        executor = make(self.launch, self.multiprocessors)
        self.call(executor)
        return executor


def last_block(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """Return the last block of a grid, alone in a list."""
    x, y, z = grid
    return [(x - 1, y - 1, z - 1)]


def values(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    """Random numbers of order 1, rounded to a dtype."""
    rounded = np.random.default_rng([seed, *shape]).standard_normal(shape)
    return rounded.astype(gemm.BFLOAT16 if dtype == "bfloat16" else dtype)


def exactly(array: np.ndarray) -> np.ndarray:
    """The same values in float64."""
    return array.astype(np.float64)


def dispatch_of(executor: Executor, L: int, E: int, k: int) -> Dispatch:
    """The index structures of L tokens, without values."""
    empty = functools.partial(executor.empty, dtype="int32")
    return Dispatch(empty((L * k,)), empty((E + 1,)), empty((L * k,)), empty((L * k,)), k)
