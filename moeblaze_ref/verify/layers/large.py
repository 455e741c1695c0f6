"""Layers whose tensors have more than 2**31 elements: a small case many times over.

Its tokens are repeated, so each repetition has the output of the small case, and the gradients of weights are so many
times as large. Where the weights are large, the tokens choose the last experts, and all others must have gradients of
zero. The number of tokens is prime, so that an index that is off by a power of two meets other numbers.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.verify.layers import cases, deviations, layouts, reference
from moeblaze_ref.verify.layers.adapter import Adapter, Sizes
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.deviations import PARTS, Deviation, Wanted
from moeblaze_ref.verify.layers.layer import CheckedLayer, Inputs
from moeblaze_ref.verify.layers.layouts import ROLES
from moeblaze_ref.verify.layers.reference import Case

WAY = "more than 2^31 elements"


class Large(NamedTuple):
    """A case and how it is made large."""

    pattern: Pattern
    times: int = 1  #: that its tokens are repeated
    unused: int = 0  #: experts before the chosen experts

    @property
    def sizes(self) -> Sizes:
        """Return the sizes of the layer that runs the case."""
        small = self.pattern.sizes
        return small._replace(L=small.L * self.times, E=small.E + self.unused)


LARGE = (
    Large(Pattern("hidden activations", Sizes(4093, 64, 2056, 8, 2), cases.distinct), times=128),
    Large(Pattern("x and the output", Sizes(4093, 2056, 64, 8, 1), cases.distinct), times=256),
    Large(Pattern("weights", Sizes(61, 4096, 4104, 4, 2), cases.distinct), unused=124),
)


class Found(NamedTuple):
    """Result of a case."""

    case: str
    units: float  #: the largest error in units of its bound
    wrong: tuple[Deviation, ...]


@contextmanager
def alone() -> Iterator[None]:
    """Let one process at a time run large cases: they take most of a GPU's memory."""
    with open(Path(tempfile.gettempdir()) / "moeblaze_large_layers.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cases_for(adapter: Adapter) -> list[Large]:
    """The cases that the layer takes; unused experts need a routing that is given."""
    taken = [large for large in LARGE if not (large.unused and adapter.router)]
    return [large._replace(pattern=_rounded(large.pattern, adapter.multiple)) for large in taken]


def _rounded(pattern: Pattern, multiple: int) -> Pattern:
    small = pattern.sizes
    d, h = (-(-size // multiple) * multiple for size in (small.d, small.h))
    return pattern._replace(sizes=small._replace(d=d, h=h))


def run(layer: CheckedLayer, large: Large) -> Found:
    """Run a step of a layer of the case's sizes, and compare everything."""
    case = cases.make(layer.adapter, large.pattern, layer.dtype)
    spec, ways = cases.spec_of(layer.adapter, case.sizes.k), (reference.one_after_another,)
    with _all_threads():
        wanted = deviations.wanted(spec, case, layer.dtype, layer.gate_dtype, ways)
    inputs, d_out = _load(layer, case, large)
    out = layer.forward(inputs)
    gradients = layer.raw_gradients(out, d_out, inputs)
    of_tokens = {"out": out.detach()} | {name: gradients.pop(name) for name in inputs.leaves()}
    del out, inputs, d_out
    compared = [*_tokens(of_tokens, wanted, case.sizes.L), *_weights(layer, gradients, wanted, large)]
    return Found(large.pattern.name, max(one.units for one in compared), sum((one.wrong for one in compared), ()))


@contextmanager
def _all_threads() -> Iterator[None]:
    """Let torch use every core: a check has one thread, since its other products are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _load(layer: CheckedLayer, case: Case, large: Large) -> tuple[Inputs, Tensor]:
    """Write the weights into the layer; return the repeated tokens and the repeated gradient of the output."""
    with torch.no_grad():
        for place, tensor in layer.places:
            for role, part in place.layout.parts(tensor).items():
                if place.expert is None:
                    (part[large.unused :] if ROLES[role][0] == "E" else part).copy_(case.weights[role])
                elif place.expert >= large.unused:
                    part.copy_(case.weights[role][place.expert - large.unused])

    def repeated(values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(layer.device, dtype).repeat(large.times, 1)

    x, d_out = repeated(case.x, layer.dtype).requires_grad_(), repeated(case.d_out, layer.dtype)
    if case.topk_weights is None:
        return Inputs(x), d_out
    index = repeated(case.topk_index + large.unused, layer.adapter.index_dtype)
    return Inputs(x, index, repeated(case.topk_weights, layer.gate_dtype).requires_grad_()), d_out


def _tokens(found: dict[str, Tensor | None], wanted: Wanted, L: int) -> Iterator[Found]:
    """Each repetition of the tokens beside the small case, on the layer's device."""
    for name, tensor in found.items():
        if tensor is None:
            tensor = torch.zeros_like(wanted.exact[name])
        here = wanted.on(tensor.device)
        for first, part in zip(range(0, len(tensor), L), tensor.split(L), strict=True):
            yield _compared(name, part.double(), here, first)


def _weights(layer: CheckedLayer, gradients: dict[str, Tensor | None], wanted: Wanted, large: Large) -> Iterator[Found]:
    """The gradients of weights beside those of the small case; of experts without tokens they are zero."""
    parts = [(place, gradients[place.name]) for place, _ in layer.places if place.name in gradients]
    for role, tensor in layouts.gather([(place, g) for place, g in parts if g is not None]).items():
        unused = large.unused if ROLES[role][0] == "E" else 0
        if tensor[:unused].count_nonzero():
            expert = int(tensor[:unused].flatten(1).any(1).nonzero()[0])
            yield Found("", torch.inf, (Deviation(role, f"expert {expert}", torch.inf, 0.0),))
        yield _compared(role, tensor[unused:].cpu().double() / large.times, wanted, unused)


def _compared(name: str, found: Tensor, wanted: Wanted, first: int) -> Found:
    """A tensor, whose parts are counted from ``first``."""
    wrong = deviations.deviations({name: found}, wanted)
    moved = tuple(deviation._replace(part=_moved(name, deviation.part, first)) for deviation in wrong)
    return Found("", deviations.worst({name: found}, wanted), moved)


def _moved(name: str, part: str | None, first: int) -> str | None:
    return None if part is None else f"{PARTS[name][0]} {int(part.split()[1]) + first}"
