"""How unevenly tokens spread over GPUs that divide the experts: from a routing trace, or by Zipf's law.

An imbalance is the number of routed rows of one GPU's experts in a layer, divided by an even share. Experts lie in
their order, as many on each GPU.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace, load
from moeblaze_ref.plan.experts import MoEBlock, Router
from moeblaze_ref.plan.run import Run

SEED = 0  # of the order in which Zipf's popular experts are dealt to GPUs


def trace_imbalances(trace: RoutingTrace, gpus: int, tokens: int) -> np.ndarray:
    """The imbalance of each layer on each GPU, in each batch of a trace.

    Parameters
    ----------
    trace : RoutingTrace
    gpus : int
        GPUs that divide the experts.
    tokens : int
        Tokens of a batch, over all these GPUs; a shorter trace is one batch, and a last shorter batch is left out.

    Returns
    -------
    ndarray (batches, gpus, layers) float64

    Raises
    ------
    ValueError
        If the GPUs do not divide the experts.
    """
    of_gpu = _experts_of_a_gpu(trace.num_experts, gpus)
    count = max(1, len(trace.topk) // tokens)
    batches = [trace.topk[i * tokens : (i + 1) * tokens] for i in range(count)]
    return np.array([_shares(batch // of_gpu, gpus) for batch in batches])


def _shares(gpu_of_choice: np.ndarray, gpus: int) -> np.ndarray:
    """Rows (gpus, layers) as multiples of an even share, of choices (tokens, layers, k)."""
    layers = np.moveaxis(gpu_of_choice, 1, 0)
    counts = np.array([np.bincount(layer.ravel(), minlength=gpus) for layer in layers])
    return np.asarray(counts.T / counts.mean(1))


def zipf_imbalance(num_experts: int, gpus: int, exponent: float, k: int = 1) -> float:
    """The imbalance of the fullest GPU if expert i is chosen in proportion to ``1 / (i + 1) ** exponent``.

    A token chooses k experts, each once at most. So the popular ones, which more than all tokens would choose, get all
    tokens, and the others get the rest in proportion. Which expert is the i-th is drawn once, by numpy's generator with
    seed 0.

    Raises
    ------
    ValueError
        If the GPUs do not divide the experts, or the exponent is below 0.
    """
    of_gpu = _experts_of_a_gpu(num_experts, gpus)
    checks.check_within("zipf", exponent, 0, 10)
    chosen = _chosen(1 / np.arange(1, num_experts + 1) ** exponent, k)
    dealt = np.random.default_rng(SEED).permutation(chosen)
    loads = dealt.reshape(gpus, of_gpu).sum(1)
    return float(loads.max() / loads.mean())


def _chosen(popularity: np.ndarray, k: int) -> np.ndarray:
    """The part of the tokens that choose each expert, at most 1, k in all; popularity falls from expert to expert."""
    for full in range(k):
        rest = (k - full) * popularity[full:] / popularity[full:].sum()
        if rest[0] <= 1:
            return np.concatenate([np.ones(full), rest])
    return (np.arange(len(popularity)) < k).astype(float)


def _experts_of_a_gpu(num_experts: int, gpus: int) -> int:
    if num_experts % gpus:
        raise ValueError(f"expert is {gpus}, but it must divide the experts, {num_experts}")
    return num_experts // gpus


@dataclass(frozen=True)
class Unevenness:
    """The imbalances of a run's batches, and where they come from."""

    source: str  #: in words
    shares: np.ndarray  #: (batches, gpus, layers), as of `trace_imbalances`

    def worst(self, run: Run) -> Run:
        """Return the run with the imbalances, on each stage of the pipeline, of the GPU and batch that need most."""
        return replace(run, imbalances=self._of_stages(run, slice(None)))

    def peaks(self, run: Run) -> list[int]:
        """Bytes of the run's peak in each batch."""
        count = len(self.shares)
        batches = (replace(run, imbalances=self._of_stages(run, slice(i, i + 1))) for i in range(count))
        return [one.worst.peak.bytes for one in batches]

    def _of_stages(self, run: Run, batches: slice) -> tuple[float, ...]:
        """The imbalances of each layer with experts: those of its stage's GPU that needs most, in some batches."""
        if self.shares.size == 1:
            return (float(self.shares.item()),)
        found: list[float] = []
        for layers, of_sum, of_most in _growth(run, self.shares.shape[2]):
            shares = self.shares[batches][..., layers].reshape(-1, len(layers))
            most = shares.max(1, initial=0)
            found += shares[np.argmax(of_sum * shares.sum(1) + of_most * most)].tolist()
        return tuple(found)


