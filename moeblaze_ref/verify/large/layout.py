"""Positions of the last rows and columns of the experts' kernels, and the blocks that compute them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import DTYPE
from moeblaze_ref.runtime import Executor, ceil_div
from moeblaze_ref.runtime.source import Size
from moeblaze_ref.verify.large.cases import dispatch_of

TENSORS = stage_contracts.tensors()
HOPPER_ROWS = gemm.ROWS_BOX[1]
MANY_BLOCKS = 2**25  # more than the tiles of a case: each of the blocks that stay has one tile


@dataclass(frozen=True)
class Layout:
    """Sizes of a case. Each token has one expert; the last expert has the last rows, the one before it all others."""

    version: str
    L: int
    E: int
    d: int
    h: int
    rows: int  #: of the last expert
    tile: tiles.MmaTile | None = None  #: of a version that has tiles; its default

    def __str__(self) -> str:
        return f"L={self.L}, E={self.E}, d={self.d}, h={self.h}"

    @property
    def dtype(self) -> str:
        """The dtype in which the version computes."""
        return "float32" if self.version in ("1_naive", "2_tiled") else "bfloat16"

    @property
    def offsets(self) -> np.ndarray:
        """expert_token_offsets (E + 1,)."""
        offsets = np.zeros(self.E + 1, np.int32)
        offsets[-2], offsets[-1] = self.L - self.rows, self.L
        return offsets

    def call(self, function: Callable, **options: Any) -> Callable[[Executor], Any]:
        """Return a call of a stage's function, all of whose tensors have this layout's shapes, but no values."""
        sizes = {"L": self.L, "R": self.L, "k": 1, "E": self.E, "d": self.d, "h": self.h}
        required = [one.name for one in inspect.signature(function).parameters.values() if one.default is one.empty]

        def call(executor: Executor) -> Any:
            def empty(name):
                if name == "dispatch":
                    return dispatch_of(executor, self.L, self.E, 1)
                shape = tuple(sizes[axis] for axis in TENSORS[name].axes.split())
                return executor.empty(shape, self.dtype if TENSORS[name].kind == DTYPE else "float32")

            tensors = {name: empty(name) for name in required if name not in options}
            return function(**tensors, **options, executor=executor)

        return call

    def extent(self, results: int = 1) -> tuple[int, int]:
        """Rows and columns of a block's results."""
        if self.version == "1_naive":
            return 1, gemm.THREADS
        if self.version == gemm.HOPPER:
            return HOPPER_ROWS, gemm.HOPPER_COLUMNS // results
        return gemm.extent(self._tile, results)

    @property
    def _tile(self) -> tiles.Tile | None:
        return self.tile or tiles.DEFAULTS.get(self.version)

    def last(self, size: int, of_block: int) -> slice:
        """The last rows or columns, those of a block."""
        return slice((ceil_div(size, of_block) - 1) * of_block, size)

    def live_rows(self) -> slice:
        """The rows of the last block, in expert order."""
        part = self.last(self.rows, self.extent()[0])
        return slice(self.L - self.rows + part.start, self.L)

    def live_columns(self, width: int, results: int = 1) -> slice:
        """The columns of the last block, of rows that have ``width``."""
        if self.version == "1_naive":
            return slice(width - gemm.THREADS, width)
        return self.last(width, self.extent(results)[1])

    def row_blocks(self, width: int, results: int = 1) -> Callable[[Size], list[Size]]:
        """The block of the last rows and columns, where a kernel computes ``width`` columns of every row."""
        rows, columns = self.extent(results)
        before, own, across = ceil_div(self.L - self.rows, rows), ceil_div(self.rows, rows), ceil_div(width, columns)

        def blocks(grid: Size) -> list[Size]:
            if self.version == "1_naive":
                return [(ceil_div(self.rows * width, gemm.THREADS) - 1, self.E - 1, 0)]
            if self.version == gemm.HOPPER:
                return [(before * across + number_in_bands(own - 1, across - 1, own, across), 0, 0)]
            if self._tile is None:
                return [(before + own - 1, across - 1, 0)]
            number = number_in_bands(before + own - 1, across - 1, grid[0], grid[1])
            return [(number % grid[0], number // grid[0], 0)]

        return blocks


def number_in_bands(row: int, column: int, rows: int, columns: int, band: int = 8) -> int:
    """The number of a tile where tiles are taken down each column of a band of row tiles."""
    first = row // band * band
    return first * columns + column * min(band, rows - first) + row - first
