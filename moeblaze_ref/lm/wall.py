"""The memory wall in training: how many tokens a step of a whole model takes until the device has no room for more.

A step reads L tokens as windows of at most ``WINDOW``: attention keeps as much for each token however long its window
is, but its time would grow with it and hide that of the experts.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.lm import data
from moeblaze_ref.lm.train import Trainer, TrainSettings, autocast
from moeblaze_ref.memory.measure import kept_bytes

WINDOW = 4_096
TIMED_STEPS = 2  # after one that compiles kernels and makes AdamW's moments
FIRST, MOST = 8 * WINDOW, 1024 * WINDOW  # tokens of the smallest step that is tried, and the end of the search
REFINEMENTS = 3  # halvings of the gap between the last L that fits and twice that
OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)  # torch's, and the allocator's of CuPy

# Ways to train the same model: the MoE layer and that layer's options.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "oracle": ("oracle", {}),
    "capacity 1.25": ("capacity", {"capacity_factor": 1.25}),
    "megablocks": ("megablocks", {}),
    **{f"moeblaze, {policy}": ("moeblaze", {"policy": policy}) for policy in POLICIES},
}

OURS = "moeblaze, minimal"


@dataclass(frozen=True)
class Row:
    """A step of a model at one size; what is measured is None where the step did not fit."""

    contender: str  #: one of ``CONTENDERS``
    L: int  #: tokens of the step
    window: int  #: tokens that attention sees at once
    kept_bytes: int | None = None  #: what autograd keeps of the forward, weights excluded
    #: The most that was allocated at a time in a whole step, with weights and AdamW's moments; None without a GPU, too.
    peak_bytes: int | None = None
    step_ms: float | None = None  #: of forward, backward and optimizer

    @property
    def fits(self) -> bool:
        """Return True if the step fits into memory."""
        return self.step_ms is not None


def settings_of(settings: TrainSettings, contender: str, L: int) -> TrainSettings:
    """The settings of a run, with a contender's layer and steps of L tokens.

    Raises
    ------
    ValueError, TypeError
        If there is no such contender, or L is no multiple of the window that it is cut into.
    """
    layer, options = CONTENDERS[checks.check_name("contender", contender, CONTENDERS)]
    checks.check_int("L", L, at_least=1)
    window = min(L, WINDOW)
    if L % window:
        raise ValueError(f"L is {L}, but beyond {WINDOW} it must be a multiple of it: windows are whole")
    config = replace(settings.config, sequence=window)
    return replace(settings, config=config, batch=L // window, layer=layer, layer_options=options)


def measure(settings: TrainSettings, contender: str, L: int, corpus: data.Corpus, device: str) -> Row:
    """Train a fresh model for a few steps of L tokens; if they do not fit, the row says so.

    Raises
    ------
    ValueError, TypeError
        As `settings_of`, or if the text is shorter than a window.
    """
    chosen = settings_of(settings, contender, L)
    row = Row(contender, L, chosen.config.sequence)
    try:
        return _measured(row, Trainer(chosen, corpus, device))
    except OUT_OF_MEMORY:
        return row
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def _measured(row: Row, trainer: Trainer) -> Row:
    gpu = trainer.device if trainer.device.type == "cuda" else None
    kept = _kept(trainer)
    trainer.advance()
    if gpu:
        torch.cuda.synchronize(gpu)
        torch.cuda.reset_peak_memory_stats(gpu)
    began = time.perf_counter()
    for _ in range(TIMED_STEPS):
        trainer.advance()
    if gpu:
        torch.cuda.synchronize(gpu)
    step_ms = (time.perf_counter() - began) / TIMED_STEPS * 1e3
    peak = torch.cuda.max_memory_allocated(gpu) if gpu else None
    return replace(row, kept_bytes=kept, peak_bytes=peak, step_ms=step_ms)


def _kept(trainer: Trainer) -> int:
    """Bytes that autograd keeps of one forward."""
    config = trainer.settings.config
    windows = torch.Generator().manual_seed(0)
    tokens, _ = data.sample_windows(trainer.corpus.training, trainer.settings.batch, config.sequence, windows)
    with autocast(trainer.settings.precision, trainer.device):
        return kept_bytes(trainer.model, tokens.to(trainer.device))


def climb(row_of: Callable[[int], Row], first: int, most: int) -> Iterator[Row]:
    """Rows at growing L: doubled from ``first``, a multiple of ``WINDOW``, up to ``most`` or until one does not fit.

    Then between the last that fits and the one that does not. ``row_of`` measures one L.
    """
    checks.check_int("first", first, at_least=WINDOW)
    fits, L = 0, first
    fails: int | None = None
    while fails is None and L <= most:
        row = row_of(L)
        yield row
        fits, fails = (L, None) if row.fits else (fits, L)
        L *= 2
    if not (fits and fails):
        return
    for _ in range(REFINEMENTS):
        L = (fits + fails) // 2 // WINDOW * WINDOW
        if L in (fits, fails):
            return
        row = row_of(L)
        yield row
        fits, fails = (L, fails) if row.fits else (fits, L)


def rows(
    settings: TrainSettings, corpus: data.Corpus, device: str, contenders: Sequence[str], most: int = MOST
) -> Iterator[Row]:
    """Climb with each contender; see `climb`.

    Raises
    ------
    ValueError, TypeError
        As `measure`.
    """
    for contender in contenders:
        yield from climb(partial(measure, settings, contender, corpus=corpus, device=device), FIRST, most)


def summarise(found: Sequence[Row]) -> dict[str, Any]:
    """Return the rows of all systems for JSON, and whether ours reaches as far as every other system.

    Returns
    -------
    dict
        {rows, largest, passed}: ``largest`` is the largest L that fits, for each contender, 0 if none did. Ours is
        ``OURS``; passed is None while it or every other system is missing, or if neither it nor one of them met a wall.
    """
    rows = [asdict(row) for row in found]
    largest: dict[str, int] = {}
    for row in found:
        largest[row.contender] = max(largest.get(row.contender, 0), row.L if row.fits else 0)
    reach = {name: L if met_wall(rows, name) else math.inf for name, L in largest.items()}
    others = [L for name, L in reach.items() if CONTENDERS[name][0] != "moeblaze"]
    known = OURS in reach and others and min(reach[OURS], max(others)) < math.inf
    return {"rows": rows, "largest": largest, "passed": 0 < reach[OURS] >= max(others) if known else None}


def met_wall(rows: Sequence[Mapping[str, Any]], contender: str) -> bool:
    """Return True if a step of this system did not fit; else its largest L is only where the search ended."""
    return any(row["contender"] == contender and row["step_ms"] is None for row in rows)
