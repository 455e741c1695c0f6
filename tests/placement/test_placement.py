"""Placement: traces and counts, both integer programs against exhaustive search, baselines, joint, the step's model."""

import threading

import numpy as np
import pytest

from moeblaze_ref.core import traces
from moeblaze_ref.placement import (
    annealing,
    baselines,
    clusters,
    exact,
    gpu_assignment,
    ilp,
    joint,
    maps,
    methods,
    simulate,
    solver,
    trace,
)
from moeblaze_ref.placement.annealing import anneal
from moeblaze_ref.placement.bounds import Bounds, equal, printed
from moeblaze_ref.placement.deadlines import Deadline
from moeblaze_ref.placement.solver import SOLVERS
from moeblaze_ref.placement.synthetic import counted_trace, synthetic_trace, trace_or_synthetic

INCLUDED = [name for name in SOLVERS if name != "gurobi"]  # the one that needs a licence


@pytest.fixture(scope="module")
def routed():
    """A small trace with skew and with dependency between layers."""
    return synthetic_trace(3000, 5, 16, 2, skew=0.8, dependency=0.7, seed=3)


@pytest.fixture(scope="module")
def counted(routed):
    return trace.profile(routed)


@pytest.fixture(scope="module")
def alike():
    """Counts of experts that are used alike: every packing balances them, few have few crossings."""
    return trace.profile(synthetic_trace(3000, 5, 16, 2, skew=0, dependency=0.7, seed=3))


def cluster(num_gpus, bandwidth=None):
    """GPUs on which a transfer costs about what the computation does."""
    bandwidth = simulate.one_node(num_gpus) if bandwidth is None else np.asarray(bandwidth, np.float64)
    return simulate.Cluster(bandwidth, row_bytes=4096, token_s=2e-8)


SLOW = np.full((4, 4), 1e6)  # links of 4 GPUs on which transfers are all that matters


def loads(profile, placed):
    return simulate.loads(profile, placed.shares())


def crossings(profile, placed):
    return simulate.cross_share(simulate.transitions(profile, placed.shares()))


def step_ms(profile, placed, on):
    return simulate.step(profile, placed.shares(), on).ms


def random_flows(layers, G, seed):
    """C with a few heavy flows."""
    rng = np.random.default_rng(seed)
    C = rng.integers(1, 200, (layers - 1, G, G))
    return C + rng.integers(0, 2000, C.shape) * (rng.random(C.shape) < 0.3)


# Traces ---------------------------------------------------------------------------------------------------------------


def test_counts_are_what_a_loop_counts(routed, counted):
    P, R = np.zeros_like(counted.P), np.zeros_like(counted.R)
    for token in routed.topk:
        for layer, chosen in enumerate(token):
            P[layer, chosen] += 1
            for e in chosen if layer + 1 < len(token) else ():
                R[layer, e, token[layer + 1]] += 1
    np.testing.assert_array_equal(counted.P, P)
    np.testing.assert_array_equal(counted.R, R)
    assert counted.tokens == 3000


def test_a_split_cuts_no_sequence_and_loses_no_token(routed):
    fit, rest = trace.split(routed, seed=1)
    assert not set(fit.seq) & set(rest.seq)
    assert fit.tokens + rest.tokens == routed.tokens and min(fit.tokens, rest.tokens) > 0
    np.testing.assert_array_equal(trace.split(routed, seed=1)[0].topk, fit.topk)
    assert any(not np.array_equal(trace.split(routed, seed)[0].seq, fit.seq) for seed in range(2, 6))


def test_a_file_gives_its_trace_back(routed, tmp_path):
    traces.save(tmp_path / "t.npz", routed)
    found = traces.load(tmp_path / "t.npz")
    np.testing.assert_array_equal(found.topk, routed.topk)
    np.testing.assert_array_equal(found.seq, routed.seq)
    assert (found.num_experts, found.model, found.pos) == (16, routed.model, None)


def test_a_file_may_say_what_it_is_in_one_json(routed, tmp_path):
    np.savez(tmp_path / "t.npz", topk=routed.topk, info='{"experts": 20, "model": "a/model"}')
    found = traces.load(tmp_path / "t.npz")
    assert (found.num_experts, found.model) == (20, "a/model")
    assert traces.load(tmp_path / "t.npz", num_experts=16, model="b").model == "b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda topk: topk.__setitem__((7, 2, 1), 16), r"topk\[7, 2, 1\] is 16, but there are only 16 experts"),
        (lambda topk: topk.__setitem__((7, 2, 1), -1), r"topk\[7, 2, 1\] is -1, but there are only 16 experts"),
        (lambda topk: topk.__setitem__((slice(None), 3), -1), r"topk\[:, 3\] names no expert at all"),
        (lambda topk: topk.__setitem__((5, 1), 4), r"topk\[5, 1\] names expert 4 twice"),
    ],
)
def test_a_wrong_trace_is_refused(routed, change, message, tmp_path):
    topk = routed.topk.copy()
    change(topk)
    np.savez(tmp_path / "t.npz", topk=topk, num_experts=16)
    with pytest.raises(ValueError, match=message):
        traces.load(tmp_path / "t.npz")


