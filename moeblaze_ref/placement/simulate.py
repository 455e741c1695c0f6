"""Model the time of a step under a placement, from the slowest GPU and the slowest link of each layer.

MoETuner (arXiv 2502.06643): a layer's tokens are done when the GPU with the most of them is, its tail; between two
layers the tokens that change GPU travel, and the slowest pair of GPUs ends last, the second tail. As in the paper's R,
a token with k experts counts once for each of its k * k pairs between neighbouring layers. Runtimes bring a token home
after each layer instead: `traffic` counts what they send, D distinct GPUs and N distinct nodes a token.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks, records
from moeblaze_ref.placement.trace import Profile

# FLOP/s of the experts' forward on one H200, by our kernels: docs/results/bench_h200.json, preset mixtral, 6*d*h*R
# FLOPs.
H200_EXPERT_FLOPS = 6.7e14
NVLINK = 450e9  # bytes/s of one GPU in one direction, all its links together: as its maker prints
INFINIBAND = 50e9  # bytes/s of one 400 Gb/s adapter, one a GPU: as its maker prints
STEP_TOKENS = 16_384
SLOWEST, FASTEST = 1e-3, 1e15  # bytes/s of a link: what lies outside is no bandwidth
MAX_RATIO = 1e6  # the fastest link over the slowest, at most: ILP 2 counts in whole numbers


@dataclass(frozen=True, eq=False)
class Cluster:
    """GPUs, their links, and what a routed row costs them.

    Parameters
    ----------
    bandwidth : array (G, G) float64
        Bytes/s from GPU g1 to GPU g2 while all pairs talk at once, ``SLOWEST`` to ``FASTEST``, and the fastest at most
        ``MAX_RATIO`` times the slowest; the diagonal is not looked at.
    row_bytes : int
        Bytes of a token that travels: d elements.
    token_s : float
        Seconds that an expert takes for one of its tokens.

    Raises
    ------
    TypeError, ValueError
        If the matrix is not square, a bandwidth is out of range, or a cost is not above zero.
    """

    bandwidth: np.ndarray
    row_bytes: int
    token_s: float

    def __post_init__(self):
        checks.check_array("bandwidth", self.bandwidth, 2, ("float64",), contiguous=False)
        rows, columns = self.bandwidth.shape
        if rows != columns or rows == 0:
            raise ValueError(f"bandwidth has shape {(rows, columns)}, but it must be square: (G, G)")
        allowed = (self.bandwidth >= SLOWEST) & (self.bandwidth <= FASTEST)
        self._check_links(allowed, f"above 0: {SLOWEST:g} to {FASTEST:g} bytes/s")
        least = self._fastest / MAX_RATIO
        self._check_links(self.bandwidth >= least, f"at least {least:g} bytes/s, a millionth of the fastest link's")
        checks.check_int("row_bytes", self.row_bytes, 1)
        checks.check_positive("token_s", self.token_s)

    def _check_links(self, allowed, words):
        """Check that all pairs of different GPUs are ``allowed`` (G, G)."""
        wrong = ~allowed & self._others
        if wrong.any():
            sender, receiver = checks.first(wrong)
            value = self.bandwidth[sender, receiver]
            raise ValueError(f"bandwidth[{sender}, {receiver}] is {value}, but it must be {words}")

    @property
    def _others(self):
        return ~np.eye(self.num_gpus, dtype=bool)

    @property
    def _fastest(self):
        return self.bandwidth.max(where=self._others, initial=0)

    @property
    def num_gpus(self) -> int:
        """G."""
        return len(self.bandwidth)

    @property
    def cost(self) -> np.ndarray:
        """Time of a token on each link over that on the fastest, (G, G): 1 or more, and 0 on the diagonal."""
        return np.divide(self._fastest, self.bandwidth, out=np.zeros_like(self.bandwidth), where=self._others)

    @property
    def num_nodes(self) -> int:
        """Equal groups of neighbouring GPUs, every link in a group over half as fast as the fastest, and none across.

        1 where links fall into no such groups: the GPUs then count as one node.
        """
        near = self.cost < 2  # (G, G)
        groups = len(np.unique(near, axis=0))
        node = np.arange(self.num_gpus) * groups // self.num_gpus  # (G,)
        equal = self.num_gpus % groups == 0 and (near == (node[:, None] == node)).all()
        return groups if equal else 1

    def check_size(self, num_gpus: int):
        """The matrix is of so many GPUs."""
        if self.num_gpus != num_gpus:
            raise ValueError(
                f"bandwidth is of {self.num_gpus} GPUs, but {num_gpus} are placed on: "
                f"it must be ({num_gpus}, {num_gpus})"
            )


def one_node(num_gpus: int, gpu_bandwidth: float = NVLINK) -> np.ndarray:
    """GPUs behind one NVLink switch: a GPU's bandwidth is shared evenly by the G - 1 others; (G, G) bytes/s."""
    return np.full((num_gpus, num_gpus), gpu_bandwidth / max(num_gpus - 1, 1))


