"""The page of the league: its tables are those of the records."""

import pytest

from moeblaze_ref.bench import LEAGUE_PRESETS
from moeblaze_ref.course.site import league

CHECKED = {
    "layer": "torch/experts",
    "dtype": "bfloat16",
    "right": True,
    "bug_class": "",
    "largest_error": 0.456,
    "deterministic": True,
    "graphs": False,
    "large": ["weights"],
    "not_supported": [],
    "first_problem": "",
    "what": "",
}
REFUSING = CHECKED | {"not_supported": ["torch.compile"]}
WRONG = CHECKED | {"layer": "a/b", "right": False, "what": "stale gradient", "first_problem": "a step\nalso: two steps"}
MISSING = dict.fromkeys(CHECKED) | {"layer": "c/d", "first_problem": "c cannot be imported"}
TIMED = {"layer": "torch/experts", "preset": "conf1", "step_ms": [2.0, 2.345], "kept_bytes": 3 * 2**30, "problem": ""}
FAILED = {"layer": "a/b", "preset": "conf1", "problem": "its process ended, killed by SIGABRT"}
RECORD = {
    "device": "NVIDIA H100 80GB HBM3, 580.1, 81559 MiB",
    "versions": {"torch": "2.11.0"},
    "commit": "0123456789abcdef",
    "checks": [CHECKED, WRONG, MISSING],
    "times": [TIMED | {"peak_bytes": 5 * 2**20}, FAILED],
}


def cells(table):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_page_is_written_from_the_records():
    text = league.DOCUMENT.read_text()
    assert league.page(text) == text


def test_a_verdict_says_what_is_wrong():
    right, wrong, missing = cells(league.verdicts(RECORD))[2:]
    assert right == ["torch/experts", "right", "0.46", "yes", "no", "weights"]
    assert wrong[1] == "wrong: stale gradient; a step; also: two steps"
    assert cells(league.verdicts({"checks": [REFUSING]}))[2][1] == "right; not supported: torch.compile"
    assert missing[:2] == ["c/d", "not checked: c cannot be imported"] and set(missing[2:]) == {league.NONE}


def test_shapes_without_times_are_named():
    assert "conf1" not in league.missing(RECORD) and set(league.missing(RECORD)) | {"conf1"} == set(LEAGUE_PRESETS)


def test_layers_without_a_verdict_are_named():
    assert league.unchecked(RECORD) == [] and league.unchecked(RECORD | {"checks": [WRONG]}) == ["torch/experts"]


@pytest.mark.parametrize(
    ("table", "cell"),
    [(league.times, "2.35"), (league.kept, "3,072"), (league.peaks, "5")],
    ids=["times", "kept", "peaks"],
)
def test_numbers_stand_at_their_layer_and_shape(table, cell):
    heading, _, right, failed = cells(table(RECORD))
    assert heading == ["layer", "conf1"]
    assert right == ["torch/experts", cell] and failed == ["a/b", league.NONE]


def test_a_layer_without_a_time_has_its_reason():
    assert league.problems(RECORD) == "- conf1, a/b: `its process ended, killed by SIGABRT`"


def test_a_record_names_where_it_was_made(monkeypatch):
    monkeypatch.setattr(league, "records", lambda: [RECORD])
    text = league.results()
    assert text.startswith("### NVIDIA H100 80GB HBM3") and "With torch 2.11.0; commit 01234567." in text
    assert "Not timed yet: conf3," in text and "Not checked yet" not in text
    monkeypatch.setattr(league, "records", list)
    assert league.results() == "No run is recorded yet."
