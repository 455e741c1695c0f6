"""The pages on placement say what their records hold, and the records hold what was asked for."""

import json
import statistics

import pytest
from helpers import unmarked

from moeblaze_ref.core import documents
from moeblaze_ref.placement import document, findings, joint, methods

ON_SPLITS = ("gptoss20b", "lm_small")
PLACE = {"device": "a processor", "versions": {"numpy": "2"}, "commit": "abc"}


def recorded(kinds):
    """The kinds of which there is a record; the pages say of the others that they are not measured yet."""
    return [kind for kind in kinds if document.HOME_RECORDS[kind].exists()]


def trial(method, seed, load, crossings, step=10.0):
    """What a record holds of one method on one split."""
    return {
        "method": method,
        "seed": seed,
        "balance_mean": load,
        "balance_worst": load + 0.1,
        "cross_share": crossings,
        "step_ms": step,
        "token_tail_ms": step * 0.6,
        "transfer_tail_ms": step * 0.4,
        "solve_s": 1.0,
        "gap": None,
        "load_gap": None,
    }


def record():
    """A small record: one split, so that rows are its trials."""
    splits = [
        trial("contiguous", 0, 1.2, 0.75, step=20.0),
        trial("greedy", 0, 1.04, 0.75),
        trial("moetuner", 0, 1.045, 0.72, step=9.9) | {"gap": 0.0025},
        trial("joint", 0, 1.06, 0.57),
    ]
    return PLACE | {"rows": splits, "splits": splits, "curve": [trial("joint", 0, 1.05, 0.6) | {"limit": 1.01}]}


def test_the_page_is_what_the_records_give():
    text = "".join(page.read_text() for page in document.PAGES)
    assert unmarked(document.fill(text)) == unmarked(text)
    kinds = (
        *document.RECORDS,
        *document.HOME_RECORDS,
        *document.COPIES_RECORDS,
        *document.LARGE_COPIES_RECORDS,
        "growth",
    )
    assert all(text.count(f"<!-- begin {kind} -->") == 1 for kind in kinds)


def test_a_record_becomes_a_block_and_a_picture(tmp_path):
    path = tmp_path / "results" / "place_x.json"
    blank = "<!-- begin x -->\n<!-- end x -->"
    assert documents.NOTHING in document.fill(blank, {"x": path})
    path.parent.mkdir()
    path.write_text(json.dumps(record()))
    text = document.fill(blank, {"x": path})
    assert "time limit" not in text
    path.write_text(json.dumps(record() | {"time_limit": 10.0}))
    text = document.fill(blank, {"x": path})
    assert "- time limit: 10 s for a method on a split" in text
    assert "](images/place_x.png)" in text and "- commit: abc" in text
    assert "| `joint` | 1.0600 | +0.0200 | 1.160 | 57.0% | 10.000 | 1.0 |  |" in text
    assert "| `moetuner` | 1.0450 | +0.0050 | 1.145 | 72.0% | 9.9000 | 1.0 | 0.250% |" in text
    assert "| `moetuner` | 50.5% | 50.5% | 50.5% |" in text
    assert "`joint` took 1.0 seconds on its slowest split." in text
    axes = document.picture(document.load(path)).axes[0]
    assert {note.get_text() for note in axes.texts} == {"contiguous", "greedy", "moetuner", "joint"}
    assert list(axes.lines[0].get_xdata()) == [60]
    assert axes.get_title(loc="left").startswith("the first of ")


def on_splits(steps, seconds=(1.0, 1.0)):
    """A record of two splits, from the steps of methods on each, and what `joint` took."""
    splits = [
        trial(method, seed, 1.04, 0.5, step) | {"solve_s": seconds[seed] if method == "joint" else 0.1}
        for method, each in steps.items()
        for seed, step in enumerate(each)
    ]
    rows = [trial(method, None, 1.04, 0.5, statistics.median(each)) for method, each in steps.items()]
    return PLACE | {"rows": rows, "splits": splits, "curve": []}