def test_ids_below_zero_are_named_where_no_number_of_experts_is_given(routed, tmp_path):
    topk = routed.topk.copy()
    topk[7, 2, 1] = -1
    np.savez(tmp_path / "t.npz", topk=topk)
    with pytest.raises(ValueError, match=r"t\.npz: topk\[7, 2, 1\] is -1, but an expert's id is at least 0"):
        traces.load(tmp_path / "t.npz")


def test_files_that_are_no_traces_are_refused(tmp_path):
    (tmp_path / "t.npz").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"t\.npz is truncated, or not an npz"):
        traces.load(tmp_path / "t.npz")
    np.savez(tmp_path / "u.npz", ids=np.zeros(3))
    with pytest.raises(ValueError, match="has no topk, but only ids"):
        traces.load(tmp_path / "u.npz")
    np.savez(tmp_path / "v.npz", topk=np.full((2, 3, 1), 70_000))
    with pytest.raises(ValueError, match="num_experts is 70001, but it must be 1..32768"):
        traces.load(tmp_path / "v.npz")


def test_a_trace_without_sequences_is_not_split(routed):
    with pytest.raises(ValueError, match="split by sequence, never by token"):
        trace.split(traces.RoutingTrace(routed.topk, 16), 0)
    with pytest.raises(ValueError, match="has 1 sequences"):
        trace.split(traces.RoutingTrace(routed.topk, 16, np.zeros(routed.tokens, int)), 0)


def test_no_tokens_are_counted_and_placed():
    empty = trace.profile(traces.RoutingTrace(np.zeros((0, 3, 2), np.int16), 4))
    assert not empty.P.any() and not empty.R.any()
    placed = baselines.greedy(empty, 2)
    assert simulate.balance(loads(empty, placed)).tolist() == [1, 1, 1]
    assert crossings(empty, placed) == 0
    assert step_ms(empty, placed, cluster(2)) == 0
    assert ilp.moetuner(empty, cluster(2)).gap == 0


def test_synthetic_traces_have_the_skew_and_the_dependency_asked_for():
    even = trace.profile(synthetic_trace(4000, 3, 16, 2, skew=0, dependency=0))
    skewed = trace.profile(synthetic_trace(4000, 3, 16, 2, skew=1.2, dependency=0))
    assert even.P.max() < 1.3 * even.P.mean() and skewed.P.max() > 3 * skewed.P.mean()
    led = trace.profile(synthetic_trace(4000, 3, 16, 1, skew=0, dependency=1))
    assert (np.sort(led.R, axis=2)[:, :, :-1] == 0).all()  # one successor each
    with pytest.raises(ValueError, match="dependency is 1.5"):
        synthetic_trace(10, 2, 4, 1, dependency=1.5)


def test_traces_are_drawn_as_often_as_was_counted():
    counts = np.array([[[0, 6, 3, 1], [5, 5, 0, 0]], [[1, 1, 1, 1], [0, 8, 1, 1]]])  # (sequences, layers, E)
    drawn = counted_trace(counts, 1, 4000)
    for sequence in range(2):
        for layer in range(2):
            chosen = np.bincount(drawn.topk[drawn.seq == sequence, layer, 0], minlength=4) / 4000
            moved = np.abs(chosen - counts[sequence, layer] / counts[sequence, layer].sum()).sum() / 2
            assert moved < 0.03  # of the tokens would have to go elsewhere
    pairs = np.sort(counted_trace(counts, 2, 50).topk[:50, 1], axis=1)
    assert (pairs == [0, 1]).all()  # of two experts above 0, both
    with pytest.raises(ValueError, match=r"counts\[0, 1\] has fewer than k = 3 experts above 0"):
        counted_trace(counts, 3, 5)
    with pytest.raises(ValueError, match="is -1, but it must be >= 0"):
        counted_trace(counts - 1, 1, 5)


# Maps -----------------------------------------------------------------------------------------------------------------


def test_a_map_survives_its_file_under_the_very_name_given(counted, tmp_path):
    placed = baselines.greedy(counted, 4)
    maps.save(tmp_path / "map", placed)
    found = maps.load(tmp_path / "map")
    np.testing.assert_array_equal(found.assignment, placed.assignment)
    assert (found.num_gpus, found.model) == (4, counted.model)
    hosted = [[expert for experts in found.hosts(layer) for expert in experts] for layer in range(5)]
    assert [sorted(experts) for experts in hosted] == [list(range(16))] * 5


