"""Placement over time: what moves, streams of batches by hand, other traffic, the commands, the page."""

import functools
import json
import statistics
from dataclasses import replace

import numpy as np
import pytest
from helpers import unmarked
from typer.testing import CliRunner

from moeblaze_ref.cli import replay as command
from moeblaze_ref.cli.app import app
from moeblaze_ref.core import documents, records, traces
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.placement import baselines, methods, moves, over_time, time_document, time_tables
from moeblaze_ref.placement import replay as replaying
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.simulate import Cluster
from moeblaze_ref.placement.synthetic import synthetic_trace
from moeblaze_ref.placement.trace import profile, split
from moeblaze_ref.placement.traffic import Runtime

PAIR = np.array([[0.0, 10.0], [10.0, 0.0]])  # bytes/s
COSTS = Runtime(Cluster(PAIR, row_bytes=10, token_s=0.5), exchange_s=0.25, rest_s=0.125)


def placed(*gpus, layers=1, num_gpus=2):
    return Placement(np.tile(np.array(gpus, np.int32), (layers, 1)), num_gpus)


def copied(*of_experts, num_gpus=2, nodes=1):
    """A map of one layer, from the GPUs of each expert."""
    return Copies(np.array([[[gpu in gpus for gpu in range(num_gpus)] for gpus in of_experts]]), nodes)


def routed(*tokens, num_experts=4, layers=1):
    """A trace whose tokens choose the same experts in every layer."""
    return RoutingTrace(np.repeat(np.array(tokens, np.int16)[:, None], layers, axis=1), num_experts)


# What moves -----------------------------------------------------------------------------------------------------------


def test_moves_are_counted_and_the_slowest_link_is_last():
    before, after = (moves.held(copied(*of)) for of in (([0], [1], [0, 1]), ([1], [0], [0])))
    link_s = np.array([[0, 1.0], [5.0, 0]])
    assert moves.moves(before, after, link_s) == (2, 5.0)  # expert 2 is there already
    assert moves.moves(before, before, link_s) == (0, 0.0)
    two = [np.concatenate([of, of]) for of in (before, after)]
    assert moves.moves(*two, link_s) == (4, 10.0)  # a link brings one expert after the other


def test_an_expert_comes_from_the_holder_whose_link_is_done_first():
    before, after = (moves.held(copied(*of, num_gpus=3)) for of in (([0, 1], [0, 1]), ([2], [2])))
    assert moves.moves(before, after, np.ones((3, 3))) == (2, 1.0)
    slow = np.ones((3, 3))
    slow[1, 2] = 3.0
    assert moves.moves(before, after, slow) == (2, 2.0)


def test_seconds_of_an_expert_are_its_bytes_over_the_links():
    np.testing.assert_allclose(moves.expert_seconds(COSTS.on, 30), [[0, 3], [3, 0]])
    with pytest.raises(ValueError, match="expert_bytes is -1"):
        moves.expert_seconds(COSTS.on, -1)


def test_the_same_map_with_other_numbers_of_gpus_moves_nothing():
    before = placed(0, 0, 1, 1, 2, 2, num_gpus=3)
    renamed = placed(2, 2, 0, 0, 1, 1, num_gpus=3)
    np.testing.assert_array_equal(moves.aligned(moves.held(before), renamed).assignment, before.assignment)
    copies = copied([0], [0, 1], [2], num_gpus=3)
    turned = copied([1], [1, 2], [0], num_gpus=3)
    found = moves.aligned(copies.held, turned)
    assert isinstance(found, Copies)
    np.testing.assert_array_equal(found.held, copies.held)


def test_the_pair_with_the_most_in_common_keeps_its_experts():
    before, after = placed(0, 0, 0, 1, 1, 1), placed(1, 1, 0, 0, 0, 1)
    np.testing.assert_array_equal(moves.aligned(moves.held(before), after).assignment, [[0, 0, 1, 1, 1, 0]])


