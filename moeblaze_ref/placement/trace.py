"""The two counts that placement needs of a routing trace, and its two parts: to fit to, and to evaluate on.

MoETuner (arXiv 2502.06643) profiles a sample of tokens: P[l, e] of them use expert e in layer l, and R[l, e1, e2] use
e1 in layer l and e2 in layer l + 1, the routing dependency between layers.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import RoutingTrace


def split(trace: RoutingTrace, seed: int) -> tuple[RoutingTrace, RoutingTrace]:
    """The profiling sample and the held-out rest: whole sequences, of which the seed chooses half at random.

    The trace needs `seq`, with at least two of them. Of an odd number the rest has one more.

    Raises
    ------
    ValueError
        If the trace does not say which sequences its tokens belong to, or has fewer than two.
    """
    if trace.seq is None:
        raise ValueError(
            "the trace has no seq, but it is split by sequence, never by token: record seq, or fit to the whole of it "
            "and evaluate on the same (--splits 0)"
        )
    sequences = np.unique(trace.seq)
    if len(sequences) < 2:
        raise ValueError(f"the trace has {len(sequences)} sequences, but a split needs at least 2")
    sampled = np.random.default_rng(seed).permutation(sequences)[: len(sequences) // 2]
    chosen = np.isin(trace.seq, sampled)
    return trace.of(chosen), trace.of(~chosen)


@dataclass(frozen=True, eq=False)
class Profile:
    """Counts of a trace for the integer programs.

    Parameters
    ----------
    P : array (layers, E) int64
        Tokens that use expert e in layer l.
    R : array (layers - 1, E, E) int64, or None
        Tokens that use e1 in layer l and e2 in layer l + 1: k * k pairs a token. None where only counts are known.
    tokens : int
        Tokens profiled.
    model : str
        As in the trace.
    trace : RoutingTrace, or None
        What was counted. None where only counts are known.

    Raises
    ------
    TypeError, ValueError
        If the shapes do not fit each other, or a count is negative.
    """

    P: np.ndarray
    R: np.ndarray | None
    tokens: int
    model: str = ""
    trace: RoutingTrace | None = None

    def __post_init__(self):
        checks.check_array("P", self.P, 2, ("int64",))
        checks.check_int("layers", self.layers, 1)
        checks.check_int("experts", self.E, 1)
        checks.check_not_negative("P", self.P)
        if self.R is not None:
            checks.check_array("R", self.R, 3, ("int64",))
            checks.check_shape("R", self.R, {"layers - 1": self.layers - 1, "E": self.E, "E ": self.E})
            checks.check_not_negative("R", self.R)

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self.P.shape[0]

    @property
    def E(self) -> int:
        """Experts of a layer."""
        return self.P.shape[1]

    def transitions(self) -> np.ndarray:
        """R, or an error where only counts are known."""
        if self.R is None:
            raise ValueError(
                "the profile holds counts alone, but this needs R: what tokens chose in neighbouring layers"
            )
        return self.R

    def traced(self) -> RoutingTrace:
        """The trace, or an error where only counts are known."""
        if self.trace is None:
            raise ValueError("the profile holds counts alone, but this needs the trace: which experts each token chose")
        return self.trace


def profile(trace: RoutingTrace) -> Profile:
    """P and R of a trace (MoETuner, profiling)."""
    return Profile(*counts(trace.topk, trace.num_experts), trace.tokens, trace.model, trace)


def counts(topk: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """P and R, as in `Profile`, of choices (tokens, layers, k) of experts, or of the GPUs that serve them."""
    E, ids = num_experts, topk.astype(np.int64)
    P = np.stack([np.bincount(layer.ravel(), minlength=E) for layer in ids.swapaxes(0, 1)])  # (layers, E)
    R = np.zeros((len(P) - 1, E, E), np.int64)  # (layers - 1, E, E)
    for before in range(len(R)):
        pairs = ids[:, before, :, None] * E + ids[:, before + 1, None, :]  # (tokens, k, k)
        R[before] = np.bincount(pairs.ravel(), minlength=E * E).reshape(E, E)
    return P, R


def load_tensors(path: Path) -> dict[str, Any]:
    """Load a dictionary that ``torch.save`` wrote, without running any code in the file.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If torch does not load it, or it is no dictionary.
    """
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path.name} is no record that torch.load reads: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds a {type(found).__name__}, but it must hold a dictionary")
    return found