def test_a_map_that_cannot_be_written_leaves_the_one_before(counted, tmp_path, monkeypatch):
    maps.save(tmp_path / "map.npz", baselines.greedy(counted, 4))

    def full(file, **arrays):
        file.write(b"half of it")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(OSError, match=r"map\.npz cannot be written: no space left"):
        maps.save(tmp_path / "map.npz", baselines.contiguous(counted, 4))
    np.testing.assert_array_equal(maps.load(tmp_path / "map.npz").assignment, baselines.greedy(counted, 4).assignment)
    assert [path.name for path in tmp_path.iterdir()] == ["map.npz"]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        ([[[0, 1], [2, 3]], [[0, 1], [1, 2, 3]]], r"layer 1: expert 1 is on GPUs \[0, 1\]"),
        ([[[0, 1], [2, 3]], [[0], [2, 3]]], "layer 1: expert 1 is on no GPU"),
        ([[[0, 1], [2, 4]]], "an expert of layer 0 is 4, but it must be 0..3"),
        ([[[0, 1], [2, 3]], [[0, 1, 2, 3]]], "layer 1 has 1 GPUs, but layer 0 has 2"),
    ],
)
def test_a_map_covers_every_expert_exactly_once(hosts, message):
    assert maps.from_hosts([[[0, 3], [1, 2]]], 4).assignment.tolist() == [[0, 1, 1, 0]]
    with pytest.raises(ValueError, match=message):
        maps.from_hosts(hosts, 4)


def test_a_wrong_map_file_is_refused(tmp_path):
    np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 2, -1]]), num_gpus=3)
    with pytest.raises(ValueError, match="layer 0: expert 3 is on no GPU"):
        maps.load(tmp_path / "map.npz")
    np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 2, 3]]), num_gpus=3)
    with pytest.raises(ValueError, match=r"expert 3 is on GPU 3, but assignment\[0, 3\] .* 3 GPUs \(valid: 0..2\)"):
        maps.load(tmp_path / "map.npz")
    np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 0, 1], [0, 1, 2**32, 2**32 + 1]]), num_gpus=2)
    with pytest.raises(ValueError, match="layer 1: expert 2 is on GPU 4294967296, but .* one of 2 GPUs"):
        maps.load(tmp_path / "map.npz")
    np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 0, 1]]), num_gpus=0)
    with pytest.raises(ValueError, match="num_gpus is 0, but it must be >= 1"):
        maps.load(tmp_path / "map.npz")
    for number in (2.9, True, [2]):
        np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 0, 1]]), num_gpus=number)
        with pytest.raises((TypeError, ValueError), match="num_gpus has"):
            maps.load(tmp_path / "map.npz")
    np.savez(tmp_path / "map.npz", assignment=np.array([[0, 1, 2, 3]]))
    with pytest.raises(ValueError, match="has no num_gpus"):
        maps.load(tmp_path / "map.npz")


def test_a_map_for_another_model_is_refused(counted):
    placed = baselines.contiguous(counted, 4)
    placed.check_fits(5, 16, counted.model)
    placed.check_fits(5, 16)
    with pytest.raises(ValueError, match="is for 5 layers of 16 experts, but the model has 5 layers of 32"):
        placed.check_fits(5, 32)
    with pytest.raises(ValueError, match="but the model is another"):
        placed.check_fits(5, 16, "another")


# ILP 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", INCLUDED)
@pytest.mark.parametrize("within", [printed(8), equal(8, 3), Bounds(1, 4)], ids=str)
def test_clusters_are_as_even_as_any(solver, within):
    rng = np.random.default_rng(5)
    P = np.round(1e5 / np.arange(1, 9) ** np.array([[0.3], [0.7], [1.3]]) + rng.integers(0, 5000, (3, 8)))
    P = P.astype(np.int64)
    found = clusters.cluster_experts(P, 3, within, solver)
    best = [exact.best_clusters(load, 3, within) for load in P]
    np.testing.assert_allclose(found.objective, [deviation for deviation, _ in best])
    np.testing.assert_array_equal(found.most, [most for _, most in best])  # ties broken: solvers agree
    np.testing.assert_allclose(found.bound, found.objective, rtol=1e-9)
    assert found.proven and found.gap < 1e-6
    for layer, load in zip(found.of_expert, P, strict=True):
        sizes, T = np.bincount(layer, minlength=3), np.bincount(layer, load, minlength=3)
        assert sizes.min() >= within.least and sizes.max() <= within.most
        assert np.abs(T - T.mean()).sum() == pytest.approx(best.pop(0)[0])


def test_the_arithmetic_bounds_hold():
    rng = np.random.default_rng(2)
    for _ in range(60):
        E, G = int(rng.integers(3, 8)), int(rng.integers(2, 4))
        load = np.sort(np.round(1000 * rng.random(E) ** 4).astype(np.int64))[::-1]
        for within in (printed(E), equal(E, G)):
            deviation, most = exact.best_clusters(load, G, within)
            assert clusters.deviation_bound(load, G, within) <= G * deviation
            assert clusters.most_bound(load, G, within) <= most


