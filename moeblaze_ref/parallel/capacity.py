"""Room for rows from a trace, so that the host need not learn how many come.

Without a capacity the host waits in each forward for the numbers of rows. With one, every rank sends the same number of
rows to every rank; rows without a token have no expert. Where a batch needs more room, `overflow` runs it again.
"""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.parallel.trip import Capacity
from moeblaze_ref.placement.copies import choose, sources
from moeblaze_ref.placement.maps import Copies, Placement

MARGIN = 0.5  # above the fullest batch: with 0.25, some steps of held-out halves of gpt-oss-20b's trace overflow


def capacity_of(
    trace: RoutingTrace, placement: Placement | Copies, layer: int, tokens: int, margin: float = MARGIN
) -> Capacity:
    """The room that the fullest batch of a trace needs, and a margin.

    A batch is ``tokens`` tokens on each rank. By the convention of `placement.copies` token t of it is on rank t % G. A
    trace that is shorter than a batch counts as one, and its numbers grow in proportion.

    Parameters
    ----------
    trace : RoutingTrace
    placement : Placement or Copies
        Of the trace's layers and experts.
    layer : int
        Of the trace, and of the placement.
    tokens : int
        Of a rank, in a batch.
    margin : float
        0.5 is half more than the fullest batch needed.

    Returns
    -------
    Capacity
        At most what any batch of so many tokens can need.

    Raises
    ------
    ValueError, TypeError
        If the placement does not fit the trace, the trace has no tokens, or a number is out of range.
    """
    placement.check_fits(trace.layers, trace.num_experts)
    checks.check_int("layer", layer, 0, trace.layers - 1)
    checks.check_int("tokens", tokens, 1)
    checks.check_within("margin", margin, 0)
    checks.check_int("tokens of the trace", trace.tokens, 1)
    G, topk = placement.num_gpus, trace.topk[:, layer]
    batch = min(G * tokens, len(topk))
    counts = [_counts(topk[at : at + batch], placement, layer) for at in range(0, len(topk) - batch + 1, batch)]
    grown = (1 + margin) * G * tokens / batch
    rows, choices = (int(np.ceil(grown * max(most))) for most in zip(*counts, strict=True))
    return Capacity(min(rows, tokens), min(choices, G * tokens * topk.shape[1]))


def _counts(topk: np.ndarray, placement: Placement | Copies, layer: int) -> tuple[int, int]:
    """The most rows from one rank to one, and the most choices of one rank's experts, in a batch (tokens, k)."""
    G = placement.num_gpus
    source = sources(len(topk), G)
    if isinstance(placement, Copies):
        homes = choose(topk, source, placement.held[layer], placement.num_nodes)  # (tokens, k)
    else:
        homes = placement.assignment[layer][topk]
    visits = (homes[:, :, None] == np.arange(G)).any(axis=1)  # (tokens, G)
    rows = max(int(visits[source == rank].sum(axis=0).max()) for rank in range(G))
    return rows, int(np.bincount(homes.ravel(), minlength=G).max())
