"""Pictures of what training shows: a function of a record of `evidence.gather` for each kind."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from moeblaze_ref.core import documents, figures
from moeblaze_ref.core.drawing import dress, panels
from moeblaze_ref.core.units import GIB
from moeblaze_ref.lm.equal_loss import gaps
from moeblaze_ref.lm.wall import met_wall
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, GREY, LINES, ORANGE, PURPLE, SKY, VERMILLION, dotted, drawn

Found = Mapping[str, Any]
# The same run, the same colour in every picture; ours is drawn last, over the others.
COLORS = {
    "oracle": BLACK,
    "oracle-other-order": GREY,
    "oracle, d backwards": GREY,
    "oracle, h backwards": SKY,
    "oracle, dh backwards": GREEN,
    "megablocks": PURPLE,
    "capacity-1.0": VERMILLION,
    "capacity-1.25": ORANGE,
    "moeblaze": BLUE,
}
# Of the memory wall, where every policy of ours has a line of its own.
WALL_LINES = {
    "oracle": (BLACK, "-"),
    "capacity 1.25": (ORANGE, LINES[ORANGE]),
    "megablocks": (PURPLE, LINES[PURPLE]),
    "moeblaze, conventional": (SKY, ":"),
    "moeblaze, paper": (SKY, "--"),
    "moeblaze, minimal": (BLUE, "-"),
    "moeblaze, inputs": (GREEN, LINES[GREEN]),
}
SMALLEST = 1e-8  # of the gaps that are drawn: less than a float32 can tell apart, and 0 has no logarithm


def picture(found: Found) -> Figure:
    """The picture of a record of any kind."""
    return PICTURES[found["kind"]](found)


def write(found: Found, path: Path, force: bool = False) -> Path:
    """Write the picture of a record as PNG to a path that ends in .png, making the folder if need be.

    With ``force`` it replaces a file there that is no picture of this project.
    """
    return figures.save(picture(found), path.parent, path.stem, force)


def replayed(found: Found) -> Figure:
    """Loss of the oracle and of ours, one on top of the other; below, the gaps of ours and of reordered oracles."""
    figure, (losses, below) = panels(8, 6, 2, sharex=True)
    for run, style in (("oracle", "-"), ("moeblaze", "--")):  # where they are equal, both show
        losses.plot(_steps(found["loss"][run]), found["loss"][run], style, color=COLORS[run], label=run)
    dress(losses, "cross entropy, nats per byte", "float32, the oracle's choice of experts replayed in the others")
    for run in _ours_last(found["loss"].keys() - {"oracle"}):
        _gap(below, found["loss"], run, markersize=4.5, **dotted(COLORS[run]))
    _bound(below, found["verdict"]["loss"]["bound"])
    dress(below, "relative gap of the loss\nto the oracle's", "")
    below.set_xlabel("step")
    _legend(losses)
    below.set_ylim(top=10 * max(found["verdict"]["loss"]["bound"], below.get_ylim()[1]))  # room for the names
    _legend(below, loc="upper left", ncols=4, handlelength=2)
    return figure


def free(found: Found) -> Figure:
    """Gap of the loss to the oracle's, and tokens that have other experts, of ours and of reordered oracles."""
    figure, (gap, tokens) = panels(8, 6, 2, sharex=True)
    for number, run in enumerate(_ours_last(found["changed"])):
        look = drawn(COLORS[run]) | {"linewidth": 4 - number}  # where lines are equal, all of them show
        _gap(gap, found["loss"], run, **look)
        tokens.plot(_steps(found["changed"][run]), found["changed"][run], label=run, **look)
    _bound(gap, found["verdict"]["loss"]["bound"])
    dress(gap, "relative gap of the loss\nto the oracle's", "float32, every router by itself")
    _mark_first(gap, found["first_change"]["moeblaze"])
    tokens.set_yscale("symlog", linthresh=1)
    tokens.set_ylim(bottom=0, top=max(1, tokens.get_ylim()[1]))  # without a change the axis would end below one token
    dress(tokens, "tokens with other experts\nthan in the oracle, all layers", "")
    tokens.set_xlabel("step")
    _legend(gap)
    return figure


