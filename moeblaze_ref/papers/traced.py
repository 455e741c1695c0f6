"""Our routing trace, where a paper's claim is about the routing of a trained model."""

import numpy as np

from moeblaze_ref.core.traces import RoutingTrace, load
from moeblaze_ref.papers.results import DOCS, Source
from moeblaze_ref.placement.simulate import STEP_TOKENS, balance
from moeblaze_ref.placement.trace import profile

TRACE = DOCS / "results" / "trace_lm_small_h200.npz"
MISSING = f"docs/results/{TRACE.name} is not installed"


def our_trace() -> RoutingTrace | None:
    """Return the trace of our small language model; None where the documentation is not installed."""
    return load(TRACE) if TRACE.exists() else None


def traced_at(trace: RoutingTrace) -> Source:
    """Return where the trace was recorded: on an H200, as the file's name says."""
    return Source("H200", trace.info["commit"])


def needed_factors(trace: RoutingTrace, step_tokens: int = STEP_TOKENS) -> np.ndarray:
    """Return the capacity factors that drop nothing: the fullest expert's rows over the mean.

    Parameters
    ----------
    trace : RoutingTrace
        With `seq`. A step takes sequences from all over the trace, as a batch of training does.
    step_tokens : int
        Tokens of a step, about: steps have whole sequences.

    Returns
    -------
    ndarray (steps, layers), float64

    Raises
    ------
    ValueError
        If the trace has no `seq`.
    """
    if trace.seq is None:
        raise ValueError("the trace has no seq, but steps have whole sequences")
    steps = max(1, len(trace.topk) // step_tokens)
    return np.stack([balance(profile(trace.of(trace.seq % steps == step)).P) for step in range(steps)])
