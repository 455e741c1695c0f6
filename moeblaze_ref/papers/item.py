"""Items of a paper: an equation, a table or a figure, with its claims and its measurement."""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure

from moeblaze_ref.papers.claims import Row, one_each
from moeblaze_ref.papers.results import Recorded, Rows

Job = Callable[[], Rows]


@dataclass(frozen=True)
class Item:
    """One equation, table or figure.

    Its functions are named as "module:function" of this package and imported on first use: what measures on a GPU needs
    torch, and what solves integer programs needs a solver.
    """

    id: str  #: what the command calls it: "moeblaze-fig3"
    place: str  #: paper and place: "MoEBlaze, figure 3"
    title: str  #: what it is about
    claims: str  #: makes its rows from what is recorded
    #: Takes a ``runtime.device.Device`` and returns what to run on a GPU. Default: nothing is measured there.
    measured_by: str | None = None
    #: True if a further run goes on after the earlier ones, with new seeds: then ``measured_by`` takes their rows too.
    continued: bool = False
    #: Draws the recorded runs of one device, given the rows of each; draws the formulas if the item is not measured.
    drawn_by: str | None = None
    #: Our assumption where the paper says nothing, shown with the rows; empty if there is none.
    assumption: str = ""

    def rows(self, recorded: Recorded) -> list[Row]:
        """Return the rows of the item, one for each claim."""
        return [replace(row, item=self.id) for row in one_each(function(self.claims)(recorded))]

    def jobs(self, device: Any, earlier: Sequence[Mapping[str, Any]] = ()) -> Sequence[Job]:
        """Return the jobs that measure the item on a GPU; ``earlier`` are the rows of earlier runs."""
        if self.measured_by is None:
            raise ValueError(f"{self.id} is not measured")
        measured_by = function(self.measured_by)
        return measured_by(device, earlier) if self.continued else measured_by(device)

    def plots(self, recorded: Recorded) -> dict[str, Figure]:
        """Return the item's pictures by name: of its runs on each device, or of its formulas if it is not measured."""
        if self.drawn_by is None:
            return {}
        draw = function(self.drawn_by)
        if self.measured_by is None:
            return {self.id: draw()}
        runs: dict[str, list[Rows]] = {}
        for device, rows in recorded.runs(self.id):
            runs.setdefault(device, []).append(rows)
        return {self._plot_name(device): draw(*found) for device, found in runs.items()}

    def plot_names(self, devices: Iterable[str]) -> list[str]:
        """Return the names of `plots` if there are runs on these devices, by their short names."""
        if self.drawn_by is None:
            return []
        return [self._plot_name(device) for device in devices] if self.measured_by else [self.id]

    def _plot_name(self, device: str) -> str:
        return f"{self.id}_{device}"


def function(name: str) -> Callable[..., Any]:
    """Return the function of a name, "module:function"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"moeblaze_ref.papers.{module}"), attribute)
