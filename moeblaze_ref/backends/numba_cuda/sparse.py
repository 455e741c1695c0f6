"""Some blocks of a launch on Numba's simulator, on arrays most of which are not there."""

import bisect
from collections.abc import Iterable
from typing import Any

import numpy as np
from numba.cuda.simulator import kernel as simulated
from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray, FakeWithinKernelCUDAArray
from numba.cuda.simulator.kernelapi import FakeCUDAModule, swapped_cuda_module

from moeblaze_ref.runtime.sparse import Reservation


class OpenArray(FakeCUDAArray):
    """A reserved array in a kernel: elements that are not open cannot be accessed.

    Parameters
    ----------
    name : str
        For messages.
    reservation : Reservation
    """

    def __init__(self, name: str, reservation: Reservation):
        super().__init__(reservation.array)
        self.name, self._ranges = name, list(reservation.ranges())

    def __getitem__(self, index):
        self._check(index)
        return self._ary[index]

    def __setitem__(self, index, value):
        self._check(index)
        self._ary[index] = value

    def _check(self, index):
        """The index is of one open element."""
        index = tuple(map(int, index if isinstance(index, tuple) else (index,)))
        inside = len(index) == self._ary.ndim and all(0 <= i < n for i, n in zip(index, self._ary.shape, strict=True))
        address = self._ary.ctypes.data + sum(i * step for i, step in zip(index, self._ary.strides, strict=False))
        begin, size = self._ranges[bisect.bisect_right(self._ranges, (address, np.inf)) - 1]
        if not inside or not begin <= address < begin + size:
            raise IndexError(f"{self.name}[{', '.join(map(str, index))}] is none of the elements of this case")


def run_blocks(kernel, blocks: int, threads: int, chosen: Iterable[int], arguments: Iterable[Any], shared_bytes: int):
    """Run the chosen blocks of a one-dimensional grid; arrays of reservations are given as `OpenArray`.

    Raises
    ------
    IndexError
        If a block accesses an element that is not open.
    """
    grid, block = (blocks, 1, 1), (threads, 1, 1)
    passed = [FakeWithinKernelCUDAArray(each) if isinstance(each, OpenArray) else each for each in arguments]
    module = FakeCUDAModule(grid, block, shared_bytes)
    with simulated._push_kernel_context(module), swapped_cuda_module(kernel.fn, module):
        for number in chosen:
            simulated.BlockManager(kernel.fn, grid, block, False).run((number, 0, 0), *passed)
