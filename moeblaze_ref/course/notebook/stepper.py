"""A launch step by step: the line that each lane is at, what the warp asks of memory, sectors, banks."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable

from ipywidgets import Dropdown, IntSlider, Widget
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.core import checks
from moeblaze_ref.course.notebook.controls import play
from moeblaze_ref.course.notebook.dispatch import PALE
from moeblaze_ref.memory.plots import BLACK, GREEN, GREY, ORANGE, SKY, VERMILLION, YELLOW
from moeblaze_ref.runtime.record import (
    BANKS,
    LANES,
    LINE_BYTES,
    NOWHERE,
    SECTOR_BYTES,
    WORD_BYTES,
    LaunchRecord,
    RecordingExecutor,
    Step,
)
from moeblaze_ref.runtime.simt.symbols import Frame
from moeblaze_ref.verify.cases import random_topk

COLORS = (SKY, YELLOW, ORANGE, GREEN)  # used alternately, under black numbers; neighbours differ in grey too
SHOWN_LINES = 13  # of the source, the current one in their middle
SHOWN_CHARACTERS = 128  # of a line
SHOWN_ROWS = 32  # of memory, 128 bytes each
LEAST_ROWS = 8  # that have a place, so that cells do not grow
LINE_WORDS = LINE_BYTES // WORD_BYTES
PANELS = ((0.605, 0.295), (0.505, 0.09), (0.05, 0.415))  # bottom and height: source, lanes, memory
LABELS = 9  # cells' widths, left of the first cell
MARKED = "#FFF3B0"  # the current line
CONFLICT = {"color": VERMILLION, "weight": "bold"}  # of a bank's number


def record_dispatch(L: int, E: int, k: int, routing: str = "uniform") -> dict[str, LaunchRecord]:
    """The first warp of every block of the paper's three steps, in raw CUDA, by the name of the kernel."""
    executor = RecordingExecutor(warp=0)
    raw_dispatch.build(random_topk(L, E, k, routing), E, executor=executor, version="1_dense_map")
    return {launch.kernel: launch for launch in executor.launches}


class Stepper:
    """Pictures of what the warps of a launch do, step by step, from one of `RecordingExecutor.launches`.

    Raises
    ------
    ValueError
        If nothing of the launch is recorded.
    """

    def __init__(self, record: LaunchRecord):
        self.record = record
        self.warps = {f"block {block}, warp {warp}": (block, warp) for block, warp in record.warps()}
        if not self.warps:
            raise ValueError(f"kernel {record.kernel} has no records: no thread of the chosen block and warp ran")
        self._steps = functools.cache(lambda warp: record.steps(*self.warps[warp]))

    def controls(self) -> dict[str, Widget]:
        """Controls for `explore`: the warp, its step, and a button that plays the steps."""
        warp = Dropdown(options=list(self.warps))
        step = IntSlider(value=1, min=1, max=len(self._steps(warp.value)))
        warp.observe(lambda change: setattr(step, "max", len(self._steps(change.new))), "value")
        return {"warp": warp, "step": play(step)}

    def count(self, warp: str) -> int:
        """Return the number of steps of one of ``warps``."""
        return len(self._steps(warp))

    def lines(self, warp: str, step: int, file: str) -> tuple[int | None, dict[int, int]]:
        """Return the line of a file that a step is at, and how many lanes are at each line; steps count from 1."""
        steps = self._steps(warp)
        at = Counter(place.line for place in _places(steps, step - 1).values() if place.file == file)
        return line_in(file, steps[step - 1].frames), dict(at)

    def picture(self, warp: str, step: int) -> Figure:
        """The source, the lanes and the memory at one step, counted from 1.

        Raises
        ------
        ValueError
            If the warp is none of ``warps``, or has no such step.
        """
        steps = self._steps(checks.check_name("warp", warp, self.warps))
        checks.check_int("step", step, at_least=1, at_most=len(steps))
        now, at = steps[step - 1], _places(steps, step - 1)
        figure = Figure(figsize=(11, 7.2))
        title = f"step {step} of {len(steps)}: kernel {self.record.kernel}, {warp}\n{sentence(now)}"
        figure.suptitle(title, x=0.005, y=0.995, ha="left", weight="bold", size="medium")
        # Places by hand: to lay out a thousand cells takes seconds.
        source, lanes, memory = (figure.add_axes((0.005, low, 0.99, high)) for low, high in PANELS)
        groups = _groups(now)
        _draw_source(source, self.record.sources.get(now.frame.file, ""), now.frames, at)
        _draw_lanes(lanes, now, at, groups)
        _draw_memory(memory, now, groups)
        figure.text(0.005, 0.005, "\n".join(filter(None, [self.record.fault, self.record.note])), color=VERMILLION)
        return figure


def line_in(file: str, frames: Iterable[Frame]) -> int | None:
    """Return the innermost line of a file among the frames of an instruction."""
    return next((frame.line for frame in frames if frame.file == file), None)


