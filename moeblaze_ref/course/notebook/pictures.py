"""How notebooks show pictures: on paper that does not glare on a dark page, with texts for who cannot see them."""

import re

import matplotlib
from IPython import get_ipython
from matplotlib.figure import Figure

PAPER = "#EEEDE8"  # below black ink, on light and dark pages
MOST_NAMES = 12  # of an axis: a longer list is cut


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


def prepare_pictures() -> None:
    """From now on, figures are on `PAPER`, and those that IPython shows as PNG carry their `alt_text`.

    Outside of IPython nothing happens.

    The text is found where nbconvert looks for it: as ``alt`` in the metadata of the picture.
    """
    shell = get_ipython()
    if shell is None:
        return
    matplotlib.rcParams["figure.facecolor"] = matplotlib.rcParams["axes.facecolor"] = PAPER
    formatter = shell.display_formatter.formatters["image/png"]
    try:
        draw = formatter.lookup_by_type(Figure)
    except KeyError:  # no %matplotlib inline: figures are not shown as pictures
        return
    formatter.for_type(Figure, lambda figure: (draw(figure), {"alt": alt_text(figure)}))
