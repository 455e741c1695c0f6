"""What a page says of measured models, and the record that it is from."""

from moeblaze_ref.core import records
from moeblaze_ref.plan import document

ROW = {"model": "tiny", "sequence": 4096, "experts": "eager", "loss": 1.25, "step_ms": [3.0, 4.0], "problem": ""}


def test_the_page_is_that_of_the_record():
    page = document.DOCUMENT.read_text()
    assert document.fill(page) == page
    assert document.fill(page.replace("| eager |", "| other |")) == page


def test_the_slower_run_is_shown_and_what_failed_says_why():
    assert document.cells(ROW | {"peak_bytes": 3 * 2**20}) == ["tiny", "4,096", "eager", "4.0", "3", "1.250"]
    failed = ROW | {"peak_bytes": None, "loss": None, "step_ms": [], "problem": "no such experts"}
    assert document.cells(failed) == ["tiny", "4,096", "eager", "no such experts", "", ""]


def test_our_experts_are_the_fastest_of_each_model():
    """What the page claims in words must hold of its record."""
    rows = records.read(document.RECORD, document.KEYS)["rows"]
    for model, sequence in {(row["model"], row["sequence"]) for row in rows}:
        of_case = {row["experts"]: row for row in rows if (row["model"], row["sequence"]) == (model, sequence)}
        losses = [row["loss"] for row in of_case.values()]
        assert max(losses) - min(losses) < 2e-3
        minimal = max(of_case.pop("moeblaze_minimal")["step_ms"])
        assert len(of_case) == 4 and all(minimal < min(row["step_ms"]) for row in of_case.values())
