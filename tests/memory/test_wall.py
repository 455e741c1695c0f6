"""The memory wall in training: what whole models keep, and the search for the largest step."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch

from moeblaze_ref.lm import data, wall
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.lm.wall import WINDOW, Row
from moeblaze_ref.memory.accounting import Assumptions, account

# h is as wide as a block of megablocks.
TINY = TrainSettings(LMConfig(d=16, h=128, E=4, k=2, layers=3, heads=2), steps=9, batch=1)
L = 24
LAYER = TINY.config.moe_layer(L)
# The oracle's account ends with its output: for both router losses plain torch keeps logits, logsumexp and shares.
OF_LOSSES = 4 * (LAYER.L * LAYER.E + LAYER.L + LAYER.E)


def measured(contender, L=L):
    return wall.measure(TINY, contender, L, data.python_help(), "cpu")


def accounted(contender):
    """Kept bytes of all the model's MoE layers by their accounts, under the routing of the step that is measured."""
    system, _, policy = contender.partition(", ")
    name = {"oracle": "conventional", "capacity 1.25": "capacity"}.get(system, system)
    tokens, _ = data.sample_windows(data.python_help().training, 1, L, torch.Generator().manual_seed(0))
    traces = Trainer(wall.settings_of(TINY, contender, L), data.python_help()).model(tokens).traces
    counts = [torch.bincount(trace.topk_experts.flatten(), minlength=LAYER.E).tolist() for trace in traces]
    kept = sum(account(LAYER, name, policy or None, Assumptions(each)).kept_bytes for each in counts)
    return kept + (len(counts) * OF_LOSSES if contender == "oracle" else 0)


class PretendedTrainer:
    """A trainer on a GPU, as far as a measurement looks at it."""

    device = torch.device("cuda")

    def __init__(self, asked):
        self.asked = asked

    def advance(self):
        self.asked.append("step")


@pytest.mark.parametrize("contender", [name for name in wall.CONTENDERS if name != "oracle"])
def test_models_keep_what_their_layers_accounts_differ_by(contender):
    """All else in the models is the same: what one layer saves over another, in every layer."""
    saved = measured("oracle").kept_bytes - measured(contender).kept_bytes
    assert saved == accounted("oracle") - accounted(contender) != 0


def test_a_row_says_what_was_run():
    row = measured("moeblaze, minimal")
    assert (row.contender, row.L, row.window, row.peak_bytes) == ("moeblaze, minimal", 24, 24, None)
    assert row.fits and row.step_ms > 0


def test_the_time_is_that_of_one_step_after_one_that_is_not_timed(monkeypatch):
    clock = [0.0]

    def advance(trainer):
        clock[0] += 60.0 if clock[0] < 60 else 3.0  # seconds: the first step compiles

    monkeypatch.setattr(wall.Trainer, "advance", advance)
    monkeypatch.setattr(wall.time, "perf_counter", lambda: clock[0])
    assert measured("oracle").step_ms == 3000.0


def test_a_gpus_peak_is_not_what_autograd_keeps(monkeypatch):
    """Of a GPU, pretended: the peak is that of the timed steps, after the counter was set back."""
    asked = []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(wall.torch.cuda, name, lambda device, name=name: asked.append(name))
    monkeypatch.setattr(wall.torch.cuda, "max_memory_allocated", lambda device: asked.append("peak") or 12_345)
    monkeypatch.setattr(wall, "_kept", lambda trainer: 67)
    row = wall._measured(Row("oracle", 8, 8), PretendedTrainer(asked))
    assert (row.kept_bytes, row.peak_bytes) == (67, 12_345)
    timed = ["step"] * wall.TIMED_STEPS
    assert asked == ["step", "synchronize", "reset_peak_memory_stats", *timed, "synchronize", "peak"]


def test_long_steps_are_cut_into_windows():
    settings = wall.settings_of(TINY, "capacity 1.25", 3 * WINDOW)
    assert (settings.batch, settings.config.sequence) == (3, WINDOW)
    assert (settings.layer, settings.layer_options) == ("capacity", {"capacity_factor": 1.25})
    assert settings.config.d == 16


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError("no room")])
def test_a_step_that_does_not_fit_is_a_row_that_says_so(monkeypatch, error):
    monkeypatch.setattr(wall.Trainer, "advance", Mock(side_effect=error))
    assert measured("oracle") == Row("oracle", 24, 24)


