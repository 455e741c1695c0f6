"""Today's plan beside what a GPU had."""

import json

import pytest

from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.plan.measure import Case, planned, planned_peaks

ROWS = json.loads((DOCS / "results" / "plan_h200.json").read_text())["rows"]


def name_of(row):
    return "-".join(str(row[key]) for key in ("model", "attention", "experts", "sequence"))


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_the_plan_keeps_what_the_gpu_kept(row):
    stage = planned(Case(row["model"], row["layers"], row["attention"], row["experts"]), row["sequence"])
    assert stage.kept.total() == row["kept_bytes"] and row["same_storages"]
    for phase, number in planned_peaks(stage).items():
        assert number == pytest.approx(row["peaks"][phase], rel=0.01), phase


def test_the_record_has_the_four_models_and_each_kernel():
    assert {"mixtral-8x7b", "qwen3-30b-a3b", "olmoe-1b-7b", "gpt-oss-20b"} <= {row["model"] for row in ROWS}
    assert {row["attention"] for row in ROWS} == {"flash", "cudnn", "efficient", "math"}
