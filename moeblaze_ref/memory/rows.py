"""Rows of each expert under drop, pad and block-sparse: routed, kept, stored.

Sources: GShard (arXiv 2006.16668), section 2.2, for a fixed capacity; MegaBlocks (arXiv 2211.15841), section 5.2, for
bins of whole blocks; MoEBlaze (arXiv 2601.05296), section 3, for none of either.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from moeblaze_ref.core import checks, sparse_contracts


@dataclass(frozen=True)
class Rows:
    """The rows of one system, an entry an expert."""

    routed: tuple[int, ...]  #: what the router sends to each expert
    kept: tuple[int, ...]  #: what the expert computes of it
    stored: tuple[int, ...]  #: what the expert's products run over, padding included

    @property
    def dropped(self) -> tuple[int, ...]:
        """Routed rows that are lost."""
        return _differences(self.routed, self.kept)

    @property
    def padding(self) -> tuple[int, ...]:
        """Padding rows: stored, but no token's."""
        return _differences(self.stored, self.kept)


def _differences(more: Sequence[int], less: Sequence[int]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(more, less, strict=True))


def capacity_rows(counts: Sequence[int], capacity: int) -> Rows:
    """Rows under a fixed capacity C: of an expert's n, max(n - C, 0) are dropped; max(C - n, 0) are padding.

    Raises
    ------
    ValueError, TypeError
        If a count or the capacity is no integer of at least 0.
    """
    counts, capacity = _checked(counts), checks.check_int("capacity", capacity, at_least=0)
    return Rows(counts, tuple(min(n, capacity) for n in counts), (capacity,) * len(counts))


def megablocks_rows(counts: Sequence[int], block: int = 128) -> Rows:
    """All n rows stay, ceil(n / block) blocks are stored: -n mod block rows are padding (MegaBlocks, section 5.2).

    Raises
    ------
    ValueError, TypeError
        If a count is no integer of at least 0, or block none of at least 1.
    """
    counts = _checked(counts)
    block = sparse_contracts.check_block(block)
    return Rows(counts, counts, tuple(-(-n // block) * block for n in counts))


def moeblaze_rows(counts: Sequence[int]) -> Rows:
    """All rows stay and no other is stored (MoEBlaze, section 3).

    Stored is the word: a tile of its products has as many rows as a block of MegaBlocks, so the FLOPs of an expert's
    last tile are spent here too, in registers and shared memory.

    Raises
    ------
    ValueError, TypeError
        If a count is no integer of at least 0.
    """
    counts = _checked(counts)
    return Rows(counts, counts, counts)


def _checked(counts: Sequence[int]) -> tuple[int, ...]:
    return tuple(checks.check_int(f"counts[{e}]", count, at_least=0) for e, count in enumerate(counts))
