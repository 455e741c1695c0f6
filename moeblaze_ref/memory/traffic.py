"""Counted memory traffic as a table and a picture: what threads ask for, and what the sectors cost."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from moeblaze_ref.core.drawing import panels
from moeblaze_ref.core.units import unit_for
from moeblaze_ref.runtime.simt.executor import LaunchReport

SECTOR_BYTES = 32
BLUE, SKY = "#0072B2", "#56B4E9"  # Okabe and Ito


def traffic_table(reports: Sequence[LaunchReport]) -> Table:
    """One row a launch and buffer: bytes requested, 32-byte sectors touched, and the ratio of the two."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("kernel", "buffer"):
        table.add_column(name, no_wrap=True)
    for name in ("bytes read", "bytes written", "sectors", "sector bytes / bytes"):
        table.add_column(name, justify="right")
    for report in reports:
        for name, traffic in report.buffers.items():
            requested = traffic.read_bytes + traffic.written_bytes
            sectors = traffic.read_sectors + traffic.written_sectors
            cost = f"{sectors * SECTOR_BYTES / requested:.2f}" if requested else "-"
            table.add_row(
                report.kernel, name, f"{traffic.read_bytes:,}", f"{traffic.written_bytes:,}", f"{sectors:,}", cost
            )
        table.add_section()
    return table


def traffic_bars(reports: Sequence[LaunchReport]) -> Figure:
    """Two bars a launch: the global bytes that its threads asked for, and the sectors that carry them.

    The reports are from ``SimtExecutor.recording``; the first is drawn on top. The axis is in MiB (2**20 bytes), or the
    unit that suits. Requested bytes are not DRAM traffic: caches are not modelled.

    Raises
    ------
    ValueError
        If there is no report.
    """
    if not reports:
        raise ValueError("reports is empty, but it must hold at least one launch")
    figure, axes = panels(8, 1.2 + 0.7 * len(reports))
    unit = unit_for(max(report.sectors for report in reports) * SECTOR_BYTES)
    requested = [unit.of(report.read_bytes + report.written_bytes) for report in reports]
    sectors = [unit.of(report.sectors * SECTOR_BYTES) for report in reports]
    rows = range(len(reports))
    upper = axes.barh([row - 0.2 for row in rows], requested, 0.38, color=BLUE, label="bytes that threads ask for")
    lower = axes.barh([row + 0.2 for row in rows], sectors, 0.38, color=SKY, label="32-byte sectors that carry them")
    for bars in (upper, lower):
        axes.bar_label(bars, fmt="{:,.3g} " + unit.name, padding=4)
    axes.set_xlim(0, max(*requested, *sectors) * 1.2)
    axes.set_yticks(rows, [report.kernel for report in reports])
    axes.invert_yaxis()
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"{unit.name} of global memory, counted access by access")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
