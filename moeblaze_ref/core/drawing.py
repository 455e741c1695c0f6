"""Helpers for pictures: figures without pyplot and its global state, headings, cells with a text."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

Place = tuple[float, float]  # along x and along y


def panels(
    width: float, height: float, rows: int = 1, columns: int = 1, framed: bool = False, **options: Any
) -> tuple[Figure, Any]:
    """Return a figure and its axes (one, or an array), without the top and the right spine.

    Parameters
    ----------
    width, height : float
        Of the figure, in inches.
    rows, columns : int
    framed : bool
        Close all sides, as around an image.
    **options
        As of `Figure.subplots`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    found = figure.subplots(rows, columns, **options)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(framed)
    return figure, found


def board(width: float, height: float, **limits: Any) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches with nothing around its axes, which get ``limits`` by `Axes.set`."""
    figure, axes = panels(width, height)
    axes.set(**limits)
    axes.set_axis_off()
    return figure, axes


def heading(axes: Axes, text: str, **look: Any) -> None:
    """Write a title above the left end of the axes."""
    axes.set_title(text, loc="left", fontsize="medium", **look)


def dress(axes: Axes, ylabel: str, title: str) -> None:
    """Name the vertical axis, and write a title above the left end of the axes."""
    axes.set_ylabel(ylabel)
    heading(axes, title)


def centered(axes: Axes, x: float, y: float, text: Any, **look: Any) -> None:
    """Write a text around a point."""
    axes.text(x, y, text, ha="center", va="center", **look)


def squares(axes: Axes, corners: Sequence[Place], colors: Sequence[str], **look: Any) -> None:
    """Draw squares of side 1 from their corners on, each in its colour, as one artist: many cells take long."""
    outlines = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1)] for x, y in corners]
    axes.add_collection(PolyCollection(outlines, facecolors=colors, joinstyle="miter", **look), autolim=False)


def cell(axes: Axes, corner: Place, extent: Place, look: Mapping[str, Any], text: object = "", **ink: Any) -> None:
    """Draw a rectangle with the look of a patch from a corner on, and a text in its middle.

    Neither takes part in the layout, nor in limits that matplotlib chooses: pictures have hundreds of cells, and would
    take twice as long.
    """
    axes.add_artist(Rectangle(corner, *extent, **look))
    if text != "":
        centered(axes, corner[0] + extent[0] / 2, corner[1] + extent[1] / 2, text, in_layout=False, **ink)
