"""What drop, pad and block-sparse cost: rows lost and rows computed for nothing, in FLOPs and in bytes, by counts alone.

Three systems side by side: a fixed capacity drops rows and pads to C (GShard, arXiv 2006.16668), MegaBlocks pads each
expert to whole blocks (arXiv 2211.15841, section 5.2), MoEBlaze does neither (arXiv 2601.05296, section 3). Waste is
counted against the routed rows that stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from moeblaze_ref import doors
from moeblaze_ref.capacity import DEFAULT_FACTOR, expert_capacity
from moeblaze_ref.config import MoEConfig
from moeblaze_ref.units import unit_for


@dataclass(frozen=True)
class Rows:
    """The rows of one system, an entry an expert.

    Parameters
    ----------
    routed : tuple of int
        What the router sends to each expert.
    kept : tuple of int
        What the expert computes of it.
    stored : tuple of int
        What the expert's products run over, padding included.
    """

    routed: tuple[int, ...]
    kept: tuple[int, ...]
    stored: tuple[int, ...]

    @property
    def dropped(self) -> tuple[int, ...]:
        """Routed rows that are lost."""
        return _differences(self.routed, self.kept)

    @property
    def padding(self) -> tuple[int, ...]:
        """Rows that are computed for nothing."""
        return _differences(self.stored, self.kept)


def _differences(more, less):
    return tuple(a - b for a, b in zip(more, less, strict=True))


def capacity_rows(counts: Sequence[int], capacity: int) -> Rows:
    """At most C rows stay of an expert's n, and C are stored: max(n - C, 0) dropped, max(C - n, 0) padding."""
    return Rows(tuple(counts), tuple(min(n, capacity) for n in counts), (capacity,) * len(counts))


def megablocks_rows(counts: Sequence[int], block: int = 128) -> Rows:
    """All n rows stay, ceil(n / block) blocks are stored: -n mod block rows are padding (MegaBlocks, section 5.2)."""
    return Rows(tuple(counts), tuple(counts), tuple(-(-n // block) * block for n in counts))


def moeblaze_rows(counts: Sequence[int]) -> Rows:
    """All rows stay and no other is stored (MoEBlaze, section 3)."""
    return Rows(tuple(counts), tuple(counts), tuple(counts))


def step_flops_per_row(config: MoEConfig) -> int:
    """FLOPs of one row in the experts' products, forward and backward: 18*d*h if gated, else 12*d*h.

    Each projection multiplies the row by a matrix (d, h), 2*d*h FLOPs, and its backward twice more: for the gradient of
    the row and for that of the matrix. The router, the activation and the gates are not counted.
    """
    projections = 3 if config.gated else 2
    return projections * 3 * 2 * config.d * config.h


def kept_bytes_per_row(config: MoEConfig) -> int:
    """Bytes that one row in a padded buffer keeps from forward to backward: (2*d + 3*h)*itemsize, or 2*d + 2*h ungated.

    Its x and y of width d; its a, y_swi and, if gated, b of width h: what the specifications' ``Saved`` holds of it.
    """
    return (2 * config.d + (3 if config.gated else 2) * config.h) * config.itemsize


@dataclass(frozen=True)
class Waste:
    """What one system loses and what it wastes.

    Parameters
    ----------
    rows : Rows
    flops_per_row : int
        Of a step, `step_flops_per_row`.
    bytes_per_row : int
        `kept_bytes_per_row`.
    """

    rows: Rows
    flops_per_row: int
    bytes_per_row: int

    @property
    def dropped_rows(self) -> int:
        """Routed rows that are lost, of all experts."""
        return sum(self.rows.dropped)

    @property
    def padding_rows(self) -> int:
        """Rows that are computed for nothing, of all experts."""
        return sum(self.rows.padding)

    @property
    def flops(self) -> int:
        """FLOPs of a step that padding costs: padding rows * `step_flops_per_row`."""
        return sum(self.expert_flops)

    @property
    def bytes(self) -> int:
        """Bytes that padding keeps until the backward: padding rows * `kept_bytes_per_row`."""
        return sum(self.expert_bytes)

    @property
    def expert_flops(self) -> tuple[int, ...]:
        """`flops` by expert."""
        return tuple(rows * self.flops_per_row for rows in self.rows.padding)

    @property
    def expert_bytes(self) -> tuple[int, ...]:
        """`bytes` by expert."""
        return tuple(rows * self.bytes_per_row for rows in self.rows.padding)

    @property
    def share(self) -> float:
        """Padding against the rows that stay, of FLOPs as of bytes; 0 if nothing is stored, infinite if only padding."""
        kept = sum(self.rows.kept)
        if kept == 0:
            return math.inf if self.padding_rows else 0.0
        return self.padding_rows / kept


def compare(
    config: MoEConfig, counts: Sequence[int], capacity_factor: float = DEFAULT_FACTOR, block: int = 128
) -> dict[str, Waste]:
    """The waste of the three systems under one routing.

    Parameters
    ----------
    config : MoEConfig
    counts : sequence of int
        Rows that are routed to each of the E experts.
    capacity_factor : float
        Of the capacity C = ceil(capacity_factor * L * k / E).
    block : int
        Rows of a block of MegaBlocks.

    Returns
    -------
    dict of str to Waste
        ``capacity``, ``megablocks`` and ``moeblaze``.

    Raises
    ------
    ValueError
        If the counts do not fit the configuration, the factor is not a finite number above 0, or block is below 1.
    TypeError
        If a count or block is no integer.
    """
    counts = doors.check_counts(counts, config.L, config.E, config.k)
    doors.check_positive("capacity_factor", capacity_factor)
    doors.check_int("block", block, at_least=1)
    rows = {
        "capacity": capacity_rows(counts, expert_capacity(config.R, config.E, capacity_factor)),
        "megablocks": megablocks_rows(counts, block),
        "moeblaze": moeblaze_rows(counts),
    }
    costs = step_flops_per_row(config), kept_bytes_per_row(config)
    return {system: Waste(one, *costs) for system, one in rows.items()}


def waste_table(wastes: dict[str, Waste]) -> Table:
    """One row a system: rows that are dropped and padded, and what the padding costs in GFLOP (1e9) and in bytes."""
    unit = unit_for(max((waste.bytes for waste in wastes.values()), default=0))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("system", no_wrap=True)
    for name in ("dropped rows", "padding rows", "padding / kept", "wasted GFLOP a step", f"wasted {unit.name} kept"):
        table.add_column(name, justify="right")
    for system, waste in wastes.items():
        table.add_row(
            system,
            f"{waste.dropped_rows:,}",
            f"{waste.padding_rows:,}",
            f"{waste.share:.1%}",
            f"{waste.flops / 1e9:,.3f}",
            unit.text(waste.bytes),
        )
    return table
