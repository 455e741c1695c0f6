"""The cost of a new map: which experts a GPU does not hold yet, and how long the links take to bring them.

The experts of a GPU are a set, so a new map may name its GPUs in any order within a node. `aligned` chooses the order
in which few experts move.
"""

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.simulate import Cluster, slowness


def held(placement: Placement | Copies) -> np.ndarray:
    """Return an array (layers, E, G) bool: True if GPU g holds expert e."""
    return placement.shares() > 0


def expert_seconds(on: Cluster, expert_bytes: int) -> np.ndarray:
    """Seconds of one expert of one layer on each link, (G, G); 0 on the diagonal."""
    return slowness(on) * checks.check_int("expert_bytes", expert_bytes, 0) / on.row_bytes


def moves(before: np.ndarray, after: np.ndarray, link_s: np.ndarray) -> tuple[int, float]:
    """Count the experts that GPUs must fetch, and the seconds until the last link is done.

    A GPU fetches an expert from a GPU that held it before: from the one whose link to it is done first. Links work at
    the same time, and each brings one expert after the other. An expert that a GPU holds already costs nothing.

    Parameters
    ----------
    before, after : array (layers, E, G) bool
        What each GPU holds. Every expert is on a GPU before.
    link_s : array (G, G) float64
        Seconds of one expert from GPU g1 to GPU g2: `expert_seconds`.

    Raises
    ------
    ValueError
        If the arrays are of different layers, experts or GPUs.
    """
    layers, E, G = before.shape
    checks.check_shape("after", after, {"layers": layers, "E": E, "G": G})
    checks.check_shape("link_s", link_s, {"G": G, "G ": G})
    busy, fetched = np.zeros((G, G)), np.argwhere(after & ~before)
    for layer, expert, gpu in fetched:
        holders = np.flatnonzero(before[layer, expert])
        done = busy[holders, gpu] + link_s[holders, gpu]
        first = done.argmin()
        busy[holders[first], gpu] = done[first]
    return len(fetched), float(busy.max())


def aligned(before: np.ndarray, after: Placement | Copies, num_nodes: int = 1) -> Placement | Copies:
    """Return the new map with the GPUs of each node in the order in which they keep many experts.

    In each layer and node the pair of an old and a new GPU with the most experts in common comes first, then the next
    such pair of the others: a heuristic. Loads, D and N stay as they are, unless a rule looks at a GPU's number.

    Parameters
    ----------
    before : array (layers, E, G) bool
        What each GPU holds now.
    after : Placement or Copies
    num_nodes : int
        Nodes of equally many neighbouring GPUs. An expert may change its GPU in a node, but not its node.
    """
    new = held(after)
    common = before.swapaxes(1, 2).astype(np.int64) @ new  # (layers, G before, G after)
    order = np.stack([_pairs(layer, num_nodes) for layer in common])  # (layers, G): the new GPU in the place of g
    if isinstance(after, Copies):
        return Copies(np.take_along_axis(new, order[:, None, :], axis=2), after.num_nodes, after.model)
    place = np.argsort(order, axis=1).astype(np.int32)  # (layers, G): the place of new GPU g
    return Placement(np.take_along_axis(place, after.assignment, axis=1), after.num_gpus, after.model)


def _pairs(common, num_nodes):
    """The new GPU in the place of each old one, (G,), from the experts that they have in common (G, G)."""
    G = len(common)
    node = np.arange(G) * num_nodes // G
    left = np.where(node[:, None] == node, common, -1)
    order = np.empty(G, np.int64)
    for _ in range(G):
        old, new = np.unravel_index(left.argmax(), left.shape)
        order[old] = new
        left[old], left[:, new] = -1, -1
    return order
