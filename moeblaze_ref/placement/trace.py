"""What routing did: top-k ids of many tokens in every layer, and the two counts that placement needs of them.

MoETuner (arXiv 2502.06643) profiles a sample of tokens: P[l, e] of them use expert e in layer l, and R[l, e1, e2] use
e1 in layer l and e2 in layer l + 1, the routing dependency between layers. A file is an npz with `topk` int16 (tokens,
layers, k), and if known `seq` (tokens,), `pos` (tokens,), `num_experts` and `model`, or `info`, a JSON object with
`experts` and `model`.
"""

import json
import pickle
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeblaze_ref import doors

MAX_IDS = 2**15  # ids are int16
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


@dataclass(frozen=True, eq=False)
class Trace:
    """The experts that tokens chose, layer by layer.

    Parameters
    ----------
    topk : array (tokens, layers, k) int16
        Expert ids, all k of a token in a layer distinct.
    num_experts : int
        E.
    seq : array (tokens,) of integers, optional
        Which sequence (prompt) a token belongs to. Tokens of one resemble each other: a split never cuts it.
    pos : array (tokens,) of integers, optional
        Where in its sequence a token stands.
    model : str
        Which model was traced; empty if unknown.

    Raises
    ------
    TypeError, ValueError
        If a dtype or shape does not fit, an id is out of range or twice in one choice, or a layer was not recorded.
    """

    topk: np.ndarray
    num_experts: int
    seq: np.ndarray | None = None
    pos: np.ndarray | None = None
    model: str = ""

    def __post_init__(self):
        doors.check_array("topk", self.topk, 3, ("int16",))
        tokens, layers, k = self.topk.shape
        doors.check_int("num_experts", self.num_experts, 1, MAX_IDS)
        doors.check_int("layers", layers, 1)
        doors.check_int("k", k, 1)
        doors.check_k(k, self.num_experts)
        _check_layers(self.topk)
        doors.check_index("topk", self.topk, self.num_experts, "experts")
        _check_distinct(self.topk)
        for name in ("seq", "pos"):
            if (array := getattr(self, name)) is not None:
                doors.check_array(name, array, 1, INTEGERS)
                doors.check_shape(name, array, {"tokens": tokens})

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.topk.shape[0]

    def of(self, chosen: np.ndarray) -> "Trace":
        """The trace of the tokens that a mask (tokens,) chooses."""
        seq, pos = (None if array is None else array[chosen] for array in (self.seq, self.pos))
        return Trace(self.topk[chosen], self.num_experts, seq, pos, self.model)


def _check_layers(topk):
    """A recorder that misses a layer leaves it empty: every id negative."""
    missing = (topk < 0).all(axis=(0, 2)) if len(topk) else np.zeros(topk.shape[1], bool)
    if missing.any():
        raise ValueError(f"topk[:, {doors.first(missing)[0]}] names no expert at all: this layer was not recorded")


def _check_distinct(topk):
    ordered = np.sort(topk, axis=2)
    twice = ordered[:, :, 1:] == ordered[:, :, :-1]
    if twice.any():
        token, layer, j = doors.first(twice)
        raise ValueError(
            f"topk[{token}, {layer}] names expert {ordered[token, layer, j]} twice, but the experts of a token must be "
            f"distinct"
        )


def load(path: Path, num_experts: int | None = None, model: str | None = None) -> Trace:
    """A trace from a file.

    Parameters
    ----------
    path : Path
        An npz, as above.
    num_experts : int, optional
        E; otherwise what the file says, or one more than the largest id.
    model : str, optional
        In place of what the file says.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError, TypeError
        If it is no npz, has no `topk`, or `Trace` refuses what it holds.
    """
    arrays = load_npz(path, "topk")
    topk = arrays["topk"]
    doors.check_array("topk", topk, 3, INTEGERS)
    about = _about(arrays)
    if num_experts is None:
        num_experts = int(about.get("num_experts", topk.max(initial=0) + 1))
    if topk.size and not -MAX_IDS <= topk.min() <= topk.max() < MAX_IDS:
        doors.check_index("topk", topk, num_experts, "experts")
    found = str(about.get("model", "")) if model is None else model
    return Trace(topk.astype(np.int16), num_experts, arrays.get("seq"), arrays.get("pos"), found)


def _about(arrays):
    """`num_experts` and `model`, each from an array of its own or from `info`."""
    info = json.loads(str(arrays["info"])) if "info" in arrays else {}
    named = {"num_experts": info.get("experts"), "model": info.get("model")}
    return {name: value for name, value in named.items() if value is not None} | arrays


