"""Maps with copies of experts: which copy a token uses, what is counted, the search, and bad input."""

import numpy as np
import pytest

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import copies, maps
from moeblaze_ref.placement.maps import Copies

E, G, K = 12, 4, 3


@pytest.fixture
def held():
    """(2, E, G): every expert has one copy or more, in each layer others."""
    rng = np.random.default_rng(0)
    found = rng.random((2, E, G)) < 0.3
    np.put_along_axis(found, rng.integers(0, G, (2, E, 1)), True, axis=2)
    return found


@pytest.fixture
def routed():
    rng = np.random.default_rng(1)
    topk = np.stack([rng.permuted(np.arange(E))[:K] for _ in range(2 * 500)]).reshape(500, 2, K)
    return RoutingTrace(topk.astype(np.int16), E, np.arange(500) // 50)


def chosen_by_loops(topk, source, held, per_node):
    """The rule of `copies.choose`, token by token, as its docstring says it."""
    batch, found = dict.fromkeys(range(held.shape[1]), 0), []
    for experts, own in zip(topk.tolist(), source.tolist(), strict=True):
        t, batch[own] = batch[own], batch[own] + 1
        of = {e: np.flatnonzero(held[e]).tolist() for e in experts}
        taken = {e: of[e][0] for e in experts if len(of[e]) == 1}
        for e in [e for e in experts if e not in taken]:
            near = {own, *taken.values()}
            nodes = {gpu // per_node for gpu in near}
            for allowed in (
                [gpu for gpu in of[e] if gpu in near],
                [gpu for gpu in of[e] if gpu // per_node in nodes],
                of[e],
            ):
                if allowed:
                    taken[e] = allowed[(t + e) % len(allowed)]
                    break
        found.append([taken[e] for e in experts])
    return np.array(found)


# The rule -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_every_token_uses_the_copies_that_the_rule_names(routed, held, nodes):
    source = np.random.default_rng(2).integers(0, G, routed.tokens)
    found = copies.choose(routed.topk[:, 0], source, held[0], nodes)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, chosen_by_loops(routed.topk[:, 0], source, held[0], G // nodes))
    assert np.take_along_axis(held[0][routed.topk[:, 0]], found[..., None], 2).all()


def test_the_nearest_copies_by_hand():
    held = np.zeros((4, 8), bool)  # two nodes of four GPUs
    held[0, 5] = held[1, [1, 5]] = held[2, [0, 6]] = held[3, [2, 3, 7]] = True
    topk = np.array([[1, 0, 3], [2, 3, 1], [3, 2, 1]], np.int16)
    found = copies.choose(topk, np.array([4, 4, 1]), held, 2)
    # Expert 0 has one copy, on GPU 5: expert 1 follows it there, and expert 3 takes the one copy in its node.
    # The second token is on node 1, where 2, 3 and 1 have a copy each. The third is on GPU 1: number 0 + 3 of 2.
    np.testing.assert_array_equal(found, [[5, 5, 7], [6, 7, 5], [3, 0, 1]])


def test_equally_near_copies_take_turns():
    held = np.array([[False, True, True, True]])
    found = copies.choose(np.zeros((6, 1), np.int64), np.zeros(6, np.int64), held)
    assert found.ravel().tolist() == [1, 2, 3, 1, 2, 3]


def test_tokens_of_a_trace_are_spread_over_the_gpus(routed, held):
    found = copies.routes(routed, Copies(held, 2))
    assert found.shape == routed.topk.shape and found.dtype == np.int32
    for l in range(2):
        expected = chosen_by_loops(routed.topk[:, l], np.arange(500) % G, held[l], 2)
        np.testing.assert_array_equal(found[:, l], expected)


def test_experts_with_one_copy_have_no_choice(routed):
    placed = maps.Placement(np.random.default_rng(3).integers(0, G, (2, E)).astype(np.int32), G)
    found = copies.routes(routed, Copies.of(placed, 2))
    for l in range(2):
        np.testing.assert_array_equal(found[:, l], placed.assignment[l, routed.topk[:, l]])


@pytest.mark.parametrize(
    ("topk", "source", "nodes", "message"),
    [
        ([[0, 12]], [0], 1, r"topk\[0, 1\] is 12, but there are only 12 experts"),
        ([[0, 1]], [4], 1, r"source\[0\] is 4, but there are only 4 GPUs"),
        ([[0, 1]], [0, 1], 1, "source has shape"),
        ([[0, 1]], [0], 3, "num_nodes is 3, but it must divide the 4 GPUs"),
    ],
)
def test_tokens_that_do_not_fit_the_map_are_refused(held, topk, source, nodes, message):
    with pytest.raises(ValueError, match=message):
        copies.choose(np.array(topk), np.array(source), held[0], nodes)


def test_an_expert_without_a_copy_is_named(held):
    held[1, 7] = False
    with pytest.raises(ValueError, match="expert 7 is on no GPU, but every expert needs one"):
        copies.choose(np.zeros((1, 1), np.int64), np.zeros(1, np.int64), held[1])
    with pytest.raises(ValueError, match="layer 1: expert 7 is on no GPU, but every expert needs one"):
        Copies(held)


# Maps with copies -----------------------------------------------------------------------------------------------------


def test_a_map_with_copies_says_what_is_where(held):
    found = Copies(held, 2, "a model")
    assert (found.layers, found.E, found.num_gpus) == (2, E, G)
    np.testing.assert_array_equal(found.sizes(), held.sum(axis=1))
    assert found.hosts(1) == [[e for e in range(E) if held[1, e, g]] for g in range(G)]
    shares = found.shares()
    np.testing.assert_allclose(shares.sum(axis=2), 1)
    assert ((shares > 0) == held).all() and np.isclose(shares, 1 / held.sum(axis=2)[..., None]).sum() == held.sum()
    found.check_fits(2, E, "a model")
    with pytest.raises(ValueError, match="the map is for a model, but the model is another"):
        found.check_fits(2, E, "another")


def test_a_map_with_copies_survives_its_file(held, tmp_path):
    maps.save(tmp_path / "map.npz", Copies(held, 2, "a model"))
    found = maps.load(tmp_path / "map.npz")
    np.testing.assert_array_equal(found.held, held)
    assert (found.num_nodes, found.model) == (2, "a model")
    maps.save(tmp_path / "map.npz", maps.from_hosts([[[0], [1]]], 2))  # one kind replaces the other
    assert isinstance(maps.load(tmp_path / "map.npz"), maps.Placement)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"num_nodes": 3}, "num_nodes is 3, but it must divide the 4 GPUs"),
        ({"num_nodes": 0}, "num_nodes is 0, but it must be >= 1"),
        ({"num_nodes": 1.0}, "num_nodes has"),
        ({}, r"map\.npz has no num_nodes"),
        ({"num_nodes": 1, "held": np.ones((1, 2, 4))}, "held has dtype"),
        ({"num_nodes": 1, "held": np.zeros((1, 2, 4), bool)}, "layer 0: expert 0 is on no GPU"),
        ({"num_nodes": 1, "held": np.ones((1, 2, 0), bool)}, "num_gpus is 0"),
    ],
)
def test_a_wrong_map_with_copies_is_refused(held, arrays, message, tmp_path):
    np.savez(tmp_path / "map.npz", **{"held": held} | arrays)
    with pytest.raises((TypeError, ValueError), match=message):
        maps.load(tmp_path / "map.npz")


def test_a_file_of_neither_kind_is_refused(tmp_path):
    np.savez(tmp_path / "map.npz", model="a model")
    with pytest.raises(ValueError, match=r"map\.npz has no assignment or held, but only model"):
        maps.load(tmp_path / "map.npz")
