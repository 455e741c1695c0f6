"""The router's decision, and the four index structures made from it (MoEBlaze, sections 2 and 4.1)."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol, Self, TypeVar


class Array(Protocol):
    """An array of the backend's own: what arrays of numpy, CuPy and Numba and torch's tensors have in common.

    An operation returns an array of the same library, whose type is not known here.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along every axis."""

    @property
    def dtype(self) -> Any:
        """Type of an element, as the library spells it; `core.arrays.dtype_of` returns its name."""

    @property
    def ndim(self) -> int:
        """Axes."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""

    @property
    def T(self) -> Any:
        """A view with the axes in the other order."""

    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __eq__(self, other: Any, /) -> Any: ...
    def __ne__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __le__(self, other: Any, /) -> Any: ...
    def __gt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...
    def __abs__(self) -> Any: ...
    def __array__(self, *args: Any, **kwargs: Any) -> Any: ...
    def __iter__(self) -> Iterator[Any]: ...
    def reshape(self, *args: Any, **kwargs: Any) -> Any: ...
    def any(self, *args: Any, **kwargs: Any) -> Any: ...
    def sum(self, *args: Any, **kwargs: Any) -> Any: ...
    def nonzero(self, *args: Any, **kwargs: Any) -> Any: ...


A_co = TypeVar("A_co", bound=Array, covariant=True)  # one library's arrays

EMPTY = -1  # in place of an index: there is none, such as of a token in the dense map that does not go to this expert

HIDDEN = ("a", "b", "y_swi")  # what the up-projection computes for every routed row


def only(stores: Collection[str], a: Array, b: Array | None, y_swi: Array) -> tuple[Array | None, ...]:
    """The three arrays of ``HIDDEN``, with None for each array that is not in ``stores``."""
    return tuple(array if name in stores else None for name, array in zip(HIDDEN, (a, b, y_swi), strict=True))


# The fields of a structure that are arrays: a step asks for them again and again.
_array_names: Callable[[Any], tuple[str, ...]] = cache(
    lambda structure: tuple(field.name for field in fields(structure) if field.type is not int)
)


def _extent(array: Array, axis: int = 0) -> int:
    extent: int = array.shape[axis]
    return extent


class Gating(NamedTuple):
    """The router's decision for every token (MoEBlaze, section 2)."""

    probs: Array  # (L, E) softmax of the logits
    topk_experts: Array  # (L, k) int32, best first, ties to the lower expert id
    gates: Array  # (L, k) probabilities of the chosen experts, or those over their sum


@dataclass(frozen=True, eq=False)
class IndexArrays:
    """A frozen dataclass of index arrays, and of the numbers that belong to them."""

    def arrays(self) -> dict[str, Array]:
        """The arrays by name."""
        return {name: getattr(self, name) for name in _array_names(type(self))}

    @classmethod
    def of(cls, arrays: Mapping[str, Array], **numbers: int) -> Self:
        """Make the structure of its arrays, found by name among others, and its numbers: the inverse of `arrays`."""
        return cls(**{name: arrays[name] for name in _array_names(cls)}, **numbers)

    def map(self, convert: Callable[[Any], Array]) -> Self:
        """The same with every array converted, such as to another backend's kind."""
        return replace(self, **{name: convert(array) for name, array in self.arrays().items()})


class Bins(IndexArrays):
    """Where a system puts the rows of the slots (token, j), which are row-major (L, k)."""

    rows: Array
    k: int

    @cached_property
    def R(self) -> int:
        """Routed rows."""
        return _extent(self.rows)

    @cached_property
    def L(self) -> int:
        """Tokens."""
        return self.R // self.k


