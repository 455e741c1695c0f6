"""Accounts as tables for a terminal and as JSON, with what the papers print beside them."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moeblaze_ref.core.config import POLICIES, PRESETS, MoEConfig, preset
from moeblaze_ref.core.routers import Router
from moeblaze_ref.core.units import GB, GIB, unit_for
from moeblaze_ref.memory.accounting import (
    GPU_CAPACITIES,
    SYSTEMS,
    Account,
    Assumptions,
    account,
    largest_tokens,
    obstacle,
    ratio,
)
from moeblaze_ref.memory.measured import Measured
from moeblaze_ref.memory.printed import INTERMEDIATE_GB, MEGABLOCKS_MB, MOEBLAZE_MB, ROUTED_BUFFER_GB

COUNTED = (
    "Counted are the activations of one layer in one forward, its input x included; weights, gradients, optimizer "
    "states, the backward's own buffers and what an allocator adds are not. Peak is the most that is alive at one "
    "time in the forward; largest L is where that peak still fits, under uniform routing. GiB is 2**30 bytes, GB 1e9."
)


def as_json(
    preset_name: str,
    config: MoEConfig,
    accounts: Sequence[Account],
    notes: Sequence[str],
    measurements: Sequence[Measured] = (),
) -> dict:
    """The accounts of a preset's configuration as plain data: what ``moeblaze memory --json`` prints.

    The accounts' own notes, which define their symbols, follow those that are given, such as `preset_notes`. The
    measurements are of the accounts, in their order, or none.

    Returns
    -------
    dict
        {preset, tokens, notes, systems: [{system, policy, kept_bytes, measured_bytes, transient_bytes,
        tensors: [{name, shape, dtype, formula, bytes, kept}]}]}. Bytes are ints; policy is None except for moeblaze,
        measured_bytes is None for what was not measured.
    """
    found = [one.kept_bytes for one in measurements] or [None] * len(accounts)
    return {
        "preset": preset_name,
        "tokens": config.L,
        "notes": all_notes(accounts, notes),
        "systems": [_account_as_json(*pair) for pair in zip(accounts, found, strict=True)],
    }


def _account_as_json(one, measured_bytes):
    fields = ("name", "shape", "dtype", "formula", "bytes", "kept")
    return {
        "system": one.system,
        "policy": one.policy,
        "kept_bytes": one.kept_bytes,
        "measured_bytes": measured_bytes,
        "transient_bytes": one.transient_bytes,
        "tensors": [{field: getattr(tensor, field) for field in fields} for tensor in one.tensors],
    }


def all_notes(accounts: Sequence[Account], notes: Sequence[str]) -> list[str]:
    """``notes``, then those of the accounts, each once."""
    return list(dict.fromkeys([*notes, *(note for one in accounts for note in one.notes)]))


def tables(
    config: MoEConfig, accounts: Sequence[Account], notes: Sequence[str], measurements: Sequence[Measured] = ()
) -> RenderableType:
    """One table an account, one row a tensor; then the summary, what was measured, the notes. Made for 100 columns.

    Arguments as of `as_json`. `conventional` is computed for the ratios even if it is not among the accounts.
    """
    remarks = (COUNTED, *all_notes(accounts, notes))
    return Group(
        *(account_table(one) for one in accounts),
        summary_table(config, accounts),
        *([measured_table(measurements)] if measurements else []),
        *(Padding(Text(remark), (0, 0, 1, 1)) for remark in remarks),
    )


def account_table(one: Account) -> Table:
    """One row a tensor in order of birth, then the totals; transient rows are dim."""
    what = SYSTEMS[one.system] if one.policy is None else f"keeps {POLICIES[one.policy]}"
    table = _table(f"{one.label}: {what}")
    for name in ("tensor", "shape", "dtype", "formula"):
        table.add_column(name, overflow="fold")  # a narrow terminal breaks a cell, and cuts none
    table.add_column("bytes", justify="right", no_wrap=True)
    table.add_column("life", no_wrap=True)
    for tensor in one.tensors:
        shape = " x ".join(map(str, tensor.shape))
        life = "kept" if tensor.kept else "transient"
        cells = (tensor.name, shape, tensor.dtype, tensor.formula, f"{tensor.bytes:,}", life)
        table.add_row(*cells, style=None if tensor.kept else "dim")
    table.add_section()
    unit = unit_for(one.peak_bytes)
    for name, number in _totals(one).items():
        table.add_row(name, "", "", f"{unit.text(number)} {unit.name}", f"{number:,}", style="bold")
    return table


def summary_table(config: MoEConfig, accounts: Sequence[Account]) -> Table:
    """One row an account: totals in one unit, kept bytes relative to conventional, largest L on each GPU."""
    unit = unit_for(max((one.peak_bytes for one in accounts), default=0))
    table = _table(f"L = {config.L:,} tokens, one layer, in {unit.name}; ratio: kept bytes over conventional's")
    table.add_column("system/policy", no_wrap=True)
    for name in ("kept", "transient", "peak", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for gpu in GPU_CAPACITIES:
        table.add_column(f"L in {gpu}", justify="right")
    for one in accounts:
        conventional = account(config, "conventional", assumptions=one.assumptions)
        share = ratio(one, conventional)
        largest = (
            f"{largest_tokens(config, one.system, one.policy, capacity, one.assumptions):,}"
            for capacity in GPU_CAPACITIES.values()
        )
        totals = map(unit.text, _totals(one).values())
        table.add_row(one.label, *totals, "-" if math.isnan(share) else f"{share:.3f}", *largest)
    return table


def measured_table(measurements: Sequence[Measured]) -> Table:
    """One row an account: the bytes that it says are kept, and those that autograd kept of the layer that ran."""
    table = _table("Bytes kept until the backward: by the formulas, and by autograd's saved tensors")
    table.add_column("system/policy", no_wrap=True)
    for name in ("formula", "measured", "difference"):
        table.add_column(name, justify="right", overflow="fold")
    for one in measurements:
        formula = one.account.kept_bytes
        kept = one.kept_bytes
        found = (one.remark, "-") if kept is None else (f"{kept:,}", f"{kept - formula:+,}")
        table.add_row(one.account.label, f"{formula:,}", *found)
    return table


def _table(title):
    return Table(
        title=Text(f"\n{title}"), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )


def _totals(one):
    return {"kept": one.kept_bytes, "transient": one.transient_bytes, "peak": one.peak_bytes}


# Sizes that the papers print ----------------------------------------------------------------------------------------


def preset_notes(name: str) -> list[str]:
    """The preset's own note and, where the MoEBlaze paper prints a size of it, that beside what the formula gives.

    Raises
    ------
    ValueError
        If there is no such preset.
    """
    return [preset(name).note, *_PRINTED.get(name, list)()]


def layer_notes(assumptions: Assumptions) -> list[str]:
    """Return notes on a router other than softmax, a shared expert, and systems that have no account of the layer."""
    found = [] if assumptions.router == Router() else [f"router: {assumptions.router}"]
    if assumptions.shared:
        found.append(f"shared expert: {assumptions.shared}")
    return [*found, *filter(None, (obstacle(system, assumptions) for system in SYSTEMS))]


def _both_units(number):
    return f"{number:,} bytes = {number / GB:.3f} GB = {number / GIB:.3f} GiB"


def _row(one, name):
    """The row called ``name`` of an account."""
    return next(tensor for tensor in one.tensors if tensor.name == name)


def _printed_deepseek():
    config = PRESETS["paper-deepseek"].config
    conventional = account(config, "conventional")
    routed, hidden = _row(conventional, "routed_x"), _row(conventional, "a")
    where = f"MoEBlaze section 2 (L = {config.L:,})"
    return [
        f"{where}: the routed-token buffer is {routed.formula} = {_both_units(routed.bytes)}; the paper prints about "
        f"{ROUTED_BUFFER_GB} GB",
        f"{where}: the intermediate is, by the paper's formula, L*h*2 = {_both_units(hidden.bytes // config.k)}; the "
        f"paper prints about {INTERMEDIATE_GB} GB. That is one row per token: the experts compute k = {config.k} rows "
        f"per token, so each saved tensor is {hidden.formula} = {_both_units(hidden.bytes)}",
    ]


def _printed_conf3():
    config = PRESETS["conf3"].config
    ours, theirs = account(config, "moeblaze", "paper"), account(config, "megablocks_published")
    where = f"MoEBlaze evaluation, conf3 (SwiGLU, L = {config.L:,})"
    saved = sum(_row(ours, name).bytes for name in ("a", "b", "y_swi"))
    return [
        f"{where}: A, B and Y_swi are {_both_units(saved)}, and all that moeblaze/paper keeps is "
        f"{_both_units(ours.kept_bytes)}; the paper prints about {MOEBLAZE_MB['conf3']:,} MB",
        f"{where}: megablocks_published keeps {_both_units(theirs.kept_bytes)}; the paper prints more than "
        f"{MEGABLOCKS_MB['conf3']:,} MB",
    ]


def _printed_conf4():
    silu = PRESETS["conf4"].config.replace(activation="silu")
    ours, theirs = account(silu, "moeblaze", "paper"), account(silu, "megablocks_published")
    where = f"MoEBlaze evaluation, conf4 (with SiLU, L = {silu.L:,})"
    return [
        f"{where}: moeblaze/paper keeps {_both_units(ours.kept_bytes)}; the paper prints {MOEBLAZE_MB['conf4']:,} MB",
        f"{where}: megablocks_published keeps {_both_units(theirs.kept_bytes)}; the paper prints "
        f"{MEGABLOCKS_MB['conf4']:,} MB",
    ]


_PRINTED = {"paper-deepseek": _printed_deepseek, "conf3": _printed_conf3, "conf4": _printed_conf4}
