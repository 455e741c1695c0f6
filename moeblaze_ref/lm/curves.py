"""Compare whole training runs: the loss that a layer costs, and the loss that another order of the text costs.

In bfloat16 two runs part at the first step, so single losses say nothing. What can be asked: is our layer's run as near
to the oracle's as the oracle's is to itself when only the order of the text differs? That measure is one draw of luck,
and so is the run that all are compared with. So the gap of every run is reported beside ours, whether or not the rule
holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moeblaze_ref.core import checks
from moeblaze_ref.lm import checkpoint, log
from moeblaze_ref.lm.run import CHECKPOINT, LOG
from moeblaze_ref.lm.train import TrainSettings

# Settings that each run changes. Other weights would be another model: the order of the text has a seed of its own.
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
SIZES = ("mean", "worst")  # of a gap
WINDOW = 20  # steps whose training losses are averaged: a single one is mostly the luck of its text

Run = dict[str, Any]


def settings_of(name: str, base: TrainSettings) -> TrainSettings:
    """The settings of a run, from those that all share; an unknown name is a ValueError."""
    return replace(base, **RUNS[checks.check_name("run", name, RUNS)])


def collect(base: TrainSettings, text: str, folder: Path) -> dict[str, Any]:
    """Collect the runs in a folder, each in a folder with its own name, and compare them.

    A run without a checkpoint is left out. ``base`` is what all runs share, ``text`` the `data.Corpus.fingerprint` of
    what they read.

    Returns
    -------
    dict
        ``runs``, see `summarise`, and what `compare_curves` makes of them.

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
    return {"runs": runs, **compare_curves(runs, base.steps)}


def summarise(lines: Sequence[Mapping[str, Any]]) -> Run:
    """One run's log, as `run.run` returns it, in short.

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


def compare_curves(runs: Mapping[str, Run], steps: int) -> dict[str, Any]:
    """Compare the runs' losses: ours must be as near to the oracle's as the oracle's on another order of the text.

    Of both losses, the mean gap and the worst gap of ``moeblaze`` to ``oracle``, over all points after the start, must
    each be at most that of ``oracle-other-order`` to ``oracle``. ``runs`` has `summarise` of each run that there is, by
    name; ``steps`` are those of a finished run.

    Returns
    -------
    dict
        {unfinished, ends, verdict, passed}: runs that are not there or not at their last step; `end` of each finished
        one; of ``training`` and of ``validation`` the gap of each finished run to the oracle's, {mean, worst, at,
        within}: nats per byte, the step of the worst, and whether both are at most those of ``oracle-other-order``;
        whether ours is within of both losses. While one of ``COMPARED`` is unfinished, ``verdict`` and ``passed`` are
        None.
    """
    finished = {name: run for name, run in runs.items() if run["steps"] == steps}
    unfinished = [name for name in RUNS if name not in finished]
    ready = not any(name in unfinished for name in COMPARED)
    verdict = {loss: _gaps(finished, loss) for loss in ("training", "validation")} if ready else None
    return {
        "unfinished": unfinished,
        "ends": {name: end(run) for name, run in finished.items()},
        "verdict": verdict,
        "passed": None if verdict is None else all(gaps["moeblaze"]["within"] for gaps in verdict.values()),
    }


def end(run: Run) -> dict[str, Any]:
    """Return the last validation losses of a run, as `summarise` returns it, in nats per byte.

    Returns
    -------
    dict
        {lowest, at, last, second_half}: the lowest loss and its step, the last one, and the mean over the second half
        of the run, which a single validation moves less than itself.
    """
    points = list(zip(run["validation"]["loss"], run["validation"]["step"], strict=True))
    lowest, at = min(points)
    second_half = fmean(loss for loss, step in points if 2 * step > run["steps"])
    return {"lowest": lowest, "at": at, "last": points[-1][0], "second_half": second_half}


def _gaps(runs: Mapping[str, Run], loss: str) -> dict[str, dict[str, Any]]:
    gaps = {name: _gap(run[loss], runs["oracle"][loss]) for name, run in runs.items() if name != "oracle"}
    luck = gaps["oracle-other-order"]
    return {name: gap | {"within": all(gap[size] <= luck[size] for size in SIZES)} for name, gap in gaps.items()}


def _gap(curve: Mapping[str, Sequence[float]], reference: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Distance of two curves; before the first step all runs are one."""
    points = zip(curve["loss"], reference["loss"], curve["step"], strict=True)
    found = [(abs(loss - other), step) for loss, other, step in points if step > 0]
    worst, at = max(found)
    return {"mean": fmean(gap for gap, _ in found), "worst": worst, "at": at}