def test_experts_change_gpus_within_a_node_alone():
    before, after = placed(0, 1, 2, 3, num_gpus=4), placed(3, 2, 1, 0, num_gpus=4)
    crossed = moves.aligned(moves.held(before), after, 2).assignment
    assert (crossed // 2 == after.assignment // 2).all()
    np.testing.assert_array_equal(moves.aligned(moves.held(before), after, 1).assignment, before.assignment)


def test_maps_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"after has shape \(1, 3, 2\), but it must be \(layers=1, E=2, G=2\)"):
        moves.moves(np.ones((1, 2, 2), bool), np.ones((1, 3, 2), bool), np.ones((2, 2)))


# Batches by hand ------------------------------------------------------------------------------------------------------

SPLIT, CROSSED = placed(0, 0, 1, 1), placed(0, 1, 0, 1)


def test_a_batch_by_hand():
    """Rows 3 and 1; tokens visit GPUs {0} and {0, 1}. A row takes 0.5 s to compute and 1 s to travel."""
    seen = replaying.observe(routed([0, 1], [0, 2]), SPLIT, COSTS)
    assert (seen.load, seen.distinct_gpus, seen.distinct_nodes) == (1.5, 1.5, 1.0)
    assert seen.ms == pytest.approx(1e3 * (3 * 0.5 + 0.125 + 2 * (2 / 2) * 1 + 0.25))
    twice = replaying.observe(routed([0, 1], [0, 2]), SPLIT, COSTS, of=4)
    assert twice.ms == pytest.approx(1e3 * (6 * 0.5 + 0.125 + 2 * (4 / 2) * 1 + 0.25))


def test_copies_by_hand_under_each_dispatch():
    """Expert 0 has two copies. Its tokens are all on GPU 0, so the rule keeps them there."""
    batch = routed([0], [1], [0], [1], [0], [1], [0], [1], num_experts=3)
    copies = copied([0, 1], [0], [1])
    loads = {name: replaying.observe(batch, copies, COSTS, name).load for name in replaying.DISPATCHES}
    assert loads == {"even": 1.5, "rule": 2.0, "balanced": pytest.approx(1.0, abs=1e-3)}


def test_a_balanced_batch_leaves_single_copies_where_they_are():
    batch = routed([0], [0], [0], [1], num_experts=3)
    copies = copied([0], [0, 1], [0, 1])  # no token uses expert 2
    seen = replaying.observe(batch, copies, COSTS, "balanced")
    assert seen.load == pytest.approx(1.5) and seen.distinct_gpus == pytest.approx(1.0)


@pytest.fixture
def stream():
    """Tokens 0 and 1 to fit to, then four batches of two; two layers."""
    tokens = [[0, 1], [0, 1], [0, 1], [0, 2], [2, 3], [2, 3], [0, 2], [0, 2], [1, 3], [1, 3], [0, 1]]
    return replaying.Stream(routed(*tokens, layers=2), COSTS, expert_bytes=30, batch=2, window=2)


def test_a_stream_under_a_map_that_stays(stream):
    asked = []
    found = replaying.replay(stream, lambda end: asked.append(end) or placed(0, 0, 1, 1, layers=2))
    assert [batch.first for batch in found] == [2, 4, 6, 8] and asked == [2]
    assert [batch.load for batch in found] == [1.5, 2.0, 1.0, 1.0]
    assert [batch.distinct_gpus for batch in found] == [1.5, 1.0, 2.0, 2.0]
    assert not any(batch.moved or batch.moves_ms for batch in found)


def test_moves_are_charged_to_the_batch_before_which_they_happen(stream):
    """Experts 1 and 2 change places in both layers: two experts of 3 s on each of two links, at the same time."""
    later = {2: placed(0, 0, 1, 1, layers=2), 6: placed(0, 1, 0, 1, layers=2)}
    found = replaying.replay(stream, later.__getitem__, every=4)
    assert [batch.moved for batch in found] == [0, 0, 4, 0]
    assert [batch.moves_ms for batch in found] == [0, 0, 6000, 0]
    assert [batch.load for batch in found] == [1.5, 2.0, 2.0, 2.0]


def test_a_map_with_the_gpus_renamed_costs_nothing(stream):
    later = {2: placed(0, 0, 1, 1, layers=2), 6: placed(1, 1, 0, 0, layers=2)}
    assert sum(batch.moved for batch in replaying.replay(stream, later.__getitem__, every=4)) == 0


