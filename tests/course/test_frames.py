"""Which states of the notebooks' controls the site draws, from which cells, and what its scripts draw from."""

import ipywidgets
import numpy as np
import pytest

from moeblaze_ref.course.notebook import doubling
from moeblaze_ref.course.notebook.explorer import RoutingGrid
from moeblaze_ref.course.notebook.routing import zipf_choices
from moeblaze_ref.course.site import frames


def test_cells_that_define_what_the_controls_need_are_chosen():
    sources = [
        "%matplotlib inline\nimport numpy as np\nfrom a import explore",
        "step = 3",  # no other cell reads this one's name
        "def twice(x): return np.sum(x) * factor",
        "print([factor for factor in range(3)])",
        "factor = 2",
        "factor = 9; step = 5",
        "explore(lambda step: twice(step), step=1)",
        "np = None",
    ]
    assert frames.needed_cells(sources) == [sources[number] for number in (0, 2, 4, 5, 6)]
    assert frames.needed_cells(sources[:4]) == []


@pytest.mark.parametrize(
    ("control", "labels", "start"),
    [
        (doubling(1024, 8192, 2048), ["1,024", "2,048", "4,096", "8,192"], 1),
        (ipywidgets.Dropdown(options=["silu", "gelu"], value="gelu"), ["silu", "gelu"], 1),
        (ipywidgets.Dropdown(options=list("abcdef")), list("abcdef"), 0),
        (ipywidgets.IntSlider(value=5, min=0, max=31), ["0", "5", "10", "21", "31"], 1),
        (ipywidgets.IntSlider(value=31, min=0, max=31), ["0", "10", "21", "31"], 3),
        (ipywidgets.FloatSlider(value=1, min=0.5, max=2, step=0.5), ["0.50", "1.00", "1.50", "2.00"], 1),
        (ipywidgets.FloatSlider(value=0, max=0.25, step=0.125, readout_format=".3f"), ["0.000", "0.125", "0.250"], 0),
    ],
)
def test_a_long_slider_loses_positions_and_keeps_its_start_and_its_ends(control, labels, start):
    pairs, found = frames.positions(control, 4)
    assert ([label for label, _ in pairs], found) == (labels, start)
    assert pairs[start][1] == control.value


def test_states_are_all_combinations_of_few_and_single_moves_of_many():
    assert len(frames.states([2, 5], [0, 0])) == 10
    many = frames.states([4, 9], [1, 2])
    assert len(many) == len(set(many)) == 4 + 9 - 1 and (1, 2) in many
    assert all((one == 1) + (other == 2) >= 1 for one, other in many)


def test_a_state_that_is_wrong_has_its_message(tmp_path):
    def refuse(k):
        raise ValueError(f"k is {k}")

    assert frames.frame(refuse, {"k": 9}, tmp_path) == {"message": "k is 9"}
    assert list(tmp_path.iterdir()) == []


def test_a_notebook_without_controls_has_no_frames(tmp_path):
    assert frames.listed("setup", tmp_path) == []


def test_the_draws_are_those_of_the_sliders():
    """With fewer choices, they are the first ones of the draw."""
    grid = RoutingGrid(np.array([[0, 1], [2, 0]]), 3)
    data = frames.routing_data(grid, {"routing": grid, "block": ipywidgets.IntSlider(value=2, min=1, max=4)})
    assert [control["name"] for control in data["controls"]] == ["tokens", "experts", "k", "skew", "block"]
    assert data["choices"] == ((0, 1), (2, 0)) and len(data["draws"]) == 8 * 6 * 13
    skews = data["controls"][3]["labels"]
    for L, E, k, number in [(8, 6, 3, 12), (5, 4, 2, 4), (1, 1, 1, 0), (3, 2, 1, 7)]:
        drawn = [row[:k] for row in data["draws"][f"{L},{E},{number}"]]
        assert drawn == zipf_choices(float(skews[number]), E, k, L).tolist()
