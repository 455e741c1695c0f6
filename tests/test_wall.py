"""The memory wall in training: what whole models keep, and the search for the largest step."""

from functools import partial

import pytest
import torch

from moeblaze_ref.lm import data, wall
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import TrainSettings
from moeblaze_ref.lm.wall import WINDOW, Row
from moeblaze_ref.memory.accounting import account

TINY = TrainSettings(LMConfig(d=16, h=32, E=4, k=2, layers=3, heads=2), steps=9, batch=1)


def measured(contender, L=24):
    return wall.measure(TINY, contender, L, data.python_help(), "cpu")


def test_models_keep_what_their_layers_accounts_differ_by():
    """All else in the models is the same: what one layer saves over another, as often as there are layers."""
    config = TINY.config.moe_layer(L=24)
    # The oracle's account ends with its output: for both router losses plain torch keeps logits, logsumexp and shares.
    losses = 4 * (config.L * config.E + config.L + config.E)
    accounted = {"oracle": account(config, "conventional").kept_bytes + losses}
    for policy in ("minimal", "inputs"):
        accounted[f"moeblaze, {policy}"] = account(config, "moeblaze", policy).kept_bytes
    kept = {contender: measured(contender).kept_bytes for contender in accounted}
    for contender, layer in accounted.items():
        assert kept["oracle"] - kept[contender] == TINY.config.layers * (accounted["oracle"] - layer)
    assert kept["oracle"] > kept["moeblaze, minimal"] > kept["moeblaze, inputs"] > 0


def test_a_row_says_what_was_run():
    row = measured("moeblaze, minimal")
    assert (row.contender, row.L, row.window, row.peak_bytes) == ("moeblaze, minimal", 24, 24, None)
    assert row.fits and row.step_ms > 0


def test_long_steps_are_cut_into_windows():
    settings = wall.settings_of(TINY, "capacity 1.25", 3 * WINDOW)
    assert (settings.batch, settings.config.sequence) == (3, WINDOW)
    assert (settings.layer, settings.layer_options) == ("capacity", {"capacity_factor": 1.25})
    assert settings.config.d == 16


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), MemoryError("no room")])
def test_a_step_that_does_not_fit_is_a_row_that_says_so(monkeypatch, error):
    def advance(trainer):
        raise error

    monkeypatch.setattr(wall.Trainer, "advance", advance)
    assert measured("oracle") == Row("oracle", 24, 24)


def test_another_error_is_no_lack_of_memory(monkeypatch):
    monkeypatch.setattr(wall.Trainer, "advance", lambda trainer: 1 / 0)
    with pytest.raises(ZeroDivisionError):
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
    found += [Row(wall.OURS, ours, ours, 1, 1, 1.0), Row(wall.OURS, 8, 8)]
    result = wall.summarise(found)
    assert result["passed"] is passed and result["largest"][wall.OURS] == ours
    assert result["rows"][-1] == {
        "contender": wall.OURS, "L": 8, "window": 8, "kept_bytes": None, "peak_bytes": None, "step_ms": None
    }  # fmt: skip


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
        measured(contender, L)
