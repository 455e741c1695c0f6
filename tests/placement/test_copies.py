"""Maps with copies of experts: which copy a token uses, what is counted, the search, and bad input."""

import time
from dataclasses import replace

import numpy as np
import pytest

from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import (
    baselines,
    bits,
    copies,
    dedup,
    dedup_copies,
    maps,
    methods,
    simulate,
    slots,
    trace,
    traffic,
)
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


@pytest.mark.parametrize(("num_gpus", "nodes"), [(64, 8), (65, 1), (130, 13), (256, 32)])
def test_more_gpus_than_a_word_has_bits(num_gpus, nodes):
    rng, num_experts = np.random.default_rng(num_gpus), 300
    held = rng.random((num_experts, num_gpus)) < 0.01
    held[np.arange(num_experts), rng.integers(num_gpus, size=num_experts)] = True
    held[:3, -1] = True  # a copy on the last GPU
    topk = np.stack([rng.choice(num_experts, 8, replace=False) for _ in range(400)])
    source = rng.integers(num_gpus, size=400)
    found = copies.choose(topk, source, held, nodes)
    np.testing.assert_array_equal(found, chosen_by_loops(topk, source, held, num_gpus // nodes))
    assert found.max() == num_gpus - 1


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
    assert found.topk.shape == routed.topk.shape and found.topk.dtype == np.int32
    for l in range(2):
        expected = chosen_by_loops(routed.topk[:, l], np.arange(500) % G, held[l], 2)
        np.testing.assert_array_equal(found.topk[:, l], expected)


def test_experts_with_one_copy_have_no_choice(routed):
    placed = maps.Placement(np.random.default_rng(3).integers(0, G, (2, E)).astype(np.int32), G)
    found = copies.routes(routed, Copies.of(placed, 2))
    for l in range(2):
        np.testing.assert_array_equal(found.topk[:, l], placed.assignment[l, routed.topk[:, l]])


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


# What is counted ------------------------------------------------------------------------------------------------------


def test_a_trial_counts_what_tokens_choose(routed, held):
    """Loads, D, N and crossings of a map with copies, by loops over the tokens."""
    on = simulate.cluster("two-nodes", G, 64, 64)
    job = methods.Job("dedup-copies", routed, 0, on, methods.Options(), 1000)
    placed = Copies(held, 2)
    rest = trace.split(routed, 0)[1]
    found = job._evaluate(methods.Fitted(placed.shares(), placed), trace.profile(rest), 0.0)
    source = np.arange(rest.tokens) % G
    chosen = [chosen_by_loops(rest.topk[:, l], source, held[l], 2) for l in range(2)]
    load = np.array([[(layer == gpu).sum() for gpu in range(G)] for layer in chosen])
    np.testing.assert_array_equal(found.load, load)
    assert found.balance_mean == pytest.approx((load.max(axis=1) / load.mean(axis=1)).mean())
    assert found.distinct_gpus == pytest.approx(np.mean([len(set(one)) for layer in chosen for one in layer]))
    assert found.distinct_nodes == pytest.approx(np.mean([len(set(one // 2)) for layer in chosen for one in layer]))
    crossed = [a != b for before, after in zip(*chosen, strict=True) for a in before for b in after]
    assert found.cross_share == pytest.approx(np.mean(crossed))


def test_a_map_with_single_copies_counts_as_without(routed):
    placed = maps.Placement(np.random.default_rng(4).integers(0, G, (2, E)).astype(np.int32), G)
    on = simulate.cluster("nvlink", G, 64, 64)
    job, whole = methods.Job("greedy", routed, None, on, methods.Options(), 1000), trace.profile(routed)
    one, other = (job._evaluate(methods.Fitted(m.shares(), m), whole, 0.0) for m in (placed, Copies.of(placed)))
    assert one.as_dict() == pytest.approx(other.as_dict())


# The search of a layer ------------------------------------------------------------------------------------------------

SIZE = 4  # slots of a GPU


@pytest.fixture(scope="module")
def skewed():
    """Sequences that differ, experts that are used together, and one expert that half of the tokens use."""
    rng, tokens = np.random.default_rng(0), 800
    seq, topk = np.arange(tokens) // 50, np.empty((tokens, 2, K), np.int16)
    for t in range(tokens):
        for l in range(2):
            pair = 2 * int((rng.zipf(1.7) + seq[t]) % 5 + 1)
            third = 0 if rng.random() < 0.5 else int(rng.choice(np.setdiff1d(np.arange(1, E), [pair, pair + 1])))
            topk[t, l] = [pair, pair + 1, third] if pair + 1 < E else [1, 2, 3]
    return RoutingTrace(topk, E, seq)


def of_layer(skewed, nodes=2, load_weight=3.0, swaps=0):
    """(where to begin, what a search reads) of the first layer."""
    sequence, weights = dedup.sample_weights(skewed, 6, 2.0, 0)
    tokens = dedup_copies.tokens_of(skewed.topk[:, 0], E, G, sequence)
    objective = slots.Objective(copies.neighbours(G, nodes), weights * G, 0.5 if nodes > 1 else 0.0, load_weight)
    load = trace.profile(skewed).P[0]
    return dedup_copies.placed(load, tokens, objective, nodes, SIZE, swaps, 0, np.inf), tokens, objective


def held_of(found):
    return (found[:, :, None] == np.arange(E)).any(axis=1).T


def test_steps_put_no_expert_twice_on_a_gpu_and_take_no_last_copy(skewed):
    found, _, objective = of_layer(skewed)
    held, T = bits.packed(held_of(found)), np.array([[0.5, 0.5, 2.5, 0.5]])
    steps = [slots._step(found, held, T) for _ in range(4000)]
    possible, fullest = [step for step in steps if step[0] != slots.NO_SLOT], 0
    for g, i, h, j, f in possible:
        e = found[g, i]
        assert f not in found[g] and e != f
        if h == slots.NO_SLOT:
            assert (found == e).sum() > 1
        else:
            assert f == found[h, j] and e not in found[h]
        fullest += h == 2 or (h == slots.NO_SLOT and f in found[2])
    assert len(possible) > 400 and fullest > 0.5 * len(possible)  # every other one is of the fullest GPU


@pytest.mark.parametrize("steps", [0, 40, 2500])
def test_what_is_carried_along_equals_a_recount(skewed, steps):
    start, tokens, objective = of_layer(skewed)
    found, change = slots.anneal_slots(start, E, tokens, objective, 0.2, 0.005, steps, 0, np.inf)
    before, after = slots.value(start, E, tokens, objective), slots.value(found, E, tokens, objective)
    assert after[0] - before[0] == pytest.approx(change, abs=1e-9)
    assert change <= 0 and (change < -0.3 or steps < 2500)
    held = held_of(found)
    assert held.any(axis=1).all() and (held.sum(axis=0) == SIZE).all()  # no GPU has an expert twice
    one = copies.choose(skewed.topk[:, 0], copies.sources(skewed.tokens, G), held, 2)
    D, N = (np.mean([len(set(token)) for token in gpus.tolist()]) for gpus in (one, one // 2))
    assert after[1:3] == pytest.approx((D, N))


def test_the_load_that_counts_is_that_of_the_samples(skewed):
    start, tokens, objective = of_layer(skewed)
    chosen = copies.choose(skewed.topk[:, 0], copies.sources(skewed.tokens, G), held_of(start), 2)
    as_trace = RoutingTrace(skewed.topk[:, :1].copy(), E, skewed.seq)
    drawn = np.random.default_rng(0).multinomial(16, np.full(16, 1 / 16), 6)
    rows = np.array([[(chosen[skewed.seq == q] == gpu).sum() for gpu in range(G)] for q in range(16)])
    shares = np.array([each @ rows / (each @ rows).sum() for each in drawn])  # (samples, G)
    stretched = rows.sum(axis=0) / rows.sum() + 2 * (shares - shares.mean(axis=0))
    assert slots.value(start, E, tokens, objective)[3] == pytest.approx((stretched * G).max(axis=1).mean())
    assert dedup.sampled_loads(as_trace, 6, 2.0, 0).shape == (6, 1, E)


def test_a_search_finds_the_best_of_all_maps():
    rng = np.random.default_rng(3)
    topk = np.stack([rng.choice(4, 2, replace=False, p=[0.5, 0.25, 0.15, 0.1]) for _ in range(200)])
    small = RoutingTrace(topk.astype(np.int16)[:, None], 4)
    sequence, weights = dedup.sample_weights(small, 4, 2.0, 0)
    tokens, objective = (
        dedup_copies.tokens_of(topk, 4, 3, sequence),
        slots.Objective(copies.neighbours(3, 1), weights * 3, 0.0, 3.0),
    )
    pairs = [[a, b] for a in range(4) for b in range(a + 1, 4)]
    every = [np.array([a, b, c]) for a in pairs for b in pairs for c in pairs if len({*a, *b, *c}) == 4]
    best = min(slots.value(one, 4, tokens, objective)[0] for one in every)
    found, _ = slots.anneal_slots(every[0], 4, tokens, objective, 0.3, 0.01, 3000, 0, np.inf)
    assert slots.value(found, 4, tokens, objective)[0] == pytest.approx(best)


def test_a_layer_after_the_deadline_stays_as_it_was(skewed):
    start, tokens, objective = of_layer(skewed)
    late = time.perf_counter() - 1
    found, change = slots.anneal_slots(start, E, tokens, objective, 0.2, 0.005, 1000, 0, late)
    np.testing.assert_array_equal(found, start)
    assert change == 0


# The search that places copies as though they were experts -----------------------------------------------------------


def test_the_hottest_copies_are_dealt_to_gpus_in_turn():
    found = dedup_copies.dealt(np.array([5.0, 9.0, 1.0]), np.array([0, 0, 1, 1, 1, 2]), 4)
    assert found.tolist() == [3, 0, 0, 1, 2, 1] and found.dtype == np.int64


def test_another_expert_takes_the_place_of_a_second_copy_on_a_gpu():
    found = dedup_copies.without_doubles(
        [np.array([0, 0, 3]), np.array([1, 2, 2]), np.array([4, 5, 1])], np.array([2, 0, 1, 3, 4, 5])
    )
    assert found.tolist() == [[0, 3, 2], [1, 2, 0], [4, 5, 1]]


def test_a_copy_has_the_tokens_of_equally_many_neighbouring_gpus(skewed, monkeypatch):
    searched, orders = [], []
    real, filled = dedup_copies.unions.anneal_layer, dedup_copies.without_doubles
    monkeypatch.setattr(dedup_copies.unions, "anneal_layer", lambda *asked: searched.append(asked) or real(*asked))
    monkeypatch.setattr(dedup_copies, "without_doubles", lambda *asked: orders.append(asked[1]) or filled(*asked))
    _, tokens, objective = of_layer(skewed)
    load = np.array([40, 3, 20, *[1] * (E - 3)])
    dedup_copies.placed(load, tokens, objective, 2, SIZE + 1, 30, 0, np.inf)
    gpus, sets, loads, num_gpus, per_node, load_weight, node_weight, count, *_ = searched[1]
    assert (num_gpus, per_node, load_weight, node_weight, count) == (G, G // 2, 3.0, 0.5, skewed.tokens)
    number = baselines.replicate(load, G * (SIZE + 1), most=G)
    assert set(number) == {1, 3, 4}
    assert (np.diff((load / number)[orders[1]]) <= 0).all()
    expected = {(e, i): set() for e in range(E) for i in range(number[e])}
    for t, experts in enumerate(skewed.topk[:, 0].tolist()):
        for e in experts:
            expected[e, (t % G) * number[e] // G].add(t)
    bits = np.unpackbits(sets.view(np.uint8), axis=1, bitorder="little")
    assert [set(np.flatnonzero(row)) for row in bits] == list(expected.values())
    rows = np.array([[sum(skewed.seq[t] == q for t in of) for q in range(16)] for of in expected.values()])
    np.testing.assert_allclose(loads, rows @ objective.weights)
    np.testing.assert_array_equal(np.bincount(gpus), [SIZE + 1] * G)


@pytest.mark.parametrize("nodes", [1, 2])
def test_copies_that_are_placed_visit_fewer_gpus(skewed, nodes):
    dealt, tokens, objective = of_layer(skewed, nodes)
    placed, _, _ = of_layer(skewed, nodes, swaps=3000)
    for found in (dealt, placed):
        assert all(len(set(gpu)) == SIZE for gpu in found.tolist()) and set(found.ravel()) == set(range(E))
    before, after = (slots.value(found, E, tokens, objective) for found in (dealt, placed))
    assert after[1] + 0.5 * (nodes > 1) * after[2] < before[1] + 0.5 * (nodes > 1) * before[2] - 0.2


# The method -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_search_has_fewer_gpus_and_nodes_a_token_than_eplb_at_a_load_near_its(skewed, nodes, monkeypatch):
    monkeypatch.setattr(dedup_copies, "LOAD_WEIGHT", 10.0)
    counted = trace.profile(skewed)
    found = dedup_copies.dedup_copies(counted, G, SIZE, nodes, steps=3000)
    assert (found.sizes() == SIZE).all() and found.num_nodes == nodes
    on = simulate.cluster({1: "nvlink", 2: "two-nodes"}[nodes], G, 64, 64)
    rows = {}
    for name, placed in (("ours", found), ("eplb-replicas", None), ("eplb-nearest", None)):
        job = methods.Job(name, skewed, None, on, methods.Options(budget=SIZE), 1000)
        fitted = methods.Fitted(placed.shares(), placed) if placed else job._fit(counted)
        rows[name] = job._evaluate(fitted, counted, 0.0)
    ours, random, nearest = rows.values()
    assert ours.distinct_gpus < random.distinct_gpus - 0.1 and ours.balance_mean < random.balance_mean + 0.03
    assert ours.distinct_nodes < random.distinct_nodes or nodes == 1
    ours_sum, nearest_sum = (
        row.distinct_gpus + 0.5 * (nodes > 1) * row.distinct_nodes + dedup_copies.LOAD_WEIGHT * row.balance_mean
        for row in (ours, nearest)
    )
    assert ours_sum < nearest_sum - 0.1


def test_more_weight_on_the_load_gives_a_more_even_load(skewed, monkeypatch):
    even = []
    for weight in (0.01, 30.0):
        monkeypatch.setattr(dedup_copies, "LOAD_WEIGHT", weight)
        chosen = copies.routes(skewed, dedup_copies.dedup_copies(trace.profile(skewed), G, SIZE, steps=1500))
        even.append(np.mean([np.bincount(layer.ravel()).max() for layer in chosen.topk.swapaxes(0, 1)]))
    assert even[1] < 0.95 * even[0]


def test_the_same_seed_finds_the_same_map_bit_for_bit(skewed):
    counted = trace.profile(skewed)
    found = [dedup_copies.dedup_copies(counted, G, SIZE, 2, 300, 300, seed).held for seed in (1, 1, 2)]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()


def test_a_long_trace_is_counted_by_every_nth_token(skewed, monkeypatch):
    assert dedup_copies.thinned(skewed, 800).tokens == 800
    thin = dedup_copies.thinned(skewed, 300)
    np.testing.assert_array_equal(thin.topk, skewed.topk[::3])
    np.testing.assert_array_equal(thin.seq, skewed.seq[::3])
    whole = dedup_copies.dedup_copies(trace.profile(skewed), G, SIZE, 2, 200)
    monkeypatch.setattr(dedup_copies, "COUNTED", 300)
    assert (dedup_copies.dedup_copies(trace.profile(skewed), G, SIZE, 2, 200).held != whole.held).any()


def test_a_budget_of_all_experts_needs_no_choice(skewed):
    found = dedup_copies.dedup_copies(trace.profile(skewed), G, E + 5, steps=10)
    assert found.held.all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((G, 2), "budget is 2: 2 experts on each of 4 GPUs are 8, but a layer has 12; the least budget is 3"),
        ((G, 0), "budget is 0"),
        ((G, 4, 3), "num_nodes is 3, but it must divide the 4 GPUs"),
        ((13, 4), "num_gpus is 13, but there are only 12 experts"),
        ((G, 4, 1, -1), "steps is -1"),
        ((G, 4, 1, 0, -1), "swaps is -1"),
    ],
)
def test_bad_input_of_the_search_is_refused(skewed, arguments, message):
    with pytest.raises(ValueError, match=message):
        dedup_copies.dedup_copies(trace.profile(skewed), *arguments)


def test_counts_without_a_trace_are_refused(skewed):
    with pytest.raises(ValueError, match="holds counts alone, but this needs the trace"):
        dedup_copies.dedup_copies(replace(trace.profile(skewed), trace=None), G, SIZE)


# EPLB as it is meant --------------------------------------------------------------------------------------------------


def test_eplb_keeps_groups_on_one_node_and_has_the_budget(skewed):
    on, counted = simulate.cluster("nvlink", G, 64, 64), trace.profile(skewed)
    options = methods.Options(budget=5, nodes=2, groups=4)
    fitted = methods.METHODS["eplb-replicas"](counted, on, options)
    np.testing.assert_array_equal(fitted.shares, baselines.eplb(counted, G, 5 * G, 2, 4))
    of_groups = traffic.by_node(fitted.shares, 2).reshape(2, 4, 3, 2).sum(axis=2)  # (layers, groups, nodes)
    assert ((of_groups > 0).sum(axis=2) == 1).all()
    nearest = methods.METHODS["eplb-nearest"](counted, on, options).placement
    np.testing.assert_array_equal(nearest.held, fitted.shares > 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 2}, "budget is 2: 2 experts on each of 4 GPUs are 8, but a layer has 12"),
        ({"nodes": 3}, "num_gpus is 4, but it must be a multiple of num_nodes = 3"),
        ({"nodes": 0}, "num_nodes is 0, but it must be >= 1"),
        ({"groups": 5}, "E is 12, but it must be a multiple of num_groups = 5"),
        ({"groups": 0}, "num_groups is 0, but it must be >= 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(skewed, options, message):
    on = simulate.cluster("nvlink", G, 64, 64)
    with pytest.raises(ValueError, match=message):
        methods.jobs(skewed, on, ["eplb-replicas"], options=methods.Options(**options))


# The map to write -----------------------------------------------------------------------------------------------------


def test_a_map_with_copies_is_written_where_a_budget_is_named_or_there_is_no_other(skewed):
    on, options = simulate.cluster("nvlink", G, 64, 64), methods.Options(copy_steps=50)
    work = methods.jobs(skewed, on, ["greedy", "dedup-copies", "eplb-replicas"], options=options)
    greedy, ours, random = [replace(job()[0], runtime_ms=ms) for job, ms in zip(work, (3.0, 2.0, 1.0), strict=True)]
    assert methods.fastest_map([greedy, ours, random]) is greedy.fitted.placement
    assert methods.fastest_map([greedy, ours, random], with_copies=True) is ours.fitted.placement
    assert methods.fastest_map([ours, random]) is ours.fitted.placement
    with pytest.raises(ValueError, match="no map to write: tokens choose at random among the copies"):
        methods.fastest_map([random])
