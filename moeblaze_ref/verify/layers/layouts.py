"""How a layer stores its weights, in a line: ``"gate_up: E 2h d"`` is one tensor of both up-projections.

A layout names the weight's role and its axes in memory. The axes are E experts, d model width, h expert width, s
width of the shared expert and 1. A tensor of gate and up projections has ``2h`` if all gate columns come before the up
columns, and ``h2`` if they alternate. ``E*h`` is one axis of both, the h rows of an expert together. A name of a
parameter with ``*`` stands for one parameter an expert, whose layout leaves E out.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

ROLES: dict[str, tuple[str, ...]] = {  #: the axes in which the reference has each weight
    "router": ("d", "E"),
    "router_bias": ("E",),
    "selection_bias": ("E",),
    "gate": ("E", "d", "h"),
    "gate_bias": ("E", "h"),
    "up": ("E", "d", "h"),
    "up_bias": ("E", "h"),
    "down": ("E", "h", "d"),
    "down_bias": ("E", "d"),
    "shared_gate": ("d", "s"),
    "shared_up": ("d", "s"),
    "shared_down": ("s", "d"),
    "shared_expert_gate": ("d", "1"),
}
#: several weights in one tensor, in their order
FUSED = {
    "gate_up": ("gate", "up"),
    "up_gate": ("up", "gate"),
    "gate_up_bias": ("gate_bias", "up_bias"),
    "up_gate_bias": ("up_bias", "gate_bias"),
    "shared_gate_up": ("shared_gate", "shared_up"),
}
DOUBLED = ("2{}", "{}2")  #: an axis of gate and up, one after the other or alternating
MERGED = "E*"  #: before the axis that is one with that of the experts
BUFFERS = ("selection_bias",)  #: what no gradient reaches
Weights = dict[str, Tensor]  # by role


def lengths(sizes: Mapping[str, int], shared: int) -> dict[str, int]:
    """Return the length of each axis: those of a case, the width of the shared expert, and 1."""
    return {**sizes, "s": shared, "1": 1}


class Layout(NamedTuple):
    """Where the weights of one tensor are."""

    roles: tuple[str, ...]  #: one, or two of a fused tensor
    axes: tuple[str, ...]  #: of the tensor, such as ("E", "2h", "d")
    merged: bool = False  #: the first two axes are one in memory
    num_experts: int = 1

    @classmethod
    def parse(cls, text: str, num_experts: int = 1, of_one: bool = False) -> "Layout":
        """Read a layout; ``of_one`` says that messages are about the parameter of one expert.

        Raises
        ------
        ValueError
            If the role is unknown, or the axes are not those of the role.
        """
        name, _, axes = (part.strip() for part in text.partition(":"))
        roles = FUSED.get(name, (name,))
        if ":" not in text:
            raise ValueError(
                f"the layout {text!r} has no colon: write a weight and its axes, such as 'gate_up: E 2h d'"
            )
        if not set(roles) <= ROLES.keys():
            raise ValueError(
                f"the layout {text!r} names {name!r}, but a weight is one of {', '.join((*ROLES, *FUSED))}"
            )
        merged = axes.startswith(MERGED)
        layout = cls(roles, tuple((f"E {axes[2:]}" if merged else axes).split()), merged, num_experts)
        plain = ROLES[roles[0]]
        right = {plain, plain[1:]} if plain[0] == "E" else {plain}
        known = set(layout.axes) <= {*plain, *(form.format(axis) for form in DOUBLED for axis in plain if axis in "hs")}
        named = any(sorted(layout.plain) == sorted(wanted) for wanted in right)
        if not known or not named or layout._fuses != len(roles) - 1:
            shown = plain[1:] if of_one and plain[0] == "E" else plain
            allowed = " or ".join(repr(form) for form in _forms(shown, len(roles) > 1))
            raise ValueError(
                f"the layout {text!r} has the axes {axes!r}, but it must have those of {allowed}, in any order"
            )
        return layout

    @property
    def text(self) -> str:
        """The axes as they are written."""
        return " ".join(self.axes).replace("E ", MERGED, 1) if self.merged else " ".join(self.axes)

    @property
    def plain(self) -> tuple[str, ...]:
        """The axes without the 2 of a fused tensor."""
        return tuple(axis.strip("2") for axis in self.axes)

    @property
    def _fuses(self) -> int:
        return sum("2" in axis for axis in self.axes)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        shape = tuple(sizes[axis.strip("2")] * (2 if "2" in axis else 1) for axis in self.axes)
        return (shape[0] * shape[1], *shape[2:]) if self.merged else shape

    def orders(self) -> Iterator["Layout"]:
        """Yield a layout for each order of the same axes."""
        for axes in itertools.permutations(self.axes):
            if not self.merged or axes[0] == "E":
                yield self._replace(axes=axes)

    def parts(self, tensor: Tensor) -> Weights:
        """Return views of the tensor by role, in the axes of the reference."""
        tensor = tensor.unflatten(0, (self.num_experts, -1)) if self.merged else tensor
        fused = next((i for i, axis in enumerate(self.axes) if "2" in axis), None)
        halves = [tensor] if fused is None else _halves(tensor, fused, self.axes[fused].startswith("2"))
        return {role: self._in_order(half, role) for role, half in zip(self.roles, halves, strict=True)}

    def _in_order(self, half: Tensor, role: str) -> Tensor:
        return half.permute([self.plain.index(axis) for axis in ROLES[role] if axis in self.plain])


def _forms(axes: Sequence[str], fused: bool) -> list[str]:
    """How a layout of these axes may be written, but for their order."""
    doubled = DOUBLED if fused else ("{}",)
    return [" ".join(form.format(axis) if axis in "hs" else axis for axis in axes) for form in doubled]


def _halves(tensor: Tensor, axis: int, concatenated: bool) -> list[Tensor]:
    if concatenated:
        return list(tensor.chunk(2, axis))
    return [tensor.unflatten(axis, (-1, 2)).select(axis + 1, i) for i in (0, 1)]


class Place(NamedTuple):
    """A parameter, and the expert whose weights alone it has, if it is one of several."""

    name: str
    layout: Layout
    expert: int | None


def places(layouts: Mapping[str, str], num_experts: int) -> list[Place]:
    """Return every parameter that the layouts speak of; ``*`` becomes each expert's number.

    Raises
    ------
    ValueError
        If a layout cannot be read, or two tensors have the same weight.
    """
    found: list[Place] = []
    taken: dict[str, str] = {}  # the name of each weight's parameter
    for name, text in layouts.items():
        each = "*" in name
        layout = Layout.parse(text, num_experts, of_one=each)
        if each == ("E" in layout.axes) and ROLES[layout.roles[0]][0] == "E":
            wrong = "one parameter an expert, so its layout has no E" if each else "all experts, so its layout has an E"
            raise ValueError(f"{name!r} stands for {wrong}: {text!r}")
        for role in layout.roles:
            if role in taken:
                raise ValueError(f"{taken[role]!r} and {name!r} both have the weight {role!r}")
        taken |= dict.fromkeys(layout.roles, name)
        experts = range(num_experts) if each else (None,)
        found += [Place(name if e is None else name.replace("*", str(e)), layout, e) for e in experts]
    return found


def gather(found: list[tuple[Place, Tensor]]) -> Weights:
    """Return the weights (or their gradients) by role, from the tensors that hold them."""
    weights: dict[str, list[Tensor]] = {}
    for place, tensor in found:
        for role, part in place.layout.parts(tensor).items():
            weights.setdefault(role, []).append(part)
    return {
        role: parts[0] if len(parts) == 1 and parts[0].ndim == len(ROLES[role]) else torch.stack(parts)
        for role, parts in weights.items()
    }


def scatter(places_: list[tuple[Place, Tensor]], weights: Weights) -> None:
    """Write the weights into the tensors that hold them."""
    with torch.no_grad():
        for place, tensor in places_:
            for role, part in place.layout.parts(tensor).items():
                part.copy_(weights[role] if place.expert is None else weights[role][place.expert])
