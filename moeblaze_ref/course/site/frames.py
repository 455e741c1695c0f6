"""Frames of the notebooks' controls: on the site every `explore` shows pictures that were drawn while it was built.

IPython runs the cells that the controls of a notebook need, with an `explore` that draws every state by the functions
of the notebook and writes the pictures to a folder. docs/_static/frames.js shows the one that the reader asks for. The
states of a `RoutingGrid` are too many: docs/_static/routing.js draws those itself, from the data that is written here.
"""

import base64
import contextlib
import gc
import hashlib
import importlib
import io
import itertools
import json
import math
import multiprocessing
import os
import symtable
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import Dropdown, Widget
from traitlets.config import Config

from moeblaze_ref.course import notebook
from moeblaze_ref.course.notebook import controls, outputs
from moeblaze_ref.course.notebook.dispatch import EXPERT_COLORS, PALE
from moeblaze_ref.course.notebook.explorer import MAX_CHOICES, MAX_EXPERTS, MAX_TOKENS, RoutingGrid
from moeblaze_ref.course.notebook.pictures import prepare_pictures
from moeblaze_ref.course.notebook.routing import zipf_choices
from moeblaze_ref.memory.plots import VERMILLION

MAX_STATES = 10  # of the controls of a picture: above, one moves at a time, and a long slider loses positions
MIN_POSITIONS = 3  # of a slider, however many controls there are
FOLDER = "_frames"  # of the site
# Modules that notebooks import, for the build to import once.
LIBRARIES = ("torch._dynamo", "moeblaze_ref.course.notebook.policies", "moeblaze_ref.verify.check")


# Cells ---------------------------------------------------------------------------------------------------------------


def needed_cells(sources: Sequence[str]) -> list[str]:
    """Return the code cells that call `explore`, and those above them that define a name which these use."""
    found = list(map(_names, sources))
    late: set[str] = set()  # what functions of the chosen cells read: when they are called, so any definition counts
    while True:
        chosen: list[int] = []
        missing: set[str] = set()
        for number in reversed(range(len(sources))):
            defined, used, _ = found[number]
            if "explore(" in sources[number] or defined & missing:
                chosen.insert(0, number)
                missing = (missing - defined) | used | late
        read = set().union(*(found[number][2] for number in chosen))
        if read <= late:
            return [sources[number] for number in chosen]
        late |= read


