"""Routing traces: which experts every token chose in every MoE layer, as one npz file.

A file holds `topk` (tokens, layers, k) and, if known, `seq` and `pos` (tokens,): which sequence a token belongs to and
where in it; `token` (tokens,) uint8, the byte that was read; `seq_kind`, what kind of text each sequence is. `info` is
a JSON object: `experts` is E, `model` names the model; all else in it says where the trace comes from. `num_experts`
and `model` may be arrays of their own instead.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeblaze_ref.core import checks, records

NPY = b"\x93NUMPY"  # how numpy.save begins a file
MAX_IDS = 2**15  # ids are int16
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
ARRAYS = ("topk", "seq", "pos", "token", "seq_kind")


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The experts that tokens chose, layer by layer.

    Parameters
    ----------
    topk : ndarray (tokens, layers, k) int16
        Expert ids, all k of a token in a layer distinct.
    num_experts : int
        E.
    seq : ndarray (tokens,) of integers, optional
        Which sequence (prompt, window) a token belongs to; its tokens stand together.
    pos : ndarray (tokens,) of integers, optional
        Where in its sequence a token stands; it rises from token to token.
    token : ndarray (tokens,) uint8, optional
        The byte that was read.
    seq_kind : ndarray (sequences,) str, optional
        What kind of text sequence s is, for every s in seq.
    model : str
        Which model was traced; empty if unknown.
    info : mapping
        Where the trace comes from, as JSON.

    Raises
    ------
    TypeError, ValueError
        If a dtype or shape does not fit, an id is out of range or twice in one choice, a layer was not recorded, or a
        sequence is torn apart or out of order: the message names the element.
    """

    topk: np.ndarray
    num_experts: int
    seq: np.ndarray | None = None
    pos: np.ndarray | None = None
    token: np.ndarray | None = None
    seq_kind: np.ndarray | None = None
    model: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.check_array("topk", self.topk, 3, ("int16",))
        tokens, layers, k = self.topk.shape
        checks.check_int("num_experts", self.num_experts, 1, MAX_IDS)
        checks.check_int("layers", layers, 1)
        checks.check_int("k", k, 1)
        checks.check_k(k, self.num_experts)
        _check_layers(self.topk)
        checks.check_index("topk", self.topk, self.num_experts, "experts")
        _check_distinct(self.topk)
        for name, dtypes in (("seq", INTEGERS), ("pos", INTEGERS), ("token", ("uint8",))):
            if (array := getattr(self, name)) is not None:
                checks.check_array(name, array, 1, dtypes)
                checks.check_shape(name, array, {"tokens": tokens})
        if self.seq is not None:
            _check_sequences(self.seq, self.pos)
        if self.seq_kind is not None:
            _check_kinds(self.seq_kind, self.seq)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.topk)

    @property
    def layers(self) -> int:
        """MoE layers."""
        layers: int = self.topk.shape[1]
        return layers

    def of(self, chosen: np.ndarray) -> "RoutingTrace":
        """The trace of the tokens that a mask (tokens,) chooses."""
        arrays = {name: getattr(self, name) for name in ("topk", "seq", "pos", "token")}
        kept = {name: array[chosen] for name, array in arrays.items() if array is not None}
        return replace(self, **kept)


def _check_layers(topk: np.ndarray) -> None:
    """A recorder that misses a layer leaves it empty: every id negative."""
    missing = checks.first_place(np.all(topk < 0, axis=(0, 2))) if len(topk) else None
    if missing is not None:
        raise ValueError(f"topk[:, {missing}] names no expert at all: this layer was not recorded")


def _check_distinct(topk: np.ndarray) -> None:
    ordered = np.sort(topk, axis=2)
    if twice := checks.first(ordered[:, :, 1:] == ordered[:, :, :-1]):
        token, layer, j = twice
        raise ValueError(
            f"topk[{token}, {layer}] names expert {ordered[token, layer, j]} twice, but the experts of a token must be "
            f"distinct"
        )


def _check_sequences(seq: np.ndarray, pos: np.ndarray | None) -> None:
    """The tokens of a sequence stand together; if positions are known, they rise inside each."""
    begins = np.flatnonzero(np.append(True, seq[1:] != seq[:-1])) if len(seq) else np.zeros(0, np.int64)
    _, firsts = np.unique(seq[begins], return_index=True)
    again = np.setdiff1d(np.arange(len(begins)), firsts)
    if len(again):
        at = begins[again[0]]
        raise ValueError(f"seq[{at}] is {seq[at]} again, but the tokens of a sequence must stand together")
    if pos is not None:
        falls = np.append(False, (pos[1:] <= pos[:-1]) & (seq[1:] == seq[:-1]))
        if (at := checks.first_place(falls)) is not None:
            raise ValueError(f"pos[{at}] is {pos[at]} after {pos[at - 1]}, but positions must rise in a sequence")