def test_the_models_constants_stand_beside_what_was_measured():
    links = {"bandwidth": [[0, 2e11], [2e11, 0]], "exchange_s": 1e-4, "rest_s": 2e-4}
    text = findings.constants({"gpus": 2, "d": 2880, "h": 2880, "token_s": 9e-8} | links)
    assert "| a routed row | 74 ns | 90 ns |" in text and "| a pair of 2 GPUs | 450 GB/s | 200 GB/s |" in text
    assert "| 150 GB/s |" in text and "| 100 us a layer |" in text and "| 200 us a layer |" in text


def test_a_baseline_that_is_faster_than_joint_is_said_to_be():
    found = on_splits({"greedy": (11.0, 13.0), "joint": (10.0, 12.0), "moetuner": (9.0, 12.0)})
    text = findings.beside_joint(found)
    assert "| `greedy` | +9.09% | 0 of 2 | 0 |" in text and "| `moetuner` | -4.55% | 1 of 2 | 1 |" in text
    assert text.endswith("held-out halves, faster than `joint`: `moetuner`.")
    none = findings.beside_joint(on_splits({"greedy": (11.0, 13.0), "joint": (10.0, 12.0)}))
    assert none.endswith("held-out halves, none is faster than `joint`.")


def test_the_slowest_split_of_joint_is_named():
    steps = {"greedy": (11.0, 13.0), "joint": (10.0, 12.0), "moetuner": (9.0, 12.0)}
    said = findings.slowest(on_splits(steps, seconds=(60.1, 59.9)))
    assert said == "`joint` took 60.1 seconds on its slowest split."


def test_a_record_of_something_else_is_refused(tmp_path):
    path = tmp_path / "place_x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match=r"place_x\.json has no commit, curve, device, splits, versions"):
        document.load(path)


@pytest.mark.parametrize("kind", ON_SPLITS)
def test_a_record_holds_every_split_and_its_rows_are_their_medians(kind):
    found = document.load(document.RECORDS[kind])
    assert [row["method"] for row in found["rows"]] == list(methods.METHODS)
    for row in found["rows"]:
        of_method = [one for one in found["splits"] if one["method"] == row["method"]]
        assert [one["seed"] for one in of_method] == list(range(20))
        for name in ("balance_mean", "balance_worst", "cross_share", "step_ms"):
            assert row[name] == statistics.median(one[name] for one in of_method)
    assert [point["limit"] for point in found["curve"]] == list(joint.LIMITS)


@pytest.mark.parametrize("kind", ON_SPLITS)
def test_none_is_faster_than_joint_by_half_a_percent_of_the_median_step(kind):
    steps = {row["method"]: row["step_ms"] for row in document.load(document.RECORDS[kind])["rows"]}
    assert steps["joint"] < 1.005 * min(steps.values())


def test_thirty_two_layers_of_eight_experts_were_solved_to_the_optimum():
    found = document.load(document.RECORDS["32x8"])
    (row,) = (row for row in found["rows"] if row["method"] == "moetuner")
    assert (found["trace"], found["gpus"], found["time_limit"]) == ("synthetic 32x8x2", 4, 30)
    assert row["solve_s"] < 30 and row["gap"] == 0


def test_the_large_model_was_solved_within_its_time_and_its_gap():
    found = document.load(document.RECORDS["scale"])
    (row,) = (row for row in found["rows"] if row["method"] == "moetuner")
    assert (found["trace"], found["gpus"]) == ("synthetic 58x256x8", 16)
    assert row["solve_s"] < 300 and row["load_gap"] <= 0.02


def home_trial(method, seed, D, load, step):
    """What a record holds of one method on one split, for a runtime that brings tokens home."""
    more = {"distinct_gpus": D, "distinct_nodes": 1.5, "runtime_ms": step, "batch_256": 1.3, "batch_16384": None}
    return trial(method, seed, load, 0.7) | more


