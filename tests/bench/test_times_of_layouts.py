"""Experts by the layout of their weights, without a GPU: what is timed, what is compared, and what is asked."""

from dataclasses import fields

import pytest
import torch
from pretended import PEAK, PretendedDevice

from moeblaze_ref.bench import layouts, plan, report
from moeblaze_ref.core.config import MoEConfig

TINY = MoEConfig(L=6, d=16, h=24, E=4, k=2)
WRONG = layouts.Way("linear")


def test_every_way_computes_what_the_layers_own_layout_does():
    rows = layouts.time_layouts("tiny", TINY, 3, PretendedDevice())
    assert [(row["layout"], row["activation"], row["biases"]) for row in rows] == [
        ("separate", "swiglu", False),
        ("linear", "swiglu", False),
        ("matmul", "swiglu", False),
        ("interleaved", "swiglu", False),
        ("interleaved", "clamped_swiglu", True),
    ]
    for row in rows:
        assert row.keys() == {field.name for field in fields(layouts.Row)}
        assert row["error"] <= 1e-6 and row["row_error"] <= 1e-6 and row["peak_bytes"] == PEAK
        assert row["over_separate"] == row["step_ms"] / rows[0]["step_ms"]
    assert not report.wrong(rows) and "over separate" in report.markdown(rows)


@pytest.mark.parametrize("place", range(6))
def test_a_wrong_tensor_is_an_error(monkeypatch, place):
    step = layouts.Scene.step

    def wrong(self, way, weights):
        found = step(self, way, weights)
        if way == WRONG and place < 5:  # out, d_x, d_topk_weights, d_gate_up, d_down
            found[place][-1] += 1
        return found

    monkeypatch.setattr(layouts.Scene, "step", wrong)
    rows = layouts.time_layouts("tiny", TINY, 1, PretendedDevice())
    assert [row["layout"] for row in report.wrong(rows)] == (["linear"] if place < 5 else [])


def test_the_weights_of_all_ways_are_the_same_numbers():
    scene = layouts.Scene(TINY, PretendedDevice())
    for way in layouts.WAYS[1:]:
        gate_up, down, *biases = scene.weights(way)
        assert all(map(torch.equal, layouts._parts(way, gate_up, down), (scene.w1, scene.w2, scene.w3)))
        assert [tuple(bias.shape) for bias in biases] == ([(4, 48), (4, 16)] if way.biases else [])


def test_jobs():
    assert [job.args[0] for job in plan.jobs("layouts", plan.Request())] == ["conf3", "mixtral", "qwen3"]
    with pytest.raises(ValueError, match="--kernel 2_tiled: bench layouts has the layer's own version"):
        plan.jobs("layouts", plan.Request(versions=("2_tiled",)))