def curves(found: Found) -> Figure:
    """Training and validation loss of every run, and below each its distance to the oracle's."""
    figure, shown = panels(11, 6, 2, 2, sharex=True)
    runs = {name: found["runs"][name] for name in _ours_last(found["runs"])}
    for (upper, lower), loss in zip(shown.T, ("training", "validation"), strict=True):
        for name, run in runs.items():
            upper.plot(run[loss]["step"], run[loss]["loss"], label=name, **drawn(COLORS[name]))
            if "oracle" in runs and name != "oracle":
                lower.plot(*_above(run[loss], runs["oracle"][loss]), label=name, **drawn(COLORS[name]))
        lower.axhline(0, color=BLACK, linewidth=0.8, zorder=1)
        where = f"{found['settings']['precision']}, {documents.device(found)}"
        dress(upper, "cross entropy, nats per byte", f"{loss} loss, {where}")
        dress(lower, "above the oracle, nats per byte", "")
        lower.set_xlabel("step")
    names = shown[0, 0].get_legend_handles_labels()
    figure.legend(*names, loc="outside lower center", ncols=6, frameon=False, handlelength=3)
    return figure


def memory(found: Found) -> Figure:
    """Peak bytes of a step at growing L, and the largest L that each layer trains, in words too."""
    figure, (peaks, walls) = panels(11, 4.5, 1, 2, width_ratios=(3, 2))
    largest = found["largest"]
    for name in largest:
        color, line = WALL_LINES[name]
        rows = sorted(
            (row for row in found["rows"] if row["contender"] == name and row["peak_bytes"]), key=lambda row: row["L"]
        )
        GiB = [row["peak_bytes"] / GIB for row in rows]
        peaks.plot([row["L"] for row in rows], GiB, linestyle=line, color=color, marker=".", label=name)
    peaks.set_xscale("log", base=2)
    peaks.set_yscale("log", base=2)
    peaks.xaxis.set_major_formatter(FuncFormatter(lambda L, _: f"{L:,.0f}"))
    peaks.yaxis.set_major_formatter(FuncFormatter(lambda gib, _: f"{gib:,.0f}"))
    peaks.set_xlabel("tokens of a step, L")
    dress(peaks, "peak memory, GiB", "a whole step of training, weights and optimizer included")
    _legend(peaks)
    bars = walls.barh(range(len(largest)), list(largest.values()), color=[WALL_LINES[name][0] for name in largest])
    reached = [f"{L:,}" if met_wall(found["rows"], name) else f"{L:,} or more" for name, L in largest.items()]
    walls.bar_label(bars, reached, padding=3)
    walls.set_yticks(range(len(largest)), list(largest))
    walls.invert_yaxis()
    walls.margins(x=0.3)
    walls.set_xticks([])
    walls.spines["bottom"].set_visible(False)
    walls.set_xlabel("tokens of a step, L")
    dress(walls, "", f"the largest step that fits, {documents.device(found)}")
    return figure


def _above(curve: Found, reference: Found) -> tuple[list[int], list[float]]:
    """Steps that both have, and how far above the reference the curve is there."""
    points = list(zip(curve["step"], curve["loss"], reference["loss"], strict=False))
    return [step for step, _, _ in points], [loss - other for _, loss, other in points]


def _ours_last(runs) -> list[str]:
    return sorted(runs, key=list(COLORS).index)


def _steps(values: Sequence[float]) -> range:
    return range(1, len(values) + 1)


def _gap(axes, losses: Mapping[str, Sequence[float]], run: str, **look):
    shown = [max(gap, SMALLEST) for gap in gaps(losses[run], losses["oracle"])]
    axes.semilogy(_steps(shown), shown, label=run, **look)


def _bound(axes, bound: float):
    axes.axhline(bound, color=BLACK, linewidth=0.8)
    axes.annotate(
        f"bound, {bound:.0e}", (1, bound), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize="small"
    )
    axes.set_ylim(bottom=SMALLEST)


def _mark_first(axes, first: Found | None):
    """A vertical line where the first token of ours changed experts, and words on the side where there is room."""
    if first is None:
        return
    step = first["step"]
    side, shift = ("left", 4) if step < sum(axes.get_xlim()) / 2 else ("right", -4)
    axes.axvline(step, color=BLUE, linewidth=0.8, linestyle=":")
    axes.annotate(
        "the first token of moeblaze\nhas other experts",
        (step, 0),
        xycoords=("data", "axes fraction"),
        xytext=(shift, 4),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize="small",
        color=BLUE,
    )


def _legend(axes, **look):
    axes.legend(**{"frameon": False, "fontsize": "small", "handlelength": 4} | look)


PICTURES = {"replayed": replayed, "free": free, "curves": curves, "memory": memory}