def test_a_map_is_fitted_to_the_last_window_once():
    trace = synthetic_trace(200, 2, 8, 2, skew=1.2)
    stream = replaying.Stream(trace, COSTS, 30, batch=20, window=50)
    fit = stream.fit("greedy", methods.Options())
    expected = baselines.greedy(profile(trace.of(np.isin(np.arange(200), np.arange(40, 90)))), 2)
    np.testing.assert_array_equal(fit(90).assignment, expected.assignment)
    assert fit(90) is fit(90)


def test_a_new_map_follows_a_drift():
    """The first half uses experts 0 and 1, the second half 2 and 3: the old map puts those two on one GPU."""
    trace = routed(*[[0], [1]] * 8, *[[2], [3]] * 8)
    stream = replaying.Stream(trace, COSTS, 30, batch=8, window=8)
    maps = {8: placed(0, 1, 0, 0), 16: placed(0, 1, 0, 0), 24: placed(0, 1, 0, 1)}
    assert [batch.load for batch in replaying.replay(stream, maps.__getitem__)] == [1, 2, 2]
    assert [batch.load for batch in replaying.replay(stream, maps.__getitem__, every=8)] == [1, 2, 1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 0}, "batch is 0, but it must be >= 1"),
        ({"expert_bytes": 0}, "expert_bytes is 0, but it must be >= 1"),
        ({"window": 10}, "the trace has 11 tokens, but a window of 10 and one batch of 2 need 12"),
    ],
)
def test_streams_that_are_refused(stream, change, message):
    with pytest.raises(ValueError, match=message):
        replace(stream, **change)


def test_times_dispatches_and_maps_that_are_refused(stream):
    with pytest.raises(ValueError, match="every is 3, but it must be a multiple of the batch of 2 tokens"):
        replaying.replay(stream, lambda end: SPLIT, every=3)
    with pytest.raises(ValueError, match="unknown dispatch 'evn'"):
        replaying.observe(routed([0, 1]), SPLIT, COSTS, "evn")
    with pytest.raises(ValueError, match="the map is for 1 layers of 4 experts, but the model has 2 layers of 4"):
        replaying.replay(stream, lambda end: SPLIT)
    with pytest.raises(ValueError, match="eplb-replicas has no map"):
        stream.fit("eplb-replicas", methods.Options())(2)


def test_a_job_replays_each_time_and_each_dispatch_of_maps_with_copies():
    stream = replaying.Stream(synthetic_trace(64, 2, 4, 1), COSTS, 30, batch=8, window=16)
    jobs = over_time.stream_jobs(stream, ["greedy", "eplb-nearest"], [16], ["even", "rule"], methods.Options())
    single, copies = (job() for job in jobs)
    assert [(row.every, row.dispatch) for row in single] == [(None, None), (16, None)]
    pairs = [(every, name) for every in (None, 16) for name in ("even", "rule")]
    assert [(row.every, row.dispatch) for row in copies] == pairs


def test_a_summary_is_of_means_and_of_the_fullest_batch():
    batches = [replaying.Batch(1.0, 2.0, 1.0, 10.0, 0, 0, 0.0), replaying.Batch(2.0, 3.0, 1.0, 20.0, 8, 5, 4.0)]
    found = over_time.summary(over_time.Replayed("greedy", 8, None, batches))
    assert (found["load"], found["worst_load"], found["distinct_gpus"]) == (1.5, 2.0, 2.5)
    assert (found["ms"], found["moves_ms"], found["total_ms"], found["moved"]) == (15, 2, 17, 5)


# Other traffic --------------------------------------------------------------------------------------------------------


def test_thirds_of_sequences():
    trace = replace(routed(*[[0]] * 7), seq=np.array([5, 5, 5, 2, 2, 2, 2]))
    first, middle, last = over_time.THIRDS
    assert over_time.by_third(trace).tolist() == [first, middle, last, first, first, middle, last]
    with pytest.raises(ValueError, match="the trace has no seq, but thirds"):
        over_time.by_third(routed([0]))


