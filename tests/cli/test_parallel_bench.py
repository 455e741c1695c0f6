"""What is measured of placements on ranks, and what the model says of the same rows."""

import json
import os
import re
import sys
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist

from moeblaze_ref.cli import parallel_bench
from moeblaze_ref.core import traces
from moeblaze_ref.parallel import measure
from moeblaze_ref.parallel.costs import Costs, rows_of, rows_sent, travel_seconds
from moeblaze_ref.parallel.local import run
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.placement import annealing, baselines, maps
from moeblaze_ref.placement.maps import Placement
from moeblaze_ref.placement.simulate import Cluster, step
from moeblaze_ref.placement.synthetic import synthetic_trace
from moeblaze_ref.placement.trace import profile, split

RANKS, TOKENS, STEPS = 2, 8, 2
TRACE = synthetic_trace(200, 2, 6, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A trace, a map for it, and a map for another model."""
    folder = tmp_path_factory.mktemp("bench")
    traces.save(folder / "trace.npz", TRACE)
    fitted = baselines.greedy(profile(split(TRACE, 0)[0]), RANKS)
    maps.save(folder / "greedy.npz", fitted)
    held = fitted.shares() > 0
    held[:, 2] = True
    maps.save(folder / "copies.npz", maps.Copies(held))
    maps.save(folder / "other.npz", Placement(fitted.assignment, RANKS, "another"))
    return folder


def torchrun(folder, *arguments):
    """What the command wrote, on all ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options = ["--trace", "trace.npz", "--preset", "toy", "--tokens", str(TOKENS), "--steps", str(STEPS)]
    command += ["-m", "moeblaze_ref.cli.parallel_bench", *options, *arguments]
    environment = os.environ | {"COLUMNS": "120"}
    return processes.run(command, cwd=folder, env=environment)


def test_placements_are_measured_beside_their_model(folder):
    ended = torchrun(
        folder, "--map", "greedy.npz", "--map", "contiguous", "--map", "copies.npz", "--record", "found.json"
    )
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"greedy .*%\)", ended.stdout) and re.search(r"contiguous .*%\)", ended.stdout)
    found = json.loads((folder / "found.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["greedy", "contiguous", "copies"]
    assert {"device", "versions", "commit"} <= found.keys()
    on = Cluster(np.array(found["bandwidth"]), 4 * found["d"], found["token_s"])
    costs = Costs(on, found["exchange_s"], found["rest_s"])
    windows = parallel_bench.batches(split(TRACE, 0)[1], RANKS * TOKENS, STEPS)
    greedy, copies = (maps.load(folder / f"{name}.npz") for name in ("greedy", "copies"))
    contiguous = baselines.contiguous(profile(TRACE), RANKS)
    for row, placement in zip(found["rows"], (greedy, contiguous, copies), strict=True):
        assert min(row["experts_ms"] + row["exchange_ms"]) > 0
        assert row["step_ms"] <= row["step_p99_ms"]
        np.testing.assert_allclose(row["modelled_experts_ms"], 1e3 * costs.expert_seconds(placement, windows))
        np.testing.assert_allclose(row["modelled_exchange_ms"], 1e3 * costs.exchange_seconds(placement, windows))
        parts = sum(row["modelled_experts_ms"]) + sum(row["modelled_exchange_ms"])
        assert row["modelled_step_ms"] == pytest.approx(parts + 1e3 * found["rest_s"] * placement.layers)
    replayed = profile(traces.RoutingTrace(np.concatenate(windows), TRACE.num_experts))
    for row, placement in zip(found["rows"][:2], (greedy, contiguous), strict=True):
        assert row["simulated_step_ms"] == pytest.approx(step(replayed, placement.shares(), on, RANKS * TOKENS).ms)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("other.npz", RANKS, "the map is for another, but the model is synthetic-2x6"),
        ("eplb-replicas", RANKS, "replicates experts for tokens that choose at random"),
        ("gready", RANKS, "Did you mean 'greedy'"),
        ("greedy.npz", 3, "greedy.npz is for 2 GPUs, but there are 3 ranks"),
    ],
)
def test_wrong_maps_are_refused(folder, name, ranks, message, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        parallel_bench.placement_of(name, TRACE, TRACE, Cluster(np.ones((ranks, ranks)), 8, 1.0))


def maps_of_a_solver():
    """The maps that this rank gets where every solution is another, and what it hears of a name that is none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_bench, "placement_of", lambda name, *_: Placement(rows_of_rank(), RANKS, name))
        found = parallel_bench.placements_of(["one", "other"], TRACE, TRACE, None, Ranks())
    with pytest.raises(ValueError, match="Did you mean 'greedy'") as refused:
        parallel_bench.placements_of(
            ["greedy", "gready"], TRACE, TRACE, Cluster(np.ones((RANKS, RANKS)), 8, 1.0), Ranks()
        )
    return [(placement.model, placement.assignment.tolist()) for placement in found], str(refused.value)


def rows_of_rank():
    return (np.arange(12, dtype=np.int32).reshape(2, 6) + dist.get_rank()) % RANKS


def test_all_ranks_have_the_maps_of_rank_0():
    first, second = run(maps_of_a_solver, RANKS)
    assert first == second and [name for name, _ in first[0]] == ["one", "other"]
    assert first[0][0][1] == [[0, 1] * 3] * 2


def test_the_search_lets_the_thread_of_a_watch_go_on():
    assert annealing._anneal.targetoptions["nogil"]


def test_rows_that_travel_are_counted_once_a_token_and_rank():
    placement = Placement(np.array([[0, 1, 1, 2, 0], [2, 2, 1, 0, 0]], np.int32), 3)
    window = synthetic_trace(12, 2, 5, 3, seed=4).topk
    expected = np.zeros((2, 3, 3))
    for token in range(12):
        for layer in range(2):
            for owner in {placement.assignment[layer, expert] for expert in window[token, layer]}:
                expected[layer, token // 4, owner] += 1
    np.testing.assert_array_equal(rows_sent(placement, window), expected)
    on = Cluster(np.array([[1.0, 2.0, 4.0], [8.0, 1.0, 2.0], [4.0, 2.0, 1.0]]), 8, 1.0)
    seconds = np.where(np.eye(3), 0, expected * 8 / on.bandwidth)  # (layers, G, G)
    slowest = 2 * seconds.max(axis=(1, 2))
    np.testing.assert_allclose(travel_seconds(placement, window, on), slowest)
    first, second = window[:6], window[6:]
    mean = (travel_seconds(placement, first, on) + travel_seconds(placement, second, on)) / 2
    np.testing.assert_allclose(Costs(on, 0.5, 0.0).exchange_seconds(placement, [first, second]), 0.5 + mean)


def test_rows_to_copies_are_those_of_the_rule():
    held = np.zeros((1, 4, 3), bool)
    held[0, [0, 1, 2, 3, 3, 3], [0, 1, 2, 0, 1, 2]] = True  # expert 3 is everywhere
    window = np.array([[[3]], [[3]], [[3]], [[0]], [[3]], [[2]]])  # two tokens of each GPU
    copies = maps.Copies(held)
    np.testing.assert_array_equal(rows_of(copies, window), [[3, 1, 2]])
    np.testing.assert_array_equal(rows_sent(copies, window), [[[2, 0, 0], [1, 1, 0], [0, 0, 2]]])
    placement = Placement(np.array([[0, 1, 1, 2, 0], [2, 2, 1, 0, 0]], np.int32), 3)
    window = synthetic_trace(12, 2, 5, 3, seed=4).topk
    np.testing.assert_array_equal(rows_sent(maps.Copies.of(placement), window), rows_sent(placement, window))


def test_experts_are_done_when_the_fullest_gpu_of_each_window_is():
    placement = Placement(np.array([[0, 0, 1]], np.int32), 2)
    left, right = np.array([[[0, 1]], [[0, 1]]]), np.array([[[0, 2]], [[2, 1]]])  # rows of the GPUs: 4, 0 and 2, 2
    np.testing.assert_array_equal(rows_of(placement, left), [[4, 0]])
    np.testing.assert_array_equal(rows_of(placement, right), [[2, 2]])
    costs = Costs(Cluster(np.ones((2, 2)), 8, 10.0), 0.0, 7.0)
    np.testing.assert_allclose(costs.expert_seconds(placement, [left, right]), [10 * (4 + 2) / 2])
    travel = costs.exchange_seconds(placement, [left, right]).sum()
    assert costs.step_seconds(placement, [left, right]) == pytest.approx(30 + travel + 7)


def test_windows_begin_again_and_are_never_short():
    windows = parallel_bench.batches(TRACE, 64, 5)
    assert [window.shape for window in windows] == [(64, 2, 2)] * 5
    np.testing.assert_array_equal(windows[3], windows[0])
    with pytest.raises(ValueError, match="a step has 201 tokens, but the trace only 200"):
        parallel_bench.batches(TRACE, 201, 1)


def test_maps_are_measured_interleaved(monkeypatch):
    order = []

    class Pretended:
        """A model whose steps take longer each time that one is made."""

        def __init__(self, placement, *sizes):
            order.append(placement)

        def times(self, x, steps):
            return np.full((1, len(steps)), float(len(order))), np.zeros((1, len(steps), 2, 3))

    monkeypatch.setattr(parallel_bench, "Model", Pretended)
    ranks = SimpleNamespace(size=1, rank=0, clock=measure.Host())
    first, second = parallel_bench.replay(["one", "other"], [TRACE.topk[:8]] * 9, 4, 4, ranks, torch.float32)
    assert order == ["one", "other"] * parallel_bench.TURNS
    assert first.whole.tolist() == [[1.0] * 3 + [3.0] * 2 + [5.0] * 2 + [7.0] * 2]
    assert second.parts.shape == (1, 9, 2, 3)
