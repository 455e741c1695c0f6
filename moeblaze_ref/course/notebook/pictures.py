"""The drawing of the layer that opens each notebook; how pictures are shown on dark pages; alternative texts."""

import contextlib
import html
import re
from collections.abc import Iterator
from typing import NamedTuple

import matplotlib
from IPython import get_ipython
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from moeblaze_ref.core import checks
from moeblaze_ref.core.drawing import board, cell, centered
from moeblaze_ref.memory.plots import BLACK, GREY, SKY

PAPER = "#EEEDE8"  # below black ink, on light and dark pages
MOST_NAMES = 12  # of an axis: a longer list is cut

# The layer -----------------------------------------------------------------------------------------------------------


class Stage(NamedTuple):
    """A stage of the layer as `layer_picture` draws it."""

    does: str
    gives: str  #: what the forward passes on
    shape: str  #: of that
    gradients: str  #: what its backward writes


LAYER = {
    "gating": Stage("softmax(x wg),\ntop k", "experts,\ngates", "(L, k)", "d_wg, d_x"),
    "dispatch": Stage("each expert's\ntokens", "index\narrays", "(R,)", ""),
    "expert_up": Stage("gather x,\ntimes w1, w2", "a, b", "(R, h)", "d_w1, d_w2, d_x"),
    "activation": Stage("silu(a) * b", "y_swi", "(R, h)", "d_a, d_b"),
    "expert_down": Stage("times w3", "y", "(R, d)", "d_w3"),
    "combine": Stage("gates * y,\nsum over k", "out", "(L, d)", "d_gates"),
}
BACKWARD = "backward"  # the lower row of the drawing
STEP, BOX = 3.2, (2.0, 1.1)  # from stage to stage, and a stage's width and height


def layer_picture(*shown: str, note: str = "") -> Figure:
    """Draw the layer, forward above and backward below, with some of its stages highlighted.

    Parameters
    ----------
    *shown : str
        Names in ``LAYER``, or ``"backward"`` for the lower row.
    note : str
        What the notebook asks about them, for the title.

    Raises
    ------
    ValueError
        If there is no such stage; the message proposes the nearest name.
    """
    for name in shown:
        checks.check_name("stage", name, (*LAYER, BACKWARD))
    right = STEP * len(LAYER)
    figure, axes = board(11, 2.9, xlim=(-1.3, right + 0.1), ylim=(-1.7, 2.6))
    axes.set_title(f"One MoE layer. Here: {note or ', '.join(shown)}", loc="left", fontsize="medium")
    _arrow(axes, (-1.2, 0.0), "x", "(L, d)")
    for number, (name, stage) in enumerate(LAYER.items()):
        left = STEP * number
        look = {"facecolor": SKY if name in shown else "white", "edgecolor": BLACK}
        cell(axes, (left, 0.7), BOX, look, stage.does, fontsize=8)
        centered(axes, left + 1, 2.1, name, weight="bold")
        _arrow(axes, (left + BOX[0], left + STEP), stage.gives, stage.shape)
        look = {"facecolor": SKY if BACKWARD in shown else "white", "edgecolor": GREY, "linestyle": "--"}
        if stage.gradients:
            cell(axes, (left - 0.3, -0.9), (2.6, 0.6), look, stage.gradients, fontsize=8)
    axes.annotate("d_out: the backward, from right to left", (0, -1.45), (right, -1.45), ha="right", va="center",
                  fontsize=8, arrowprops={"arrowstyle": "->", "color": GREY})  # fmt: skip
    return figure


def _arrow(axes, ends, name, shape):
    """An arrow of the forward with what it carries above it and the shape below."""
    axes.annotate("", (ends[1], 1.25), (ends[0], 1.25), arrowprops={"arrowstyle": "->"})
    for text, height, side in ((name, 1.35, "bottom"), (shape, 1.15, "top")):
        axes.text(sum(ends) / 2, height, text, ha="center", va=side, fontsize=7)


# Alternative texts ---------------------------------------------------------------------------------------------------


def alt_text(figure: Figure) -> str:
    """A figure in words: its titles, axes with the names on them, legends and what is written in it."""
    title = [figure.get_suptitle()]
    legends = [_of_legend(legend) for legend in figure.legends]
    return "; ".join(filter(None, [*title, *map(_of_axes, figure.axes), *legends])) or "a drawing"


def _of_axes(axes):
    parts = [axes.get_title(loc) for loc in ("left", "center", "right")]
    if axes.axison:
        parts += [_of_axis("x", axes.get_xlabel(), axes.get_xticklabels())]
        parts += [_of_axis("y", axes.get_ylabel(), axes.get_yticklabels())]
    parts += [_of_legend(axes.get_legend())] if axes.get_legend() else []
    parts += _words(axes.texts)
    return ", ".join(dict.fromkeys(" ".join(part.split()) for part in parts if part))  # each once


def _of_axis(name, label, ticks):
    """Return an axis' label and the names on it, without numbers."""
    names = _words(ticks)
    more = [f"and {len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    said = [*filter(None, [label]), *([", ".join(names[:MOST_NAMES] + more)] if names else [])]
    return f"{name}: {' of '.join(said)}" if said else ""


def _words(texts):
    """Return the words of a text, without numbers, powers of ten, single letters and code."""
    said = (" ".join(text.get_text().split()) for text in texts if "monospace" not in text.get_fontfamily())
    return [text for text in said if re.search("[A-Za-z_]{3}", text) and not text.startswith("$")]


def _of_legend(legend):
    return "legend: " + ", ".join(text.get_text() for text in legend.get_texts())


@contextlib.contextmanager
def _laid_out(figure: Figure) -> Iterator[Bbox]:
    """Lay a figure out, and return its box in inches, as ``bbox_inches="tight"`` does after it has drawn all once."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine(None)
    try:
        yield figure.get_tightbbox(renderer).padded(matplotlib.rcParams["savefig.pad_inches"])
    finally:
        figure.set_layout_engine(engine)


def prepare_pictures() -> None:
    """Draw figures on `PAPER` from now on; those that IPython shows as PNG carry their `alt_text`.

    Outside of IPython nothing happens.

    The text is in the metadata of the picture, where nbconvert looks for it, and in HTML, which JupyterLab shows.
    """
    shell = get_ipython()
    if shell is None:
        return
    matplotlib.rcParams["figure.facecolor"] = matplotlib.rcParams["axes.facecolor"] = PAPER
    formatter = shell.display_formatter.formatters["image/png"]
    try:
        draw = formatter.pop(Figure)
    except KeyError:  # no %matplotlib inline: figures are not shown as pictures
        return

    def described(figure: Figure) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
        formatter.pop(Figure, None)  # a second %matplotlib inline brings it back, and would have all drawn twice
        with _laid_out(figure) as box:
            png = draw(figure, bbox_inches=box)
        text = alt_text(figure)
        shown = f'<img src="data:image/png;base64,{png}" alt="{html.escape(text)}">'
        return {"image/png": png, "text/html": shown}, {"image/png": {"alt": text}}

    shell.display_formatter.mimebundle_formatter.for_type(Figure, described)
