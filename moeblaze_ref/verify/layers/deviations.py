"""Compare what a layer computes with the reference: each whole tensor, then each token and each expert of it."""

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.verify.comparisons import BOUNDS, FEW_ELEMENTS, SMALL_TENSOR_BOUNDS
from moeblaze_ref.verify.layers import reference
from moeblaze_ref.verify.layers.layouts import ROLES
from moeblaze_ref.verify.layers.reference import Case, Experts, Results, Spec

#: along which axis a tensor is looked at part by part, and what a part is called
PARTS = {"out": ("token", 0), "x": ("token", 0), "topk_weights": ("token", 0)} | {
    role: ("expert", axes.index("E")) for role, axes in ROLES.items() if "E" in axes
}
FEW_ROWS = 8
LEAST_MOVE = 2.0**-20  # of a limit, relative: as much as a sum in float32 may be off
# Expected results of small cases are cached: the ways of running a layer share them, and so do layers of a kind.
MOST_KNOWN = 256
SMALL_CASE = 2**19  # elements
_known: dict[Hashable, "Wanted"] = {}


class Deviation(NamedTuple):
    """A tensor that is wrong."""

    tensor: str  #: "out", or of which input or weight it is the gradient
    part: str | None  #: the first wrong token or expert, such as "expert 3"; None if no single one is
    error: float  #: of the tensor or its part, relative
    bound: float

    @property
    def units(self) -> float:
        """The error in units of the bound."""
        return self.error / self.bound if math.isfinite(self.error) else math.inf

    def __str__(self) -> str:
        name = "the output" if self.tensor == "out" else f"the gradient of {self.tensor}"
        where = f", {self.part}" if self.part else ""
        size = f"{self.units:.3g} times the bound" if math.isfinite(self.error) else "NaN or infinite"
        return f"{name}{where}: error {self.error:.3g}, {size}"


class Wanted(NamedTuple):
    """Expected results of a case, and the bounds of their errors."""

    exact: Results  #: of the reference in float64
    sizes: Results  #: of tensors that may vanish, others by which their errors are measured
    bounds: dict[str, tuple[float, Tensor]]  #: of the error of each whole tensor, and of each part of it (n,)

    def on(self, device: torch.device) -> "Wanted":
        """The same on another device."""
        exact, sizes = ({name: t.to(device) for name, t in of.items()} for of in (self.exact, self.sizes))
        bounds = {name: (of_whole, of_parts.to(device)) for name, (of_whole, of_parts) in self.bounds.items()}
        return Wanted(exact, sizes, bounds)


def wanted(
    spec: Spec,
    case: Case,
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    ways: Sequence[Experts] = reference.PLAIN_WAYS,
) -> Wanted:
    """The reference of a case, and the bounds from what plain torch makes of it in the layer's dtype."""
    if case.numel > SMALL_CASE:
        return _computed(spec, case, dtype, gate_dtype, ways)
    key = spec, dtype, gate_dtype, tuple(ways), case.fingerprint()
    if key not in _known:
        if len(_known) == MOST_KNOWN:
            del _known[next(iter(_known))]  # the oldest
        _known[key] = _computed(spec, case, dtype, gate_dtype, ways)
    return _known[key]


