"""How unevenly tokens spread over GPUs that divide the experts: from a routing trace, or by Zipf's law.

An imbalance is the number of routed rows of one GPU's experts, divided by an even share. Experts lie in their order, as
many on each GPU.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace, load
from moeblaze_ref.plan.experts import MoEBlock, Router
from moeblaze_ref.plan.run import Run

SEED = 0  # of the order in which Zipf's popular experts are dealt to GPUs


def trace_imbalances(trace: RoutingTrace, gpus: int, tokens: int) -> np.ndarray:
    """The imbalance of the fullest GPU in each layer of each batch of a trace.

    Parameters
    ----------
    trace : RoutingTrace
    gpus : int
        GPUs that divide the experts.
    tokens : int
        Tokens of a batch, over all these GPUs; a shorter trace is one batch, and a last shorter batch is left out.

    Returns
    -------
    ndarray (batches, layers) float64

    Raises
    ------
    ValueError
        If the GPUs do not divide the experts.
    """
    of_gpu = _experts_of_a_gpu(trace.num_experts, gpus)
    count = max(1, len(trace.topk) // tokens)
    batches = [trace.topk[i * tokens : (i + 1) * tokens] for i in range(count)]
    return np.array(
        [[_fullest(batch[:, layer] // of_gpu, gpus) for layer in range(batch.shape[1])] for batch in batches]
    )


def _fullest(gpu_of_row: np.ndarray, gpus: int) -> float:
    counts = np.bincount(gpu_of_row.ravel(), minlength=gpus)
    return float(counts.max() / counts.mean())


def zipf_imbalance(num_experts: int, gpus: int, exponent: float) -> float:
    """The imbalance of the fullest GPU if expert i is chosen in proportion to ``1 / (i + 1) ** exponent``.

    Which expert is the i-th is drawn once, by numpy's generator with seed 0.

    Raises
    ------
    ValueError
        If the GPUs do not divide the experts, or the exponent is below 0.
    """
    of_gpu = _experts_of_a_gpu(num_experts, gpus)
    checks.check_within("zipf", exponent, 0, 10)
    popularity = 1 / np.arange(1, num_experts + 1) ** exponent
    dealt = np.random.default_rng(SEED).permutation(popularity)
    loads = dealt.reshape(gpus, of_gpu).sum(1)
    return float(loads.max() / loads.mean())


def _experts_of_a_gpu(num_experts: int, gpus: int) -> int:
    if num_experts % gpus:
        raise ValueError(f"expert is {gpus}, but it must divide the experts, {num_experts}")
    return num_experts // gpus


@dataclass(frozen=True)
class Unevenness:
    """The imbalances of a run's batches, and where they come from."""

    source: str  #: in words
    batches: tuple[float, ...]  #: that of each batch's fullest layer

    @property
    def worst(self) -> float:
        """The largest."""
        return max(self.batches)

    def exceeding(self, run: Run, capacity: int, overhead: float) -> float:
        """The part of the batches whose peak, with the allocator's overhead, is above a capacity in bytes."""
        peaks = (replace(run, imbalance=one).worst.peak.bytes for one in self.batches)
        return sum(peak * (1 + overhead) > capacity for peak in peaks) / len(self.batches)


def of_run(run: Run, trace: Path | None, zipf: float | None) -> Unevenness:
    """How unevenly the GPUs of a run get rows.

    Parameters
    ----------
    run : Run
    trace : Path, optional
        A file with a routing trace of a model with as many experts.
    zipf : float, optional
        Zipf's exponent of the experts' popularity, if there is no trace.

    Raises
    ------
    ValueError
        If both are given, if the GPUs do not divide the experts, or if the trace is of another number of experts.
    OSError
        If the trace cannot be read.
    """
    if trace is not None and zipf is not None:
        raise ValueError("a trace and zipf were given, but only one of them can say how tokens spread")
    experts = max((part.E for part in run.model.parts if isinstance(part, Router | MoEBlock)), default=0)
    gpus = run.parallel.expert
    if gpus == 1:
        return Unevenness("all on one GPU", (1.0,))
    if trace is None and zipf is None:
        return Unevenness("spread evenly", (1.0,))
    if trace is None:
        return Unevenness(f"spread by Zipf's law with exponent {zipf}", (zipf_imbalance(experts, gpus, zipf or 0),))
    found = load(trace)
    if found.num_experts != experts:
        raise ValueError(f"{trace} has {found.num_experts} experts, but {run.model.name} has {experts}")
    tokens = run.step.batch * run.step.sequence * gpus // run.parallel.tensor
    imbalances = trace_imbalances(found, gpus, tokens)
    return Unevenness(f"those of {len(imbalances)} batches of {trace.name}", tuple(imbalances.max(1).tolist()))