def two_nodes(num_gpus: int, gpu_bandwidth: float = NVLINK) -> np.ndarray:
    """Two nodes of G / 2 GPUs: NVLink inside, an InfiniBand adapter a GPU between them; (G, G) bytes/s."""
    checks.check_int("num_gpus", num_gpus, 2)
    if num_gpus % 2:
        raise ValueError(f"num_gpus is {num_gpus}, but two nodes need an even number")
    return _nodes(num_gpus, num_gpus // 2, gpu_bandwidth)


def nodes_of_eight(num_gpus: int, gpu_bandwidth: float = NVLINK) -> np.ndarray:
    """Nodes of eight GPUs, with links as in `two_nodes`; (G, G) bytes/s."""
    checks.check_int("num_gpus", num_gpus, 1)
    if num_gpus % 8:
        raise ValueError(f"num_gpus is {num_gpus}, but nodes of 8 GPUs need a multiple of 8")
    return _nodes(num_gpus, 8, gpu_bandwidth)


def _nodes(num_gpus, per_node, gpu_bandwidth):
    """A GPU's bandwidth is shared evenly by the others of its node, its adapter's by those of other nodes."""
    node = np.arange(num_gpus) // per_node  # (G,)
    inside, across = gpu_bandwidth / max(per_node - 1, 1), INFINIBAND / max(num_gpus - per_node, 1)
    return np.where(node[:, None] == node, inside, across)


TOPOLOGIES = {"nvlink": one_node, "two-nodes": two_nodes, "nodes-of-8": nodes_of_eight}


def cluster(topology: str, num_gpus: int, d: int, h: int) -> Cluster:
    """A cluster of H200s, by the name of its links or from a file of what was measured.

    Parameters
    ----------
    topology : str
        One of ``TOPOLOGIES``, or the path of a JSON file with `bandwidth` (G, G) in bytes/s, and if it was measured
        `token_s` in seconds.
    num_gpus : int
        G.
    d, h : int
        Model width and expert width: a token's d elements of 2 bytes travel, and cost 6*d*h FLOPs in a gated expert.

    Raises
    ------
    ValueError, TypeError, OSError
        If there is no such topology or file, or as `Cluster`: the matrix is not (G, G), or a number is out of range.
    """
    for name, size in (("num_gpus", num_gpus), ("d", d), ("h", h)):
        checks.check_int(name, size, 1)
    token_s = 6 * d * h / H200_EXPERT_FLOPS
    if topology.endswith(".json"):
        measured = records.read(Path(topology), ("bandwidth",))
        token_s = measured.get("token_s", token_s)
        bandwidth = matrix(measured["bandwidth"])
    else:
        bandwidth = TOPOLOGIES[checks.check_name("topology", topology, TOPOLOGIES)](num_gpus)
    found = Cluster(bandwidth, 2 * d, token_s)
    found.check_size(num_gpus)
    return found


def matrix(rows) -> np.ndarray:
    """Bandwidths (G, G) float64 from lists of numbers; a ValueError or TypeError names what is wrong."""
    if not (isinstance(rows, list) and all(isinstance(row, list) for row in rows)) or len(set(map(len, rows))) > 1:
        raise ValueError("bandwidth must be a matrix: G lists of G numbers")
    return np.array([[_speed(i, j, value) for j, value in enumerate(row)] for i, row in enumerate(rows)], np.float64)


def _speed(sender, receiver, value) -> float:
    name = f"bandwidth[{sender}, {receiver}]"
    if isinstance(value, bool):
        raise TypeError(f"{name} is {value} (bool), but it must be a number")
    return checks.check_float(name, value)


# A profile under a placement. ``shares`` (layers, E, G): the part of an expert's tokens that each GPU serves, by
# Placement.shares().


def loads(profile: Profile, shares: np.ndarray) -> np.ndarray:
    """Tokens of each GPU in each layer, (layers, G): T of the paper."""
    checks.check_shape("shares", shares, {"layers": profile.layers, "E": profile.E, "G": None})
    return (profile.P[:, None, :] @ shares)[:, 0]


def transitions(profile: Profile, shares: np.ndarray) -> np.ndarray:
    """C[l, g1, g2], tokens that go from GPU g1 in layer l to g2 in layer l + 1, (layers - 1, G, G)."""
    checks.check_shape("shares", shares, {"layers": profile.layers, "E": profile.E, "G": None})
    return shares[:-1].swapaxes(1, 2) @ profile.transitions() @ shares[1:]


def balance(T: np.ndarray) -> np.ndarray:
    """The fullest GPU's load over the mean, of each layer, (layers,): 1 is perfect, as is a layer without tokens."""
    mean = T.mean(axis=1)  # (layers,)
    return np.divide(T.max(axis=1), mean, out=np.ones_like(mean), where=mean > 0)


def cross_share(C: np.ndarray) -> float:
    """The share of transitions that leave their GPU; 0 if there are none."""
    total = C.sum()
    return float(1 - np.trace(C, axis1=1, axis2=2).sum() / total) if total else 0.0


@dataclass(frozen=True, eq=False)
class Step:
    """The modelled time of a step.

    Parameters
    ----------
    compute_s : array (layers,)
        The slowest GPU's seconds in each layer: the tail of token processing.
    transfer_s : array (layers - 1,)
        The slowest pair's seconds between layers: the tail of communication.
    """

    compute_s: np.ndarray
    transfer_s: np.ndarray

    @property
    def ms(self) -> float:
        """Both tails over all layers, milliseconds."""
        return 1e3 * float(self.compute_s.sum() + self.transfer_s.sum())


def step(profile: Profile, shares: np.ndarray, on: Cluster, tokens: int = STEP_TOKENS) -> Step:
    """Model the time of a step of ``tokens`` tokens with the profile's routing.

    Raises
    ------
    ValueError
        If the shares are not of the profile's layers and experts and the cluster's GPUs.
    """
    on.check_size(shares.shape[-1])
    scale = tokens / max(profile.tokens, 1)
    compute = loads(profile, shares).max(axis=1) * on.token_s  # (layers,)
    transfer = (transitions(profile, shares) * slowness(on)).max(axis=(1, 2), initial=0)  # (layers - 1,)
    return Step(scale * compute, scale * transfer)


def slowness(on: Cluster) -> np.ndarray:
    """Seconds of one token on each link, (G, G); 0 on the diagonal."""
    return np.divide(on.row_bytes, on.bandwidth, out=np.zeros_like(on.bandwidth), where=on._others)
