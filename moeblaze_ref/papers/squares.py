"""MegaBlocks' figure 5: dense square products by the tile of a thread block and by the order of the tiles.

Source: MegaBlocks (arXiv 2211.15841). Section 5.1.2 chose blocks of 128x128 because the CUTLASS tile of that size is on
a par with the others or better. Section 6.3 says what the order of the tiles changes through the L2 cache. Here one
Triton kernel takes every tile and order, beside cuBLAS. Operands are bfloat16.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.bench.stages import input_sets
from moeblaze_ref.papers.agreement import checked_errors
from moeblaze_ref.papers.results import Rows
from moeblaze_ref.runtime.clock import Samples, interleave, replayed
from moeblaze_ref.runtime.device import Device

SIZES = tuple(2**power for power in range(9, 15))  # 512 to 16,384
# Warps of each tile's thread blocks: 64 to 128 float32 sums a thread, and 32 where the tile has no more.
WARPS = {
    (64, 64): (4,),
    (64, 128): (4,),
    (128, 64): (4,),
    (64, 256): (4, 8),
    (256, 64): (4, 8),
    (128, 128): (4, 8),
    (128, 256): (8,),
    (256, 128): (8,),
}
STAGES = (3, 4)
PAPERS_TILE = (128, 128)
BAND = 8  # rows of tiles that share a column: neighbours in time find it in the L2 cache
ROW_BY_ROW = 1
REPETITIONS = 9


class Kernel(NamedTuple):
    """One way of running the Triton product."""

    tile: tuple[int, int]  #: rows and columns
    warps: int
    stages: int
    band: int = BAND  #: see `triton_matmul.multiply`


KERNELS = tuple(Kernel(tile, *way) for tile, warps in WARPS.items() for way in product(warps, STAGES))
ORDERS = tuple(Kernel(PAPERS_TILE, *way) for way in product(WARPS[PAPERS_TILE], STAGES, (BAND, ROW_BY_ROW)))


@dataclass(frozen=True, eq=False)
class Operands:
    """Two matrices and room for their product, each (n, n) bfloat16."""

    left: Tensor
    right: Tensor
    result: Tensor

    @classmethod
    def random(cls, n: int, device: torch.device) -> "Operands":
        """Draw operands whose product has elements of order 1."""
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        left, right = (torch.randn(n, n, **options) for _ in range(2))
        return cls(left, right.mul_(n**-0.5), torch.empty(n, n, **options))


def time_square(n: int, device: Device, kernels: Sequence[Kernel] = KERNELS) -> Rows:
    """Time every tile and order, and cuBLAS, on one size, interleaved, by replays of CUDA graphs.

    A graph multiplies as many pairs of operands as fill the L2 cache twice. Every result is compared with cuBLAS's. The
    size n is that of rows, columns and depth, a multiple of every tile's sides.

    Returns
    -------
    list of dict
        {n, system, tile, band, warps, stages, ms, quartiles_ms, tflops, error, row_error}: a row for each tile and
        order, of its fastest kernel and the system "triton", and one of "cublas", which has no kernel and no errors.
        Milliseconds are of one product.

    Raises
    ------
    ArithmeticError
        If a result is not that of cuBLAS.
    """
    sets = [Operands.random(n, device.torch_device) for _ in range(input_sets(6 * n * n, device.cache_bytes))]
    errors = {kernel: _error(kernel, sets[0]) for kernel in kernels}
    works = {None: partial(_by_cublas, sets)} | {kernel: partial(_by_triton, kernel, sets) for kernel in kernels}
    contenders = {kernel: replayed(device.captured(work)) for kernel, work in works.items()}
    samples = interleave(contenders, REPETITIONS, device)
    times = {kernel: taken.shared_by(len(sets)) for kernel, taken in samples.items()}
    fastest: dict[tuple[tuple[int, int], int], Kernel] = {}  # by tile and order
    for kernel in kernels:
        rival = fastest.setdefault((kernel.tile, kernel.band), kernel)
        if times[kernel].median < times[rival].median:
            fastest[kernel.tile, kernel.band] = kernel
    of_tiles = [_row(n, kernel, times[kernel], errors[kernel]) for kernel in fastest.values()]
    return [*of_tiles, _row(n, None, times[None], {})]


def _by_cublas(sets: Sequence[Operands]):
    for operands in sets:
        torch.mm(operands.left, operands.right, out=operands.result)


def _by_triton(kernel: Kernel, sets: Sequence[Operands]):
    from moeblaze_ref.papers import triton_matmul  # only a GPU's torch brings Triton

    for operands in sets:
        triton_matmul.multiply(operands.left, operands.right, operands.result, *kernel)


def _error(kernel: Kernel, operands: Operands) -> dict[str, float]:
    expected = torch.mm(operands.left, operands.right)
    operands.result.fill_(torch.nan)
    _by_triton(kernel, [operands])
    rows, columns = kernel.tile
    what = f"the product of size {len(expected)} by tiles of {rows}x{columns} in bands of {kernel.band}"
    return checked_errors(what, operands.result, expected)


def _row(n: int, kernel: Kernel | None, taken: Samples, error: Mapping[str, float]) -> dict[str, Any]:
    return {
        "n": n,
        "system": "cublas" if kernel is None else "triton",
        "tile": None if kernel is None else list(kernel.tile),
        "band": None if kernel is None else kernel.band,
        "warps": None if kernel is None else kernel.warps,
        "stages": None if kernel is None else kernel.stages,
        "ms": taken.median,
        "quartiles_ms": list(taken.quartiles),
        "tflops": 2 * n**3 / taken.median / 1e9,
        "error": error.get("error"),
        "row_error": error.get("row_error"),
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return, for each size, the rate of the paper's tile over that of the fastest tile: 1 where it is the fastest.

    The rows are as `time_square` returns them, of one device.
    """
    ms = {(row["n"], tuple(row["tile"])): row["ms"] for row in rows if row["tile"]}
    sizes = sorted({n for n, _ in ms})
    return {n: min(took for (size, _), took in ms.items() if size == n) / ms[n, PAPERS_TILE] for n in sizes}


def gains_by_order(rows: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Return, for each size, by how much of its time bands of tiles are faster than tiles row by row; below 0: slower.

    The rows are as `time_square` returns them of ``ORDERS``, of one device.
    """
    ms = {(row["n"], row["band"]): row["ms"] for row in rows if row["tile"]}
    return {n: 1 - ms[n, BAND] / ms[n, ROW_BY_ROW] for n in sorted({n for n, _ in ms})}


def jobs(device: Device) -> list[Callable[[], Rows]]:
    """Return a job for each size, see `time_square`.

    They should take 5 minutes on an H100: the few repetitions bound the largest size, where 23 contenders multiply 22
    times each, 8.8 TFLOP a product.
    """
    return [partial(time_square, n, device) for n in SIZES]


def jobs_of_orders(device: Device) -> list[Callable[[], Rows]]:
    """Return a job for each size, see `time_square`; they should take a minute on an H100."""
    return [partial(time_square, n, device, ORDERS) for n in SIZES]
