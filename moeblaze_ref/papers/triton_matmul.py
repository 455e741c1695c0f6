"""A dense product of square matrices in Triton whose tile is a parameter. Importing this module imports Triton.

MegaBlocks (arXiv 2211.15841), section 5.1.2 and figure 5, compares the tiles of CUTLASS's dense products. Here one
kernel takes every tile, so that nothing but the tile and its schedule differs.
"""

import triton
import triton.language as tl
from torch import Tensor

DEPTH = 64  # columns of left and rows of right that one step multiplies


@triton.jit
def product_kernel(
    left, right, result, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr
):
    """Write one tile (ROWS, COLUMNS) of result = left right, all (n, n) row-major, n a multiple of every constant."""
    high, wide = n // ROWS, n // COLUMNS
    row, column = tl.swizzle2d(tl.program_id(0) // wide, tl.program_id(0) % wide, high, wide, BAND)
    rows = row * ROWS + tl.arange(0, ROWS)[:, None]  # (ROWS, 1)
    columns = column * COLUMNS + tl.arange(0, COLUMNS)[None, :]  # (1, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left_tile = left + rows * n + depth[None, :]  # (ROWS, DEPTH) addresses
    right_tile = right + depth[:, None] * n + columns  # (DEPTH, COLUMNS) addresses
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, n, DEPTH):
        total = tl.dot(tl.load(left_tile), tl.load(right_tile), total)
        left_tile += DEPTH
        right_tile += DEPTH * n
    tl.store(result + rows * n + columns, total.to(result.dtype.element_ty))


def multiply(left: Tensor, right: Tensor, result: Tensor, tile: tuple[int, int], warps: int, stages: int, band: int):
    """Write the product of left and right into result.

    Parameters
    ----------
    left, right, result : Tensor (n, n), bfloat16 or float16
        Contiguous. Sums are float32, rounded once.
    tile : tuple of int
        Rows and columns of a thread block's tile.
    warps : int
        Of a thread block.
    stages : int
        Steps whose operands are in shared memory at one time.
    band : int
        Rows of tiles that share a column before the next column is computed; 1 is the order row by row.

    Raises
    ------
    ValueError
        If n is not a multiple of the tile's rows and columns and of ``DEPTH``.
    """
    n, (rows, columns) = len(left), tile
    if n == 0 or n % rows or n % columns or n % DEPTH:
        raise ValueError(f"n is {n}, but a tile of {rows}x{columns} needs a multiple of {rows}, {columns} and {DEPTH}")
    product_kernel[n // rows * (n // columns),](
        left, right, result, n, rows, columns, DEPTH, band, num_warps=warps, num_stages=stages
    )
