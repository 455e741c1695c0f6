"""What corresponds to the comparison in MoEBlaze's paper: our layer and our MegaBlocks in turns, and both papers' sides.

Source: MoEBlaze (arXiv 2601.05296), its evaluation: one layer, a forward and a backward without an optimizer, against
MegaBlocks alone, with SiLU and with SwiGLU. Of its seven configurations three are known exactly or nearly so.
"""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from moeblaze_ref.bench import layer, results
from moeblaze_ref.bench.contestants import OURS
from moeblaze_ref.bench.device import Device
from moeblaze_ref.bench.report import ratio
from moeblaze_ref.config import MoEConfig, preset
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.units import MB

PRESETS = ("conf1", "conf3", "conf4")
ACTIVATIONS = ("silu", "swiglu")
POLICIES = ("paper", "minimal")  # what the paper's layer keeps, and what ours keeps by default
THEIRS = "megablocks"
UNKNOWN = "not measured yet"

Row = dict[str, Any]


class Printed(NamedTuple):
    """What the paper prints of one activation."""

    least_faster: float  # times as fast as MegaBlocks, over the seven configurations
    most_faster: float
    preset: str  # the one whose bytes it prints
    kept: str  # MB, of MoEBlaze
    kept_by_megablocks: str  # MB


PRINTED = {
    "silu": Printed(1.4, 3.7, "conf4", "6,100", "22,000"),
    "swiglu": Printed(2.0, 6.2, "conf3", "about 10,000", "more than 40,000"),
}
PLACE = "one H100, PyTorch 2.0.1, CUDA 12.1"  # where it was measured


def time_both(name: str, config: MoEConfig, repetitions: int, device: Device) -> list[Row]:
    """Our layer under ``POLICIES`` and our MegaBlocks, in turns.

    Parameters
    ----------
    name : str
        In the rows.
    config : MoEConfig
    repetitions : int
    device : Device

    Returns
    -------
    list of dict
        `layer.Row`, of the kind "paper".
    """
    choice = layer.Choice((OURS, THEIRS), POLICIES, repetitions=repetitions)
    return [row | {"kind": "paper"} for row in layer.time_layer(name, config, choice, device)]


# Both sides -------------------------------------------------------------------------------------------------------------


def beside(found: results.Result | None) -> str:
    """What the paper prints and what was measured here, in Markdown, a line for each activation and configuration.

    Parameters
    ----------
    found : dict or None
        Of which the rows of kind "paper" are shown, in the run that is worst for ours; None if there is no file yet.
    """
    rows = results.rows_of(found, "paper") if found else []
    here = f"{found['device']}, torch {found['versions'].get('torch', 'unknown')}" if rows else UNKNOWN
    head = [
        "activation",
        "preset",
        "there: times as fast, least and most of seven",
        *(f"here: `{policy}`" for policy in POLICIES),
        "there: MB kept",
        "by MegaBlocks",
        *(f"here: MB kept, `{policy}`" for policy in POLICIES),
        "by our MegaBlocks",
        "accounted for even groups: ours",
        "the published one",
    ]
    lines = [list(_line(activation, name, rows)) for activation in ACTIVATIONS for name in PRESETS]
    rules = ["---", "---", *["---:"] * (len(head) - 2)]
    table = "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rules, *lines))
    return f"- there: {PLACE}\n- here: {here}\n\n{table}"


def _line(activation: str, name: str, rows: Iterable[Row]) -> Iterator[str]:
    """The cells of one configuration."""
    printed = PRINTED[activation]
    mine = [row for row in rows if (row["preset"], row["activation"]) == (name, activation)]
    yield from (activation, name, f"{printed.least_faster:g} to {printed.most_faster:g}")
    for policy in POLICIES:
        times = [row["ratio_to"][THEIRS] for row in mine if row["policy"] == policy]
        yield ratio(min(times)) if times else UNKNOWN
    yield from (printed.kept, printed.kept_by_megablocks) if name == printed.preset else ("", "")
    for system, policy in (*((OURS, policy) for policy in POLICIES), (THEIRS, None)):
        kept = [row["kept_bytes"] for row in mine if (row["system"], row["policy"]) == (system, policy)]
        yield f"{max(kept) / MB:,.0f}" if kept else UNKNOWN
    config = preset(name).config.replace(activation=activation)
    for system in (THEIRS, "megablocks_published"):
        yield f"{account(config, system).kept_bytes / MB:,.0f}"