# torch.OutOfMemoryError is a RuntimeError, too.
@pytest.mark.parametrize("error", [ZeroDivisionError(), RuntimeError("no kernel image is available")], ids=repr)
def test_another_error_is_no_lack_of_memory(monkeypatch, error):
    monkeypatch.setattr(wall.Trainer, "advance", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error)):
        measured("oracle")


def row_of(room, L):
    return Row("oracle", L, WINDOW, 1, 1, 1.0) if L <= room * WINDOW else Row("oracle", L, WINDOW)


@pytest.mark.parametrize(
    "room, tried, best",
    [
        (0, [1], 0),
        (1, [1, 2], 1),
        (3, [1, 2, 4, 3], 3),
        (21, [1, 2, 4, 8, 16, 32, 24, 20, 22], 20),
        (99, [1, 2, 4, 8, 16, 32], 32),
    ],
)
def test_the_search_doubles_and_then_halves_the_gap(room, tried, best):
    rows = list(wall.climb(partial(row_of, room), WINDOW, 32 * WINDOW))
    assert [row.L // WINDOW for row in rows] == tried
    assert wall.summarise(rows)["largest"] == {"oracle": best * WINDOW}


@pytest.mark.parametrize(("ours", "passed"), [(4, True), (3, True), (2, False)])
def test_ours_must_reach_as_far_as_the_others(ours, passed):
    found = [
        Row("oracle", 2, 2, 1, 1, 1.0),
        Row("megablocks", 3, 3, 1, 1, 1.0),
        Row("moeblaze, inputs", 9, 9, 1, 1, 1.0),
    ]
    found += [Row("oracle", 4, 4), Row("megablocks", 4, 4), Row(wall.OURS, ours, ours, 1, 1, 1.0), Row(wall.OURS, 8, 8)]
    result = wall.summarise(found)
    assert result["passed"] is passed and result["largest"][wall.OURS] == ours
    assert result["rows"][-1] == {
        "contender": wall.OURS, "L": 8, "window": 8, "kept_bytes": None, "peak_bytes": None, "step_ms": None
    }  # fmt: skip


def rows_of(fits, fails):
    """The largest step that fits, of each contender, and those that met a wall."""
    made = [Row(name, L, L, 1, 1, 1.0) for name, L in fits.items() if L]
    return made + [Row(name, 9, 9) for name in fails]


@pytest.mark.parametrize(
    "fits, fails, passed",
    [
        ({}, (), None),
        ({wall.OURS: 4}, (wall.OURS,), None),  # nothing to compare it with
        ({"oracle": 4}, ("oracle",), None),
        ({wall.OURS: 4, "moeblaze, inputs": 8}, (wall.OURS, "moeblaze, inputs"), None),
        ({}, ("oracle", wall.OURS), False),  # no layer fits
        ({wall.OURS: 8, "oracle": 8}, (), None),  # the search ended before any wall
        ({wall.OURS: 8, "oracle": 8}, ("oracle",), True),
        ({wall.OURS: 8, "oracle": 8}, (wall.OURS,), False),
        ({wall.OURS: 8, "oracle": 4, "megablocks": 8}, (wall.OURS, "oracle"), False),
    ],
)
def test_what_met_no_wall_is_not_taken_for_one_that_did(fits, fails, passed):
    assert wall.summarise(rows_of(fits, fails))["passed"] is passed


@pytest.mark.parametrize(
    "contender, L, message",
    [
        ("moeblaze", 24, "unknown contender 'moeblaze'"),
        ("oracle", 0, "L is 0, but it must be >= 1"),
        ("oracle", WINDOW + 1, "L is 4097, but beyond 4096 it must be a multiple"),
    ],
)
def test_bad_sizes_are_named(contender, L, message):
    with pytest.raises(ValueError, match=message):
        measured(contender, L=L)
