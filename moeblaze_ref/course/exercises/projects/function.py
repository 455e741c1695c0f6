"""Autograd functions that a reader writes: outputs, gradients and saved bytes."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from moeblaze_ref.backends.numpy_ref import dispatch
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.course.exercises.projects.session import FORGED, Arrays, Row, Session, difference, tensor
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify import torch_cells
from moeblaze_ref.verify.cases import random_topk
from moeblaze_ref.verify.torch_cells.function import Backward

WEIGHTS = ("w1", "w2", "w3")  #: live anyway: they cost nothing when they are saved


@dataclass(frozen=True)
class Case:
    """Arguments of a function, and the results that are expected of it."""

    name: str
    inputs: Arrays  #: the arguments of its forward, in their order; floats get a gradient
    d_out: np.ndarray  #: the argument of its backward
    allowed: int  #: bytes that it may save, weights aside
    expected: Callable[[], Arrays]  #: what is right, float64
    compared: Callable[[Arrays], Arrays] = lambda found: found  #: from ``out`` and the gradients to what is compared


@dataclass(frozen=True)
class Function:
    """A project of an ``autograd.Function``."""

    defines: str
    cases: Callable[[], Iterable[Case]]
    by_hand: bool  #: whether the backward must do without autograd
    refused: tuple[str, ...] = ()

    def rows(self, cell: torch_cells.Cell, session: Session) -> Iterator[Row]:
        """Run forward and backward, in two processes, and compare."""
        cases = list(self.cases())
        work = partial(torch_cells.function.forward, cell, [case.inputs for case in cases])
        forwards = session.ask(work, len(cases))
        saved = [[tensor(one) for one in _listed(found, "saved")] for found in forwards]
        steps = [Backward(kept, _needs(case), case.d_out) for case, kept in zip(cases, saved, strict=True)]
        backwards = session.ask(partial(torch_cells.function.backward, cell, steps, self.by_hand), len(cases))
        for case, kept, forward, backward in zip(cases, saved, forwards, backwards, strict=True):
            found = {"out": tensor(forward.get("out"))} | _gradients(case, _listed(backward, "gradients"))
            yield _row(case, kept, found)
        if changed := backwards[-1].get("changed"):
            problem = f"{changed} of an earlier step has changed: a later step writes into its memory"
            yield Row("the gradients of all cases at the end", "", problem)


def _listed(found: dict[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    return value if isinstance(value, list) else [value]


def _needs(case: Case) -> list[bool]:
    return [array.dtype == np.float32 for array in case.inputs.values()]


def _gradients(case: Case, listed: list[Any]) -> Arrays:
    """The gradients of the inputs that need one, by name."""
    if len(listed) != len(case.inputs):
        raise ChildProcessError(FORGED)
    told = zip(case.inputs, _needs(case), listed, strict=True)
    return {f"d_{name}": tensor(one) for name, needed, one in told if needed}


def _row(case: Case, saved: list[np.ndarray], found: Arrays) -> Row:
    kept = sum(one.nbytes for one in saved if not _is_weight(one, case))
    counted = f"{kept:,} bytes saved, {case.allowed:,} allowed"
    problem = difference(case.compared(found), case.expected())
    if not problem and kept > case.allowed:
        problem = f"saves {kept:,} bytes, but {case.allowed:,} are allowed: {kept - case.allowed:,} too many"
    return Row(case.name, counted, problem)


def _is_weight(saved: np.ndarray, case: Case) -> bool:
    """Return True if a saved tensor is a weight, bit for bit."""
    weights = [case.inputs[name] for name in WEIGHTS if name in case.inputs]
    return any(saved.shape == weight.shape and saved.tobytes() == weight.tobytes() for weight in weights)


def _differentiated(function: Callable[..., Tensor], inputs: Arrays, d_out: np.ndarray) -> Arrays:
    """The output and the gradients of all floats, by autograd in float64."""
    leaves = {
        name: torch.from_numpy(array.astype(np.float64)).requires_grad_() if array.dtype == np.float32 else array
        for name, array in inputs.items()
    }
    wanted = {f"d_{name}": leaf for name, leaf in leaves.items() if isinstance(leaf, Tensor)}
    with torch.enable_grad():
        out = function(**leaves)
        gradients = torch.autograd.grad(out, [*wanted.values()], torch.from_numpy(d_out.astype(np.float64)))
    found = {"out": out} | dict(zip(wanted, gradients, strict=True))
    return {name: one.detach().numpy() for name, one in found.items()}


def _random(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * rng.standard_normal(shape)).astype(np.float32)


# ---- one expert, by hand -----------------------------------------------------------------------------


def _expert(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return oracle.activate(x @ w1, x @ w2, "swiglu") @ w3


_EXPERTS = {  # rows, d, h, and how large the pre-activations are
    "five rows": (5, 8, 16, 1.0),
    "one row": (1, 8, 8, 1.0),
    "no rows": (0, 8, 16, 1.0),
    "sizes that nothing divides": (33, 13, 11, 1.0),
    "large pre-activations": (7, 8, 16, 30.0),
}


def _expert_inputs(rows: int, d: int, h: int, size: float) -> tuple[Arrays, np.ndarray]:
    rng = np.random.default_rng(rows)
    x, w1, w2 = _random(rng, rows, d), _random(rng, d, h, scale=size * d**-0.5), _random(rng, d, h, scale=d**-0.5)
    w3, d_out = _random(rng, h, d, scale=h**-0.5), _random(rng, rows, d)
    return {"x": x, "w1": w1, "w2": w2, "w3": w3}, d_out


def _swiglu_cases() -> Iterator[Case]:
    for name, (rows, d, h, size) in _EXPERTS.items():
        inputs, d_out = _expert_inputs(rows, d, h, size)
        allowed = 4 * rows * (d + 2 * h)  # x, a and b
        yield Case(name, inputs, d_out, allowed, partial(_differentiated, _expert, inputs, d_out))


SWIGLU = Function("Expert", _swiglu_cases, by_hand=True, refused=("inference_mode", "ops", "func"))


# ---- an activation that the layer lacks --------------------------------------------------------------


def _squared_reglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return (torch.relu(x @ w1).square() * (x @ w2)) @ w3


def _in_the_layer(inputs: Arrays, d_out: np.ndarray, found: Arrays) -> Arrays:
    """The layer's output and gradients, from the activation's."""
    x, w1, w2, w3 = inputs.values()
    y, d_a, d_b = found["out"], found["d_a"], found["d_b"]
    if not y.shape == d_a.shape == d_b.shape == (len(x), len(w3)):
        raise ValueError(f"y, d_a and d_b must have the shape of a, {(len(x), len(w3))}")
    d_x = d_a @ w1.T + d_b @ w2.T
    return {"out": y @ w3, "d_x": d_x, "d_w1": x.T @ d_a, "d_w2": x.T @ d_b, "d_w3": y.T @ d_out}


def _activation_cases() -> Iterator[Case]:
    for name, (rows, d, h, size) in _EXPERTS.items():
        inputs, d_out = _expert_inputs(rows, d, h, size)
        x, w1, w2, w3 = inputs.values()
        expected = partial(_differentiated, _squared_reglu, inputs, d_out)
        yield Case(
            name,
            {"a": x @ w1, "b": x @ w2},
            d_out @ w3.T,
            4 * rows * 2 * h,  # a and b
            expected,
            partial(_in_the_layer, inputs, d_out),
        )


SQUARED_REGLU = Function("SquaredReGLU", _activation_cases, by_hand=True, refused=("inference_mode", "ops", "func"))


# ---- the experts of a layer, with MoEBlaze's checkpoint ----------------------------------------------


def _experts(x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, **structures: np.ndarray) -> Tensor:
    chosen = torch.from_numpy(structures["token_expert_indices"].reshape(gates.shape)).long()
    routing = oracle.Routing(gates, gates, chosen, gates)  # neither logits nor probabilities are read
    return oracle.experts(x, routing, w1, w2, w3, "swiglu")


_LAYERS = {
    "uneven experts": (MoEConfig(13, 8, 16, 4, 2, dtype="float32"), "zipf"),
    "one expert gets all": (MoEConfig(11, 8, 16, 5, 1, dtype="float32"), "hot"),
    "empty experts": (MoEConfig(11, 8, 16, 6, 2, dtype="float32"), "empty"),
    "one token": (MoEConfig(1, 8, 8, 4, 2, dtype="float32"), "uniform"),
    "k = E": (MoEConfig(9, 13, 11, 3, 3, dtype="float32"), "uniform"),
}


def _checkpoint_cases() -> Iterator[Case]:
    for name, (config, routing) in _LAYERS.items():
        rng = np.random.default_rng(config.L)
        L, d, h, E, k = config.sizes.values()
        inputs = {
            "x": _random(rng, L, d),
            "gates": rng.random((L, k)).astype(np.float32),
            "w1": _random(rng, E, d, h, scale=d**-0.5),
            "w2": _random(rng, E, d, h, scale=d**-0.5),
            "w3": _random(rng, E, h, d, scale=h**-0.5),
        }
        structures = dispatch.build_by_sort(random_topk(L, E, k, routing), E).arrays()
        inputs |= {name: np.asarray(array) for name, array in structures.items()}
        d_out = _random(rng, L, d)
        allowed = account(config, "moeblaze", "paper").kept_bytes
        yield Case(name, inputs, d_out, allowed, partial(_differentiated, _experts, inputs, d_out))


CHECKPOINT = Function("Experts", _checkpoint_cases, by_hand=False)


# ---- a loss that does not keep its logits ------------------------------------------------------------


def _cross_entropy(x: Tensor, head: Tensor, labels: np.ndarray) -> Tensor:
    return functional.cross_entropy(x @ head.T, torch.from_numpy(labels), reduction="none")


_LOSSES = {  # rows, d, vocabulary, and how large the logits are
    "a few rows": (5, 8, 50, 1.0),
    "one row": (1, 8, 40, 1.0),
    "sizes that nothing divides": (33, 13, 71, 1.0),
    "large logits": (7, 8, 50, 100.0),
}


def _loss_cases() -> Iterator[Case]:
    for name, (rows, d, vocabulary, size) in _LOSSES.items():
        rng = np.random.default_rng(rows)
        inputs = {
            "x": _random(rng, rows, d),
            "head": _random(rng, vocabulary, d, scale=size * d**-0.5),
            "labels": rng.integers(vocabulary, size=rows),
        }
        d_out = _random(rng, rows)
        allowed = sum(array.nbytes for array in inputs.values()) + d_out.nbytes  # a float32 a row
        yield Case(name, inputs, d_out, allowed, partial(_differentiated, _cross_entropy, inputs, d_out))


LOSS = Function("Loss", _loss_cases, by_hand=True, refused=("inference_mode", "ops", "func"))


# ---- products of grouped rows ------------------------------------------------------------------------


def _grouped(rows: Tensor, w1: Tensor, lengths: np.ndarray) -> Tensor:
    groups = zip(rows.split(lengths.tolist()), w1, strict=True)
    return torch.cat([group @ w for group, w in groups])


_GROUPS = {  # rows of each expert, one step after another
    "the first step": (3, 2, 4),
    "a second step of the same shape, and an expert without rows": (5, 0, 4),
    "one expert has all rows": (0, 0, 9),
    "no rows": (0, 0, 0),
    "other sizes": (1, 6, 0, 2),
    "the lengths of the second step again": (5, 0, 4),
}


def _grouped_cases() -> Iterator[Case]:
    for step, (name, lengths) in enumerate(_GROUPS.items()):
        rng = np.random.default_rng(step)
        rows, w1 = _random(rng, sum(lengths), 6), _random(rng, len(lengths), 6, 8, scale=6**-0.5)
        inputs = {"rows": rows, "w1": w1, "lengths": np.array(lengths)}
        d_out = _random(rng, sum(lengths), 8)
        allowed = rows.nbytes + inputs["lengths"].nbytes
        yield Case(name, inputs, d_out, allowed, partial(_differentiated, _grouped, inputs, d_out))


GROUPED = Function("Grouped", _grouped_cases, by_hand=True, refused=("inference_mode", "ops", "func"))