def test_kinds_and_where_they_change():
    trace = replace(routed(*[[0]] * 5), seq=np.array([0, 0, 1, 2, 2]), seq_kind=np.array(["a", "a", "b"]))
    assert over_time.by_kind(trace).tolist() == ["a", "a", "a", "b", "b"]
    assert over_time.changes(trace) == [(0, "a"), (3, "b")]
    assert over_time.changes(routed([0])) == []
    with pytest.raises(ValueError, match="the trace has no seq_kind"):
        over_time.by_kind(routed([0]))


@pytest.fixture(scope="module")
def two_kinds():
    """Twelve sequences of 40 tokens: kind a uses experts 0 to 3, kind b 4 to 7."""
    rng = np.random.default_rng(0)
    seq = np.repeat(np.arange(12), 40)
    topk = (rng.integers(0, 4, (480, 2, 1)) + 4 * (seq % 2)[:, None, None]).astype(np.int16)
    return RoutingTrace(topk, 8, seq.astype(np.int32), seq_kind=np.array(["a", "b"] * 6))


def test_a_map_is_fitted_to_one_kind_in_one_half_and_evaluated_on_both_in_the_other(two_kinds):
    jobs = over_time.shift_jobs(two_kinds, "kind", (), ["greedy"], 2, COSTS, methods.Options())
    assert [(job.fitted, job.seed) for job in jobs] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    sample, rest = split(two_kinds, 1)
    placement = baselines.greedy(profile(sample.of(over_time.by_kind(sample) == "a")), 2)
    for row in jobs[1]():
        seen = replaying.observe(rest.of(over_time.by_kind(rest) == row.evaluated), placement, COSTS, of=16_384)
        assert (row.load, row.distinct_gpus, row.ms) == (seen.load, seen.distinct_gpus, seen.ms)
        assert (row.fitted, row.seed, row.method) == ("a", 1, "greedy")


def test_losses_are_medians_of_pairs_of_the_same_seed():
    def row(fitted, seed, load):
        return over_time.Shift(load, 2 * load, 1.0, 10 * load, "greedy", fitted, "b", seed)

    ours, same = (1.5, 1.2, 2.0), (1.0, 1.1, 1.9)  # differences 0.5, 0.1, 0.1, but of medians 0.4
    rows = [row("a", seed, load) for seed, load in enumerate(ours)]
    rows += [row("b", seed, load) for seed, load in enumerate(same)]
    lost, none = over_time.losses(rows)
    assert (lost.fitted, lost.evaluated, lost.load) == ("a", "b", 1.5)
    assert lost.lost_load == pytest.approx(0.1) and lost.lost_gpus == pytest.approx(0.2)
    assert lost.lost_share == pytest.approx(statistics.median([0.5, 0.1 / 1.1, 0.1 / 1.9]))
    assert (none.lost_load, none.lost_share, none.lost_nodes) == (0, 0, 0)


def test_shifts_that_are_refused(two_kinds):
    def jobs(by="kind", kinds=(), seeds=1):
        return over_time.shift_jobs(two_kinds, by, kinds, ["greedy"], seeds, COSTS, methods.Options())

    for wrong, message in (
        ({"by": "kinds"}, "unknown way to tell traffic apart 'kinds'"),
        ({"kinds": ("c",)}, "unknown kind of traffic 'c'"),
        ({"kinds": ("a",)}, "the traffic is of kind a alone, but two kinds are compared"),
        ({"seeds": 0}, "seeds is 0, but it must be >= 1"),
    ):
        with pytest.raises(ValueError, match=message):
            jobs(**wrong)


def test_a_half_without_a_kind_is_named():
    lonely = replace(routed(*[[0]] * 4), seq=np.array([0, 1, 2, 3]), seq_kind=np.array(["a", "b", "b", "b"]))
    with pytest.raises(ValueError, match="has a half without traffic of kind 'a': leave it out by --kinds"):
        for job in over_time.shift_jobs(lonely, "kind", (), ["greedy"], 1, COSTS, methods.Options()):
            job()


# The commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path, two_kinds, monkeypatch):
    monkeypatch.setattr(methods, "Options", functools.partial(methods.Options, swaps=800, copy_steps=50))
    path = tmp_path / "trace.npz"
    traces.save(path, two_kinds)
    return path


