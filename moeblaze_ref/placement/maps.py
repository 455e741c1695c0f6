"""Placement maps: the GPU of every expert, or its GPUs if it has copies, in every layer of a model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeblaze_ref.core import checks, records
from moeblaze_ref.core.traces import INTEGERS, load_npz

NOWHERE = -1


class Map:
    """Base class of maps, without copies (`Placement`) and with them (`Copies`)."""

    model: str

    @property
    def _of_experts(self) -> np.ndarray:
        """An array whose first axes are layers and experts."""
        raise NotImplementedError

    @property
    def layers(self) -> int:
        """MoE layers."""
        return self._of_experts.shape[0]

    @property
    def E(self) -> int:
        """Experts of a layer."""
        return self._of_experts.shape[1]

    def shares(self) -> np.ndarray:
        """The share of each expert's tokens that each GPU serves, (layers, E, G) float64."""
        raise NotImplementedError

    def check_fits(self, layers: int, num_experts: int, model: str = ""):
        """The map is for a model of this shape, and of this name where both are known."""
        if (self.layers, self.E) != (layers, num_experts):
            raise ValueError(
                f"the map is for {self.layers} layers of {self.E} experts, but the model has {layers} layers of "
                f"{num_experts}"
            )
        if self.model and model and self.model != model:
            raise ValueError(f"the map is for {self.model}, but the model is {model}")


@dataclass(frozen=True, eq=False)
class Placement(Map):
    """A placement: the GPU of every expert, layer by layer.

    Parameters
    ----------
    assignment : array (layers, E) int32
        GPU of expert e in layer l, 0 to num_gpus - 1.
    num_gpus : int
        G, at most E.
    model : str
        Which model it is for; empty if unknown.

    Raises
    ------
    TypeError, ValueError
        If there are more GPUs than experts, or an expert is on no GPU or on one that does not exist.
    """

    assignment: np.ndarray
    num_gpus: int
    model: str = ""

    def __post_init__(self):
        checks.check_array("assignment", self.assignment, 2, ("int32",))
        checks.check_int("layers", self.layers, 1)
        check_gpus(self.num_gpus, self.E)
        _check_assigned(self.assignment, self.num_gpus)

    @property
    def _of_experts(self) -> np.ndarray:
        return self.assignment

    def shares(self) -> np.ndarray:
        """The share of each expert's tokens that each GPU serves, (layers, E, G) float64: here one GPU all of them."""
        return np.eye(self.num_gpus)[self.assignment]

    def sizes(self) -> np.ndarray:
        """Experts of each GPU in each layer, (layers, G) int64."""
        return np.stack([np.bincount(layer, minlength=self.num_gpus) for layer in self.assignment])

    def hosts(self, layer: int) -> list[list[int]]:
        """The experts of each GPU in one layer, ascending."""
        return [np.flatnonzero(self.assignment[layer] == gpu).tolist() for gpu in range(self.num_gpus)]


@dataclass(frozen=True, eq=False)
class Copies(Map):
    """A placement with copies: the GPUs of every expert, layer by layer. `copies.choose` says which one a token uses.

    Parameters
    ----------
    held : array (layers, E, G) bool
        held[l, e, g] is True where GPU g has a copy of expert e in layer l.
    num_nodes : int
        Nodes of equally many neighbouring GPUs.
    model : str
        Which model it is for; empty if unknown.

    Raises
    ------
    TypeError, ValueError
        If an expert is on no GPU, or the nodes do not divide the GPUs.
    """

    held: np.ndarray
    num_nodes: int = 1
    model: str = ""

    def __post_init__(self):
        checks.check_array("held", self.held, 3, ("bool",), contiguous=False)
        for name, number in (("layers", self.layers), ("E", self.E), ("num_gpus", self.num_gpus)):
            checks.check_int(name, number, 1)
        check_nodes(self.num_nodes, self.num_gpus)
        nowhere = checks.first(~self.held.any(axis=2))  # type: ignore[arg-type]  # not a scalar
        if nowhere:
            raise ValueError(f"layer {nowhere[0]}: expert {nowhere[1]} is on no GPU, but every expert needs one")

    @classmethod
    def of(cls, placement: Placement, num_nodes: int = 1) -> "Copies":
        """The same map, in which every expert has one copy."""
        return cls(placement.shares() > 0, num_nodes, placement.model)

    @property
    def _of_experts(self) -> np.ndarray:
        return self.held

    @property
    def num_gpus(self) -> int:
        """G."""
        return self.held.shape[2]

    def shares(self) -> np.ndarray:
        """The share of each expert's tokens that each GPU serves if copies share evenly, (layers, E, G) float64."""
        return self.held / self.held.sum(axis=2, keepdims=True)

    def sizes(self) -> np.ndarray:
        """Experts of each GPU in each layer, copies too, (layers, G) int64."""
        return self.held.sum(axis=1)

    def hosts(self, layer: int) -> list[list[int]]:
        """The experts of each GPU in one layer, ascending."""
        return [np.flatnonzero(of_gpu).tolist() for of_gpu in self.held[layer].T]