@dataclass(frozen=True, eq=False)
class Dispatch(IndexArrays):
    """Where every routed row comes from and where it goes; all arrays are int32.

    In a partial one, of `build_part`, some slots have no row: R is less than L * k.

    Parameters
    ----------
    expert_token_indices : array (R,)
        Token ids grouped by expert, ascending token id inside an expert.
    expert_token_offsets : array (E + 1,)
        Expert e owns positions offsets[e] to offsets[e + 1] of the expert order.
    token_expert_indices : array (R,)
        Expert ids of token 0, then of token 1, ...: row-major (L, k); ``EMPTY`` for a slot without a row.
    token_index_map : array (R,)
        Position of slot (token, j) in the expert order, row-major (L, k); ``EMPTY`` for a slot without a row.
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
        return _extent(self.expert_token_indices)

    @cached_property
    def slots(self) -> int:
        """L * k."""
        return _extent(self.token_index_map)

    @cached_property
    def L(self) -> int:
        """Tokens."""
        return self.slots // self.k

    @cached_property
    def E(self) -> int:
        """Experts."""
        return _extent(self.expert_token_offsets) - 1


STRUCTURES = tuple(field.name for field in fields(Dispatch) if field.name != "k")  # by their paper names


# MegaBlocks (arXiv 2211.15841), section 5 ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PaddedBins(Bins):
    """Where MegaBlocks puts the routed rows: every expert's group padded to whole blocks; all arrays are int32.

    R and L are as in `Bins`.

    Parameters
    ----------
    padded_offsets : array (E + 1,)
        Expert e owns the padded rows offsets[e] to offsets[e + 1]: multiples of ``block``.
    slots : array (P,)
        Slot token * k + j of every padded row, in expert order; ``EMPTY`` where it is padding.
    rows : array (R,)
        Padded row of every slot, row-major (L, k): the inverse of ``slots``.
    k : int
        Experts per token.
    block : int
        Rows of a block.
    """

    padded_offsets: Array
    slots: Array
    rows: Array
    k: int
    block: int

    @cached_property
    def P(self) -> int:
        """Padded rows."""
        return _extent(self.slots)

    @cached_property
    def E(self) -> int:
        """Experts."""
        return _extent(self.padded_offsets) - 1


@dataclass(frozen=True, eq=False)
class Topology(IndexArrays):
    """Which blocks of a block-sparse matrix are stored: hybrid blocked-CSR-COO with transpose indices, all int32.

    The values are an array (nnz, block, block), block after block in the order of the block rows. CSR says where a
    block row begins, COO which block row and column a block lies in, the transpose indices in which order to visit
    the blocks column by column: the values never move.

    Parameters
    ----------
    row_offsets : array (M / block + 1,)
        Block row r owns the blocks offsets[r] to offsets[r + 1].
    column_indices : array (nnz,)
        Block column of every block, ascending inside a block row.
    row_indices : array (nnz,)
        Block row of every block.
    column_offsets : array (N / block + 1,)
        Block column c owns ``transpose_indices`` offsets[c] to offsets[c + 1].
    transpose_indices : array (nnz,)
        The blocks column by column, ascending block rows inside a block column.
    block : int
        Rows and columns of a block.
    """

    row_offsets: Array
    column_indices: Array
    row_indices: Array
    column_offsets: Array
    transpose_indices: Array
    block: int

    @cached_property
    def nnz(self) -> int:
        """Stored blocks."""
        return _extent(self.column_indices)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """Rows M and columns N of the matrix, in elements."""
        return self.block * (_extent(self.row_offsets) - 1), self.block * (_extent(self.column_offsets) - 1)


# GShard (arXiv 2006.16668), section 2.2 -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CapacityBins(Bins):
    """Where a system of fixed capacity puts the routed rows: C rows for every expert; both arrays are int32.

    R and L are as in `Bins`.

    Parameters
    ----------
    slots : array (E, C)
        Slot token * k + j of every row that is reserved, those with the best claim first; ``EMPTY`` where it is
        padding.
    rows : array (R,)
        Row expert * C + place of every slot, row-major (L, k); ``EMPTY`` where the slot is dropped.
    k : int
        Experts per token.
    """

    slots: Array
    rows: Array
    k: int

    @cached_property
    def E(self) -> int:
        """Experts."""
        return _extent(self.slots)

    @cached_property
    def C(self) -> int:
        """Rows of an expert."""
        return _extent(self.slots, 1)