def _computed(spec: Spec, case: Case, dtype: torch.dtype, gate_dtype: torch.dtype, ways: Sequence[Experts]) -> Wanted:
    exact, sizes = reference.exact(spec, case), reference.sizes(spec, case)
    plain = [reference.results(spec, case, dtype, gate_dtype, way) for way in ways]
    plain += _with_limits_moved(spec, case, dtype)
    rows = _different_rows(case)
    bounds = {}
    for name, tensor in exact.items():
        errors = [_errors(name, results[name], tensor, sizes.get(name, tensor)) for results in plain]
        whole, parts = (max(float(e) for e in kind) for kind in zip(*((w, p.max()) for w, p in errors), strict=True))
        count = len(errors[0][1])
        of_parts = rows.of_experts if name in reference.PER_EXPERT else rows.of_all(name).expand(count)
        few, many = (bound_for(parts, numbers, dtype) for numbers in (0, tensor.numel() // count))
        bounds_of_parts = torch.full((count,), many, dtype=torch.float64).masked_fill(of_parts < FEW_ROWS, few)
        bounds[name] = bound_for(whole, rows.numbers(name, tensor), dtype), bounds_of_parts
    return Wanted(exact, sizes, bounds)


def _with_limits_moved(spec: Spec, case: Case, dtype: torch.dtype) -> list[Results]:
    """Results of an activation with limits, where numbers that are nearly at a limit are clamped, or are not.

    A rounding error decides that, and the derivative jumps there. The list is empty if the activation has no limits.
    """
    moved = getattr(spec.activation, "with_limits_moved", None)
    if moved is None:
        return []
    relative = max(torch.finfo(dtype).eps, LEAST_MOVE)
    return [reference.exact(spec._replace(activation=moved(by)), case) for by in (relative, -relative)]


class _Rows(NamedTuple):
    """How many rows the numbers of a gradient come from; equal rows have equal errors, which no sum averages."""

    tokens: int
    of_experts: Tensor  # (E,)
    k: int

    def of_all(self, name: str) -> Tensor:
        """How many rows a whole tensor comes from."""
        return torch.tensor(self.tokens if name.startswith("shared_") else self.tokens * self.k)

    def numbers(self, name: str, tensor: Tensor) -> int:
        """How many numbers of a whole tensor have errors of their own: of a router's gradient one for each choice."""
        rows = int(self.of_all(name))
        if rows < FEW_ROWS:
            return 0
        counted = _numbers_that_count(tensor)
        return min(rows, counted) if name in ("router", "router_bias") else counted


def _numbers_that_count(tensor: Tensor) -> int:
    """All numbers, if they are like those of a normal distribution; fewer, if some are much larger than the others."""
    squares = tensor.square()
    counted = 3 * squares.sum().square() / squares.square().sum()  # NaN if all are zero
    return min(tensor.numel(), int(counted.nan_to_num(0.0)))


def _different_rows(case: Case) -> _Rows:
    tokens, which = case.x.unique(dim=0, return_inverse=True)
    pairs = torch.stack([case.topk_index, which[:, None].expand_as(case.topk_index)], 2).flatten(0, 1)  # (R, 2)
    of_experts = pairs.unique(dim=0)[:, 0].bincount(minlength=case.sizes.E)
    return _Rows(len(tokens), of_experts, case.sizes.k)


def deviations(found: Results, wanted: Wanted) -> list[Deviation]:
    """Return what is wrong, of the tensors that a layer computed."""
    return [deviation for name in found for deviation in _of_tensor(name, found[name], wanted)]


def worst(found: Results, wanted: Wanted) -> float:
    """The largest error of a tensor or part, in units of its bound."""
    units = 0.0
    for name, tensor in found.items():
        whole, parts = _errors_of(name, tensor, wanted)
        of_whole, of_parts = wanted.bounds[name]
        worst_of_both = max(whole / of_whole, float((parts / of_parts).max()))
        units = max(units, worst_of_both if math.isfinite(worst_of_both) else math.inf)
    return units


def wrong_parts(name: str, found: Tensor, wanted: Wanted) -> list[int]:
    """The tokens or experts whose part of a tensor is wrong; none of a tensor that is not looked at in parts."""
    _, parts = _errors_of(name, found, wanted)
    return _beyond(name, parts, wanted)


def _beyond(name: str, parts: Tensor, wanted: Wanted) -> list[int]:
    """The tokens or experts whose errors are beyond their bound."""
    wrong = ~(parts <= wanted.bounds[name][1])
    return wrong.nonzero().flatten().tolist() if name in PARTS else []


def _of_tensor(name: str, found: Tensor, wanted: Wanted) -> Iterator[Deviation]:
    whole, parts = _errors_of(name, found, wanted)
    of_whole, of_parts = wanted.bounds[name]
    if wrong := _beyond(name, parts, wanted):
        yield Deviation(name, f"{PARTS[name][0]} {wrong[0]}", float(parts[wrong[0]]), float(of_parts[wrong[0]]))
    elif not whole <= of_whole:
        yield Deviation(name, None, whole, of_whole)


def _errors_of(name: str, found: Tensor, wanted: Wanted) -> tuple[float, Tensor]:
    exact = wanted.exact[name]
    if found.shape != exact.shape:
        return math.inf, torch.full((1,), math.inf)
    return _errors(name, found, exact, wanted.sizes.get(name, exact))


def _errors(name: str, found: Tensor, exact: Tensor, size: Tensor) -> tuple[float, Tensor]:
    """Relative error of the tensor, and of each part; a small part is measured by a part's usual size.

    A tensor that is not looked at in parts has one.
    """
    axis = PARTS[name][1] if name in PARTS else None
    off, norms, usual = (_norms(tensor, axis) for tensor in (found - exact, exact, size))
    whole = float(_ratio(off.norm(), torch.maximum(norms.norm(), usual.norm())))
    least = torch.maximum(norms.square().mean(), usual.square().mean()).sqrt()
    return whole, _ratio(off, torch.maximum(norms, least))


def _norms(tensor: Tensor, axis: int | None) -> Tensor:
    """The norm of each part of a tensor, or of all of it: (n,)."""
    parts = tensor.reshape(1, -1) if axis is None else tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
    return parts.norm(dim=1)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """The quotient; where nothing is exact but zero, any error is infinite."""
    return torch.where(error == 0, error, error / size)


def bound_for(lost: float, numel: int, dtype: torch.dtype) -> float:
    """Twice what plain torch loses, or four times in few elements; at least float32's bound, or that of few elements.

    In few elements the ratio is noise: 129 bfloat16 numbers that are summed in another order lose half as much or
    twice. Gradients that come from a few rows count as few elements: the rounding of a row is in all of them. So do
    tensors in which a few numbers are much larger than the others.
    """
    if numel >= FEW_ELEMENTS:
        return max(2 * lost, BOUNDS["float32"])
    return max(4 * lost, SMALL_TENSOR_BOUNDS.get(str(dtype).removeprefix("torch."), 0.0), BOUNDS["float32"])
