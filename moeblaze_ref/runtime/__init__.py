"""One launch interface: CuPy's arrays on a GPU, numpy's on the CPU, and in `torch_executor` torch's own tensors.

The same .cu file runs through each `Executor`: the module that it loads has ``launch(kernel, grid, block,
shared_bytes=0, **arguments)``.
"""

import functools
import math
from typing import Any, Protocol

import numpy as np

from moeblaze_ref.core.arrays import address_of
from moeblaze_ref.core.on_demand import import_on_demand
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime.source import KernelArguments as KernelArguments  # with the executors
from moeblaze_ref.runtime.source import Module


class Executor(Protocol):
    """An executor: it compiles and runs kernel files. Its methods take arrays of its own kind alone."""

    def __hash__(self) -> int:
        """Hash of the executor, which is a key of caches."""

    @property
    def name(self) -> str:
        """The name of its backend, such as for messages."""

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability of the device, which decides the default versions."""

    @property
    def multiprocessors(self) -> int:
        """Blocks of a kernel whose blocks stay until all its work is done."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new array of the executor's kind."""

    def full(self, shape: tuple[int, ...], dtype: str, value: float) -> Array:
        """A new array of one value."""

    def cast(self, array: Any, dtype: str) -> Array:
        """The array in another dtype; itself if it has it."""

    def assign(self, target: Any, source: Any) -> None:
        """Write the elements of an array into another one of its shape and dtype."""

    def from_numpy(self, array: np.ndarray) -> Array:
        """The array where the executor's kernels can take it."""

    def to_numpy(self, array: Any) -> np.ndarray:
        """The array on the host."""

    def matmul(self, left: Any, right: Any, dtype: str) -> Array:
        """A plain dense product by a library, for what needs no kernel of ours; sums are float32."""

    def add_product(self, total: Any, left: Any, right: Any) -> Array:
        """Add the same product to ``total`` in place, and return it: the sum is float32 and is rounded once."""

    def check(self, file: str) -> None:
        """The file's header lets it run here; otherwise a ValueError says why not."""

    def tensor_map(self, array: Any, box: tuple[int, ...]) -> Any:
        """Boxes of the array, or of a part of one, as a kernel's argument of type TensorMap: see `TensorMap`."""

    def load(self, file: str, text: str | None = None, **constants: Any) -> Module:
        """Compile a kernel file."""


@functools.cache
def simt_executor() -> Executor:
    """The shared instrumented SIMT executor."""
    from moeblaze_ref.runtime.simt.executor import SimtExecutor

    return SimtExecutor()


@functools.cache
def cupy_executor() -> Executor:
    """The shared CuPy executor."""
    from moeblaze_ref.runtime.cupy import CupyExecutor

    return CupyExecutor()


def executor_for(array: Array) -> Executor:
    """Where an array lives decides who computes on it: numpy -> SIMT, a CUDA array -> CuPy."""
    return cupy_executor() if hasattr(array, "__cuda_array_interface__") else simt_executor()


def ceil_div(n: int, size: int) -> int:
    """Blocks of ``size`` that cover ``n``."""
    return -(-n // size)


def widest_pack(array: Array, width: int) -> int:
    """Neighbouring elements that one instruction can move of rows of ``width`` elements.

    16 bytes of them, or fewer, so that they divide a row and the array begins at a multiple of their bytes. The SIMT
    executor copies numpy arrays to where they may begin.
    """
    address = 0 if isinstance(array, np.ndarray) else address_of(array)
    itemsize: int = array.dtype.itemsize
    return math.gcd(16, width * itemsize, address) // itemsize


import_on_demand(__name__)