def _check_kinds(seq_kind: np.ndarray, seq: np.ndarray | None) -> None:
    if seq_kind.dtype.kind != "U":
        raise TypeError(f"seq_kind has dtype {seq_kind.dtype}, but it must be text")
    if seq is None:
        raise ValueError("seq_kind says what each sequence is, but there is no seq")
    checks.check_index("seq", seq, len(seq_kind), "sequences in seq_kind")


def save(path: Path, trace: RoutingTrace, force: bool = False) -> None:
    """Write a trace as `load` reads it.

    Parameters
    ----------
    path : Path
        A trace that is there is replaced; another file only with ``force``.
    trace : RoutingTrace
    force : bool

    Raises
    ------
    ValueError
        If another file is there.
    OSError
        If it cannot be written; what was there before stays.
    """
    arrays = {name: array for name in ARRAYS if (array := getattr(trace, name)) is not None}
    info = json.dumps({**trace.info, "experts": trace.num_experts, "model": trace.model})

    def write(part: Path) -> None:
        with part.open("wb") as file:  # numpy would add .npz to a name that lacks it
            np.savez_compressed(file, info=info, **arrays)

    records.replace(Path(path), write, load, force)


def load(path: Path, num_experts: int | None = None, model: str | None = None) -> RoutingTrace:
    """A trace from a file; arrays that this project does not know are left out.

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
        If it is no npz, has no `topk`, or `RoutingTrace` refuses what it holds: the message begins with its name.
    """
    arrays = load_npz(path, "topk")
    try:
        return _trace(arrays, num_experts, model)
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # JSON's own asks for more than a message
        raise kind(f"{Path(path).name}: {error}") from None


def _trace(arrays: Mapping[str, np.ndarray], num_experts: int | None, model: str | None) -> RoutingTrace:
    topk, info = arrays["topk"], _info(arrays)
    checks.check_array("topk", topk, 3, INTEGERS, contiguous=False)
    stated: Any = arrays.get("num_experts", info.get("experts")) if num_experts is None else num_experts
    if stated is None:
        if below := checks.first(topk < 0):
            raise ValueError(f"topk{list(below)} is {topk[below]}, but an expert's id is at least 0")
        stated = int(topk.max(initial=0)) + 1  # int16 has no number after 32767
    num_experts = checks.check_int("num_experts", np.asarray(stated).item(), 1, MAX_IDS)
    if topk.size and not -MAX_IDS <= topk.min() <= topk.max() < MAX_IDS:
        checks.check_index("topk", topk, num_experts, "experts")
    if model is None:
        model = str(arrays.get("model", info.get("model", "")))
    held = {name: arrays[name] for name in ARRAYS[1:] if name in arrays}
    return RoutingTrace(np.ascontiguousarray(topk, np.int16), num_experts, model=model, info=info, **held)


def _info(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    return records.check_object("info", records.parse("info", str(arrays["info"])), ()) if "info" in arrays else {}


def load_npz(path: Path, needed: str, *instead: str) -> dict[str, np.ndarray]:
    """The arrays of an npz, which must hold ``needed`` or one named ``instead``; nothing in it is ever unpickled.

    Raises
    ------
    OSError
        If there is no such file, or it may not be read.
    ValueError
        If it is not an npz of plain arrays, is damaged, or lacks that array: the message begins with its name.
    """
    with Path(path).open("rb") as file:
        if file.read(len(NPY)) == NPY:
            name = Path(path).name
            raise ValueError(
                f"{name} is a single array, but an npz is needed: numpy.savez(path, {needed}=array) makes it"
            )
        file.seek(0)
        try:
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
        except Exception:  # what zipfile, zlib and numpy raise of a damaged file has no other type in common
            raise ValueError(f"{Path(path).name} is truncated, or not an npz of plain arrays") from None
    if not found.keys() & {needed, *instead}:
        wanted = " or ".join([needed, *instead])
        raise ValueError(f"{Path(path).name} has no {wanted}, but only {', '.join(found) or 'nothing'}")
    return found
