"""The combine: each token gathers its k expert outputs, weights them by its gates and sums them.

Sources: MoEBlaze (arXiv 2601.05296), section 3.1, for the reduction into (L, d); SonicMoE
(arXiv 2512.14080) for gather-and-sum instead of a scatter, which needs no atomics.
"""

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import implements


@implements(stage_contracts.COMBINE, ARRAYS)
def forward(y, gates, dispatch):
    """Rows are summed in the order j = 0, ..., k - 1: always the same bits."""
    out = np.zeros((dispatch.L, y.shape[1]), dtype=y.dtype)  # (L, d)
    positions = dispatch.token_index_map.reshape(gates.shape)  # (L, k) into the expert order
    for j in range(dispatch.k):
        out += gates[:, j, None] * y[positions[:, j]]
    return out


@implements(stage_contracts.COMBINE_BACKWARD, ARRAYS)
def backward(d_out, y, gates, dispatch):
    d_y = np.empty_like(y)  # (R, d)
    d_gates = np.empty_like(gates)  # (L, k)
    positions = dispatch.token_index_map.reshape(gates.shape)  # (L, k) into the expert order
    for j in range(dispatch.k):
        d_y[positions[:, j]] = gates[:, j, None] * d_out
        d_gates[:, j] = (d_out * y[positions[:, j]]).sum(axis=1)
    return d_y, d_gates