def _growth(run: Run, depth: int) -> Iterator[tuple[np.ndarray, int, int]]:
    """Yield for each stage its layers with experts, as layers of a trace, and how its peak grows with their rows.

    What is kept grows with the sum over the layers, and what passes with the layer that has most rows: by so many bytes
    for one more even share.
    """
    even, twice = (replace(run, imbalances=(factor,)).stages for factor in (1.0, 2.0))
    of_trace = np.arange(run.routed_layers) * depth // max(run.routed_layers, 1)
    first = 0
    for one, two in zip(even, twice, strict=True):
        layers = of_trace[first : first + one.routed_layers]
        first += len(layers)
        grown = two.peak.bytes - one.peak.bytes
        kept = one.in_flight * (two.kept.total() - one.kept.total()) * ("activations" not in run.offload)
        kept = min(kept, grown)
        yield layers, kept // max(len(layers), 1), grown - kept


EVEN = Unevenness("spread evenly", np.ones((1, 1, 1)))


def of_run(run: Run, trace: Path | None, zipf: float | None) -> Unevenness:
    """How unevenly the GPUs of a run get rows.

    Parameters
    ----------
    run : Run
    trace : Path, optional
        A file with a routing trace of a model with as many experts, and as many choices of a token.
    zipf : float, optional
        Zipf's exponent of the experts' popularity, if there is no trace.

    Raises
    ------
    ValueError
        If both are given, if the GPUs do not divide the experts, or if the trace has another number of experts or of
        choices.
    OSError
        If the trace cannot be read.
    """
    if trace is not None and zipf is not None:
        raise ValueError("a trace and zipf were given, but only one of them can say how tokens spread")
    gpus = run.parallel.expert
    routers = [part for part in run.model.parts if isinstance(part, Router | MoEBlock)]
    if gpus == 1 or not routers:
        return replace(EVEN, source="all on one GPU")
    if trace is None and zipf is None:
        return EVEN
    if trace is None:
        factor = zipf_imbalance(routers[0].E, gpus, zipf or 0, routers[0].k)
        return Unevenness(f"spread by Zipf's law with exponent {zipf}", np.full((1, 1, 1), factor))
    found = load(trace)
    for what, of_trace, of_model in (
        ("experts", found.num_experts, routers[0].E),
        ("choices of a token", found.topk.shape[2], routers[0].k),
    ):
        if of_trace != of_model:
            raise ValueError(f"{trace} has {of_trace} {what}, but {run.model.name} has {of_model}")
    tokens = run.step.batch * run.step.sequence * gpus // run.parallel.tensor
    shares = trace_imbalances(found, gpus, tokens)
    return Unevenness(_source(found, trace.name, len(shares), tokens, run.routed_layers), shares)


def _source(trace: RoutingTrace, name: str, batches: int, tokens: int, layers: int) -> str:
    """Say which tokens and layers of a trace are counted."""
    depth = trace.topk.shape[1]
    of = "" if depth == layers else f", whose {depth} layers stand for the model's {layers}"
    if len(trace.topk) < tokens:
        return f"those of {name}, of {len(trace.topk):,} tokens where a step has {tokens:,}{of}"
    return f"those of {batches} batch{'es' * (batches > 1)} of {name}{of}"