def test_clusters_in_no_time_are_packed_and_say_how_far_they_may_be():
    load = np.round(1e6 * np.random.default_rng(0).random((1, 40))).astype(np.int64)
    found = clusters.cluster_experts(load, 4, time_limit=0.001)
    assert 0 <= found.gap < 0.02 and (found.bound <= found.objective).all()
    assert np.bincount(found.of_expert[0]).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("within", "message"),
    [
        (Bounds(3, 8), "infeasible: at least 3 experts on each of 3 GPUs are 9, but a layer has only 8"),
        (Bounds(0, 2), "infeasible: at most 2 experts on each of 3 GPUs are 6, but a layer has 8"),
    ],
)
def test_bounds_that_nothing_meets_are_named(within, message):
    with pytest.raises(ValueError, match=message):
        clusters.cluster_experts(np.ones((2, 8), np.int64), 3, within)
    with pytest.raises(ValueError, match=message):
        baselines.greedy(trace.Profile(np.ones((2, 8), np.int64), None, 1), 3, within)


def test_more_gpus_than_experts_are_refused(counted):
    for place in (baselines.contiguous, baselines.round_robin, baselines.greedy, baselines.eplb, baselines.exflow):
        with pytest.raises(ValueError, match="num_gpus is 17, but there are only 16 experts"):
            place(counted, 17)
    with pytest.raises(ValueError, match="num_gpus is 17, but there are only 16 experts"):
        ilp.moetuner(counted, cluster(17))


# ILP 2 ----------------------------------------------------------------------------------------------------------------

