"""How models store their experts' weights: both up-projections in one tensor, ``gate_up``, and ``down``."""

from dataclasses import dataclass
from typing import TypeVar

from moeblaze_ref.core.structures import Array

Kind = TypeVar("Kind", bound=Array)


@dataclass(frozen=True)
class Layout:
    """A way to store weights. G is 2 with a gated activation, else 1.

    Parameters
    ----------
    name : str
        As in ``LAYOUTS``; the kernels are compiled for it by this name.
    transposed : bool
        As an ``nn.Linear``'s: gate_up (E, G h, d) and down (E, d, h). Else (E, d, G h) and (E, h, d).
    interleaved : bool
        Columns of w1 and w2 alternate. Else those of w1 come first.
    """

    name: str
    transposed: bool
    interleaved: bool

    def shapes(self, E: int, d: int, h: int, gated: bool) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Return the shapes of gate_up and of down."""
        columns = h * (1 + gated)
        return ((E, columns, d), (E, d, h)) if self.transposed else ((E, d, columns), (E, h, d))

    def widths(self, gate_up: Array, gated: bool) -> tuple[int, int]:
        """Return d and h."""
        _, rows, columns = gate_up.shape
        d, hidden = (columns, rows) if self.transposed else (rows, columns)
        return d, hidden // (1 + gated)

    def stored(self, gate_up: Kind) -> tuple[Kind, Kind]:
        """Return w1 and w2 of a gated activation as they are stored: views of gate_up."""
        if self.interleaved:
            return gate_up[:, :, 0::2], gate_up[:, :, 1::2]
        if self.transposed:
            h = gate_up.shape[1] // 2
            return gate_up[:, :h], gate_up[:, h:]
        h = gate_up.shape[2] // 2
        return gate_up[:, :, :h], gate_up[:, :, h:]


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("linear", transposed=True, interleaved=False),  # most models of transformers
        Layout("matmul", transposed=False, interleaved=False),  # Llama 4
        Layout("interleaved", transposed=False, interleaved=True),  # gpt-oss
    )
}
