"""Sliders that move pictures."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from IPython.display import Markdown, display
from ipywidgets import IntProgress, IntSlider, Layout, Play, SelectionSlider, VBox, Widget, interactive, jslink

LABEL_WIDTH = "8em"  # holds the longest name of a control


def doubling(first: int, last: int, value: int) -> SelectionSlider:
    """A slider over first, 2 first, 4 first, ... up to last, which starts at ``value``."""
    sizes = [first << doublings for doublings in range((last // first).bit_length())]
    return SelectionSlider(options=[(f"{size:,}", size) for size in sizes], value=value)


def explore(picture: Callable[..., Any], beside: bool = False, **controls: Widget):
    """Draw a picture with the values of the controls, and again whenever one of them is let go.

    ``picture`` is called with a keyword for every control and returns what is shown. A ValueError, such as that of
    k > E, is shown as its message. High controls stand ``beside`` the picture, so that both are in view.
    """
    for control in controls.values():
        control.continuous_update = False
        if hasattr(control, "style"):
            control.style.description_width = LABEL_WIDTH

    def draw(**values):
        try:
            display(picture(**values))
        except ValueError as error:
            display(Markdown(f"**{error}**"))

    shown: Any = interactive(draw, **controls)  # ipywidgets has no types
    if beside:
        *handles, output = shown.children
        output.layout = Layout(flex="1 1 0", min_width="0")  # a picture that is too wide shrinks
        shown.layout = Layout(flex_flow="row", align_items="flex-start")
        shown.children = VBox(handles, layout=Layout(flex="0 0 auto")), output
    display(shown)


def play(slider: IntSlider, seconds: float = 1.5) -> IntSlider:
    """The slider, below buttons that move it on by itself, a step in as many seconds."""
    buttons = Play(value=slider.value, min=slider.min, max=slider.max, interval=int(1000 * seconds))
    for trait in ("value", "max"):
        jslink((slider, trait), (buttons, trait))
    display(buttons)
    return slider


def progress(total: int, unit: str = "") -> Callable[..., None]:
    """Show a bar; the function that is returned moves it to a step, and writes a number in ``unit`` beside it."""
    bar = IntProgress(max=total, layout={"width": "60%"}, style={"description_width": "initial"})
    display(bar)

    def on_step(step: int, number: float | None = None):
        bar.value = step
        bar.description = f"{step} of {total}" + ("" if number is None else f": {number:.2f} {unit}")

    return on_step


def track(items: Sequence[Any]) -> Iterator[Any]:
    """The items one by one, under a bar that counts them."""
    on_step = progress(len(items))
    for number, item in enumerate(items, start=1):
        yield item
        on_step(number)
