"""The router's matrix products as a Numba kernel: logits from x and wg, and back.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.numba_cuda.runtime import (
    DTYPES,
    THREADS,
    ZERO,
    all_to_device,
    blocks_for,
    cuda,
    float32_output,
    launch,
    to_caller,
)
from moeblaze_ref.core import stage_contracts


@cuda.jit
def matmul_kernel(left, right, product):
    """Multiply left (m, p) by right (p, n).

    Source        MoEBlaze, section 2: X Wg; and its gradients, by transposed operands
    Grid          ceil(m n / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 m n p; writes 4 m n
    """
    rows, columns = product.shape
    element = cuda.grid(1)
    row, column = element // columns, element % columns
    if row < rows:
        total = ZERO
        for i in range(left.shape[1]):
            total += left[row, i] * right[i, column]
        product[row, column] = total


def forward(x, wg):
    """Router logits.

    Parameters
    ----------
    x : array (L, d), float32
        Tokens, finite. A numpy array, or on the GPU a CuPy array.
    wg : array (d, E)

    Returns
    -------
    logits : array (L, E)
        Of the kind of ``x``.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_router`; the dtype is float32.
    """
    stage_contracts.check_router(x, wg, DTYPES)
    return _matmul(x, wg)


def input_gradient(d_logits, wg):
    """Gradient of x, through the router alone.

    Parameters
    ----------
    d_logits : array (L, E), float32
        Gradient of the logits, finite.
    wg : array (d, E)

    Returns
    -------
    d_x : array (L, d)

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_input_gradient(d_logits, wg, DTYPES)
    return _matmul(d_logits, wg.T)


def weight_gradient(d_logits, x):
    """Gradient of wg.

    Parameters
    ----------
    d_logits : array (L, E), float32
        Gradient of the logits, finite.
    x : array (L, d)

    Returns
    -------
    d_wg : array (d, E)

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_weight_gradient(d_logits, x, DTYPES)
    return _matmul(x.T, d_logits)


def _matmul(left, right):
    """The product (m, n) of (m, p) and (p, n)."""
    product = float32_output((left.shape[0], right.shape[1]))
    launch(matmul_kernel, blocks_for(product.size), THREADS, *all_to_device(left, right), product)
    (product,) = to_caller(left, product)
    return product