def run(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, [*map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else " ".join(result.stderr.split())


def test_a_replayed_file_as_json_as_a_table_as_a_record_and_as_a_picture(file, tmp_path):
    words = ("replay", "--trace", file, "--gpus", 2, *SHORT, "--rebalance", "80,160")
    rows = json.loads(run(*words, "--json"))
    assert list(dict.fromkeys(row["method"] for row in rows)) == list(command.METHODS)
    assert [row["every"] for row in rows[:3]] == [None, 80, 160]
    record, folder = tmp_path / "record.json", tmp_path / "plots"
    said = run(*words, "--method", "eplb-nearest", "--dispatch", "even,balanced", "--record", record, "--plots", folder)
    assert "160 tokens" in said and "balanced" in said and (folder / "load_by_batch.png").exists()
    written = json.loads(record.read_text())
    assert (written["command"], written["batch"], written["window"]) == ("replay", 40, 80)
    assert written["changes"][:2] == [[0, "a"], [40, "b"]]
    assert [batch["first"] for batch in written["streams"][0]["batches"]] == list(range(80, 480, 40))


def test_a_shift_as_json_as_a_table_and_as_a_record(file, tmp_path):
    words = ("shift", "--trace", file, "--gpus", 2, "--method", "greedy,eplb", "--seeds", 2)
    rows = json.loads(run(*words, "--json", "--record", tmp_path / "record.json"))
    assert [(row["fitted"], row["evaluated"]) for row in rows[:4]] == [("a", "a"), ("a", "b"), ("b", "a"), ("b", "b")]
    written = json.loads((tmp_path / "record.json").read_text())
    assert written["command"] == "shift" and written["losses"] == rows and len(written["trials"]) == 16
    assert "lost load" in run(*words) and "first third" in run(*words, "--by", "third")


SHORT = ("--batch", 40, "--window", 80)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("replay", "--gpus", 9), "num_gpus is 9, but there are only 8 experts"),
        (
            ("replay", "--gpus", 2, *SHORT, "--rebalance", "many"),
            "--rebalance is 'many', but it must be a number of tokens",
        ),
        (("replay", "--gpus", 2, *SHORT, "--rebalance", 50), "every is 50, but it must be a"),
        (("replay", "--gpus", 2), "the trace has 480 tokens, but a window of 4096 and one batch of 1024 need 5120"),
        (("replay", "--gpus", 2, "--topology", "ring"), "unknown topology 'ring'"),
        (("shift", "--gpus", 2, "--kinds", "a"), "the traffic is of kind a alone"),
        (("shift", "--gpus", 2, "--method", "gredy"), "unknown method 'gredy'"),
        (("shift", "--gpus", 0), "gpus is 0, but it must be >= 1"),
    ],
)
def test_commands_that_are_refused_in_one_line(file, words, message):
    assert message in run(words[0], "--trace", file, *words[1:], code=2)


@pytest.mark.parametrize("command", ["replay", "shift"])
def test_a_method_that_is_too_large_is_refused_before_it_runs(file, command, monkeypatch):
    monkeypatch.setitem(methods.LARGEST, "joint", (1, "it solves programs"))
    said = run(command, "--trace", file, "--gpus", 2, "--method", "greedy,joint", code=2)
    assert "joint is not tried on 2 GPUs, but on at most 1: it solves programs" in said


# The page -------------------------------------------------------------------------------------------------------------


def test_empty_columns_are_left_out():
    row = {"method": "greedy", "every": None, "dispatch": None, "load": 1.0, "worst_load": 1.2, "distinct_gpus": 2.0}
    row |= {"distinct_nodes": 1.0, "ms": 3.0, "moves_ms": 0.0, "total_ms": 3.0, "moved": 0}
    assert list(time_tables.cells(time_tables.STREAM, [row])) == [
        *("method", "new map after", "load", "fullest batch", "D", "step ms"),
    ]
    moved = row | {"every": 2048, "moved": 7, "ms": 2.5, "moves_ms": 1.0, "total_ms": 3.5, "distinct_nodes": 1.5}
    text = time_tables.markdown(time_tables.STREAM, [row, moved])
    assert "| greedy | 2,048 tokens | 1.000 | 1.200 | 2.000 | 1.500 | 2.500 | 1.000 | 3.500 | 7 |" in text
    assert time_tables.pays([row]) == ""
    assert time_tables.pays([row, moved]) == (
        "New maps shorten the step in 1 of 1 rows, by at most 0.500 ms. The moves add at least 1.000 ms a batch. With "
        "the moves, no row has a shorter step than the map that stays."
    )
    free = row | {"every": 4096, "moved": 7, "ms": 2.5, "moves_ms": 0.0, "total_ms": 2.5}
    assert "With the moves, 1 row has a shorter step" in time_tables.pays([row, moved, free])
    assert "With the moves, 2 rows have a shorter step" in time_tables.pays([row, free, free])


