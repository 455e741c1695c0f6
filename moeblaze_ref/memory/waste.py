"""Cost of dropping, padding and block-sparse storage: lost and wasted rows, in FLOPs and bytes, from counts.

Three systems side by side: a fixed capacity drops rows and pads to C (GShard, arXiv 2006.16668), MegaBlocks pads each
expert to whole blocks (arXiv 2211.15841, section 5.2), MoEBlaze stores neither (arXiv 2601.05296, section 3). Waste is
counted against the routed rows that stay. Its FLOPs are those of rows that are stored: what a tile of a product
computes beyond the rows that it is given is counted for no system. Its bytes are those of the torch layers,
`CapacityMoE` and `BlockSparseMoE`, from their accounts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.units import unit_for
from moeblaze_ref.memory.accounting import BLOCK, Assumptions, account
from moeblaze_ref.memory.rows import Rows, capacity_rows, megablocks_rows, moeblaze_rows
from moeblaze_ref.systems.capacity import DEFAULT_FACTOR, capacity_for

# Factors of the number of stored rows in the formulas of an account.
_STORED = {"capacity": {"E", "C"}, "megablocks": {"T", "S"}}


def step_flops_per_row(config: MoEConfig) -> int:
    """FLOPs of one row in the experts' products, forward and backward: 18*d*h if gated, else 12*d*h.

    Each projection multiplies the row by a matrix (d, h), 2*d*h FLOPs, and its backward twice more: for the gradient of
    the row and for that of the matrix. The router, the activation and the gates are not counted.
    """
    projections = 3 if config.gated else 2
    return projections * 3 * 2 * config.d * config.h


def kept_bytes_per_row(config: MoEConfig, system: str, block: int = BLOCK) -> int:
    """Bytes that a row of padding keeps from forward to backward in a torch layer, by the layer's account.

    The system is ``capacity`` or ``megablocks``, the block that of ``megablocks``. The bytes depend on d, h, the
    activation and the dtype alone: in bfloat16, `CapacityMoE` keeps (d + 4*h)*2 + 5 bytes of a row with swiglu,
    (d + 2*h)*2 + 5 with silu and (d + h)*2 + 5 with relu, whose input autograd need not keep. `BlockSparseMoE` keeps
    the outputs y of padding too, and act(a) never. An entry of the topology belongs to a block, of which a row at least
    is real, and is not counted.

    Raises
    ------
    ValueError, TypeError
        If no such system pads, or block does not divide h.
    """
    checks.check_name("padding system", system, _STORED)
    least = Assumptions(capacity_factor=1, block=block)  # one routed row: E = C = T = 1
    one = account(config.replace(L=1, E=1, k=1), system, assumptions=least)
    stored = math.prod(one.symbols[name] for name in _STORED[system])
    of_rows = (tensor for tensor in one.tensors if tensor.kept and _STORED[system] <= set(tensor.formula.split("*")))
    return sum(tensor.bytes for tensor in of_rows) // stored


@dataclass(frozen=True)
class Waste:
    """Lost and wasted rows of one system."""

    rows: Rows
    flops_per_row: int  #: of a step, `step_flops_per_row`
    bytes_per_row: int  #: `kept_bytes_per_row`; 0 of a system that stores no padding

    @property
    def dropped_rows(self) -> int:
        """Routed rows that are lost, of all experts."""
        return sum(self.rows.dropped)

    @property
    def padding_rows(self) -> int:
        """Rows that are stored for nothing, of all experts."""
        return sum(self.rows.padding)

    @property
    def flops(self) -> int:
        """FLOPs of a step that padding costs: padding rows * `step_flops_per_row`."""
        return sum(self.expert_flops)

    @property
    def bytes(self) -> int:
        """Bytes that padding keeps until the backward in the torch layer: padding rows * `kept_bytes_per_row`."""
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
        """Padding against the rows that stay; 0 if nothing is stored, infinite if only padding."""
        kept = sum(self.rows.kept)
        if kept == 0:
            return math.inf if self.padding_rows else 0.0
        return self.padding_rows / kept


def compare(
    config: MoEConfig, counts: Sequence[int], capacity_factor: float | str = DEFAULT_FACTOR, block: int = BLOCK
) -> dict[str, Waste]:
    """The waste of ``capacity``, ``megablocks`` and ``moeblaze`` under one routing.

    ``counts`` are the rows that are routed to each of the E experts. The capacity is C = ceil(capacity_factor * L * k /
    E), by "max" the most rows of any expert. MegaBlocks has blocks of ``block`` rows and columns. MoEBlaze has no
    padding, of FLOPs either, since waste is counted by rows that are stored; see `moeblaze_rows`.

    Raises
    ------
    ValueError
        If the counts do not fit the configuration, the factor is not a finite number above 0, or block is below 1 or
        does not divide h.
    TypeError
        If a count or block is no integer.
    """
    return {
        "capacity": capacity_waste(config, counts, capacity_factor),
        "megablocks": megablocks_waste(config, counts, block),
        "moeblaze": Waste(moeblaze_rows(counts), step_flops_per_row(config), bytes_per_row=0),
    }


def capacity_waste(config: MoEConfig, counts: Sequence[int], capacity_factor: float | str = DEFAULT_FACTOR) -> Waste:
    """The waste of a fixed capacity, as in `compare`."""
    counts = checks.check_counts(counts, config.L, config.E, config.k)
    rows = capacity_rows(counts, capacity_for(counts, capacity_factor))
    return Waste(rows, step_flops_per_row(config), kept_bytes_per_row(config, "capacity"))


def megablocks_waste(config: MoEConfig, counts: Sequence[int], block: int = BLOCK) -> Waste:
    """The waste of bins of whole blocks, as in `compare`."""
    counts = checks.check_counts(counts, config.L, config.E, config.k)
    block = sparse_contracts.check_block(block, config.h)
    rows = megablocks_rows(counts, block)
    return Waste(rows, step_flops_per_row(config), kept_bytes_per_row(config, "megablocks", block))


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
