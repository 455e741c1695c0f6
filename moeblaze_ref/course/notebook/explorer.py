"""Route a handful of tokens by hand, and see what every system makes of it."""

import itertools
from typing import Any, NamedTuple

import numpy as np
from ipywidgets import Button, FloatSlider, GridBox, IntSlider, Label, Layout, ValueWidget, VBox
from matplotlib.figure import Figure

from moeblaze_ref.backends.numpy_ref import dispatch
from moeblaze_ref.core import checks
from moeblaze_ref.core.drawing import panels
from moeblaze_ref.course.notebook.controls import LABEL_WIDTH
from moeblaze_ref.course.notebook.dispatch import CELL_INCHES, EXPERT_COLORS, PALE, STEPS, board_size, draw_arrays
from moeblaze_ref.course.notebook.megablocks import draw_bins
from moeblaze_ref.course.notebook.routing import zipf_choices

MAX_TOKENS, MAX_EXPERTS, MAX_CHOICES = 8, 6, 3  # what fits a picture
WIDTH = "2.6em"  # of a button
LOOK: Any = {"continuous_update": False, "style": {"description_width": LABEL_WIDTH}}  # of a slider
NO_SLOT = "\N{NO-BREAK SPACE}"  # an empty text would leave the one before on the button


class Routing(NamedTuple):
    """The experts of each token."""

    topk_experts: tuple[tuple[int, ...], ...]  #: L times k
    E: int


class RoutingGrid(VBox, ValueWidget):
    """Buttons, a row a token and a column an expert, above them sliders that draw the choices anew.

    A click gives a token an expert in place of the one that it has had for longest; its k stays. A button shows the
    slot of its expert.

    Parameters
    ----------
    topk_experts : ndarray (L, k), int
        The choices to begin with; L, E and k are at most 8, 6 and 3.
    num_experts : int

    Attributes
    ----------
    value : Routing
    """

    children: tuple[Any, ...]  # ipywidgets has no types

    def __init__(self, topk_experts: np.ndarray, num_experts: int):
        L, k = topk_experts.shape
        self._tokens = self._slider("tokens", L, MAX_TOKENS)
        self._experts = self._slider("experts", num_experts, MAX_EXPERTS)
        self._k = self._slider("k", k, min(num_experts, MAX_CHOICES))
        self._skew = FloatSlider(description="skew", min=0, max=3, step=0.25, value=0, **LOOK)
        self._sliders = self._tokens, self._experts, self._k, self._skew
        super().__init__(self._sliders)
        self._buttons: list[list[Button]] = []
        self._show(Routing(tuple(map(tuple, topk_experts.tolist())), num_experts))
        for slider in self._sliders:
            slider.observe(self._draw, "value")

    @staticmethod
    def _slider(name: str, value: int, most: int) -> IntSlider:
        checks.check_int(name, value, at_least=1, at_most=most)
        return IntSlider(description=name, min=1, max=most, value=value, **LOOK)

    def _draw(self, _change):
        """Choices as the sliders ask for, by chance; every expert is less popular than the one before by the skew."""
        self._k.max = min(self._experts.value, MAX_CHOICES)
        choices = zipf_choices(self._skew.value, self._experts.value, self._k.value, self._tokens.value)
        self._show(Routing(tuple(map(tuple, choices.tolist())), self._experts.value))

    def choose(self, token: int, expert: int):
        """Give a token an expert in place of the one that it has had for longest; nothing if it has it already.

        Raises
        ------
        ValueError
            If there is no such token or expert.
        """
        choices, E = self.value
        checks.check_int("token", token, at_least=0, at_most=len(choices) - 1)
        checks.check_int("expert", expert, at_least=0, at_most=E - 1)
        if expert not in choices[token]:
            row = (*choices[token][1:], expert)
            self._show(Routing((*choices[:token], row, *choices[token + 1 :]), E))

    def _show(self, routing: Routing):
        shape = len(routing.topk_experts), routing.E
        if shape != np.shape(self._buttons):
            self._buttons = [[self._button(token, expert) for expert in range(shape[1])] for token in range(shape[0])]
            self.children = (*self._sliders, self._table())
        for chosen, row in zip(routing.topk_experts, self._buttons, strict=True):
            for expert, button in enumerate(row):
                button.description = str(chosen.index(expert)) if expert in chosen else NO_SLOT
                button.style.button_color = EXPERT_COLORS[expert] if expert in chosen else PALE
        self.value = routing

    def _button(self, token: int, expert: int) -> Button:
        button = Button(tooltip=f"token {token} to expert {expert}", layout=Layout(width=WIDTH, margin="0"))
        button.style.text_color = "black"  # on a dark page too
        button.on_click(lambda _: self.choose(token, expert))
        return button

    def _table(self) -> GridBox:
        """The buttons under the names of their experts, beside those of their tokens."""
        experts = len(self._buttons[0])
        names = [Label(""), *(Label(f"e{expert}") for expert in range(experts))]
        rows = [[Label(f"token {token}"), *row] for token, row in enumerate(self._buttons)]
        layout = Layout(grid_template_columns=f"5em {f'{WIDTH} ' * experts}", grid_gap="1px")
        return GridBox([*names, *itertools.chain.from_iterable(rows)], layout=layout)


def routing_picture(routing: Routing, capacity_factor: float, block: int) -> Figure:
    """The dense map and the four structures of a routing, and the rows that three systems make of it.

    One gives each expert a capacity by ``capacity_factor``, one works in blocks of ``block`` rows, one has no buffer.

    Raises
    ------
    ValueError, TypeError
        If the routing is none, the factor is not above 0, or the block has no row.
    """
    topk_experts = np.array(routing.topk_experts, np.int32)  # (L, k)
    routed = dispatch.build(topk_experts, routing.E)
    width, height = board_size(topk_experts, routing.E)
    tall = CELL_INCHES * height
    figure, (arrays, bins) = panels(max(CELL_INCHES * width, 10), tall + 4, 2, height_ratios=(tall, 4))
    title = f"R = {routed.R} routed rows of {routed.L} tokens and {routed.E} experts"
    draw_arrays(arrays, topk_experts, routing.E, title, len(STEPS) - 1, positions=False)
    draw_bins(bins, routed, capacity_factor, block)
    for axes in (arrays, bins):
        axes.set_anchor("W")
    return figure
