"""`moeblaze place`: every method on every split, as a table, as JSON, as a map, as pictures, as a record."""

import functools
import inspect
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from moeblaze_ref.cli.app import app
from moeblaze_ref.core import traces
from moeblaze_ref.placement import (
    baselines,
    copies,
    gpu_assignment,
    joint,
    maps,
    methods,
    plots,
    simulate,
    synthetic,
    trace,
    traffic,
)
from moeblaze_ref.placement.synthetic import synthetic_trace

KEYS = ["method", "balance_mean", "balance_worst", "cross_share", "step_ms", "solve_s", "gap", "load_gap"]
KEYS += ["distinct_gpus", "distinct_nodes", "runtime_ms", "batch_256", "batch_1024", "batch_4096", "batch_16384", "cut"]
KEYS += ["skipped", "status"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A trace of 4 layers and 8 experts in 6 sequences."""
    path = tmp_path_factory.mktemp("traces") / "trace.npz"
    traces.save(path, synthetic_trace(1200, 4, 8, 2, skew=0.8, dependency=0.6, sequences=6))
    return path


@pytest.fixture(autouse=True)
def short_search(monkeypatch):
    """Few steps of annealing: what is tested here is the way around it."""
    monkeypatch.setattr(methods, "Options", functools.partial(methods.Options, steps=20_000, swaps=800, copy_steps=50))


def place(*arguments):
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["place", *map(str, arguments)])


def placed(*arguments):
    """What is printed by a command that succeeds."""
    result = place(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments):
    """The error of a command that fails, on one line."""
    result = place(*arguments)
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_every_method_is_a_row_of_json(file):
    rows = json.loads(placed("--trace", file, "--gpus", 4, "--method", "all", "--splits", 3, "--json"))
    assert [row["method"] for row in rows] == list(methods.METHODS)
    assert all(list(row) == KEYS for row in rows)
    by_name = {row["method"]: row for row in rows}
    assert by_name["moetuner"]["gap"] < 0.02 and by_name["greedy"]["gap"] is None
    assert 1 <= by_name["greedy"]["balance_mean"] < by_name["contiguous"]["balance_mean"]
    assert by_name["moetuner"]["status"] == "solved" and by_name["moetuner"]["skipped"] == ""
    assert {by_name[name]["status"] for name in by_name if name != "moetuner"} == {"heuristic"}
    assert by_name["moetuner"]["cross_share"] < 1 and by_name["joint"]["step_ms"] > 0


def test_rows_are_medians_of_halves_that_were_held_out(file):
    routed = traces.load(file)
    on = simulate.cluster("nvlink", 2, 64, 64)
    trials = [trial for job in methods.jobs(routed, on, ("greedy",), splits=3) for trial in job()]
    assert [trial.seed for trial in trials] == [0, 1, 2]
    for trial in trials:
        fit, rest = map(trace.profile, trace.split(routed, trial.seed))
        placed = baselines.greedy(fit, 2)
        np.testing.assert_array_equal(trial.fitted.placement.assignment, placed.assignment)
        np.testing.assert_array_equal(trial.load, simulate.loads(rest, placed.shares()))
        assert trial.step_ms == simulate.step(rest, placed.shares(), on).ms
        assert trial.step_ms == pytest.approx(trial.token_tail_ms + trial.transfer_tail_ms)
    (row,) = methods.medians(trials)
    assert row.balance_mean == sorted(trial.balance_mean for trial in trials)[1]


def test_the_table_the_map_the_pictures_and_the_record(file, tmp_path):
    out, record, folder = tmp_path / "new" / "map.npz", tmp_path / "record.json", tmp_path / "plots"
    chosen = ("--method", "contiguous,greedy", "--method", "joint", "--splits", 2)
    said = placed("--trace", file, "--gpus", 2, *chosen, "--out", out, "--record", record, "--plots", folder)
    assert "greedy" in said and "medians over 2 splits" in " ".join(said.split())
    found, routed = maps.load(out), traces.load(file)
    found.check_fits(4, 8, routed.model)
    written = json.loads(record.read_text())
    assert [split["seed"] for split in written["splits"] if split["method"] == "joint"] == [0, 1]
    assert written["model"] == routed.model and "versions" in written
    assert (written["solver"], written["time_limit"], written["limit"]) == ("cp_sat", 180, 1.02)
    assert [point["limit"] for point in written["curve"]] == list(joint.LIMITS)
    assert {point["seed"] for point in written["curve"]} == {0}
    assert {path.name for path in folder.iterdir()} == {"load_by_gpu.png", "load_against_crossings.png"}


def test_the_objective_says_which_step_the_map_is_fastest_in(file, tmp_path):
    chosen = ("--trace", file, "--gpus", 2, "--method", "joint,dedup", "--json")
    for objective, name in methods.OBJECTIVES.items():
        rows = json.loads(placed(*chosen, "--objective", objective, "--out", tmp_path / "map.npz", "--force"))
        best = min(rows, key=lambda row: row[name])
        assert simulate.cross_share(
            simulate.transitions(
                trace.profile(trace.split(traces.load(file), 0)[1]), maps.load(tmp_path / "map.npz").shares()
            )
        ) == pytest.approx(best["cross_share"])
    assert "unknown objective 'hop'" in refused(*chosen, "--objective", "hop")


def test_a_budget_gives_a_map_with_copies_and_is_recorded(file, tmp_path):
    out, record = tmp_path / "map.npz", tmp_path / "record.json"
    chosen = ("--trace", file, "--gpus", 4, "--topology", "two-nodes", "--out", out, "--force", "--json")
    rows = json.loads(placed(*chosen, "--method", "dedup-copies", "--budget", 3, "--record", record))
    found = maps.load(out)
    assert isinstance(found, maps.Copies) and (found.sizes() == 3).all() and found.num_nodes == 2
    written = json.loads(record.read_text())
    assert (written["budget"], written["nodes"], written["groups"]) == (3, None, None)
    rest = trace.split(traces.load(file), 0)[1]
    chosen_gpus = copies.routes(rest, found)
    assert rows[0]["distinct_nodes"] == traffic.distinct(chosen_gpus, chosen_gpus.shares(), 2)[1]
    placed(*chosen, "--method", "greedy,dedup-copies")
    assert isinstance(maps.load(out), maps.Placement)  # without a budget, of maps without copies


def test_eplb_takes_groups_and_nodes(file):
    chosen = ("--trace", file, "--gpus", 4, "--method", "eplb-replicas", "--json")
    alone, grouped = (
        json.loads(placed(*chosen, *options))[0] for options in ((), ("--nodes", 2, "--groups", 2, "--budget", 3))
    )
    assert grouped["balance_mean"] > alone["balance_mean"]  # a group of four experts stays on one node


@pytest.mark.parametrize("method", [name for name in methods.METHODS if name != "eplb-replicas"])
def test_the_same_command_and_seed_write_the_same_file(file, tmp_path, method):
    def written(name, seed):
        path = tmp_path / f"{name}.npz"
        said = place("--trace", file, "--gpus", 4, "--method", method, "--seed", seed, "--out", path)
        assert said.exit_code == 0 and "another map" not in said.stderr
        return path.read_bytes()

    first = written("first", 1)
    assert written("again", 1) == first
    if method in ("exflow", "dedup", "dedup-copies"):
        assert written("other", 2) != first


def test_every_search_gets_its_seed(file, monkeypatch):
    given = {}

    def noting(name, function):
        bound = inspect.signature(function)

        def noted(*of, **named):
            given[name] = bound.bind(*of, **named).arguments["seed"]
            return function(*of, **named)

        return noted

    for owner, name in (
        (methods, "moetuner"),
        (methods, "joint"),
        (methods, "dedup"),
        (methods.baselines, "exflow"),
        (methods.dedup_copies, "dedup_copies"),
    ):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    placed("--trace", file, "--gpus", 4, "--method", "exflow,moetuner,joint,dedup,dedup-copies", "--seed", 7)
    assert given == dict.fromkeys(["moetuner", "joint", "exflow", "dedup", "dedup_copies"], 7)


def test_several_seeds_are_several_trials_and_the_first_is_written(file, tmp_path):
    record, written = tmp_path / "r.json", tmp_path / "several.npz"
    asked = ("--trace", file, "--gpus", 4, "--method", "dedup", "--splits", 2, "--seed", 4)
    placed(*asked, "--seeds", 3, "--record", record, "--out", written)
    found = json.loads(record.read_text())
    assert [(one["seed"], one["search_seed"]) for one in found["splits"]] == [(h, s) for h in (0, 1) for s in (4, 5, 6)]
    assert (found["seed"], found["seeds"]) == (4, 3)
    placed(*asked, "--out", tmp_path / "one.npz")
    assert (tmp_path / "one.npz").read_bytes() == written.read_bytes()


def test_a_search_that_the_time_limit_ended_is_named(file):
    said = place("--trace", file, "--gpus", 4, "--method", "dedup", "--time-limit", 1e-9)
    assert "dedup: the time limit of 1e-09 s ended it, so another run may find another map" in " ".join(
        said.stderr.split()
    )
    (row,) = json.loads(placed("--trace", file, "--gpus", 4, "--method", "dedup", "--time-limit", 1e-9, "--json"))
    assert row["cut"]


def test_methods_that_are_not_tried_on_many_gpus_are_named_with_the_reason(file, tmp_path):
    large = ("--trace", file, "--expand", "3x128x4", "--gpus", 64, "--topology", "nodes-of-8")
    result = place(*large, "--method", "greedy,moetuner", "--record", tmp_path / "record.json", "--json")
    assert result.exit_code == 0, result.output
    reason = "moetuner is not tried on 64 GPUs, but on at most 32: its second program has (layers - 1) * G**4 rows"
    assert reason in " ".join(result.stderr.split())
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["skipped"] == {"moetuner": reason} and [row["method"] for row in written["rows"]] == ["greedy"]
    assert written["expand"] == "3x128x4"
    assert reason in refused(*large, "--method", "moetuner")
    assert "num_experts is 100, but it must be a multiple of the trace's 8" in refused(*large, "--expand", "3x100x4")


def test_a_whole_trace_is_fitted_and_evaluated(file):
    said = placed("--trace", file, "--gpus", 2, "--method", "greedy", "--splits", 0)
    assert "the whole trace, on which they were fitted too" in " ".join(said.split())


def test_every_method_takes_experts_that_gpus_and_nodes_do_not_divide_and_nodes_that_are_not_equal(file, tmp_path):
    links, odd = tmp_path / "one_pair_slower.json", tmp_path / "odd.npz"
    bandwidth = [[1e11] * 4 for _ in range(4)]
    bandwidth[0][1] = bandwidth[1][0] = 4e10
    links.write_text(json.dumps({"bandwidth": bandwidth}))
    traces.save(odd, synthetic_trace(600, 3, 7, 2, sequences=4))
    for path, gpus, topology in ((odd, 3, "nvlink"), (file, 4, links), (odd, 4, "two-nodes")):
        rows = json.loads(placed("--trace", path, "--gpus", gpus, "--topology", topology, "--json"))
        assert len(rows) == len(methods.METHODS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", 9), "error: --gpus is 9, but there are only 8 experts"),
        (("--gpus", 4, "--method", "greddy"), "unknown method 'greddy'. Did you mean 'greedy'?"),
        (("--gpus", 4, "--experts-per-gpu", "3:8"), "infeasible: at least 3 experts on each of 4 GPUs"),
        (("--gpus", 4, "--experts-per-gpu", "3"), "'3' must be MIN:MAX"),
        (("--gpus", 4, "--experts-per-gpu", "²:3"), "'²:3' must be MIN:MAX"),
        (("--gpus", 4, "--budget", 1), "budget is 1: 1 experts on each of 4 GPUs are 4, but a layer has 8"),
        (("--gpus", 4, "--nodes", 3), "error: --gpus is 4, but it must be a multiple of --nodes = 3"),
        (("--gpus", 4, "--groups", 3), "E is 8, but it must be a multiple of --groups = 3"),
        (("--gpus", 0), "error: --gpus is 0, but it must be >= 1"),
        (("--gpus", 4, "--nodes", 0), "error: --nodes is 0, but it must be >= 1"),
        (("--gpus", 4, "--groups", -3), "error: --groups is -3, but it must be >= 1"),
        (("--gpus", 4, "--budget", 9), "--budget is 9, but a layer has only 8 experts, and a GPU holds each once"),
        (("--gpus", 4, "--topology", "nodes-of-8"), "error: --gpus is 4, but nodes of 8 GPUs need a multiple of 8"),
        (("--gpus", 4, "--experts", 6), "but there are only 6 experts (valid: 0..5)"),
        (("--gpus", 4, "--topology", "ring"), "unknown topology 'ring'"),
        (("--gpus", 3, "--topology", "two-nodes"), "two nodes need an even number"),
        (("--gpus", 4, "--solver", "cplex"), "unknown solver 'cplex'"),
        (("--gpus", 4, "--limit", 0.5, "--method", "joint"), "limit is 0.5, but no load can be more even than 1"),
        (("--gpus", 4, "--limit", 0.5, "--method", "greedy"), "limit is 0.5, but no load can be more even than 1"),
        (("--gpus", 4, "--time-limit", 1e300), "error: --time-limit is 1e+300, but it must be at most 1e+09 seconds"),
        (("--gpus", 4, "--synthetic", "4x8x2"), "give either --trace, or --synthetic with LAYERSxExK"),
        (("--gpus", 4, "--splits", -1), "splits is -1, but it must be >= 0"),
        (("--gpus", 4, "--method", "eplb-replicas", "--out", "map.npz"), "no map to write"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(file, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused("--trace", file, *arguments)


def test_a_program_that_is_too_large_is_said_to_be_unsolved(file, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_assignment, "MAX_ROWS", 10)
    asked = ("--trace", file, "--gpus", 4, "--topology", "two-nodes", "--method", "moetuner", "--json")
    result = place(*asked, "--record", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    (row,) = json.loads(result.stdout)
    assert row["skipped"].startswith("ILP 2 was not solved: it has ") and "but at most 10 are tried" in row["skipped"]
    assert (
        row["status"] == "heuristic"
        and row["gap"] > 0
        and f"moetuner: {row['skipped']}" in " ".join(result.stderr.split())
    )
    assert json.loads((tmp_path / "r.json").read_text())["splits"][0]["skipped"] == row["skipped"]


@pytest.mark.parametrize("method", ["moetuner", "greedy"])
def test_a_solver_that_is_not_installed_is_said_before_any_work(file, method, monkeypatch):
    def none_there(model, kind, **settings):
        assert kind.name == "GUROBI"
        raise RuntimeError("bad_function_call")

    monkeypatch.setattr("ortools.math_opt.python.mathopt.solve", none_there)
    monkeypatch.setattr(methods.Job, "__call__", lambda *arguments: pytest.fail("worked before it asked"))
    said = refused("--trace", file, "--gpus", 4, "--method", method, "--solver", "gurobi")
    assert "solver gurobi does not run here" in said and "OR-Tools: cp_sat, highs, scip" in said


def test_a_trace_without_sequences_names_the_option_that_needs_none(tmp_path):
    path = tmp_path / "t.npz"
    np.savez(path, topk=synthetic_trace(300, 3, 8, 2).topk, num_experts=8)
    asked = ("--trace", path, "--gpus", 2, "--method", "greedy")
    assert "--splits 0" in refused(*asked)
    placed(*asked, "--splits", 0)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("99999999x99999999x2", "layers is 99999999, but it must be 1..128"),
        ("4x99999999x2", "num_experts is 99999999, but it must be 1..1024"),
        ("4x1024x1024", "k is 1024, but it must be 1..32"),
    ],
)
def test_a_huge_synthetic_trace_is_refused_before_anything_is_allocated(monkeypatch, size, message):
    monkeypatch.setattr(synthetic.np, "empty", lambda *of: pytest.fail("allocated"))
    monkeypatch.setattr(synthetic.np.random, "default_rng", lambda *of: pytest.fail("drawn"))
    result = place("--synthetic", size, "--gpus", 2)
    assert result.exit_code == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "option",
    [
        ("--gpus", 10**24),
        ("--splits", 10**20),
        ("--d", 10**30),
        ("--h", 10**30),
        ("--tokens", 10**30),
        ("--experts", 8),  # which the size names
    ],
)
def test_a_number_without_a_meaning_is_refused(option):
    said = refused("--synthetic", "2x8x2", *(() if option[0] == "--gpus" else ("--gpus", 2)), *option)
    assert option[0] in said or "leave the number of experts out" in said


def test_a_synthetic_trace_is_named_by_its_size(monkeypatch, tmp_path):
    monkeypatch.setattr(synthetic, "TOKENS", 400)
    record = tmp_path / "record.json"
    placed("--synthetic", "3x8x2", "--gpus", 2, "--method", "moetuner", "--splits", 0, "--record", record)
    written = json.loads(record.read_text())
    assert written["trace"] == "synthetic 3x8x2" and written["curve"] == []
    assert written["rows"][0]["load_gap"] <= written["rows"][0]["gap"] < 0.01
    for size in ("3x8", "3x8x2x1", "axbxc"):
        assert f"'{size}' must be LAYERSxExK" in refused("--synthetic", size, "--gpus", 2)


def test_a_missing_trace_and_an_empty_one(tmp_path):
    np.savez(tmp_path / "empty.npz", topk=np.zeros((0, 2, 1), np.int16), num_experts=4)
    np.savez(tmp_path / "uncounted.npz", topk=np.zeros((0, 2, 4), np.int16))
    for name, message in (
        ("none.npz", "none.npz"),
        ("empty.npz", "the trace has no tokens"),
        ("uncounted.npz", "error: uncounted.npz has no tokens: there is nothing to place by"),
    ):
        assert message in refused("--trace", tmp_path / name, "--gpus", 2)


def test_the_heat_map_shows_load_over_the_mean(file):
    trials = [
        trial
        for job in methods.jobs(traces.load(file), simulate.cluster("nvlink", 4, 64, 64), ("greedy", "contiguous"))
        for trial in job()
    ]
    panels = [axes for axes in plots.heat_map(trials).axes if axes.images]
    for axes, trial in zip(panels, trials, strict=True):
        np.testing.assert_allclose(axes.images[0].get_array(), trial.load / trial.load.mean(axis=1, keepdims=True))
        assert axes.get_title(loc="left").startswith(trial.method)
    with pytest.raises(ValueError, match="at least one"):
        plots.heat_map([])
