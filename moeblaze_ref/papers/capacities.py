"""MegaBlocks' figures 2 and 8 on small models: validation loss by capacity factor, against steps and against time.

Source: MegaBlocks (arXiv 2211.15841), sections 2.2, 3 and 6.2. All variants have the same active FLOPs: one expert a
token, as wide as the FFN of the dense model. They read Python's own text in bytes; a seed has its own weights and its
own order of the text, both the same for every variant with experts.

Sizes are ours, chosen so that the 35 runs of the item end within 10 minutes on an H100, which runs of 400 steps would
not.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch

from moeblaze_ref.core import checks
from moeblaze_ref.lm import curves, data, run
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import Trainer, TrainSettings
from moeblaze_ref.papers.results import Rows, Run
from moeblaze_ref.runtime.device import Device

ITEM = "megablocks-fig2"
SEEDS = 5  # of a run
POINTS = 10  # validations of a run
VALIDATION_BATCHES = 32

NO_TIMES = {"seconds_at": None, "seconds": None}  # of a CPU, where ``oracle`` stands for the block-sparse layer


@dataclass(frozen=True)
class Variant:
    """A variant of the model: its layer, capacity factor and sizes."""

    layer: str  #: one of ``systems.SYSTEMS``
    #: Of the layer ``capacity``; "max" is the smallest that drops nothing, in every step and layer anew.
    capacity_factor: float | str | None = None
    #: Returns the variant's sizes, from those that all variants share.
    config_of: Callable[[LMConfig], LMConfig] = lambda shared: shared


def dense(shared: LMConfig) -> LMConfig:
    """Return the sizes of the dense model: one expert, which gets every token."""
    return replace(shared, E=1)


def larger_dense(shared: LMConfig) -> LMConfig:
    """Return the sizes of the next dense model, as Medium is to Small: 4/3 as wide, to a pair a head; twice as deep."""
    pairs = 2 * shared.heads
    d = round(4 / 3 * shared.d / pairs) * pairs
    return replace(dense(shared), d=d, h=d * shared.h // shared.d, layers=2 * shared.layers)


# A dense model's time has a router that the paper's dense models do not have.
VARIANTS = {
    "dense": Variant("capacity", 1.0, dense),
    "larger dense": Variant("capacity", 1.0, larger_dense),
    "1.0": Variant("capacity", 1.0),
    "1.5": Variant("capacity", 1.5),
    "2.0": Variant("capacity", 2.0),
    "max": Variant("capacity", "max"),
    "dropless": Variant("megablocks"),
}
FACTORS = tuple(name for name in VARIANTS if name not in ("dense", "larger dense", "dropless"))  # from the smallest
FIXED_FACTORS = tuple(name for name in FACTORS if name != "max")
RESOLVED = 3  # standard errors: of five seeds, Student's t has 95% within 2.8
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
        steps=300,
        batch=32,
        learning_rate=2e-3,
        warmup=50,
        final_fraction=0.1,
        precision="bfloat16",
    ),
}


def jobs(device: Device, earlier: Sequence[Mapping[str, Any]] = ()) -> list[Callable[[], Rows]]:
    """Return a job for each variant and seed; each returns one row, see `row_of`.

    The ``SEEDS`` seeds follow those of ``earlier``, the rows of earlier runs. Before its first run a variant takes a
    step that is thrown away, so that no compilation is in the time of a run.
    """
    place = device.torch_device
    compiled: set[str] = set()
    first = max((row["seed"] + 1 for row in earlier), default=0)
    return [
        partial(_train_compiled, name, seed, SIZES[place.type], data.standard_library(), place, compiled)
        for seed in range(first, first + SEEDS)
        for name in VARIANTS
    ]


def _train_compiled(
    name: str, seed: int, base: TrainSettings, corpus: data.Corpus, device: torch.device, compiled: set[str]
) -> Rows:
    """`train`, after a first step if the variant is not among those that this process has ``compiled``."""
    if name not in compiled:
        Trainer(settings_of(name, seed, base, device.type), corpus, device).advance()
        compiled.add(name)
    return train(name, seed, base, corpus, device)


def settings_of(name: str, seed: int, base: TrainSettings, device_type: str) -> TrainSettings:
    """Return the settings of a run, from those that all runs share.

    Raises
    ------
    ValueError
        If there is no such variant.
    """
    variant = VARIANTS[checks.check_name("variant", name, VARIANTS)]
    layer = DROPLESS_ON_A_CPU if (variant.layer, device_type) == ("megablocks", "cpu") else variant.layer
    options = {} if variant.capacity_factor is None else {"capacity_factor": variant.capacity_factor}
    return replace(base, config=variant.config_of(base.config), layer=layer, layer_options=options, seed=seed)


def train(name: str, seed: int, base: TrainSettings, corpus: data.Corpus, device: torch.device) -> Rows:
    """Train a variant with one seed on the settings that all runs share; return its row, on a CPU with ``NO_TIMES``."""
    settings = settings_of(name, seed, base, device.type)
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
    """Return the row of a finished run of a variant, from the lines of `run.run`.

    Returns
    -------
    dict
        {variant, system, capacity_factor, seed, shape, precision, tokens_of_step, steps, loss, seconds_at,
        held_out_loss, seconds, dropped_share}. ``steps``, ``loss`` and ``seconds_at`` have an entry for each
        validation: the steps done, the held-out loss in nats a byte, and the seconds of those steps alone.
        ``held_out_loss`` and ``seconds`` are their last entries. ``dropped_share`` is the mean share of dropped rows;
        None if the layer drops none.
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