def test_a_record_of_tokens_that_come_home_becomes_a_table():
    splits = [home_trial("greedy", seed, 3.0, 1.1, 50.0) for seed in (0, 1)]
    splits += [home_trial("dedup", 0, 2.5, 1.12, 49.0), home_trial("dedup", 1, 2.4, 1.15, 50.5)]
    rows = [home_trial("greedy", None, 3.0, 1.1, 50.0), home_trial("dedup", None, 2.45, 1.135, 49.75)]
    text = findings.home({"rows": rows, "splits": splits})
    assert (
        "| `dedup` | 2.450 | 1.500 | 1.135 | 1.235 | 1.300 |  | +0.035 | +0.050 | 70.0% | 49.750 | 1 of 2 | 1.0 |"
        in text
    )
    with pytest.raises(ValueError, match="the record has no greedy"):
        findings.home({"rows": rows[1:], "splits": splits[2:]})


def test_a_record_of_copies_stands_beside_eplb():
    splits = [home_trial("eplb-replicas", seed, 3.4, 1.1, 50.0) for seed in (0, 1)]
    splits += [home_trial("dedup-copies", 0, 3.0, 1.09, 49.0), home_trial("dedup-copies", 1, 3.5, 1.11, 51.0)]
    splits[2]["distinct_nodes"] = 1.2
    rows = [home_trial("dedup-copies", None, 3.25, 1.1, 50.0)]
    text = findings.copies({"rows": rows, "splits": splits})
    assert "| 1.100 | 1.200 | 1.300 |  | +0.000 | +0.010 | 70.0% | 50.000 | 1 of 2 | 1.0 |" in text
    assert "over `eplb-replicas`, median" in text
    assert text.endswith("a lower D in 1 of 2 splits and a lower N in 1 of 2 splits than `eplb-replicas`.")
    on_one_node = [trial | {"distinct_nodes": 1.0} for trial in splits]
    assert findings.copies({"rows": rows, "splits": on_one_node}).endswith(
        "lower D in 1 of 2 splits than `eplb-replicas`."
    )
    with pytest.raises(ValueError, match="the record has no eplb-replicas"):
        findings.copies({"rows": rows, "splits": splits[2:]})


def test_copies_are_no_fuller_than_eplbs_and_send_less_in_every_split():
    for found in [document.load(path) for path in document.COPIES_RECORDS.values() if path.exists()]:
        trials = {(trial["method"], trial["seed"]): trial for trial in found["splits"]}
        rows = {row["method"]: row for row in found["rows"]}
        assert rows["dedup-copies"]["balance_mean"] <= rows["eplb-replicas"]["balance_mean"]
        for seed in range(20):
            ours, theirs = (trials[method, seed] for method in ("dedup-copies", "eplb-replicas"))
            assert ours["balance_mean"] <= theirs["balance_mean"] + 0.02 and not ours["cut"]
            assert ours["distinct_gpus"] < theirs["distinct_gpus"]
            assert ours["distinct_nodes"] < theirs["distinct_nodes"] or found["topology"] == "nvlink"


@pytest.mark.parametrize(("kind", "is_fuller"), [("copies_v3_256", False), ("copies_k2_256", True)])
def test_copies_on_many_gpus_send_less_than_eplbs_and_are_as_full_as_the_page_says(kind, is_fuller):
    rows = {row["method"]: row for row in document.load(document.LARGE_COPIES_RECORDS[kind])["rows"]}
    ours, theirs = rows["dedup-copies"], rows["eplb-replicas"]
    assert 0.95 * theirs["distinct_gpus"] < ours["distinct_gpus"] < theirs["distinct_gpus"] and not ours["cut"]
    assert ours["distinct_nodes"] < 0.8 * theirs["distinct_nodes"]
    assert (ours["balance_mean"] > theirs["balance_mean"]) == is_fuller


