"""Whole training runs side by side: what a layer costs in loss, beside what another order of the text costs.

In bfloat16 two runs part at the first step, so single losses say nothing. What can be said: our layer's run is as near to
the oracle's as the oracle's is to itself when only the order of the text differs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moeblaze_ref import doors
from moeblaze_ref.lm import checkpoint, log
from moeblaze_ref.lm.run import CHECKPOINT, LOG
from moeblaze_ref.lm.train import TrainSettings

# What each run changes in the settings. Other weights would be another model: the order of the text has a seed of its own.
RUNS: dict[str, dict[str, Any]] = {
    "oracle": {"layer": "oracle"},
    "oracle-other-order": {"layer": "oracle", "order_seed": 1},
    "moeblaze": {"layer": "moeblaze"},
    "megablocks": {"layer": "megablocks"},
    "capacity-1.0": {"layer": "capacity", "layer_options": {"capacity_factor": 1.0}},
    "capacity-1.25": {"layer": "capacity", "layer_options": {"capacity_factor": 1.25}},
}
COMPARED = ("oracle", "oracle-other-order", "moeblaze")  # that the verdict needs
CHECKPOINT_EVERY = 250  # steps: six runs that write gigabytes at once would train little
WINDOW = 20  # steps whose training losses are averaged: a single one is mostly the luck of its text

Run = dict[str, Any]


def settings_of(name: str, base: TrainSettings) -> TrainSettings:
    """The settings of a run, from those that all share.

    Raises
    ------
    ValueError
        If there is no such run.
    """
    return replace(base, **RUNS[doors.check_name("run", name, RUNS)])


def collect(base: TrainSettings, text: str, folder: Path) -> dict[str, Any]:
    """What the runs in a folder have come to.

    Parameters
    ----------
    base : TrainSettings
        What all runs share.
    text : str
        `data.Corpus.fingerprint` of what they read.
    folder : Path
        Of the runs' own folders, each with its run's name; those without a checkpoint are left out.

    Returns
    -------
    dict
        ``runs``, see `summarise`, and what `judge` makes of them.

    Raises
    ------
    ValueError
        If there is no run, or one of other settings or of another text (`checkpoint.CheckpointError`).
    """
    begun = [name for name in RUNS if (folder / name / CHECKPOINT).exists()]
    if not begun:
        raise ValueError(f"{folder} holds no run yet, but it must have at least one of {', '.join(RUNS)}")
    for name in begun:
        checkpoint.check(folder / name / CHECKPOINT, settings_of(name, base), text)
    runs = {name: summarise(log.read(folder / name / LOG)) for name in begun}
    return {"runs": runs, **judge(runs, base.steps)}


def summarise(lines: Sequence[Mapping[str, Any]]) -> Run:
    """One run's log in short.

    Parameters
    ----------
    lines : sequence of dict
        As `run.run` returns them.

    Returns
    -------
    dict
        {steps, training, validation, tokens_per_second, peak_bytes, dropped_share}: steps done; {step, loss} of the
        training loss, averaged over `WINDOW` steps, at the last of them, and of the validation loss; the median speed;
        the peak, None on a CPU; the mean share of dropped rows, None where none can be.
    """
    steps = [line for line in lines if "loss" in line]
    held_out = [line for line in lines if "validation_loss" in line]
    windows = [steps[end - WINDOW : end] for end in range(WINDOW, len(steps) + 1, WINDOW)]
    dropped = [line["dropped_share"] for line in steps if "dropped_share" in line]
    return {
        "steps": len(steps),
        "training": {
            "step": [window[-1]["step"] for window in windows],
            "loss": [fmean(line["loss"] for line in window) for window in windows],
        },
        "validation": {
            "step": [line["step"] for line in held_out],
            "loss": [line["validation_loss"] for line in held_out],
        },
        "tokens_per_second": median(line["tokens_per_second"] for line in steps),
        "peak_bytes": max((line["peak_bytes"] for line in steps if "peak_bytes" in line), default=None),
        "dropped_share": fmean(dropped) if dropped else None,
    }


def judge(runs: Mapping[str, Run], steps: int) -> dict[str, Any]:
    """Whether our layer's run is as near to the oracle's as the oracle's on another order of the text.

    Of both losses, the mean gap and the worst gap of ``moeblaze`` to ``oracle``, over all points after the start, must
    each be at most that of ``oracle-other-order`` to ``oracle``.

    Parameters
    ----------
    runs : mapping
        `summarise` of each run that there is, by name.
    steps : int
        Of a finished run.

    Returns
    -------
    dict
        {unfinished, above_oracle, verdict, passed}: runs that are not there or not at their last step; of the finished
        others the last validation loss less the oracle's, in nats per byte; of ``training`` and of ``validation``
        {passed, moeblaze, oracle-other-order}, with {mean, worst} gap in nats per byte. While one of ``COMPARED`` is
        unfinished, ``verdict`` and ``passed`` are None.
    """
    finished = {name: run for name, run in runs.items() if run["steps"] == steps}
    unfinished = [name for name in RUNS if name not in finished]
    ready = not any(name in unfinished for name in COMPARED)
    verdict = {loss: _judge_loss(finished, loss) for loss in ("training", "validation")} if ready else None
    return {
        "unfinished": unfinished,
        "above_oracle": _above_oracle(finished),
        "verdict": verdict,
        "passed": all(one["passed"] for one in verdict.values()) if ready else None,
    }


def _judge_loss(runs: Mapping[str, Run], loss: str) -> dict[str, Any]:
    ours, theirs = (_gap(runs[name][loss], runs["oracle"][loss]) for name in ("moeblaze", "oracle-other-order"))
    within = all(ours[size] <= theirs[size] for size in ours)
    return {"passed": within, "moeblaze": ours, "oracle-other-order": theirs}


def _gap(curve: Mapping[str, Sequence[float]], reference: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean and worst distance of two curves, in nats per byte; before the first step all runs are one."""
    points = zip(curve["step"], curve["loss"], reference["loss"], strict=True)
    found = [abs(loss - other) for step, loss, other in points if step > 0]
    return {"mean": fmean(found), "worst": max(found)}


def _above_oracle(finished: Mapping[str, Run]) -> dict[str, float]:
    last = {name: run["validation"]["loss"][-1] for name, run in finished.items()}
    return {name: loss - last["oracle"] for name, loss in last.items() if name != "oracle"} if "oracle" in last else {}
