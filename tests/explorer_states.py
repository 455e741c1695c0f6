"""Runs when the kernel of a browser test starts: keeps every ``explore``, to say what a reader should see of it."""

from typing import Any

from IPython import get_ipython
from ipywidgets import FloatSlider, IntSlider

get_ipython().run_line_magic("matplotlib", "inline")  # as notebooks do before they import what follows

from moeblaze_ref.course import notebook  # noqa: E402
from moeblaze_ref.course.notebook import controls  # noqa: E402

_explorers: list[Any] = []
_shown: dict[int, list[str]] = {}  # the texts of an explorer's controls when its picture was drawn, or failed
_drawing: list[tuple[int, list[str]]] = []
_explore, _display = controls.explore, controls.display


def _kept(picture, beside=False, **widgets):
    number = len(_explorers)
    _explorers.append((picture, widgets))

    def noted(**values):
        _drawing[:] = [(number, _control_texts(number))]
        try:
            return picture(**values)
        except ValueError:
            raise  # its message is displayed
        except Exception:
            _shown.update(_drawing)
            raise

    return _explore(noted, beside, **widgets)


def _noted(shown):
    _display(shown)
    _shown.update(_drawing)
    _drawing.clear()


notebook.explore = controls.explore = _kept
controls.display = _noted


def _texts(control):
    if hasattr(control, "choose"):  # a RoutingGrid
        *sliders, table = control.children
        buttons = [cell.description for cell in table.children if hasattr(cell, "click")]
        return [text for slider in sliders for text in _texts(slider)] + buttons
    if isinstance(control, IntSlider | FloatSlider):
        return [format(control.value, control.readout_format)]
    option = control.options[control.index]
    return [str(option[0] if isinstance(option, tuple) else option)]


def _control_texts(number):
    return [text for control in _explorers[number][1].values() for text in _texts(control)]


def is_shown(number):
    """Whether the picture, or the message in its place, is out for the values that the controls have."""
    return _shown.get(number) == _control_texts(number)


def explorer_state(number):
    """The texts of the controls, and the picture that they ask for with its text, or the message in their place."""
    picture, widgets = _explorers[number]
    state: dict[str, Any] = {"controls": _control_texts(number)}
    try:
        shown = picture(**{name: control.value for name, control in widgets.items()})
    except ValueError as error:
        return state | {"picture": None, "alt": None, "message": str(error)}
    made, about = get_ipython().display_formatter.format(shown)
    return state | {"picture": made["image/png"].strip(), "alt": about["image/png"]["alt"], "message": None}
