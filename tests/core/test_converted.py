"""Names in the results files were converted once; every value is the one that was measured."""

import hashlib
import json

import pytest

from moeblaze_ref.core.paths import DOCS

NEW_NAMES = {"4_hopper": "7_persistent"}
# Of each file before its names were converted: a hash of its values. A file that is measured again leaves this table.
BEFORE = {
    "bench_h200": "1f8d646c9830beca",
    "check_h200": "c788d03411a8057d",
    "paper_h200": "13f6424ad046846e",
    "systems_h200": "eb4cd1ff2ff8c683",
}
CONVERTED_RUNS = {"paper_h200": 2}  # of each item; later runs stand behind them


def values_of(document):
    """Every value of a JSON document, in order and without the keys; names that were converted as they are now."""
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        return [value for part in document for value in values_of(part)]
    if isinstance(document, str):
        for old, new in NEW_NAMES.items():
            document = document.replace(old, new)
    return [document]


def hash_of(document):
    return hashlib.sha256(json.dumps(values_of(document)).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", BEFORE)
def test_a_converted_file_holds_the_values_that_were_measured(name):
    text = (DOCS / "results" / f"{name}.json").read_text()
    document = json.loads(text)
    if name in CONVERTED_RUNS:
        document["items"] = {item: runs[: CONVERTED_RUNS[name]] for item, runs in document["items"].items()}
    assert hash_of(document) == BEFORE[name]
    assert not any(old in text for old in NEW_NAMES)


def test_a_changed_value_shows():
    document = {"version": "4_hopper", "rows": [{"ms": 1.5}, {"ms": None}]}
    assert hash_of(document) == hash_of({"version": "7_persistent", "rows": [{"step_ms": 1.5}, {"ms": None}]})
    assert hash_of(document) != hash_of({"version": "4_hopper", "rows": [{"ms": None}, {"ms": 1.5}]})
