"""docs/parallel.md says what its records hold."""

import json

import pytest

from moeblaze_ref import documents
from moeblaze_ref.parallel import document

RUN = {
    **{"gpus": 2, "tokens": 64, "layers": 2, "experts": 8, "d": 16, "h": 24, "k": 2, "model": "", "trace": "some.npz"},
    **{"token_s": 5e-9, "bandwidth": [[1.0, 2e9], [3e9, 1.0]], "exchange_s": 3e-5, "rest_s": 4e-5},
    **{"device": "a GPU", "versions": {"numpy": "2"}, "commit": "abc"},
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
    assert document.fill(text) == text
    assert all(text.count(f"<!-- begin {name} -->") == 1 for name in document.RECORDS)
    assert any(path.exists() for path in document.RECORDS.values())


def test_a_record_becomes_a_block(tmp_path):
    path, blank = tmp_path / "ep.json", "<!-- begin x -->\n<!-- end x -->"
    assert documents.NOTHING in document.fill(blank, {"x": path})
    path.write_text(json.dumps(RUN | {"rows": [row("toy_2_contiguous", 20.0, 4.0), row("toy_2_greedy", 16.0, 3.0)]}))
    text = document.fill(blank, {"x": path})
    assert "routed as some.npz" in text and "5 ns a routed row, 2 GB/s a pair" in text and "- commit: abc" in text
    assert (
        "| `greedy` | 16.00 | 17.00 | 14.40 (-10%) | 8.00 | 6.00 | 7.50 (+25%) | 4.00 | 3.00 (-25%) |" in text
    )
    assert "| `greedy` | +20.0% | +20.0% | +20.0% | +25.0% | +0.0% |" in text
    assert "| `contiguous` | +" not in text


def test_a_record_of_something_else_is_refused(tmp_path):
    path = tmp_path / "ep.json"
    path.write_text(json.dumps({"rows": []}))
    with pytest.raises(ValueError, match="ep.json has no bandwidth, commit"):
        document.fill("<!-- begin x -->\n<!-- end x -->", {"x": path})
