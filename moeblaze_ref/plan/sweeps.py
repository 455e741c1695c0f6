"""The peak of a run against the batch or the sequence, for each save policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.plan.configs import Model
from moeblaze_ref.plan.run import Run

AXES = ("batch", "sequence")
FACTORS = (0.25, 0.5, 1, 2, 4, 8)


@dataclass(frozen=True)
class Line:
    """The peaks of one way to compute the experts."""

    experts: str  #: as the option ``--experts`` names it
    sizes: tuple[int, ...]  #: batches or sequences
    peaks: tuple[int, ...]  #: bytes


def sweep(run: Run, axis: str, spread: Callable[[Run], Run] = lambda run: run) -> Sequence[Line]:
    """Lines of a run's own experts and, where our layer can take their place, of each policy.

    Parameters
    ----------
    run : Run
    axis : str
        One of ``AXES``; from a quarter of the run's own to eight times it.
    spread : function, optional
        Gives a run with its own imbalances. Default: those of ``run``.

    Returns
    -------
    sequence of Line
    """
    own = getattr(run.step, axis)
    whole = run.parallel.tensor if axis == "sequence" else 1  # GPUs divide a sequence
    sizes = tuple(sorted({max(1, int(own * factor) // whole) * whole for factor in FACTORS}))
    return [
        Line(name, sizes, tuple(spread(_resized(run, model, axis, size)).worst.peak.bytes for size in sizes))
        for name, model in _ways(run.model)
    ]


def _resized(run: Run, model: Model, axis: str, size: int) -> Run:
    step = replace(run.step, batch=size) if axis == "batch" else replace(run.step, sequence=size)
    return replace(run, model=model, step=step)


def _ways(model: Model) -> list[tuple[str, Model]]:
    ways = [("as given", model)]
    for policy in POLICIES:
        try:
            ways.append((f"moeblaze/{policy}", model.in_system("moeblaze", policy)))
        except ValueError:
            break
    return ways
