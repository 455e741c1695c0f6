"""The router's matrix products as a Numba kernel: logits from x and wg, and back.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.numba_cuda.runtime import ARRAYS, ZERO, cuda, per_element
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements


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


@implements(stage_contracts.ROUTER, ARRAYS)
def forward(x, wg):
    return _matmul(x, wg)


@implements(stage_contracts.ROUTER_D_X, ARRAYS)
def input_gradient(d_logits, wg, d_x=None):
    product = _matmul(d_logits, wg.T)
    if d_x is None:
        return product
    d_x += product
    return d_x


@implements(stage_contracts.ROUTER_D_WG, ARRAYS)
def weight_gradient(d_logits, x):
    return _matmul(x.T, d_logits)


def _matmul(left, right):
    """The product (m, n) of (m, p) and (p, n)."""
    return per_element(matmul_kernel, left, (left.shape[0], right.shape[1]), left, right)