TWO_NODES = np.where(np.arange(4)[:, None] // 2 == np.arange(4) // 2, 9.0, 1.0)
LOPSIDED = np.random.default_rng(9).random((4, 4)) + 0.3


@pytest.mark.parametrize("solver", INCLUDED)
@pytest.mark.parametrize("bandwidth", [np.ones((4, 4)), TWO_NODES], ids=["one node", "two nodes"])
def test_the_gpu_assignment_is_as_fast_as_any(solver, bandwidth):
    C, cost, sizes = random_flows(5, 4, seed=1), cluster(4, bandwidth).cost, np.full((5, 4), 2)
    found = gpu_assignment.assign_gpus(C, cost, sizes, solver)
    assert found.objective == pytest.approx(exact.best_gpu_assignment(C, cost, sizes))
    assert found.gap == pytest.approx(0, abs=1e-6)
    assert (np.sort(found.gpus, axis=1) == np.arange(4)).all()


@pytest.mark.parametrize("bandwidth", [np.ones((3, 3)), TWO_NODES[1:, 1:], LOPSIDED[1:, 1:]], ids=["1", "2", "any"])
@pytest.mark.parametrize("seed", range(3))
def test_gpus_of_uneven_clusters_host_as_many_experts_everywhere(bandwidth, seed):
    rng = np.random.default_rng(seed)
    C, cost = random_flows(6, 3, seed), cluster(3, bandwidth).cost
    sizes = np.array([rng.permutation([1, 2, 3]) for _ in range(6)])
    found = gpu_assignment.assign_gpus(C, cost, sizes)
    assert np.bincount(found.gpus.ravel(), sizes.ravel()).tolist() == [12, 12, 12]
    best = exact.best_gpu_assignment(C, cost, sizes)
    assert found.objective == pytest.approx(best, rel=1e-3)
    assert found.bound <= best + 1e-6


def test_five_gpus_agree_with_the_dynamic_program():
    C, cost, sizes = random_flows(7, 5, seed=4), cluster(5).cost, np.full((7, 5), 2)
    found = gpu_assignment.assign_gpus(C, cost, sizes)
    assert found.objective == pytest.approx(exact.best_gpu_assignment(C, cost, sizes)) and found.gap == 0


def test_an_assignment_that_cannot_be_even_is_refused():
    with pytest.raises(ValueError, match=r"infeasible: no assignment .* 4 to 4 experts .*ILP 2's constraint on memory"):
        gpu_assignment.assign_gpus(np.ones((1, 2, 2), np.int64), cluster(2).cost, np.array([[1, 3], [0, 4]]))
    with pytest.raises(ValueError, match="infeasible"):
        exact.best_gpu_assignment(np.ones((1, 2, 2)), cluster(2).cost, np.array([[1, 3], [0, 4]]))


def test_beyond_five_gpus_the_bound_still_holds():
    C, sizes = random_flows(4, 6, seed=7), np.full((4, 6), 1)
    found = gpu_assignment.assign_gpus(C, cluster(6).cost, sizes)
    assert found.gap == 0
    halves = gpu_assignment.assign_gpus(
        C, cluster(6, 1 + 3.0 * (np.arange(6)[:, None] // 3 == np.arange(6) // 3)).cost, sizes, time_limit=1
    )
    assert found.objective <= halves.bound + 1e-6 <= halves.objective + 1e-6


def test_the_map_is_both_programs(counted):
    on = cluster(4)
    found = ilp.moetuner(counted, on)
    C = simulate.transitions(counted, found.placement.shares())
    off_diagonal = C * (1 - np.eye(4))
    assert off_diagonal.max(axis=(1, 2)).sum() == pytest.approx(found.gpus.objective)
    np.testing.assert_array_equal(loads(counted, found.placement).max(axis=1), found.clusters.most)
    assert found.gap < 1e-3 and found.placement.model == counted.model


@pytest.mark.parametrize(
    "routing",
    [
        lambda: trace_or_synthetic(None, "32x8x2"),  # docs/results/place_32x8.json
        lambda: synthetic_trace(4096, 32, 8, 2, skew=0.3, dependency=0.6, seed=1),
    ],
    ids=["skewed", "nearly even"],
)
def test_both_programs_are_solved_to_the_optimum_for_32_layers_of_8_experts(routing):
    found = ilp.moetuner(trace.profile(routing()), cluster(4), time_limit=30)
    assert found.clusters.proven and found.clusters.gap == 0
    assert found.gpus.gap == 0 and found.gap == 0


# Baselines ------------------------------------------------------------------------------------------------------------


def test_baselines_by_hand():
    P = np.array([[9, 1, 1, 5, 4, 4]])
    counted = trace.Profile(P, np.zeros((0, 6, 6), np.int64), 24)
    assert baselines.contiguous(counted, 2).assignment.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert baselines.contiguous(counted, 4).assignment.tolist() == [[0, 0, 1, 2, 2, 3]]
    assert baselines.round_robin(counted, 4).assignment.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert baselines.greedy(counted, 2).assignment.tolist() == [[0, 1, 0, 1, 1, 0]]
    assert baselines.greedy(counted, 2, printed(6)).assignment.tolist() == [[0, 1, 1, 1, 1, 0]]
    assert baselines.greedy(counted, 2, Bounds(1, 5)).sizes().min() >= 1


def test_packing_keeps_its_bounds():
    load = np.array([100, 1, 1, 1, 1, 1, 1, 1])
    assert sorted(np.bincount(baselines.pack(load, 3, Bounds(2, 5)), minlength=3)) == [2, 3, 3]
    assert np.bincount(baselines.pack(np.zeros(7), 7, Bounds(1, 7))).tolist() == [1] * 7


def test_eplb_replicates_the_hot_and_packs_the_rest(counted):
    assert baselines.replicate(np.array([90, 20, 10]), 6).tolist() == [4, 1, 1]
    packed = baselines.eplb(counted, 4)
    np.testing.assert_array_equal(packed, baselines.greedy(counted, 4).shares())  # replicas = E: packing alone
    shares = baselines.eplb(counted, 4, replicas=24)
    np.testing.assert_allclose(shares.sum(axis=2), 1)
    even = [simulate.balance(simulate.loads(counted, s)).mean() for s in (packed, shares)]
    assert even[1] < even[0]
    with pytest.raises(ValueError, match="replicas is 18, but it must be a multiple of num_gpus = 4"):
        baselines.eplb(counted, 4, replicas=18)


def test_eplb_keeps_groups_on_their_node(counted):
    shares = baselines.eplb(counted, 4, num_nodes=2, num_groups=4)
    on_node_0 = shares[:, :, :2].sum(axis=2)
    groups = on_node_0.reshape(5, 4, 4)
    assert (groups == groups[:, :, :1]).all() and (groups[:, :, 0].sum(axis=1) == 2).all()


def test_eplb_counts_all_as_one_node_where_groups_do_not_divide():
    odd = trace.profile(synthetic_trace(500, 2, 7, 2))
    np.testing.assert_array_equal(baselines.eplb(odd, 4, 8, num_nodes=2), baselines.eplb(odd, 4, 8))
    with pytest.raises(ValueError, match="num_gpus is 4, but it must be a multiple of num_nodes = 3"):
        baselines.eplb(odd, 4, 8, num_nodes=3)


def test_exflow_finds_the_experts_that_follow_each_other():
    led = trace.profile(synthetic_trace(2000, 4, 8, 1, skew=0, dependency=1))
    found = baselines.exflow(led, 4, steps=200_000)
    assert crossings(led, found) == 0
    assert (found.sizes() == 2).all()
    assert crossings(led, baselines.contiguous(led, 4)) > 0.3


# Joint ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [None, TWO_NODES * 1e10], ids=["one node", "two nodes"])
def test_joint_is_under_its_limit_and_no_slower_than_any_baseline(alike, topology):
    on = cluster(4, topology)
    found = joint.joint(alike, on, limit=1.1, steps=200_000)
    others = joint.baseline_placements(alike, 4, steps=200_000).values()
    assert step_ms(alike, found, on) <= min(step_ms(alike, other, on) for other in others)
    even = simulate.balance(loads(alike, found))
    packed = simulate.balance(loads(alike, baselines.greedy(alike, 4)))
    assert (even <= np.maximum(packed, 1.1) + 1e-9).all()
    assert crossings(alike, found) < crossings(alike, baselines.greedy(alike, 4)) - 0.05


def test_joint_returns_a_faster_baselines_placement(counted, monkeypatch):
    slow = cluster(4, SLOW)  # exflow has the fewest transfers
    monkeypatch.setattr(joint, "search", lambda profile, on, *rest: baselines.round_robin(profile, 4))
    found = joint.joint(counted, slow, steps=100_000)
    others = joint.baseline_placements(counted, 4, steps=100_000)
    best = min(step_ms(counted, other, slow) for other in others.values())
    assert step_ms(counted, found, slow) == best


def test_joint_gives_a_faster_placement_that_it_is_shown(counted, monkeypatch):
    slow = cluster(4, SLOW)
    shown = joint.search(counted, slow, limit=4.0, steps=1_000_000)
    monkeypatch.setattr(joint, "search", lambda profile, on, *rest: baselines.round_robin(profile, 4))
    found = joint.joint(counted, slow, steps=2_000, others=[baselines.contiguous(counted, 4), shown])
    np.testing.assert_array_equal(found.assignment, shown.assignment)
    with pytest.raises(ValueError, match="the map is for 1 layers of 8 experts, but the model has"):
        joint.joint(counted, slow, steps=2_000, others=[maps.Placement(np.arange(8, dtype=np.int32)[None] % 4, 4)])


def test_joint_lets_the_slowest_pair_count_for_more_where_a_baseline_is_faster(counted, monkeypatch):
    on, tails = cluster(4, SLOW), []
    fast = joint.search(counted, on, limit=4.0, steps=1_000_000)

    def search(profile, on, limit, bounds, steps, seed, tail, deadline):
        tails.append(tail)
        return baselines.round_robin(profile, 4) if tail < joint.TAILS[1] else fast

    monkeypatch.setattr(joint, "search", search)
    assert joint.joint(counted, on, steps=2_000) is fast
    assert tails == list(joint.TAILS[:2])


def test_joint_is_as_fast_as_every_method_that_places_each_expert_once(alike):
    on, options = cluster(4), methods.Options(steps=100_000, time_limit=5.0, solver="highs")
    fitted = {name: fit(alike, on, options) for name, fit in methods.METHODS.items()}
    times = {
        name: simulate.step(alike, one.shares, on).ms
        for name, one in fitted.items()
        if isinstance(one.placement, maps.Placement)
    }
    assert times.keys() == methods.METHODS.keys() - {"eplb-replicas", "eplb-nearest", "dedup-copies"}
    assert times["joint"] == min(times.values())


def test_a_limit_below_the_mean_is_refused(counted):
    with pytest.raises(ValueError, match=r"limit is 0\.9, but no load can be more even than 1"):
        joint.joint(counted, cluster(4), limit=0.9)


def test_annealing_is_seeded_keeps_the_numbers_of_experts_and_never_worsens(counted):
    start, cost = baselines.greedy(counted, 4), cluster(4).cost
    found = [anneal(counted, start, cost, 1.1, tail=0, steps=50_000, seed=seed).assignment for seed in (1, 1, 2)]
    assert (found[0] == found[1]).all() and (found[0] != found[2]).any()
    none = anneal(counted, start, cost, 1.1, steps=0)
    np.testing.assert_array_equal(none.assignment, start.assignment)
    assert crossings(counted, maps.Placement(found[0], 4)) < crossings(counted, start)


def test_a_relabelling_keeps_the_books_and_the_loads(counted):
    """What is carried along equals what is counted afresh, on links of different speeds."""
    start, cost, tail = baselines.greedy(counted, 4), cluster(4, LOPSIDED).cost, 0.3
    a, T = start.assignment.copy(), loads(counted, start)
    to, came, C = annealing._flows(a, counted.R.astype(float), 4)
    times = np.array([annealing._time(flow, cost, tail) for flow in C])
    before, change = times.sum(), 0.0
    for _ in range(50):
        change += annealing._relabel(a, T, to, came, C, times, cost, tail, temperature=np.inf)
    moved = maps.Placement(a, 4)
    assert (a[1:] != start.assignment[1:]).any() and (a[0] == start.assignment[0]).all()
    np.testing.assert_array_equal(T, loads(counted, moved))
    np.testing.assert_array_equal(np.sort(T), np.sort(loads(counted, start)))
    for carried, counted_afresh in zip((to, came, C), annealing._flows(a, counted.R.astype(float), 4), strict=True):
        np.testing.assert_array_equal(carried, counted_afresh)
    np.testing.assert_allclose(times, [annealing._time(flow, cost, tail) for flow in C])
    assert before + change == pytest.approx(times.sum()) and change != 0


# The step's model -----------------------------------------------------------------------------------------------------


def test_a_step_by_hand():
    P = np.array([[30, 10, 0, 0], [10, 10, 10, 10]])
    R = np.zeros((1, 4, 4), np.int64)
    R[0, 0] = [10, 0, 10, 10]
    R[0, 1] = [0, 10, 0, 0]
    counted = trace.Profile(P, R, 40)
    placed = maps.Placement(np.array([[0, 0, 1, 1], [0, 1, 0, 1]], np.int32), 2)
    on = simulate.Cluster(np.array([[0.0, 100.0], [50.0, 0.0]]), row_bytes=10, token_s=0.5)
    T, C = loads(counted, placed), simulate.transitions(counted, placed.shares())
    assert T.tolist() == [[40, 0], [20, 20]] and C.tolist() == [[[20, 20], [0, 0]]]
    assert simulate.balance(T).tolist() == [2, 1] and simulate.cross_share(C) == 0.5
    found = simulate.step(counted, placed.shares(), on, tokens=80)
    np.testing.assert_allclose(found.compute_s, [40, 20])
    np.testing.assert_allclose(found.transfer_s, [2 * 20 * 10 / 100])
    assert found.ms == pytest.approx(64_000)


@pytest.mark.parametrize(
    ("bandwidth", "message"),
    [
        (np.ones((2, 3)), r"bandwidth has shape \(2, 3\), but it must be square"),
        (np.array([[1.0, 0.0], [1.0, 1.0]]), r"bandwidth\[0, 1\] is 0\.0, but it must be above 0"),
        (np.array([[1.0, 1.0], [np.nan, 1.0]]), r"bandwidth\[1, 0\] is nan, but it must be above 0"),
        (np.array([[1.0, -2.0], [1.0, 1.0]]), r"bandwidth\[0, 1\] is -2\.0, but it must be above 0"),
        (np.array([[1.0, 1.0], [np.inf, 1.0]]), r"bandwidth\[1, 0\] is inf, but it must be above 0: 0.001 to 1e\+15"),
        (np.array([[1.0, 1e-300], [1.0, 1.0]]), r"bandwidth\[0, 1\] is 1e-300, but it must be above 0: 0.001 to"),
        (np.array([[1.0, 1e9], [999.0, 1.0]]), r"bandwidth\[1, 0\] is 999\.0, but it must be at least 1000 bytes/s"),
    ],
)
def test_a_wrong_bandwidth_is_refused(bandwidth, message):
    with pytest.raises(ValueError, match=message):
        simulate.Cluster(bandwidth, 10, 1e-9)


@pytest.mark.filterwarnings("error")
def test_a_gpus_link_to_itself_is_not_looked_at(counted):
    bandwidth = np.full((4, 4), 2.0)
    for itself in (np.nan, np.inf, 0.0, -1.0):
        np.fill_diagonal(bandwidth, itself)
        assert (cluster(4, bandwidth).cost == 1 - np.eye(4)).all()
        assert np.isfinite(step_ms(counted, baselines.greedy(counted, 4), cluster(4, bandwidth)))


@pytest.mark.parametrize("solver", INCLUDED)
def test_gpu_assignment_on_links_as_different_as_may_be(solver):
    """Times as whole numbers would leave what solvers count with."""
    bandwidth = np.full((4, 4), 1e9)
    bandwidth[0, 1] = 3e3
    C, cost = 10_000_000 * random_flows(4, 4, seed=2), cluster(4, bandwidth).cost
    found = gpu_assignment.assign_gpus(C, cost, np.full((4, 4), 2), solver, time_limit=20)
    best = exact.best_gpu_assignment(C, cost, np.full((4, 4), 2))
    assert found.bound <= best * (1 + 1e-5) and found.objective == pytest.approx(best, rel=1e-5)


def test_bandwidths_of_another_size_are_refused(counted):
    with pytest.raises(ValueError, match="bandwidth is of 3 GPUs, but 4 are placed on"):
        simulate.step(counted, baselines.greedy(counted, 4).shares(), cluster(3))


@pytest.mark.parametrize(
    ("near", "num_nodes"),
    [
        ([[0, 1, 2, 3]], 1),
        ([[0, 1], [2, 3]], 2),
        ([[0], [1], [2], [3]], 1),  # all links alike
        ([[0], [1, 2, 3]], 1),  # uneven
        ([[0, 2], [1, 3]], 1),  # no neighbours
        ([[0, 2, 3], [1, 2, 3]], 1),  # one pair is slower
    ],
)
def test_nodes_are_equal_groups_of_neighbours_or_one(near, num_nodes):
    bandwidth = np.ones((4, 4))
    for group in near:
        bandwidth[np.ix_(group, group)] = 3
    assert cluster(4, bandwidth).num_nodes == num_nodes


def test_topologies_by_name_and_by_file(tmp_path):
    node = simulate.cluster("nvlink", 4, d=100, h=10)
    assert node.num_nodes == 1 and node.row_bytes == 200 and (node.bandwidth == 150e9).all()
    nodes = simulate.cluster("two-nodes", 8, d=100, h=10)
    assert nodes.num_nodes == 2 and nodes.cost.max() == pytest.approx(12) and nodes.bandwidth[0, 3] == 150e9
    measured = tmp_path / "links.json"
    measured.write_text('{"bandwidth": [[0, 5], [6, 0]], "token_s": 0.25}')
    found = simulate.cluster(str(measured), 2, d=100, h=10)
    assert (found.token_s, found.bandwidth.tolist()) == (0.25, [[0, 5], [6, 0]])
    with pytest.raises(ValueError, match="bandwidth is of 2 GPUs, but 3 are placed on"):
        simulate.cluster(str(measured), 3, 100, 10)
    for text in ("5", "null", "[1, 2]", "[[0, 5], [6]]"):
        measured.write_text(f'{{"bandwidth": {text}}}')
        with pytest.raises(ValueError, match="must be a matrix"):
            simulate.cluster(str(measured), 2, 100, 10)
    for value, said in (("true", r"True \(bool\)"), ('"5"', r"'5' \(str\)"), ("null", r"None \(NoneType\)")):
        measured.write_text(f'{{"bandwidth": [[0, {value}], [6, 0]]}}')
        with pytest.raises(TypeError, match=rf"bandwidth\[0, 1\] is {said}, but it must be a number"):
            simulate.cluster(str(measured), 2, 100, 10)
    measured.write_text("{")
    with pytest.raises(ValueError, match=r"links\.json is not JSON"):
        simulate.cluster(str(measured), 2, 100, 10)
    with pytest.raises(ValueError, match=r"unknown topology 'nvlnk'\. Did you mean 'nvlink'"):
        simulate.cluster("nvlnk", 4, 100, 10)
    with pytest.raises(ValueError, match="two nodes need an even number"):
        simulate.cluster("two-nodes", 3, 100, 10)


def test_the_model_scales_on_paper():
    rng = np.random.default_rng(0)
    P = rng.integers(1, 100, (58, 256))
    R = rng.integers(0, 9, (57, 256, 256))
    large = trace.Profile(P, R, 4096)
    on = simulate.cluster("two-nodes", 64, d=7168, h=2048)
    packed, first = baselines.greedy(large, 64), baselines.contiguous(large, 64)
    assert step_ms(large, packed, on) < step_ms(large, first, on)


# The same map again ---------------------------------------------------------------------------------------------------


def uneven(G, E=24):
    """A layer's loads that packing does not balance, and the model of its clusters."""
    p = np.sort(np.round(1e6 * np.random.default_rng(3).random(E) ** 3).astype(np.int64))[::-1]
    layer = clusters._Layer(p, G, Bounds(E // G, E // G), 0)
    layer.model.minimize(layer.deviation)
    return layer


@pytest.mark.parametrize("solver_name", INCLUDED)
def test_a_solver_ends_by_its_work_and_not_by_the_clock(solver_name):
    """Twice the same, beside a busy thread too, and nothing says that the time limit ended it."""
    layer, found, busy = uneven(4), [], threading.Event()
    for beside in (False, True):
        worker = threading.Thread(target=lambda: [None for _ in iter(busy.is_set, True)])
        busy.clear()
        if beside:
            worker.start()
        deadline = Deadline(1000)
        solution = solver.minimise(layer.model, solver_name, 0.3, deadline, seed=5)
        busy.set()
        if beside:
            worker.join()
        assert not deadline.cut
        found.append(solution and (layer.clusters(solution.values).tolist(), solution.bound))
    assert found[0] == found[1]


@pytest.mark.parametrize("solver_name", INCLUDED)
def test_a_solver_that_the_clock_ends_says_so(solver_name):
    layer, deadline = uneven(8, 64), Deadline(0.3)
    solver.minimise(layer.model, solver_name, 1e6, deadline)
    assert deadline.cut


def test_a_solver_is_given_its_seed_and_its_work(monkeypatch):
    given = []
    monkeypatch.setattr(solver, "_solve", lambda model, name, parameters, *of: given.append(parameters) or exit())
    for name in INCLUDED:
        with pytest.raises(SystemExit):
            solver.minimise(solver.new_model(), name, 7.0, Deadline(), seed=2**31 + 5)
    assert [one.random_seed for one in given] == [5] * len(INCLUDED)
    by_name = dict(zip(INCLUDED, given, strict=True))
    assert by_name["cp_sat"].cp_sat.max_deterministic_time == pytest.approx(7 * solver.CP_SAT_WORK)
    assert by_name["cp_sat"].cp_sat.interleave_search and by_name["cp_sat"].threads == solver.WORKERS
    assert by_name["highs"].node_limit == by_name["scip"].node_limit == 7 * solver.NODES


def test_a_share_of_the_time_that_ends_a_search_is_remembered():
    deadline = Deadline(1000)
    assert not deadline.over() and not deadline.cut
    assert deadline.over(deadline.at - 2000) and deadline.cut and not deadline.over()
