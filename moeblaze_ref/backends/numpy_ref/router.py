"""The router's matrix products: logits from x and wg, and back.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements


@implements(stage_contracts.ROUTER, ARRAYS)
def forward(x, wg):
    return x @ wg


@implements(stage_contracts.ROUTER_D_X, ARRAYS)
def input_gradient(d_logits, wg, d_x=None):
    product = d_logits @ wg.T
    if d_x is None:
        return product
    d_x += product
    return d_x


@implements(stage_contracts.ROUTER_D_WG, ARRAYS)
def weight_gradient(d_logits, x):
    return x.T @ d_logits
