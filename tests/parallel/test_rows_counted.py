"""The rows that the layer sends are those that the simulator counts: of every layer and rank, to the row."""

import numpy as np
import pytest
import torch

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.parallel import local
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.placement import traffic
from moeblaze_ref.placement.copies import routes
from moeblaze_ref.placement.maps import Copies, Placement

LAYERS, E, K, TOKENS = 2, 12, 3, 230
G, NODES, D, H = 4, 2, 8, 8


@pytest.fixture(scope="module")
def trace():
    """A routing with hot experts, others in each layer; the ranks have 58, 58, 57 and 57 tokens."""
    rng = np.random.default_rng(4)
    scores = rng.gumbel(size=(TOKENS, LAYERS, E)) + rng.permuted(np.tile(np.linspace(0, 3, E), (LAYERS, 1)), axis=1)
    topk = scores.argsort(axis=2)[..., : -K - 1 : -1].astype(np.int16)
    return RoutingTrace(topk, E, np.zeros(TOKENS, np.int64))


@pytest.fixture(scope="module")
def placement():
    rows = np.random.default_rng(5).integers(0, G, (LAYERS, E)).astype(np.int32)
    return Placement(rows, G)


@pytest.fixture(scope="module")
def copies(placement):
    """The map, and copies: some experts on two or three GPUs, one on every GPU."""
    held = placement.shares() > 0
    held |= np.random.default_rng(6).random(held.shape) < 0.2
    held[:, 3] = True
    return Copies(held, NODES)


class Noted(Ranks):
    """Ranks that note which rows they send."""

    def __init__(self):
        super().__init__()
        self.noted = []

    def exchange(self, rows, sent, received):
        """Note the rows that go to each rank."""
        self.noted.append(rows.split(list(sent)))
        return super().exchange(rows, sent, received)


def tokens_sent(placements, topk):
    """What this process sends under each map."""
    return [tokens_sent_by(placement, topk) for placement in placements]


@torch.no_grad()
def tokens_sent_by(placement, topk):
    """The numbers of this rank's tokens that go to each rank, in every layer; token t of the trace is on rank t % G.

    A row begins with the number of its token.
    """
    found, (tokens, layers, k) = [], topk.shape
    for layer in range(layers):
        ranks = Noted()
        mine = np.arange(ranks.rank, tokens, G)
        moe = ExpertParallelMoE(D, H, placement.E, k, placement, layer, ranks=ranks)
        x = torch.randn(len(mine), D)
        x[:, 0] = torch.from_numpy(mine)
        ranks.noted.clear()  # of weights, which agree at the start
        moe(x, torch.from_numpy(topk[mine, layer].astype(np.int32)))
        _, there, _, _ = ranks.noted  # counts, rows, slots, and the way back
        found.append([rows[:, 0].long().numpy() for rows in there])
    return found


@pytest.fixture(scope="module")
def counted(placement, copies, trace):
    """Rows to each GPU and node that the layer sends over gloo by each map: (layers, G) and (layers, nodes)."""
    of_ranks = local.run(tokens_sent, G, [placement, copies], trace.topk)
    return [rows_and_nodes(of_map, trace) for of_map in zip(*of_ranks, strict=True)]


def rows_and_nodes(of_ranks, trace):
    tokens, layers, _ = trace.topk.shape
    to_gpus, rows = np.zeros((layers, tokens, G), bool), np.zeros((layers, G))
    for of_layers in of_ranks:
        for layer, of_gpus in enumerate(of_layers):
            for gpu, sent in enumerate(of_gpus):
                to_gpus[layer, sent, gpu] = True
                rows[layer, gpu] += len(sent)
    assert (to_gpus.sum(axis=1) == rows).all()  # no token twice
    return rows, to_gpus.reshape(layers, tokens, NODES, -1).any(axis=3).sum(axis=1)


def test_rows_of_a_map_without_copies(counted, placement, trace):
    (rows, to_nodes), _ = counted
    np.testing.assert_array_equal(rows, traffic.visits(trace, placement.shares()))
    np.testing.assert_array_equal(to_nodes, traffic.visits(trace, traffic.by_node(placement.shares(), NODES)))
    D, N = traffic.distinct(trace, placement.shares(), NODES)
    assert (rows.sum() / (LAYERS * TOKENS), to_nodes.sum() / (LAYERS * TOKENS)) == (D, N)


def test_rows_of_a_map_with_copies(counted, copies, placement, trace):
    _, (rows, to_nodes) = counted
    served = routes(trace, copies)
    np.testing.assert_array_equal(rows, traffic.visits(served, served.shares()))
    np.testing.assert_array_equal(to_nodes, traffic.visits(served, traffic.by_node(served.shares(), NODES)))
    D, N = traffic.distinct(served, served.shares(), NODES)
    assert (rows.sum() / (LAYERS * TOKENS), to_nodes.sum() / (LAYERS * TOKENS)) == (D, N)
    assert rows.sum() < traffic.visits(trace, placement.shares()).sum()  # copies save rows
