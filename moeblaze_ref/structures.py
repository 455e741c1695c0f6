"""What the router decides, and the four index structures made of it (MoEBlaze, sections 2 and 4.1)."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

Array = Any  # numpy.ndarray, cupy.ndarray or a Numba device array: the backend's own
EMPTY = -1  # in the dense map: this token does not go to this expert


HIDDEN = ("a", "b", "y_swi")  # what the up-projection computes for every routed row


def only(stores: Collection[str], a: Array, b: Array | None, y_swi: Array) -> tuple[Array | None, ...]:
    """The three of ``HIDDEN``, with None for those that are not in ``stores``."""
    return tuple(array if name in stores else None for name, array in zip(HIDDEN, (a, b, y_swi), strict=True))


class Gating(NamedTuple):
    """What the router decided for every token (MoEBlaze, section 2)."""

    probs: Array  # (L, E) softmax of the logits
    topk_experts: Array  # (L, k) int32, best first, ties to the lower expert id
    gates: Array  # (L, k) probabilities of the chosen experts, or those over their sum


@dataclass(frozen=True, eq=False)
class Dispatch:
    """Where every routed row comes from and where it goes; all arrays are int32.

    Parameters
    ----------
    expert_token_indices : array (R,)
        Token ids grouped by expert, ascending token id inside an expert.
    expert_token_offsets : array (E + 1,)
        Expert e owns positions offsets[e] to offsets[e + 1] of the expert order.
    token_expert_indices : array (R,)
        Expert ids of token 0, then of token 1, ...: row-major (L, k).
    token_index_map : array (R,)
        Position of slot (token, j) in the expert order, row-major (L, k).
    k : int
        Experts per token.
    """

    expert_token_indices: Array
    expert_token_offsets: Array
    token_expert_indices: Array
    token_index_map: Array
    k: int

    @cached_property
    def R(self) -> int:
        """Routed rows."""
        return self.expert_token_indices.shape[0]

    @cached_property
    def L(self) -> int:
        """Tokens."""
        return self.R // self.k

    @cached_property
    def E(self) -> int:
        """Experts."""
        return self.expert_token_offsets.shape[0] - 1

    def arrays(self) -> dict[str, Array]:
        """The four arrays by their paper names."""
        return {name: getattr(self, name) for name in STRUCTURES}

    def map(self, convert: Callable[[Array], Array]) -> "Dispatch":
        """The same structures with every array converted, such as to another backend's kind."""
        return Dispatch(**{name: convert(array) for name, array in self.arrays().items()}, k=self.k)


STRUCTURES = tuple(field.name for field in fields(Dispatch) if field.name != "k")  # by their paper names
