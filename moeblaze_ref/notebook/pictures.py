"""What a picture says to those who cannot see it."""

from IPython import get_ipython
from matplotlib.figure import Figure


def alt_text(figure: Figure) -> str:
    """A figure in words: its titles, axes and legends, and of a drawing without axes what is written in it."""
    title = [figure.get_suptitle()]
    legends = [_of_legend(legend) for legend in figure.legends]
    return "; ".join(filter(None, [*title, *map(_of_axes, figure.axes), *legends])) or "a drawing"


def _of_axes(axes):
    parts = [axes.get_title(loc) for loc in ("left", "center", "right")]
    parts += [f"{name}: {label}" for name, label in (("x", axes.get_xlabel()), ("y", axes.get_ylabel())) if label]
    parts += [_of_legend(axes.get_legend())] if axes.get_legend() else []
    if not axes.axison:  # a drawing: its words, without the numbers in its cells
        parts += [text.get_text() for text in axes.texts if len(text.get_text()) > 3]
    return ", ".join(dict.fromkeys(" ".join(part.split()) for part in parts if part))  # each once


def _of_legend(legend):
    return "legend: " + ", ".join(text.get_text() for text in legend.get_texts())


def describe_pictures() -> None:
    """From now on, figures that IPython shows as PNG carry their `alt_text`; outside of IPython nothing happens.

    It is found where nbconvert looks for it: as ``alt`` in the metadata of the picture.
    """
    shell = get_ipython()
    if shell is None:
        return
    formatter = shell.display_formatter.formatters["image/png"]
    try:
        draw = formatter.lookup_by_type(Figure)
    except KeyError:  # no %matplotlib inline: figures are not shown as pictures
        return
    formatter.for_type(Figure, lambda figure: (draw(figure), {"alt": alt_text(figure)}))
