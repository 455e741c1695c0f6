"""docs/parallel_measured.md says what its records hold."""

import json

import pytest
from helpers import unmarked

from moeblaze_ref.core import documents
from moeblaze_ref.parallel import document, findings

RUN = {
    **{"gpus": 2, "tokens": 64, "layers": 2, "experts": 8, "d": 16, "h": 24, "k": 2, "model": "", "trace": "some.npz"},
    **{"token_s": 5e-9, "bandwidth": [[1.0, 2e9], [3e9, 1.0]], "exchange_s": 3e-5, "rest_s": 4e-5},
    **{"steps": 50, "device": "a GPU", "versions": {"numpy": "2"}, "commit": "abc"},
}


def row(name, step, tail):
    """What a record holds of one map in two layers."""
    return {
        **{"name": name, "step_ms": step, "step_p99_ms": step + 1, "modelled_step_ms": 0.9 * step},
        **{"simulated_step_ms": step / 2, "experts_ms": [tail, tail], "modelled_experts_ms": [tail, 1.5 * tail]},
        **{"exchange_ms": [1.0, 3.0], "modelled_exchange_ms": [1.0, 2.0]},
    }


def test_the_page_is_what_the_records_give():
    text = document.DOCUMENT.read_text()
    assert unmarked(document.fill(text)) == unmarked(text)
    assert all(text.count(f"<!-- begin {name} -->") == 1 for name in document.RECORDS)
    assert any(path.exists() for path in document.RECORDS.values())


def test_a_record_becomes_a_block(tmp_path):
    path, blank = tmp_path / "ep.json", "<!-- begin x -->\n<!-- end x -->"
    assert documents.NOTHING in document.fill(blank, {"x": path})
    path.write_text(json.dumps(RUN | {"rows": [row("toy_2_contiguous", 20.0, 4.0), row("toy_2_greedy", 16.0, 3.0)]}))
    text = document.fill(blank, {"x": path})
    assert "routed as some.npz" in text and "5 ns a routed row, 2 GB/s a pair" in text and "- commit: abc" in text
    foretold = "14.40 (-10.0%) | 8.00 (-50.0%) | 6.00 | 7.50 (+25.0%) | 4.00 | 3.00 (-25.0%)"
    assert f"| `greedy` | 16.00 | 17.00 | {foretold} |" in text
    assert "| less than `contiguous` by |" in text
    assert "| `greedy` | +20.0% | +20.0% | +20.0% | +25.0% | +0.0% |" in text
    assert "| `contiguous` | +" not in text
    assert "Warning" not in text and "are one map here" not in text


def test_a_record_of_something_else_is_refused(tmp_path):
    path = tmp_path / "ep.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="ep.json has no bandwidth, commit"):
        document.fill("<!-- begin x -->\n<!-- end x -->", {"x": path})


def test_the_furthest_step_of_each_model_is_named():
    near, far = row("near", 10.0, 1.0), row("far", 10.0, 1.0)
    near |= {"modelled_step_ms": 11.49, "simulated_step_ms": 8.51}
    far |= {"modelled_step_ms": 8.49, "simulated_step_ms": 11.48}
    assert findings.furthest(["near", "far"], [near, far]) == (
        "The modelled step is furthest from the measured one for far (-15.1%), "
        "and the simulated step for near (-14.9%)."
    )


def test_of_the_committed_records_the_simulated_steps_too_have_their_gap():
    for path in document.MAPS.values():
        if path.exists():
            rows = document.load(path)["rows"]
            for one in rows:
                assert f"({one['simulated_step_ms'] / one['step_ms'] - 1:+.1%})" in findings.cells(one)[3]


def test_rows_of_one_map_tell_the_noise():
    first, other, twin = row("contiguous", 20.0, 4.0), row("greedy", 16.0, 3.0), row("eplb", 12.0, 3.0)
    twin |= {name: other[name] for name in ("modelled_step_ms", "simulated_step_ms")} | {"experts_ms": [2.0, 2.5]}
    text = findings.summary(RUN | {"rows": [first, other, twin]})
    assert "`greedy` and `eplb` are one map here" in text and text.count("are one map here") == 1
    assert "steps are 25.0% apart, their experts' tails 25.0% and their exchange's 0.0%" in text


def test_no_map_vanishes_where_two_end_in_the_same_word():
    names = ["run1_contiguous", "run1_greedy", "run2_greedy"]
    text = findings.summary(RUN | {"rows": [row(name, 20.0 + place, 4.0) for place, name in enumerate(names)]})
    assert all(text.count(f"\n| `{name}` |") == 2 for name in ("run1_greedy", "run2_greedy"))
    assert text.count("\n| `contiguous` |") == 1 and "| less than `contiguous` by |" in text


def test_a_second_contiguous_map_is_held_against_the_first():
    text = findings.summary(RUN | {"rows": [row("a_contiguous", 20.0, 4.0), row("b_contiguous", 15.0, 4.0)]})
    assert "| less than `a_contiguous` by |" in text and "| `b_contiguous` | +25.0% |" in text


def test_without_a_contiguous_map_there_are_no_gains():
    text = findings.summary(RUN | {"rows": [row("greedy", 20.0, 4.0)]})
    assert "| `greedy` | 20.00 |" in text and "No `contiguous` map was measured" in text and "less than" not in text


def test_a_negative_cost_is_told():
    assert findings.doubts(RUN) == []
    [said] = findings.doubts(RUN | {"exchange_s": -3.164e-3})
    assert said.startswith("Warning: the fitted cost of the exchange is negative (-3164 us in each layer): noise")
    assert said in findings.summary(RUN | {"exchange_s": -3.164e-3, "rows": [row("contiguous", 20.0, 4.0)]})
    assert "cost of the rest" in findings.doubts(RUN | {"rest_s": -1e-6})[0]


def test_a_percentile_of_few_steps_is_practically_the_slowest():
    assert "p99 of 50 steps is practically the slowest of them." in findings.what(RUN)
    assert "p99 of 500 steps." in findings.what(RUN | {"steps": 500})