def sentence(step: Step) -> str:
    """Return a sentence on a step: its accesses and their cost."""
    lanes = f"{len(step.lanes)} lane{'s' * (len(step.lanes) > 1)}"
    if not step.is_access:
        return f"{step.operation}: {lanes}"
    asked = f"{step.operation}: {lanes} ask{'s' * (len(step.lanes) == 1)} for {step.bytes:,} bytes of {_arrays(step)}; "
    return asked + (_banks_sentence(step) if step.region.space == "shared" else _sectors_sentence(step))


def _arrays(step):
    offsets = step.records["offset"].tolist()
    regions = [step.regions[where] for where in step.records["where"].tolist()]
    return " and ".join(
        dict.fromkeys(region.part(offset).name for region, offset in zip(regions, offsets, strict=True))
    )


def _sectors_sentence(step):
    if step.outside:
        return f"lane {', '.join(map(str, step.outside))} is out of bounds"
    moved = f"{_count(step.sectors, 'sector')} ({step.sectors * SECTOR_BYTES:,} bytes) in {_count(step.lines, 'line')}"
    if step.sectors <= step.fewest_sectors:
        return f"{moved}: coalesced"
    return f"{moved}, where {step.fewest_sectors} would do: {step.sectors / step.fewest_sectors:.3g} times as many"


def _banks_sentence(step):
    passes = f"{_count(sum(step.passes), 'pass')} over the banks"
    return passes + (f", {step.conflicts} of them bank conflicts" if step.conflicts else ", no bank conflict")


def _count(number, thing):
    plural = thing + ("es" if thing.endswith("s") else "s")
    return f"{number:,} {thing if number == 1 else plural}"


def _places(steps: list[Step], now: int) -> dict[int, Frame]:
    """The line that each lane is at: that of its step now, or of its next one; lanes that have ended are left out."""
    found: dict[int, Frame] = {}
    for step in steps[now:]:
        for lane in step.lanes.tolist():
            found.setdefault(lane, step.frame)
        if len(found) == LANES:
            break
    return found


# Colours -------------------------------------------------------------------------------------------------------------