def check_nodes(num_nodes: int, num_gpus: int):
    """Nodes have equally many GPUs."""
    if num_gpus % checks.check_int("num_nodes", num_nodes, 1):
        raise ValueError(f"num_nodes is {num_nodes}, but it must divide the {num_gpus} GPUs")


def _check_assigned(assignment, num_gpus):
    """Every expert is on a GPU, and on one that exists; integers of any width."""
    nowhere = assignment == NOWHERE
    if nowhere.any():
        layer, expert = checks.first(nowhere)
        raise ValueError(f"layer {layer}: expert {expert} is on no GPU, but every expert needs one")
    beyond = (assignment < 0) | (assignment >= num_gpus)
    if beyond.any():
        layer, expert = checks.first(beyond)
        raise ValueError(
            f"layer {layer}: expert {expert} is on GPU {assignment[layer, expert]}, but assignment[{layer}, {expert}] "
            f"must be one of {num_gpus} GPUs (valid: 0..{num_gpus - 1})"
        )


def check_gpus(num_gpus: int, num_experts: int):
    """Every GPU can hold an expert of every layer."""
    if checks.check_int("num_gpus", num_gpus, 1) > num_experts:
        raise ValueError(f"num_gpus is {num_gpus}, but there are only {num_experts} experts: a GPU would have none")


def from_hosts(hosts: Sequence[Sequence[Sequence[int]]], num_experts: int, model: str = "") -> Placement:
    """A placement from lists of experts, hosts[layer][gpu].

    Raises
    ------
    ValueError
        If a list names an expert that does not exist, or an expert is named twice or never: the error says which.
    """
    assignment = np.full((len(hosts), num_experts), NOWHERE, np.int32)
    for layer, gpus in enumerate(hosts):
        if len(gpus) != len(hosts[0]):
            raise ValueError(f"layer {layer} has {len(gpus)} GPUs, but layer 0 has {len(hosts[0])}")
        named = Counter(expert for experts in gpus for expert in experts)
        twice = [expert for expert, times in named.items() if times > 1]
        if twice:
            on = [gpu for gpu, experts in enumerate(gpus) for expert in experts if expert == twice[0]]
            raise ValueError(f"layer {layer}: expert {twice[0]} is on GPUs {on}, but every expert needs exactly one")
        for gpu, experts in enumerate(gpus):
            for expert in experts:
                assignment[layer, checks.check_int(f"an expert of layer {layer}", expert, 0, num_experts - 1)] = gpu
    return Placement(assignment, len(hosts[0]) if hosts else 0, model)


def save(path: Path, placement: Placement | Copies, force: bool = False):
    """Write a map as npz: `assignment` (layers, E) int32, `num_gpus`, `model`.

    A map with copies has `held` (layers, E, G) bool and `num_nodes` instead of `assignment` and `num_gpus`. A map that
    is there is replaced; another file only with ``force``.

    Raises
    ------
    ValueError
        If another file is there.
    OSError
        If it cannot be written; what was there before stays.
    """

    def write(part: Path) -> None:
        with part.open("wb") as file:  # np.savez would add a suffix to the name
            np.savez_compressed(file, **vars(placement))

    records.replace(Path(path), write, load, force)


def load(path: Path) -> Placement | Copies:
    """A map from a file of `save`.

    Raises
    ------
    OSError
        If the file cannot be read.
    ValueError, TypeError
        If it is no npz, lacks an array, holds what are no integers, or `Placement` or `Copies` refuses what it holds.
    """
    arrays = load_npz(path, "assignment", "held")
    return (_copies if "held" in arrays else _placement)(arrays, Path(path).name)


def _placement(arrays, name) -> Placement:
    checks.check_array("assignment", arrays["assignment"], 2, INTEGERS)
    num_gpus = _number(arrays, "num_gpus", name)
    check_gpus(num_gpus, arrays["assignment"].shape[1])
    _check_assigned(arrays["assignment"], num_gpus)  # before int32 would wrap what is too large for it
    assignment = np.ascontiguousarray(arrays["assignment"], np.int32)
    return Placement(assignment, num_gpus, str(arrays.get("model", "")))


def _copies(arrays, name) -> Copies:
    return Copies(arrays["held"], _number(arrays, "num_nodes", name), str(arrays.get("model", "")))


def _number(arrays, key, name) -> int:
    """One whole number of a file."""
    if key not in arrays:
        raise ValueError(f"{name} has no {key}")
    checks.check_array(key, arrays[key], 0, INTEGERS)
    return int(arrays[key])
