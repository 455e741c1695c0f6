"""Traffic of a runtime under a placement: D and N, the load of batches, and the time of a step.

A runtime brings a token home after each layer. In a layer it sends a token's row once to every GPU that has one of the
token's experts. So what counts is D, the distinct GPUs of a token, and N, its distinct nodes: means over tokens and
layers. Source: docs/parallel_measured.md, which measured `parallel.layer`. `parallel.costs` models the same step for
windows of tokens.
"""

from dataclasses import dataclass
from pathlib import Path

import numba
import numpy as np

from moeblaze_ref.core import checks, records
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement.copies import Routes
from moeblaze_ref.placement.simulate import STEP_TOKENS, TOPOLOGIES, Cluster, Step, balance, matrix, slowness

BATCHES = (256, 1024, 4096, 16_384)  # tokens whose load is looked at together

# Measured on two H200s with gpt-oss-20b's experts: docs/results/ep_h200x2_gptoss.json. No links between nodes were
# measured, so those keep the bandwidth that their maker prints.
EXPERT_FLOPS = 6 * 2880 * 2880 / 8.591699224780314e-08
GPU_BANDWIDTH = 172685324928.9377  # bytes/s of one GPU in one direction, all its links together
EXCHANGE_S, REST_S = 0.00012937599420547485, 0.0007720520272850988  # of a layer, whatever its rows


def visits(trace: RoutingTrace | Routes, shares: np.ndarray) -> np.ndarray:
    """Count the tokens that have at least one expert on each GPU, (layers, G) float64.

    Parameters
    ----------
    trace : RoutingTrace or Routes
        Of a map with copies its routes, by the rule of `copies.choose`: the counts are then exact.
    shares : array (layers, E, G) float64
        The share of each expert's tokens that each GPU serves. Where several GPUs share an expert, as in EPLB, a token
        chooses one of them at random, so that the count is the expected one. Summed over the GPUs of nodes, it counts
        visits to nodes.

    Raises
    ------
    ValueError
        If the shares are not of the trace's layers and experts.
    """
    checks.check_shape("shares", shares, {"layers": trace.topk.shape[1], "E": trace.num_experts, "G": None})
    return _visits(trace.topk, np.ascontiguousarray(shares, np.float64))


@numba.njit(cache=True, nogil=True)
def _visits(topk, shares):
    tokens, layers, k = topk.shape
    G = shares.shape[2]
    found, absent = np.zeros((layers, G)), np.empty(G)
    for l in range(layers):
        for t in range(tokens):
            absent[:] = 1.0
            for j in range(k):
                absent *= 1.0 - shares[l, topk[t, l, j]]
            found[l] += 1.0 - absent
    return found


def by_node(shares: np.ndarray, num_nodes: int) -> np.ndarray:
    """Shares of nodes instead of GPUs, (layers, E, nodes): neighbouring GPUs are one node."""
    layers, E, G = shares.shape
    return shares.reshape(layers, E, num_nodes, G // num_nodes).sum(axis=3)


def distinct(trace: RoutingTrace | Routes, shares: np.ndarray, num_nodes: int = 1) -> tuple[float, float]:
    """Return D and N: the distinct GPUs and nodes of a token, means over tokens and layers."""
    each = max(trace.tokens, 1) * trace.topk.shape[1]
    of_gpus, of_nodes = visits(trace, shares), visits(trace, by_node(shares, num_nodes))
    return float(of_gpus.sum() / each), float(of_nodes.sum() / each)


def batch_loads(trace: RoutingTrace | Routes, shares: np.ndarray) -> dict[int, float]:
    """The fullest GPU's load over the mean in batches of tokens, by the size of a batch: means over batches and layers.

    A batch is neighbouring tokens of the trace, as in a prefill. Tokens that fill no whole batch are left out, and so
    are the sizes of ``BATCHES`` above the trace's tokens.
    """
    return {size: _batch_load(trace, shares, size) for size in BATCHES if size <= trace.tokens}


def _batch_load(trace, shares, size):
    batches = trace.topk[: trace.tokens // size * size].reshape(-1, size, *trace.topk.shape[1:])
    return float(np.mean([balance(_loads(batch, shares)) for batch in batches]))


def _loads(topk, shares):
    """(layers, G) tokens of each GPU."""
    E = shares.shape[1]
    P = np.stack([np.bincount(layer.ravel(), minlength=E) for layer in topk.swapaxes(0, 1)])
    return (P[:, None, :].astype(np.float64) @ shares)[:, 0]


@dataclass(frozen=True, eq=False)
class Runtime:
    """Costs of a layer in a runtime that brings tokens home.

    Parameters
    ----------
    on : Cluster
        Its links and what a routed row costs.
    exchange_s, rest_s : float
        Seconds of a layer that no row adds to: of its exchange, and of router, dispatch and host.
    """

    on: Cluster
    exchange_s: float = EXCHANGE_S
    rest_s: float = REST_S


def runtime(topology: str, num_gpus: int, d: int, h: int) -> Runtime:
    """The measured costs on links by name, or those of a file; parameters and errors as in `simulate.cluster`.

    A file may also hold `exchange_s` and `rest_s` in seconds, as the records of ``parallel_bench`` do.
    """
    token_s = 6 * d * h / EXPERT_FLOPS
    if not topology.endswith(".json"):
        links = TOPOLOGIES[checks.check_name("topology", topology, TOPOLOGIES)]
        return Runtime(Cluster(links(num_gpus, GPU_BANDWIDTH), 2 * d, token_s))
    measured = records.read(Path(topology), ("bandwidth",))
    on = Cluster(matrix(measured["bandwidth"]), 2 * d, measured.get("token_s", token_s))
    return Runtime(on, measured.get("exchange_s", EXCHANGE_S), measured.get("rest_s", REST_S))


def step(T: np.ndarray, visited: np.ndarray, tokens: int, costs: Runtime, of: int = STEP_TOKENS) -> Step:
    """Model a step of ``of`` tokens, spread evenly over the GPUs, that come home after every layer.

    Parameters
    ----------
    T : array (layers, G)
        Routed rows of each GPU: `simulate.loads`.
    visited : array (layers, G)
        Tokens with an expert on each GPU: `visits`.
    tokens : int
        Tokens that were counted in both.
    costs : Runtime
    of : int

    Returns
    -------
    Step
        In each layer the slowest GPU's experts and the rest of the layer; twice the slowest pair's rows, there and
        back, and the exchange's own time.
    """
    scale, G = of / max(tokens, 1), T.shape[1]
    slow = slowness(costs.on).max(axis=0)  # (G,) seconds of a row from the GPU that reaches this one last
    compute = scale * T.max(axis=1) * costs.on.token_s + costs.rest_s
    transfer = 2 * scale * (visited / G * slow).max(axis=1) + costs.exchange_s * (G > 1)
    return Step(compute, transfer)