def pools(runs: Iterable[Run], *variants: str) -> list[list[Run]]:
    """Return the runs of this item that trained all of these variants, in groups of one device and the same models.

    The runs of a group may differ in their steps and commits. Our kernels have no part in a loss of these variants:
    all but the dropless one are plain torch.
    """
    groups = defaultdict(list)
    for found in runs:
        models = {row["variant"]: _model(row) for row in found.rows if row["variant"] in variants}
        if len(models) == len(variants):
            groups[found.source.device, *(models[name] for name in variants)].append(found)
    return list(groups.values())


def _model(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what must be equal for two rows of a variant to train the same model on batches of one size."""
    return tuple(sorted(row["shape"].items())), row["precision"], row["tokens_of_step"]


class Gain(NamedTuple):
    """Difference of the losses of two variants, paired seed by seed."""

    mean: float  #: nats a byte, over the seeds that both have
    error: float  #: standard error of the mean; infinite of a single seed
    seeds: int  #: different ones

    @property
    def resolved(self) -> bool:
        """True if the seeds distinguish the mean from 0."""
        return abs(self.mean) > RESOLVED * self.error


def gain(runs: Iterable[Sequence[Mapping[str, Any]]], before: str, after: str) -> Gain:
    """Return the gain in held-out loss of the variant ``after`` over ``before``, of all runs of a pool together.

    The two losses of a difference are of one seed and one run. A seed counts once, by the mean of its differences: its
    runs begin with the same weights and read the same text, so they are not independent, however long they train. The
    seeds are, and the standard error is that of their means. A run has the rows of `row_of`.

    Raises
    ------
    ValueError
        If the variants have no seed in common.
    """
    of_seed = defaultdict(list)
    for rows in runs:
        losses = {(row["variant"], row["seed"]): row["held_out_loss"] for row in rows}
        for variant, seed in losses:
            if variant == before and (after, seed) in losses:
                of_seed[seed].append(losses[before, seed] - losses[after, seed])
    if not of_seed:
        raise ValueError(f"variants {before} and {after} have no seed in common")
    means = [fmean(differences) for differences in of_seed.values()]
    error = stdev(means) / len(means) ** 0.5 if len(means) > 1 else float("inf")
    return Gain(fmean(means), error, len(means))


class EqualLoss(NamedTuple):
    """The time of the dropless model beside the best capacity factor, at a loss that all of them reach."""

    loss: float  #: nats a byte
    seconds: dict[str, float]  #: of training until that loss, by variant

    @property
    def best_factor(self) -> str:
        """The capacity factor that reaches the loss first."""
        return min(FIXED_FACTORS, key=self.seconds.__getitem__)

    @property
    def speed(self) -> float:
        """Return the speed-up of the dropless model."""
        return self.seconds[self.best_factor] / self.seconds["dropless"]


def equal_loss(rows: Sequence[Mapping[str, Any]]) -> EqualLoss:
    """Return when the dropless model and each fixed capacity factor reach the same held-out loss.

    The loss is the lowest that all of them reach. Losses and times are means over the seeds, and linear between two
    validations. The rows are those of `row_of`, of one GPU, with the variant dropless and every one of
    ``FIXED_FACTORS``.
    """
    curves_of = {}
    for name in (*FIXED_FACTORS, "dropless"):
        runs = [row for row in rows if row["variant"] == name]
        curves_of[name] = [np.mean([run[column] for run in runs], axis=0) for column in ("seconds_at", "loss")]
    loss = max(losses.min() for _, losses in curves_of.values())
    return EqualLoss(float(loss), {name: _reached(loss, *curve) for name, curve in curves_of.items()})


def _reached(loss: float, seconds: np.ndarray, losses: np.ndarray) -> float:
    """The time at which a falling curve first comes to a loss."""
    after = int(np.argmax(losses <= loss))
    if after == 0:
        return float(seconds[0])
    pair = slice(after - 1, after + 1)
    return float(np.interp(-loss, -losses[pair], seconds[pair]))
