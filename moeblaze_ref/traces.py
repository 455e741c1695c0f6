"""Routing traces: which experts every token of a text chose in every MoE layer, as one npz file with its origin.

The placement of experts reads the choices; what an expert reads shows in the bytes beside them.
"""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moeblaze_ref import doors, records

IDENTITY = {"experts"}  # of ``info``: without it nobody could say which ids are valid


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """The choices of a model, token by token.

    Parameters
    ----------
    topk : ndarray (tokens, layers, k) int16
        Experts of each token in each layer, best first.
    seq : ndarray (tokens,) int32
        The sequence of each token; the tokens of one stand together and in order.
    pos : ndarray (tokens,) int32
        Place of each token in what the model read: its sequence.
    token : ndarray (tokens,) uint8, optional
        The byte that was read.
    seq_kind : ndarray (sequences,) str, optional
        What kind of text each sequence is.
    info : mapping
        Origin, as JSON: ``experts`` is E; a trace of this project names the model, its text and its checkpoint too.

    Raises
    ------
    ValueError, TypeError
        If an array has another shape or dtype than the others ask for, an id is outside 0..E-1, a token has an expert
        twice, or a sequence is torn apart or out of order: the message names the element.
    """

    topk: np.ndarray
    seq: np.ndarray
    pos: np.ndarray
    token: np.ndarray | None = None
    seq_kind: np.ndarray | None = None
    info: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        records.check_object("info", self.info, IDENTITY)
        doors.check_int("info.experts", self.info["experts"], at_least=1)
        doors.check_array("topk", self.topk, rank=3, dtypes=("int16",))
        doors.check_index("topk", self.topk, self.E, "experts")
        self._check_distinct()
        for name, dtype in (("seq", "int32"), ("pos", "int32"), ("token", "uint8")):
            if (array := getattr(self, name)) is not None:
                doors.check_array(name, array, rank=1, dtypes=(dtype,))
                doors.check_shape(name, array, {"tokens": len(self.topk)})
        self._check_order()
        self._check_kinds()

    @property
    def E(self) -> int:
        """Experts of each layer."""
        return self.info["experts"]

    @property
    def sequences(self) -> int:
        """Sequences of the text."""
        return int(self.seq[-1]) + 1 if len(self.seq) else 0

    def _check_distinct(self):
        chosen = np.sort(self.topk, axis=-1)
        twice = (chosen[..., 1:] == chosen[..., :-1]).any(axis=-1)  # (tokens, layers)
        if twice.any():
            token, layer = np.argwhere(twice)[0]
            raise ValueError(
                f"topk[{token}, {layer}] is {self.topk[token, layer].tolist()}, but the experts of a token must differ"
            )

    def _check_order(self):
        """Sequences are numbered 0, 1, ... as they come, and positions rise inside each."""
        first, step = np.diff(self.seq, prepend=np.int32(-1)), np.diff(self.pos, prepend=np.int32(-1))
        self._reject("seq", self.seq, (first != 0) & (first != 1), "sequences stand together, numbered 0, 1, ...")
        self._reject("pos", self.pos, (self.pos < 0) | ((first == 0) & (step <= 0)), "positions rise in a sequence")

    def _reject(self, name: str, array: np.ndarray, bad: np.ndarray, rule: str):
        if bad.any():
            at = int(bad.argmax())
            before = f" after {array[at - 1]}" if at else ""
            raise ValueError(f"{name}[{at}] is {array[at]}{before}, but {rule}")

    def _check_kinds(self):
        if self.seq_kind is not None:
            if self.seq_kind.dtype.kind != "U":
                raise TypeError(f"seq_kind has dtype {self.seq_kind.dtype}, but it must be text")
            doors.check_shape("seq_kind", self.seq_kind, {"sequences": self.sequences})


ARRAYS = ("topk", "seq", "pos", "token", "seq_kind")
NEEDED = {"topk", "seq", "pos", "info"}


def save(path: Path, trace: RoutingTrace):
    """Write a trace, compressed."""
    arrays = {name: array for name in ARRAYS if (array := getattr(trace, name)) is not None}
    with path.open("wb") as file:  # numpy would add .npz to a name that lacks it
        np.savez_compressed(file, info=json.dumps(trace.info), **arrays)


def load(path: Path) -> RoutingTrace:
    """Read and check a trace; arrays that this project does not know are left out.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError, TypeError
        If it is no npz file, it lacks one of ``NEEDED``, or as `RoutingTrace`: the message begins with its name.
    """
    try:
        with zipfile.ZipFile(path):  # numpy would take a single array too
            held = np.load(path, allow_pickle=False)
        with held:
            found = {name: held[name] for name in (*ARRAYS, "info") if name in held}
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ValueError(f"{path} is truncated, or no npz file: {error}") from None
    if missing := NEEDED - found.keys():
        raise ValueError(f"{path} has no {', '.join(sorted(missing))}")
    try:
        return RoutingTrace(**found | {"info": json.loads(str(found["info"]))})
    except (ValueError, TypeError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # JSON's own asks for more than a message
        raise kind(f"{path}: {error}") from None
