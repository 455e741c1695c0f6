"""MegaBlocks' figures 2 and 8 on small models: held-out loss by capacity factor, against steps and against time.

Source: MegaBlocks (arXiv 2211.15841), sections 2.2, 3 and 6.2. All variants have the same active FLOPs: one expert a
token, as wide as the FFN of the dense model. They read Python's own text in bytes; a seed has its own weights and its
own order of the text, both the same for every variant with experts.

Sizes are ours, chosen so that the 30 runs of the item end within 10 minutes on an H100, and within half an hour on two
cores of a CPU.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch

from moeblaze_ref import doors
from moeblaze_ref.bench.device import Device
from moeblaze_ref.lm import curves, data, run
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import Trainer, TrainSettings

ITEM = "megablocks-fig2"
SEEDS = range(5)
POINTS = 10  # validations of a run
VALIDATION_BATCHES = 32

NO_TIMES = {"seconds_at": None, "seconds": None}  # of a CPU, where ``oracle`` stands for the block-sparse layer

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Variant:
    """What a run changes in the model.

    Parameters
    ----------
    layer : str
        One of ``systems.SYSTEMS``.
    capacity_factor : float or str, optional
        Of the layer ``capacity``; "max" is the smallest that drops nothing, in every step and layer anew.
    dense : bool
        Whether the layer has a single expert, in place of the model's E.
    """

    layer: str
    capacity_factor: float | str | None = None
    dense: bool = False


# A dense model is one expert, which gets every token: its time has a router that the paper's dense models do not have.
VARIANTS = {
    "dense": Variant("capacity", 1.0, dense=True),
    "1.0": Variant("capacity", 1.0),
    "1.5": Variant("capacity", 1.5),
    "2.0": Variant("capacity", 2.0),
    "max": Variant("capacity", "max"),
    "dropless": Variant("megablocks"),
}
FACTORS = tuple(name for name in VARIANTS if name not in ("dense", "dropless"))  # from the smallest
DROPLESS_ON_A_CPU = "oracle"  # the same function; our block-sparse kernels are slow there

SIZES = {
    "cpu": TrainSettings(
        LMConfig(d=64, h=256, E=32, k=1, layers=2, heads=4, sequence=128, activation="gelu"),
        steps=1000,
        batch=8,
        learning_rate=4e-3,
        warmup=50,
        final_fraction=0.1,
    ),
    "cuda": TrainSettings(
        LMConfig(d=256, h=1024, E=32, k=1, layers=3, heads=4, sequence=256, activation="gelu"),
        steps=600,
        batch=32,
        learning_rate=2e-3,
        warmup=50,
        final_fraction=0.1,
        precision="bfloat16",
    ),
}


def jobs(item: str, device: Device) -> list[Callable[[], Rows]]:
    """Return a job for each variant and seed; each returns one row, see `row_of`.

    Parameters
    ----------
    item : str
        ``ITEM``.
    device : Device

    Raises
    ------
    ValueError
        If the item is another.
    """
    doors.check_name("item", item, (ITEM,))
    place = device.torch_device
    return [
        partial(train, name, seed, SIZES[place.type], data.standard_library(), place)
        for seed in SEEDS
        for name in VARIANTS
    ]


def settings_of(name: str, seed: int, base: TrainSettings, device_type: str) -> TrainSettings:
    """Return the settings of a run, from those that all runs share.

    Raises
    ------
    ValueError
        If there is no such variant.
    """
    variant = VARIANTS[doors.check_name("variant", name, VARIANTS)]
    layer = DROPLESS_ON_A_CPU if (variant.layer, device_type) == ("megablocks", "cpu") else variant.layer
    options = {} if variant.capacity_factor is None else {"capacity_factor": variant.capacity_factor}
    config = replace(base.config, E=1) if variant.dense else base.config
    return replace(base, config=config, layer=layer, layer_options=options, seed=seed)


def train(name: str, seed: int, base: TrainSettings, corpus: data.Corpus, device: torch.device) -> Rows:
    """Train one variant with one seed and return its row, on a CPU with ``NO_TIMES``.

    A first step of the same model is thrown away, so that no compilation is in the time.

    Parameters
    ----------
    name : str
        One of ``VARIANTS``.
    seed : int
    base : TrainSettings
        What all runs share.
    corpus : data.Corpus
    device : torch.device
    """
    settings = settings_of(name, seed, base, device.type)
    Trainer(settings, corpus, device).advance()
    with TemporaryDirectory() as folder:
        lines = run.run(
            Trainer(settings, corpus, device),
            Path(folder),
            every=max(1, base.steps // POINTS),
            validation_batches=VALIDATION_BATCHES,
            checkpoint_every=base.steps,
        )
    row = row_of(name, settings, lines)
    return [row | NO_TIMES if device.type == "cpu" else row]


def row_of(name: str, settings: TrainSettings, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what a run came to.

    Parameters
    ----------
    name : str
        One of ``VARIANTS``.
    settings : TrainSettings
    lines : sequence of dict
        As `run.run` returns them.

    Returns
    -------
    dict
        {variant, system, capacity_factor, seed, shape, precision, tokens_of_step, steps, loss, seconds_at,
        held_out_loss, seconds, dropped_share}. ``loss`` is the held-out loss, nats per byte, after so many ``steps``,
        which had taken ``seconds_at``; validations do not count. ``held_out_loss`` and ``seconds`` are the last of
        them. ``dropped_share`` is the mean share of dropped rows, None where none can be dropped.
    """
    short, tokens = curves.summarise(lines), settings.batch * settings.config.sequence
    took = [tokens / line["tokens_per_second"] for line in lines if "loss" in line]
    elapsed = list(accumulate(took, initial=0.0))  # after 0, 1, 2, ... steps
    steps, loss = short["validation"]["step"], short["validation"]["loss"]
    config = settings.config
    return {
        "variant": name,
        "system": settings.layer,
        "capacity_factor": VARIANTS[name].capacity_factor,
        "seed": settings.seed,
        "shape": {size: getattr(config, size) for size in ("d", "h", "E", "k", "layers", "sequence")},
        "precision": settings.precision,
        "tokens_of_step": tokens,
        "steps": steps,
        "loss": loss,
        "seconds_at": [elapsed[step] for step in steps],
        "held_out_loss": loss[-1],
        "seconds": elapsed[-1],
        "dropped_share": short["dropped_share"],
    }


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return each variant's held-out loss over its seeds.

    Parameters
    ----------
    rows : sequence of dict
        As `row_of` returns them, of one device.

    Returns
    -------
    dict
        By variant, in the order of ``VARIANTS``: {seeds, mean, deviation, seconds, dropped_share}: number of runs, mean
        and sample deviation of their losses (None of a single run), mean seconds (None of a CPU), and the mean share of
        dropped rows, None where none can be dropped.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not rows:
        raise ValueError("rows is empty, but it must hold at least one run")
    found = {name: [row for row in rows if row["variant"] == name] for name in VARIANTS}
    return {name: _of_variant(runs) for name, runs in found.items() if runs}


def _of_variant(runs: Rows) -> dict[str, Any]:
    losses = [row["held_out_loss"] for row in runs]
    return {
        "seeds": len(runs),
        "mean": fmean(losses),
        "deviation": stdev(losses) if len(losses) > 1 else None,
        "seconds": _mean([row["seconds"] for row in runs]),
        "dropped_share": _mean([row["dropped_share"] for row in runs]),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """The mean of what a variant has in every run, or in none."""
    return None if None in values else fmean(values)