def _names(source: str) -> tuple[set[str], set[str], set[str]]:
    """Names that a cell defines, that it reads, and that a function in it reads from the notebook."""
    code = "\n".join(line for line in source.splitlines() if not line.startswith("%"))
    top = symtable.symtable(code, "cell", "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    inner = [symbol for table in _below(top) for symbol in table.get_symbols() if symbol.is_global()]
    used, late = (
        {symbol.get_name() for symbol in symbols if symbol.is_referenced()} for symbols in (top.get_symbols(), inner)
    )
    return defined, used, late


def _below(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _below(child)


# States --------------------------------------------------------------------------------------------------------------


def all_positions(control: Widget) -> tuple[list[tuple[str, Any]], int]:
    """Return (label, value) of each position of a control, and the number of its current position."""
    if hasattr(control, "options"):
        pairs = [option if isinstance(option, tuple) else (str(option), option) for option in control.options]
        return pairs, control.index
    count = round((control.max - control.min) / control.step) + 1
    values = [control.min + number * control.step for number in range(count)]
    pairs = [(format(value, control.readout_format), value) for value in values]
    return pairs, round((control.value - control.min) / control.step)


def positions(control: Widget, most: int) -> tuple[list[tuple[str, Any]], int]:
    """Return positions of a control, and the number of its current position.

    Of a list these are all entries. Of a slider these are ``most`` positions, from end to end, and the current one.
    """
    pairs, start = all_positions(control)
    last = len(pairs) - 1
    if isinstance(control, Dropdown) or last < most:
        return pairs, start
    chosen = sorted({start, *(round(number * last / (most - 1)) for number in range(most))})
    return [pairs[number] for number in chosen], chosen.index(start)


def states(counts: Sequence[int], start: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the states of controls with so many positions, as numbers of positions.

    All combinations if there are at most ``MAX_STATES``. Otherwise the start, and each control moved by itself.
    """
    if math.prod(counts) <= MAX_STATES:
        return list(itertools.product(*map(range, counts)))
    moved = (
        (*start[:number], position, *start[number + 1 :])
        for number, count in enumerate(counts)
        for position in range(count)
    )
    return list(dict.fromkeys(moved))


# In IPython ----------------------------------------------------------------------------------------------------------


class Shell(InteractiveShell):
    """IPython without a terminal and without a window."""

    def enable_gui(self, gui: str | None = None) -> None:
        """Do nothing: pictures are inline."""


def draw(path: Path, folder: Path) -> None:
    """Draw every state of a notebook's controls into a folder, and list the frames of each `explore` there.

    It leaves this process with another `explore`: give it one of its own.
    """
    cells = nbformat.read(path, as_version=4).cells
    found: list[dict[str, Any]] = []

    def explore(picture: Callable[..., Any], beside: bool = False, **widgets: Widget) -> None:
        grid = next((widget for widget in widgets.values() if isinstance(widget, RoutingGrid)), None)
        found.append(_drawn(picture, widgets, folder) if grid is None else routing_data(grid, widgets))

    notebook.explore = controls.explore = explore
    os.chdir(path.parent)
    options = Config(
        {
            "HistoryManager": {"enabled": False},
            "InlineBackend": {"print_figure_kwargs": {"pil_kwargs": {"compress_level": 1}}},  # `small` compresses again
        }
    )
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(io.StringIO()):
        shell = Shell.instance(config=options, ipython_dir=home)
        shell.run_line_magic("matplotlib", "inline")
        prepare_pictures()
        for source in needed_cells([cell.source for cell in cells if cell.cell_type == "code"]):
            shell.run_cell(source).raise_error()
    (folder / f"{path.stem}.json").write_text(json.dumps(found))


def _drawn(picture: Callable[..., Any], widgets: dict[str, Widget], folder: Path) -> dict[str, Any]:
    """The controls, and the frame of every state by the numbers of its positions."""
    most = max(MAX_STATES // len(widgets), MIN_POSITIONS)
    pairs, start = zip(*(positions(widget, most) for widget in widgets.values()), strict=True)
    frames = {}
    for state in states(list(map(len, pairs)), start):
        values = {name: of[number][1] for name, of, number in zip(widgets, pairs, state, strict=True)}
        frames[",".join(map(str, state))] = frame(picture, values, folder)
    return {"controls": list(map(_control, widgets, widgets.values(), pairs, start)), "frames": frames}


def _control(name: str, widget: Widget, pairs: list[tuple[str, Any]], start: int) -> dict[str, Any]:
    return {
        "name": name,
        "list": isinstance(widget, Dropdown),
        "labels": [label for label, _ in pairs],
        "start": start,
    }


def frame(picture: Callable[..., Any], values: dict[str, Any], folder: Path) -> dict[str, str]:
    """Draw a state: the name of its picture in the folder and its text, or the message in its place."""
    try:
        shown = picture(**values)
    except ValueError as error:
        return {"message": str(error)}
    formatter = Shell.instance().display_formatter
    assert formatter  # which every shell has
    data, metadata = formatter.format(shown)
    png = outputs.small(base64.b64decode(data["image/png"]), effort=6)  # 7% larger than by 9, in a sixth of the time
    name = f"{hashlib.sha256(png).hexdigest()[:16]}.png"
    (folder / name).write_bytes(png)
    return {"picture": name, "alt": metadata["image/png"]["alt"]}


def routing_data(grid: RoutingGrid, widgets: dict[str, Widget]) -> dict[str, Any]:
    """Return the data of docs/_static/routing.js: the choices at the start and of every draw, colours and limits."""
    *sliders, _ = grid.children
    named = {slider.description: slider for slider in sliders}
    named |= {name: widget for name, widget in widgets.items() if widget is not grid}
    pairs, start = zip(*map(all_positions, named.values()), strict=True)
    draws = {
        f"{L},{E},{number}": zipf_choices(skew, E, min(E, MAX_CHOICES), L).tolist()  # with fewer choices the first ones
        for L, E in itertools.product(range(1, MAX_TOKENS + 1), range(1, MAX_EXPERTS + 1))
        for number, (_, skew) in enumerate(pairs[list(named).index("skew")])
    }
    return {
        "controls": list(map(_control, named, named.values(), pairs, start)),
        "drawing": [slider.description for slider in sliders],
        "choices": grid.value.topk_experts,
        "draws": draws,
        "colors": {"experts": EXPERT_COLORS, "pale": PALE, "dropped": VERMILLION},
    }


# In the build --------------------------------------------------------------------------------------------------------


def draw_all(paths: Sequence[Path], folder: Path) -> None:
    """Draw the frames of notebooks into a folder, each notebook in a process of its own, several at a time."""
    folder.mkdir(parents=True)
    for module in LIBRARIES:
        importlib.import_module(module)
    gc.freeze()  # what was imported stays: no process need look through it for garbage
    forked = multiprocessing.get_context("fork")  # with what is imported here
    with forked.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        pool.starmap(draw, [(path, folder) for path in paths], chunksize=1)


def listed(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return what `draw` has listed of a notebook, by its name without the ending; an entry for each `explore`."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else []
