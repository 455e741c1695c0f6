"""Distinct GPUs and nodes a token, and the search for few of them: against counts by loops, and with bad input."""

import time
from dataclasses import replace

import numpy as np
import pytest

from moeblaze_ref.core import records
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.parallel import costs as parallel_costs
from moeblaze_ref.placement import annealing, baselines, dedup, maps, methods, simulate, trace, traffic, unions
from moeblaze_ref.placement.bounds import Bounds
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.expand import expand, expanded
from moeblaze_ref.placement.synthetic import synthetic_trace

E, G, K = 16, 4, 3


@pytest.fixture(scope="module")
def routed():
    """A trace in which experts 0 and 1, 2 and 3, ... are often used together, and sequences differ."""
    rng, tokens = np.random.default_rng(0), 1200
    seq = np.arange(tokens) // 60
    topk = np.empty((tokens, 3, K), np.int16)
    for t in range(tokens):
        for l in range(3):
            pair = 2 * int((rng.zipf(1.6) + seq[t]) % (E // 2))
            topk[t, l] = [pair, pair + 1, rng.choice(np.setdiff1d(np.arange(E), [pair, pair + 1]))]
    return RoutingTrace(topk, E, seq)


@pytest.fixture(scope="module")
def counted(routed):
    return trace.profile(routed)


def counted_by_loops(routed, assignment, per_node):
    """(D, N) of a map, token by token."""
    gpus = [{assignment[l, e] for e in token[l]} for token in routed.topk for l in range(routed.topk.shape[1])]
    return np.mean([len(one) for one in gpus]), np.mean([len({gpu // per_node for gpu in one}) for one in gpus])


def on_links(topology="nvlink", gpus=G, token_s=1e-9):
    return traffic.Runtime(simulate.Cluster(simulate.TOPOLOGIES[topology](gpus), 4096, token_s), 0.0, 0.0)


# What is counted ------------------------------------------------------------------------------------------------------


def test_distinct_gpus_and_nodes_are_what_a_loop_counts(routed):
    rng = np.random.default_rng(1)
    placed = maps.Placement(rng.integers(0, G, (3, E)).astype(np.int32), G)
    assert traffic.distinct(routed, placed.shares(), 2) == pytest.approx(counted_by_loops(routed, placed.assignment, 2))
    window = routed.topk[: 4 * (routed.tokens // 4)]
    sent = parallel_costs.rows_sent(placed, window)  # what the parallel layer sends
    np.testing.assert_array_equal(sent.sum(axis=1), traffic.visits(routed, placed.shares()))


def test_a_token_chooses_one_copy_of_an_expert_at_random():
    routed = RoutingTrace(np.array([[[0, 1]]], np.int16), 3)
    shares = np.array([[[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]])
    np.testing.assert_allclose(traffic.visits(routed, shares), [[0.5, 1, 0, 0]])
    assert traffic.distinct(routed, shares, 2) == (1.5, 1.0)  # both copies are on the first node


def test_loads_of_batches_are_means_over_batches_and_layers(routed):
    placed = baselines.round_robin(trace.profile(routed), G)
    found = traffic.batch_loads(routed, placed.shares())
    each = []
    for first in range(0, 1024, 256):
        for l in range(3):
            load = np.bincount(placed.assignment[l, routed.topk[first : first + 256, l].ravel()], minlength=G)
            each.append(load.max() / load.mean())
    assert found.keys() == {256, 1024} and found[256] == pytest.approx(np.mean(each))


def test_a_step_that_brings_tokens_home_by_hand():
    T, visited = np.array([[60.0, 20.0]]), np.array([[40.0, 10.0]])
    on = simulate.Cluster(np.array([[1.0, 100.0], [50.0, 1.0]]), row_bytes=10, token_s=0.5)
    found = traffic.step(T, visited, tokens=40, costs=traffic.Runtime(on, exchange_s=1.0, rest_s=2.0), of=80)
    np.testing.assert_allclose(found.compute_s, [2 * 60 * 0.5 + 2])
    np.testing.assert_allclose(found.transfer_s, [2 * 2 * (40 / 2) * 10 / 50 + 1])


def test_the_measured_costs_are_those_of_the_record(tmp_path):
    from moeblaze_ref.core import records
    from moeblaze_ref.placement.document import MEASURED

    measured = records.read(MEASURED, ("token_s", "bandwidth", "exchange_s", "rest_s"))
    for found in (traffic.runtime("nvlink", 2, 2880, 2880), traffic.runtime(str(MEASURED), 2, 2880, 2880)):
        assert found.on.token_s == pytest.approx(measured["token_s"])
        assert found.on.bandwidth[0, 1] == pytest.approx(measured["bandwidth"][0][1])
        assert (found.exchange_s, found.rest_s) == (measured["exchange_s"], measured["rest_s"])


def test_nodes_of_eight_gpus():
    on = simulate.cluster("nodes-of-8", 32, d=100, h=10)
    assert on.num_nodes == 4 and on.bandwidth[0, 8] == simulate.INFINIBAND / 24
    with pytest.raises(ValueError, match="num_gpus is 12, but nodes of 8 GPUs need a multiple of 8"):
        simulate.cluster("nodes-of-8", 12, 100, 10)


# The search of a layer ------------------------------------------------------------------------------------------------


def layer_search(routed, steps, seed=0, load_weight=0.5, node_weight=0.7, deadline=np.inf):
    """(start, found, change) of one layer, and a function that counts a map's value afresh."""
    sets = unions.token_sets(routed.topk[:, 0], E)
    loads = np.ascontiguousarray(dedup.sampled_loads(routed, 5, 2.0, 0)[:, 0].T) * G
    sizes = (G, 2, load_weight, node_weight, routed.tokens)
    start = np.arange(E) % G
    found, change = unions.anneal_layer(start, sets, loads, *sizes, 0.1, 0.003, steps, seed, deadline)
    return start, found, change, lambda gpus: unions.value(gpus, sets, loads, *sizes)


@pytest.mark.parametrize("steps", [0, 50, 5000])
def test_what_is_carried_along_equals_a_recount(routed, steps):
    start, found, change, value = layer_search(routed, steps)
    assert value(found)[0] - value(start)[0] == pytest.approx(change, abs=1e-9)
    one_layer = RoutingTrace(np.ascontiguousarray(routed.topk[:, :1]), E)
    assert value(found)[1:3] == pytest.approx(counted_by_loops(one_layer, found[None], 2))
    assert (np.bincount(found) == E // G).all() and change <= 0
    assert change < -0.3 or steps < 5000


def test_a_search_finds_the_best_of_all_maps():
    rng = np.random.default_rng(3)
    topk = np.stack([rng.choice(6, 2, replace=False, p=[0.3, 0.25, 0.2, 0.1, 0.1, 0.05]) for _ in range(300)])
    small = RoutingTrace(topk.astype(np.int16)[:, None], 6)
    sets, loads = unions.token_sets(topk, 6), np.ascontiguousarray(dedup.sampled_loads(small, 4, 2.0, 0)[:, 0].T) * 3
    sizes = (3, 1, 2.0, 0.0, 300)
    maps_of_six = np.array(np.meshgrid(*[range(3)] * 6)).reshape(6, -1).T
    even = [one for one in maps_of_six.astype(np.int64) if (np.bincount(one, minlength=3) == 2).all()]
    best = min(unions.value(one, sets, loads, *sizes)[0] for one in even)
    found, _ = unions.anneal_layer(np.arange(6) % 3, sets, loads, *sizes, 0.3, 0.01, 3000, 0, np.inf)
    assert unions.value(found, sets, loads, *sizes)[0] == pytest.approx(best)


def test_a_layer_after_the_deadline_stays_as_it_was(routed, counted):
    start, found, change, _ = layer_search(routed, 5000, deadline=time.perf_counter() - 1)
    assert (found == start).all() and change == 0
    placed = baselines.greedy(counted, G)
    late = annealing.anneal(counted, placed, 1 - np.eye(G), 9.0, steps=10**9, deadline=(over := Deadline(-1)))
    assert over.cut
    np.testing.assert_array_equal(late.assignment, placed.assignment)


# The loads that count -------------------------------------------------------------------------------------------------


def test_sampled_loads_have_the_traces_mean_and_stretched_differences(routed, counted):
    one, two = (dedup.sampled_loads(routed, 6, stretch, seed=4) for stretch in (1.0, 2.0))
    whole = counted.P / counted.P.sum(axis=1, keepdims=True)
    for found in (one, two):
        np.testing.assert_allclose(found.mean(axis=0), whole)
        np.testing.assert_allclose(found.sum(axis=2), 1)
    np.testing.assert_allclose(two - whole, 2 * (one - whole), atol=1e-12)
    assert np.abs(one - whole).max() > 0.01
    no_seq = dedup.sampled_loads(RoutingTrace(routed.topk, E), 6, 1.0, seed=4)
    np.testing.assert_allclose(no_seq.mean(axis=0), whole)


# The method -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("topology", "nodes"), [("nvlink", 1), ("two-nodes", 2)])
def test_the_search_has_fewer_distinct_gpus_and_nodes_than_packing(routed, counted, topology, nodes):
    on = on_links(topology)
    assert on.on.num_nodes == nodes
    packed, found = baselines.greedy(counted, G), dedup.dedup(counted, on, swaps=80000)
    before, after = (traffic.distinct(routed, one.shares(), nodes) for one in (packed, found))
    assert after[0] < before[0] - 0.2 and (found.sizes() == E // G).all()
    assert after[1] < before[1] - 0.2 or nodes == 1


def test_the_same_seed_finds_the_same_map_bit_for_bit(counted):
    found = [dedup.dedup(counted, on_links(), swaps=1600, seed=seed).assignment for seed in (1, 1, 2)]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()


def test_more_weight_on_the_load_gives_a_more_even_load(counted):
    packed = baselines.greedy(counted, G)
    even = [
        simulate.balance(simulate.loads(counted, dedup.search(counted, packed, 1, weight, 5000).shares())).mean()
        for weight in (0.01, 30.0)
    ]
    assert even[1] < even[0] - 0.02


def test_packing_is_the_answer_where_rows_cost_and_links_do_not(counted, monkeypatch):
    """A search that would make the step longer is not returned, and heavier loads are tried before that."""
    packed, tried = baselines.greedy(counted, G), []
    uneven = baselines.contiguous(counted, G)
    monkeypatch.setattr(dedup, "search", lambda *of: tried.append((of[3], list(of[7]))) or uneven)
    found = dedup.dedup(counted, on_links(token_s=1e-3))
    np.testing.assert_array_equal(found.assignment, packed.assignment)
    assert tried == [(weight, [0, 1, 2]) for weight in dedup.LOAD_WEIGHTS]


@pytest.mark.parametrize(("topology", "taken"), [("nvlink", False), ("two-nodes", True)])
def test_nodes_may_cost_a_little_time_and_gpus_of_one_node_none(counted, monkeypatch, topology, taken):
    good = dedup.search(counted, baselines.greedy(counted, G), swaps=800)
    monkeypatch.setattr(dedup, "search", lambda *of: good)
    ms = {id(good): np.full(3, 1.004)}
    monkeypatch.setattr(dedup, "_layers_ms", lambda profile, placement, *of: ms.get(id(placement), np.ones(3)))
    found = dedup.dedup(counted, on_links(topology))
    assert (found.assignment == good.assignment).all() == taken


@pytest.mark.parametrize(
    ("ms", "searched", "packing"),
    [
        ([[0.5, 1.2, 1.2]], [[0, 1, 2]], []),  # together no slower
        ([[0.9, 1.2, 1.2], [0.9, 0.9, 1.15]], [[0, 1, 2], [1, 2]], []),
        ([[0.9, 1.2, 1.2], [0.9, 0.9, 1.5], [0.9, 0.9, 1.5], [0.9, 0.9, 1.5]], [[0, 1, 2], [1, 2], [2], [2]], [2]),
    ],
)
def test_layers_are_searched_again_until_all_together_are_no_slower(counted, monkeypatch, ms, searched, packing):
    tried, packed = [], baselines.greedy(counted, G)
    other = dedup.search(counted, packed, swaps=800)
    monkeypatch.setattr(dedup, "search", lambda *of: tried.append(list(of[7])) or other)
    times = iter([[1.0, 1.0, 1.0], *ms])
    monkeypatch.setattr(dedup, "_layers_ms", lambda *of: np.array(next(times)))
    found = dedup.dedup(counted, on_links())
    assert tried == searched
    for l in range(3):
        np.testing.assert_array_equal(found.assignment[l], (packed if l in packing else other).assignment[l])


def test_dedup_keeps_the_bounds_of_the_packing(counted):
    found = dedup.dedup(counted, on_links(), bounds=Bounds(1, 8), swaps=800)
    np.testing.assert_array_equal(found.sizes(), baselines.greedy(counted, G, Bounds(1, 8)).sizes())


def test_bad_input_of_the_search_is_refused(counted):
    bare = trace.Profile(counted.P, counted.R, counted.tokens)
    with pytest.raises(ValueError, match="holds counts alone, but this needs the trace"):
        dedup.dedup(bare, on_links())
    with pytest.raises(ValueError, match="num_gpus is 20, but there are only 16 experts"):
        dedup.dedup(counted, on_links(gpus=20))
    with pytest.raises(ValueError, match="swaps is -1"):
        dedup.dedup(counted, on_links(), swaps=-1)
    with pytest.raises(ValueError, match=r"load_weight is 0"):
        dedup.search(counted, baselines.greedy(counted, G), load_weight=0.0)
    with pytest.raises(ValueError, match="shares has shape"):
        traffic.visits(counted.traced(), np.ones((2, E, G)))


# Larger models --------------------------------------------------------------------------------------------------------


def test_expanded_traces_keep_sequences_and_the_loads_of_experts(routed):
    large = expand(routed, layers=5, num_experts=4 * E, k=2 * K)
    assert large.topk.shape == (routed.tokens, 5, 2 * K) and (large.seq == routed.seq).all()
    real = large.topk // 4  # the experts whose parts they are
    for l in range(5):
        np.testing.assert_array_equal(np.sort(real[:, l, ::2]), np.sort(routed.topk[:, l % 3]))
        np.testing.assert_array_equal(real[:, l, ::2], real[:, l, 1::2])
    assert (expand(routed, 5, 4 * E, 2 * K).topk == large.topk).all()
    assert (expand(routed, 5, 4 * E, 2 * K, seed=1).topk != large.topk).any()
    assert (large.topk[:, 0] % 4 != large.topk[:, 3] % 4).any()  # a repeated layer has other parts


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ((3, 40, 3), "num_experts is 40, but it must be a multiple of the trace's 16"),
        ((3, 32, 4), "k is 4, but it must be a multiple of the trace's 3"),
        ((3, 16, 6), "k is 6, 2 times the trace's, but an expert has only 1 parts"),
        ((0, 32, 3), "layers is 0"),
    ],
)
def test_a_size_that_does_not_fit_the_trace_is_refused(routed, size, message):
    with pytest.raises(ValueError, match=message):
        expand(routed, *size)
    with pytest.raises(ValueError, match="'58x256' must be LAYERSxExK"):
        expanded(routed, "58x256")


def test_a_large_cluster_is_placed_and_large_programs_are_refused(routed):
    large = expand(routed, 2, 8 * E, 2 * K)
    on = simulate.cluster("nodes-of-8", 64, d=100, h=10)
    (work,) = methods.jobs(large, on, ["dedup"], options=methods.Options(swaps=2500))
    (found,) = work()
    packed = methods.jobs(large, on, ["eplb"])[0]()[0]
    assert found.distinct_gpus < packed.distinct_gpus and found.distinct_nodes < packed.distinct_nodes
    reason = (
        r"moetuner is not tried on 64 GPUs, but on at most 32: its second program has \(layers - 1\) \* G\*\*4 rows"
    )
    with pytest.raises(ValueError, match=reason):
        methods.jobs(large, on, ["moetuner"])
    assert methods.too_large(methods.METHODS, 64).keys() == {"exflow", "moetuner", "joint"}
    assert not methods.too_large(methods.METHODS, 32)


# The map to write -----------------------------------------------------------------------------------------------------


def test_the_objective_chooses_the_map():
    routed = synthetic_trace(600, 3, 8, 2, dependency=0.9, seed=1)
    on = simulate.cluster("nvlink", 2, 64, 64)
    trials = [trial for job in methods.jobs(routed, on, ["contiguous", "greedy"]) for trial in job()]
    trials[0] = replace(trials[0], step_ms=1.0, runtime_ms=9.0)
    trials[1] = replace(trials[1], step_ms=2.0, runtime_ms=8.0)
    assert methods.fastest_map(trials, "hops") is trials[0].fitted.placement
    assert methods.fastest_map(trials) is trials[1].fitted.placement
    with pytest.raises(ValueError, match=r"unknown objective 'dedupe'\. Did you mean 'dedup'"):
        methods.fastest_map(trials, "dedupe")


def test_jobs_in_other_processes_give_the_same_rows():
    from moeblaze_ref.core import progress

    routed = synthetic_trace(600, 2, 8, 2, seed=1)
    on, options = simulate.cluster("nvlink", 2, 64, 64), methods.Options(swaps=800)
    work = methods.jobs(routed, on, ["greedy", "dedup"], splits=2, options=options)
    here, there = ([trial.as_dict() for trial in progress.run_with_bar("", work, n)] for n in (1, 2))
    for one, other in zip(here, there, strict=True):
        assert one | {"solve_s": 0} == other | {"solve_s": 0}


def test_the_costs_of_a_layer_are_those_of_the_record():
    measured = records.read(ROOT / "docs" / "results" / "ep_h200x2_gptoss.json", {"token_s", "bandwidth"})
    costs = traffic.runtime("nvlink", 2, measured["d"], measured["h"])
    assert costs.on.token_s == pytest.approx(measured["token_s"], rel=1e-12)
    assert costs.on.bandwidth[0, 1] == measured["bandwidth"][0][1]
    assert (costs.exchange_s, costs.rest_s) == (measured["exchange_s"], measured["rest_s"])