def load_npz(path: Path, needed: str) -> dict[str, np.ndarray]:
    """The arrays of an npz, which must hold one called ``needed``; nothing in it is ever unpickled."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{Path(path).name} is no npz of plain arrays: {error}") from None
    if needed not in found:
        raise ValueError(f"{Path(path).name} has no {needed}, but only {', '.join(found) or 'nothing'}")
    return found


def save(path: Path, trace: Trace):
    """Write a trace as `load` reads it."""
    optional = {name: array for name in ("seq", "pos") if (array := getattr(trace, name)) is not None}
    np.savez_compressed(path, topk=trace.topk, num_experts=trace.num_experts, model=trace.model, **optional)


def split(trace: Trace, seed: int, share: float = 0.5) -> tuple[Trace, Trace]:
    """The profiling sample and the held-out rest: whole sequences, chosen at random.

    Parameters
    ----------
    trace : Trace
        With `seq`: at least two of them.
    seed : int
        The same seed chooses the same sequences.
    share : float
        Of the sequences, those to profile: in (0, 1); at least one stays on each side.

    Raises
    ------
    ValueError
        If the trace does not say which sequences its tokens belong to, or has fewer than two.
    """
    if trace.seq is None:
        raise ValueError(
            "the trace has no seq, but it is split by sequence, never by token: record seq, or do not split"
        )
    sequences = np.unique(trace.seq)
    if len(sequences) < 2:
        raise ValueError(f"the trace has {len(sequences)} sequences, but a split needs at least 2")
    if not 0 < doors.check_number("share", share) < 1:
        raise ValueError(f"share is {share}, but it must be between 0 and 1")
    sampled = min(max(int(len(sequences) * share), 1), len(sequences) - 1)
    chosen = np.isin(trace.seq, np.random.default_rng(seed).permutation(sequences)[:sampled])
    return trace.of(chosen), trace.of(~chosen)


@dataclass(frozen=True, eq=False)
class Profile:
    """What the integer programs know of a trace.

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

    Raises
    ------
    TypeError, ValueError
        If the shapes do not fit each other, or a count is negative.
    """

    P: np.ndarray
    R: np.ndarray | None
    tokens: int
    model: str = ""

    def __post_init__(self):
        doors.check_array("P", self.P, 2, ("int64",))
        doors.check_int("layers", self.layers, 1)
        doors.check_int("experts", self.E, 1)
        doors.check_not_negative("P", self.P)
        if self.R is not None:
            doors.check_array("R", self.R, 3, ("int64",))
            doors.check_shape("R", self.R, {"layers - 1": self.layers - 1, "E": self.E, "E ": self.E})
            doors.check_not_negative("R", self.R)

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


def profile(trace: Trace) -> Profile:
    """P and R of a trace (MoETuner, profiling)."""
    E, ids = trace.num_experts, trace.topk.astype(np.int64)
    P = np.stack([np.bincount(layer.ravel(), minlength=E) for layer in ids.swapaxes(0, 1)])  # (layers, E)
    R = np.zeros((len(P) - 1, E, E), np.int64)  # (layers - 1, E, E)
    for before in range(len(R)):
        pairs = ids[:, before, :, None] * E + ids[:, before + 1, None, :]  # (tokens, k, k)
        R[before] = np.bincount(pairs.ravel(), minlength=E * E).reshape(E, E)
    return Profile(P, R, trace.tokens, trace.model)


def from_sglang(path: Path, layers: Sequence[int] | None = None) -> Profile:
    """The counts of an expert-distribution record that SGLang wrote: P alone, without R.

    Parameters
    ----------
    path : Path
        A file of torch.save with `logical_count`, (layers, E) or (steps, layers, E), added up over the steps.
    layers : sequence of int, optional
        Only these, in this order: a model's dense layers have no counts.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError
        If there is no such array in it, or a layer without counts.
    """
    import torch

    try:
        record = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{Path(path).name} is no record that torch.load reads: {error}") from None
    if not isinstance(record, dict) or "logical_count" not in record:
        raise ValueError(f"{Path(path).name} has no logical_count, as SGLang's records of mode 'stat' have")
    counts = np.asarray(record["logical_count"]).astype(np.int64)
    if counts.ndim not in (2, 3):
        raise ValueError(f"logical_count has shape {counts.shape}, but it must be (layers, E) or (steps, layers, E)")
    P = counts.reshape(-1, *counts.shape[-2:]).sum(axis=0)  # (layers, E)
    if layers is not None:
        P = P[[doors.check_int("layer", layer, 0, len(P) - 1) for layer in layers]]
    silent = ~P.any(axis=1)
    if silent.any():
        raise ValueError(f"layer {doors.first(silent)[0]} has no counts: if it is dense, leave it out by `layers`")
    return Profile(np.ascontiguousarray(P), None, tokens=int(P.sum(axis=1).max()))
