"""The record of every adapter over 20 seeds, which a page speaks of."""

from moeblaze_ref.core import records
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.verify.layers import adapters

RECORD = DOCS / "results" / "layers_cpu.json"


def test_every_adapter_was_right_over_20_seeds():
    """A new adapter is added to the record by ``--resume``."""
    found = records.read(RECORD, ("rows", "seeds", "device", "versions", "commit"))
    assert found["seeds"] == 20 and {row["layer"] for row in found["rows"]} == {*adapters.factories()}
    wrong = [(row["layer"], row["dtype"]) for row in found["rows"] if not row["right"] or row["refused"]]
    assert not wrong
    assert {row["dtype"] for row in found["rows"]} == {"float32", "bfloat16", "float16"}
    assert 0.1 < max(row["largest_error"] for row in found["rows"]) < 1