def test_the_growth_stands_beside_eplb():
    rows = [home_trial("eplb", None, 4.0, 1.1, 50.0), home_trial("dedup", None, 3.0, 1.12, 49.0)]
    found = [{"expand": "2x64x8", "gpus": 64, "peak_bytes": 2**30, "rows": rows}]
    assert "| 2x64x8 | 64 | 1.0 | 1.00 | 25.0% | 0.0% | +0.020 |" in findings.growth(found)


@pytest.mark.parametrize("kind", recorded(document.HOME))
def test_a_record_of_tokens_that_come_home_has_twenty_splits_and_their_medians(kind):
    found = document.load(document.HOME_RECORDS[kind])
    for row in found["rows"]:
        of_method = [one for one in found["splits"] if one["method"] == row["method"]]
        assert [one["seed"] for one in of_method] == list(range(20)) and not row["cut"]
        for name in ("distinct_gpus", "distinct_nodes", "balance_mean", "runtime_ms", "batch_256"):
            assert row[name] == statistics.median(one[name] for one in of_method)


SLOWER = ("gptoss_2x8",)  # than packing at the median, as the page says


@pytest.mark.parametrize("kind", recorded(document.HOME))
def test_dedup_has_the_fewest_gpus_a_token_and_a_median_step_no_slower_than_packing(kind):
    rows = {row["method"]: row for row in document.load(document.HOME_RECORDS[kind])["rows"]}
    ours = rows.pop("dedup")
    assert ours["distinct_gpus"] < min(row["distinct_gpus"] for row in rows.values())
    assert (ours["runtime_ms"] > rows["greedy"]["runtime_ms"]) == (kind in SLOWER)


@pytest.mark.parametrize("kind", recorded(document.HOME))
def test_no_baseline_is_as_good_as_dedup_in_load_and_distinct_gpus_and_nodes(kind):
    """By the medians: each baseline that has no more of two of them has more of the third."""
    names = ("balance_mean", "distinct_gpus", "distinct_nodes")
    rows = {row["method"]: [row[name] for name in names] for row in document.load(document.HOME_RECORDS[kind])["rows"]}
    ours = rows.pop("dedup")
    for method, theirs in rows.items():
        assert any(one > other for one, other in zip(theirs, ours, strict=True)), method


def test_a_record_of_several_seeds_becomes_a_table():
    splits = [
        home_trial("dedup", seed, D, 1.1, 50.0) | {"search_seed": search, "cut": search == 1}
        for seed, search, D in ((0, 0, 2.5), (0, 1, 2.6), (1, 0, 3.0), (1, 1, 3.05))
    ]
    text = findings.seeds({"rows": [home_trial("dedup", None, 2.8, 1.1, 50.0)], "splits": splits})
    assert (
        "| `dedup` | 1.100 (0.000) | 2.800 (0.100) | 1.500 (0.000) | 70.0% (0.0%) | 50.00 (0.00) | 1.0 (0.0) | 2 |"
        in text
    )


def test_a_record_of_seeds_has_three_on_five_splits():
    for found in [document.load(path) for path in document.SEEDS_RECORDS.values() if path.exists()]:
        for method in [row["method"] for row in found["rows"]]:
            trials = [(one["seed"], one["search_seed"]) for one in found["splits"] if one["method"] == method]
            assert trials == [(split, seed) for split in range(5) for seed in range(3)]


@pytest.mark.parametrize("kind", recorded(document.SIZES))
def test_large_models_are_placed_in_two_minutes_and_four_gibibytes(kind):
    found = document.load(document.HOME_RECORDS[kind])
    rows = {row["method"]: row for row in found["rows"]}
    assert found["gpus"] == int(kind.partition("_")[2]) and found["peak_bytes"] < 4 * 2**30
    assert rows["dedup"]["solve_s"] < 120 and rows["dedup"]["distinct_nodes"] < rows["eplb"]["distinct_nodes"]
