"""The router's matrix products: logits from x and wg, and back.

Source: MoEBlaze (arXiv 2601.05296), section 2: X Wg, with Wg of shape (d, E).
"""

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.core import stage_contracts


def forward(x, wg):
    """Router logits.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
        Tokens, finite.
    wg : ndarray (d, E)

    Returns
    -------
    logits : ndarray (L, E)

    Raises
    ------
    ValueError
        If shapes disagree or a value is not finite.
    TypeError
        If a dtype is not allowed.
    """
    stage_contracts.check_router(x, wg, DTYPES)
    return x @ wg


def input_gradient(d_logits, wg):
    """Gradient of x, through the router alone.

    Parameters
    ----------
    d_logits : ndarray (L, E), float64 or float32
        Gradient of the logits, finite.
    wg : ndarray (d, E)

    Returns
    -------
    d_x : ndarray (L, d)

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_input_gradient(d_logits, wg, DTYPES)
    return d_logits @ wg.T


def weight_gradient(d_logits, x):
    """Gradient of wg.

    Parameters
    ----------
    d_logits : ndarray (L, E), float64 or float32
        Gradient of the logits, finite.
    x : ndarray (L, d)

    Returns
    -------
    d_wg : ndarray (d, E)

    Raises
    ------
    ValueError, TypeError
        As `forward`.
    """
    stage_contracts.check_router_weight_gradient(d_logits, x, DTYPES)
    return x.T @ d_logits
