"""Model of a step of expert parallelism, from costs on even loads and the rows of each GPU and link.

In every layer the experts are done when the GPU with the most rows is, and the exchange when the slowest pair of GPUs
is: the two tails of MoETuner (arXiv 2502.06643). Unlike in its model, `placement.simulate`, a token comes home after
every layer, one row goes for all its experts on a GPU, and the rest of a layer takes time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeblaze_ref.placement.copies import choose
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.simulate import Cluster, slowness


@dataclass(frozen=True, eq=False)
class Costs:
    """Costs of a layer under even loads, and how they grow.

    Parameters
    ----------
    on : Cluster
        Its cost of a token and its bandwidths: what a further row takes.
    exchange_s : float
        Seconds of the way there and back, beside what its rows take at these bandwidths.
    rest_s : float
        Seconds of a layer beside its experts and its exchange: router, dispatch, the host.
    """

    on: Cluster
    exchange_s: float
    rest_s: float

    def expert_seconds(self, placement: Placement | Copies, windows: Sequence[np.ndarray]) -> np.ndarray:
        """The slowest GPU's experts in every layer (layers,), the mean over the windows (tokens, layers, k)."""
        return self.on.token_s * np.mean([rows_of(placement, window).max(axis=1) for window in windows], axis=0)

    def exchange_seconds(self, placement: Placement | Copies, windows: Sequence[np.ndarray]) -> np.ndarray:
        """Seconds there and back in every layer (layers,), a mean over windows; each GPU has a part of every window."""
        return self.exchange_s + np.mean([travel_seconds(placement, window, self.on) for window in windows], axis=0)

    def step_seconds(self, placement: Placement | Copies, windows: Sequence[np.ndarray]) -> float:
        """Return the modelled seconds of a step: all layers, and the rest of each."""
        layers = self.expert_seconds(placement, windows) + self.exchange_seconds(placement, windows) + self.rest_s
        return float(layers.sum())


def rows_of(placement: Placement | Copies, window: np.ndarray) -> np.ndarray:
    """Routed rows of each GPU in every layer, (layers, G), of a window (tokens, layers, k)."""
    return _is_on(placement, window).sum(axis=(0, 2))


def rows_sent(placement: Placement | Copies, window: np.ndarray) -> np.ndarray:
    """Rows from each GPU to each in every layer, (layers, G, G): one for each token with an expert there."""
    visits = _is_on(placement, window).any(axis=2)  # (tokens, layers, G)
    return np.stack([part.sum(axis=0) for part in np.split(visits, placement.num_gpus)], axis=1)


def travel_seconds(placement: Placement | Copies, window: np.ndarray, on: Cluster) -> np.ndarray:
    """Seconds of the window's rows there and back in every layer, (layers,): twice the slowest pair of GPUs."""
    return 2 * (rows_sent(placement, window) * slowness(on)).max(axis=(1, 2))


def _is_on(placement: Placement | Copies, window: np.ndarray) -> np.ndarray:
    """Return True where a token's choice is on a GPU, (tokens, layers, k, G)."""
    return homes(placement, window)[..., None] == np.arange(placement.num_gpus)


def homes(placement: Placement | Copies, window: np.ndarray) -> np.ndarray:
    """The GPU of each choice, (tokens, layers, k); each GPU has a part of the window's tokens."""
    if isinstance(placement, Placement):
        return placement.assignment[np.arange(placement.layers)[None, :, None], window]
    tokens, G = len(window), placement.num_gpus
    source = np.arange(tokens) * G // tokens
    of_layers = [choose(window[:, l], source, held, placement.num_nodes) for l, held in enumerate(placement.held)]
    return np.stack(of_layers, axis=1)