def test_dispatches_stand_beside_even_shares_of_the_same_method():
    def row(method, dispatch, load, every=None):
        return {"method": method, "dispatch": dispatch, "load": load, "every": every}

    rows = [row("a", "even", 1.5), row("a", "rule", 1.75), row("a", "balanced", 1.25), row("a", "even", 9, every=8)]
    said = time_tables.gains([*rows, row("b", None, 1.0)])
    assert said == "Load of `a` beside even shares: +0.250 under `rule`, -0.250 under `balanced`."
    assert time_tables.gains([row("b", None, 1.0), row("c", "even", 1.0)]) == ""


def test_the_largest_loss_is_named():
    rows = [
        {"method": name, "fitted": "a", "evaluated": "b", "lost_load": load, "lost_share": share}
        for name, load, share in (("x", 0.5, 0.01), ("y", 0.25, 0.02))
    ]
    assert time_tables.largest_loss(rows) == (
        "`y` loses most time when it is fitted to *a* and evaluated on *b*. Its load changes by +0.250, and its step "
        "by +2.00%."
    )


def test_the_page_is_what_the_records_give():
    text = (DOCS / "placement_over_time.md").read_text()
    assert unmarked(documents.fill(text, time_document.blocks())) == unmarked(text)
    assert all(text.count(f"<!-- begin {name} -->") == 1 for name in time_document.RECORDS)


@pytest.mark.parametrize("name", time_document.RECORDS)
def test_a_record_is_of_its_trials(name):
    found = records.read(time_document.RECORDS[name], ())
    if "streams" in found:
        for row in found["streams"]:
            assert row["load"] == pytest.approx(statistics.fmean(batch["load"] for batch in row["batches"]))
            assert row["moved"] == sum(batch["moved"] for batch in row["batches"])
            assert (row["moved"] == 0) == (row["every"] is None)
    else:
        again = over_time.losses([over_time.Shift(**row) for row in found["trials"]])
        assert [vars(row) for row in again] == found["losses"]
        assert found["seeds"] == len({row["seed"] for row in found["trials"]}) == 3


def streams(name):
    """The rows of a record by method, time between maps and dispatch."""
    rows = records.read(time_document.RECORDS[name], ())["streams"]
    return {(row["method"], row["every"], row["dispatch"]): row for row in rows}


@pytest.mark.parametrize("name", time_document.DRAWN)
def test_new_maps_do_not_pay_as_the_page_says(name):
    rows = streams(name)
    for (method, every, dispatch), row in rows.items():
        if every is not None:
            assert row["total_ms"] > rows[method, None, dispatch]["total_ms"]
    copies, single = (rows[method, 4096, dispatch] for method, dispatch in (("eplb-nearest", "rule"), ("eplb", None)))
    assert copies["moved"] > single["moved"]


@pytest.mark.parametrize("name", ["time_dispatch_gptoss_8", "time_dispatch_gptoss_16"])
def test_the_balance_lowers_the_load_and_the_rule_lowers_d_as_the_page_says(name):
    rows = streams(name)
    for method in ("eplb-nearest", "dedup-copies"):
        even, rule, balance = (rows[method, None, dispatch] for dispatch in ("even", "rule", "balanced"))
        assert balance["load"] < even["load"] - 0.1 and balance["distinct_gpus"] > even["distinct_gpus"]
        assert rule["load"] > even["load"] and rule["distinct_gpus"] < even["distinct_gpus"] - 0.1
