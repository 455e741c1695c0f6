"""Counts of tokens an expert, without the choices of each token.

They are enough for the methods that look at loads alone. What a runtime sends depends on the choices of each token, so
D, N, crossings and steps stay unknown.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks
from moeblaze_ref.core.traces import INTEGERS, load_npz
from moeblaze_ref.placement.trace import Profile, load_tensors


@dataclass(frozen=True, eq=False)
class Counted:
    """Counts of some traffic, in parts such as its tasks or its steps.

    Parameters
    ----------
    counts : array (parts, layers, E) int64
        Tokens that use expert e in layer l.
    model : str
        Whose routing it is; empty if unknown.

    Raises
    ------
    TypeError, ValueError
        If it is no such array, a count is negative, or a layer has none.
    """

    counts: np.ndarray
    model: str = ""

    def __post_init__(self):
        checks.check_array("counts", self.counts, 3, ("int64",), contiguous=False)
        checks.check_not_negative("counts", self.counts)
        checks.check_int("parts", len(self.counts), 1)
        checks.check_int("layers", self.layers, 1)
        checks.check_int("experts", self.num_experts, 1)
        if silent := checks.first(~self.counts.any(axis=(0, 2))):  # type: ignore[arg-type]  # not a scalar
            raise ValueError(f"layer {silent[0]} has no counts")

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self.counts.shape[1]

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.counts.shape[2]

    @property
    def tokens(self) -> int:
        """Choices in the layer that has most: how many experts a token chose is unknown."""
        return int(self.counts.sum(axis=(0, 2)).max())

    def halves(self, seed: int) -> tuple["Counted", "Counted"]:
        """Half of the parts, which the seed chooses, and the others; of an odd number these have one more.

        Raises
        ------
        ValueError
            If there are fewer than two parts, or a half has no counts of a layer.
        """
        parts = len(self.counts)
        if parts < 2:
            raise ValueError(
                "the counts have one part, but a split needs at least 2: record counts (parts, layers, E), or fit to "
                "the whole of them and evaluate on the same (--splits 0)"
            )
        chosen = np.isin(np.arange(parts), np.random.default_rng(seed).permutation(parts)[: parts // 2])
        return Counted(self.counts[chosen], self.model), Counted(self.counts[~chosen], self.model)

    def profile(self) -> Profile:
        """The counts of all parts, without transitions."""
        return Profile(np.ascontiguousarray(self.counts.sum(axis=0)), None, self.tokens, self.model)


def read(path: Path) -> np.ndarray:
    """Read counts (parts, layers, E) int64, of all layers of a model.

    Parameters
    ----------
    path : Path
        An npz with ``counts``, or a file of torch.save with ``logical_count``, as SGLang 0.5.23's recorder writes it in
        mode stat. Each is (layers, E), or (parts, layers, E): the parts of SGLang's are steps.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError, TypeError
        If there is no such array in it, or it holds no counts.
    """
    name, found = ("counts", _of_npz(path)) if path.suffix == ".npz" else ("logical_count", _of_torch(path))
    if found.ndim == 2:
        found = found[None]
    checks.check_array(name, found, 3, INTEGERS, contiguous=False)
    checks.check_not_negative(name, found)
    return found.astype(np.int64)


def _of_npz(path: Path) -> np.ndarray:
    return load_npz(path, "counts")["counts"]


def _of_torch(path: Path) -> np.ndarray:
    record = load_tensors(path)
    if "logical_count" not in record:
        raise ValueError(f"{path.name} has no logical_count, as SGLang's records of mode stat have")
    return np.asarray(record["logical_count"])