def _groups(step: Step) -> dict[tuple[int, int], int]:
    """Return the colour of each (region, word), from 0 on: its sector, or in shared memory its pass."""
    if not step.is_access:
        return {}
    if step.region.space == "shared":
        return step.pass_of_words()
    sectors = {tuple(sector): number for number, sector in enumerate(step.units(SECTOR_BYTES).tolist())}
    words = SECTOR_BYTES // WORD_BYTES
    return {(where, word): sectors[where, word // words] for where, word in step.units(WORD_BYTES).tolist()}


def _color(group: int) -> str:
    return COLORS[group % len(COLORS)]


# Panels --------------------------------------------------------------------------------------------------------------


def _panel(axes: Axes, height: float, title: str):
    """An empty sheet of cells, 32 to the right of the labels, ``height`` down."""
    axes.set(xlim=(-LABELS, LANES + 0.05), ylim=(height + 0.05, 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(title, loc="left", size="small", color=BLACK)


def _cells(axes: Axes, places: list[tuple[float, float]], colors: list[str] | str, **look):
    """Cells at their upper left corners, as one collection: each by itself would be drawn a hundred times as slowly."""
    cells = PatchCollection([Rectangle(place, 1, 1) for place in places], facecolor=colors, **look)
    cells.set(edgecolor=GREY, linewidth=0.5, in_layout=False)
    axes.add_collection(cells)


def _text(axes: Axes, x: float, y: float, text: str, **look):
    """A text in the middle of a cell, or with ``ha`` beside it."""
    if text:
        size = 7.5 if axes.get_ylim()[0] <= 20 else 5  # fits a cell's height
        axes.text(x, y + 0.53, text, **{"ha": "center", "va": "center", "size": size, "in_layout": False} | look)


def _draw_source(axes: Axes, text: str, frames: tuple[Frame, ...], at: dict[int, Frame]):
    """Lines around the current one, which is marked; left of them how many lanes are there."""
    frame, *callers = frames
    called = "".join(f", called from {caller.function}, line {caller.line}" for caller in callers)
    _panel(axes, SHOWN_LINES, f"{frame.file}, line {frame.line}, in {frame.function}{called}")
    here = Counter(place.line for place in at.values() if place.file == frame.file)
    for row, (number, line) in enumerate(_excerpt(text.splitlines(), frame.line)):
        if number == frame.line:
            axes.add_patch(Rectangle((-LABELS, row), LABELS + LANES, 1, facecolor=MARKED, edgecolor=BLACK))
        gutter = _count(here[number], "lane") if here[number] else ""
        _text(axes, 2.6 - LABELS, row, gutter, ha="right", size=8, weight="bold")
        _text(axes, 3 - LABELS, row, f"{number:4d}  {line}".replace("$", r"\$"), ha="left", family="monospace", size=8)


def _excerpt(lines: list[str], middle: int) -> list[tuple[int, str]]:
    """Numbers and texts of the lines around one."""
    first = max(0, min(middle - 1 - SHOWN_LINES // 2, len(lines) - SHOWN_LINES))
    cut = (line if len(line) <= SHOWN_CHARACTERS else line[: SHOWN_CHARACTERS - 1] + "…" for line in lines)
    return list(enumerate(cut, start=1))[first : first + SHOWN_LINES]


def _draw_lanes(axes: Axes, step: Step, at: dict[int, Frame], groups):
    """A cell for each lane, in the colour of what it asks for; below it the line that it is at, and that by number."""
    _panel(axes, 3, "")
    asked = zip(*(step.records[name].tolist() for name in ("where", "offset")), strict=True)
    first_words = [(where, offset // WORD_BYTES) for where, offset in asked]
    asks = {lane: groups.get(word) for lane, word in zip(step.lanes.tolist(), first_words, strict=True)}
    shades = ["white"] * LANES
    for lane, group in asks.items():
        shades[lane] = PALE if group is None else _color(group)
    for lane in step.outside:
        shades[lane] = VERMILLION
    _cells(axes, [(lane, 0) for lane in range(LANES)], shades)
    below = "" if not groups else "served in pass" if step.region.space == "shared" else "asks for sector"
    for top, name in enumerate(("lane", "is at line", below)):
        _text(axes, -0.4, top, name, ha="right")
    for lane, place in at.items():
        _text(axes, lane + 0.5, 0, str(lane))
        _text(axes, lane + 0.5, 1, str(place.line) if place.file == step.frame.file else "…")
    for lane, group in asks.items():
        _text(axes, lane + 0.5, 2, "" if group is None else str(group + 1))


def _draw_memory(axes: Axes, step: Step, groups):
    """A row for each line of 128 bytes that is touched, a cell for each word; in a word the lanes that ask for it."""
    lines = [tuple(line) for line in step.units(LINE_BYTES).tolist()]
    if not lines:
        return _panel(axes, LEAST_ROWS, "no array is touched in this step")
    left_out = f"; {len(lines) - SHOWN_ROWS} more rows are not drawn" if len(lines) > SHOWN_ROWS else ""
    _panel(axes, max(min(len(lines), SHOWN_ROWS), LEAST_ROWS) + 1, _memory_title(step) + left_out)
    tops = {line: top for top, line in enumerate(lines[:SHOWN_ROWS], start=1)}
    places = {
        (where, line * LINE_WORDS + column): (column, top)
        for (where, line), top in tops.items()
        for column in range(LINE_WORDS)
    }
    _draw_columns(axes, step, len(tops))
    moved = _moved_words(step)
    _cells(axes, [places[word] for word in places if word not in moved], "white")
    _cells(axes, [places[word] for word in places if word in moved - groups.keys()], "white", hatch="////")
    asked = [word for word in places if word in groups]
    _cells(axes, [places[word] for word in asked], [_color(groups[word]) for word in asked])
    for word, lanes in _lanes_of_words(step).items():
        if word in places:
            _text(axes, places[word][0] + 0.5, places[word][1], _who(lanes))
    for (where, line), top in tops.items():
        label = step.regions[where].element(line * LINE_BYTES, int(step.records["bytes"].max()))
        _text(axes, -0.4, top, label, ha="right")


def _moved_words(step):
    """Words that come with what is asked for: whole sectors of global memory, of shared memory nothing else."""
    if step.region.space == "shared":
        return {tuple(word) for word in step.units(WORD_BYTES).tolist()}
    words = SECTOR_BYTES // WORD_BYTES
    return {
        (where, sector * words + word) for where, sector in step.units(SECTOR_BYTES).tolist() for word in range(words)
    }


def _memory_title(step):
    turns = f"{len(COLORS)} colours by turns"
    if step.region.space == "shared":
        return f"shared memory: a column is a bank, a number the lane that asks; passes, numbered above, have {turns}"
    return f"global memory: a number is the lane that asks; sectors of 8 words have {turns}; hatched words move unasked"


def _draw_columns(axes, step, rows):
    """Draw the banks above the rows, conflicts marked; or bytes from the row's start, and lines between sectors."""
    if step.region.space != "shared":
        for column in range(0, LINE_WORDS, SECTOR_BYTES // WORD_BYTES):
            _text(axes, column + 0.15, 0, f"byte +{column * WORD_BYTES}", ha="left")
            axes.vlines(column, 0, rows + 1, color=BLACK, linewidth=1.5, zorder=3, in_layout=False)
        return
    _text(axes, -0.4, 0, "bank", ha="right")
    for bank in range(BANKS):
        _text(axes, bank + 0.5, 0, str(bank), **(CONFLICT if bank in step.busy_banks else {}))


def _lanes_of_words(step):
    """Lanes that ask for each (region, word), in order."""
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    records = (step.records[name].tolist() for name in ("where", "offset", "bytes"))
    for lane, where, offset, size in zip(step.lanes.tolist(), *records, strict=True):
        for word in range(offset // WORD_BYTES, (offset + size - 1) // WORD_BYTES + 1):
            if where != NOWHERE:
                found[where, word].append(lane)
    return found


def _who(lanes):
    """``3``, ``4-7`` for neighbours, ``5x`` for five others."""
    if len(lanes) == 1:
        return str(lanes[0])
    return f"{lanes[0]}-{lanes[-1]}" if lanes[-1] - lanes[0] == len(lanes) - 1 else f"{len(lanes)}x"
