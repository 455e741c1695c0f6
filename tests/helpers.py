"""What the tests of several stages share: routings and shapes to try, and what every Dispatch must be."""

import re
import resource
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from moeblaze_ref.verify.cases import ROUTINGS, Case, make_case, random_topk


@st.composite
def routings(draw, max_tokens=600, max_experts=40):
    """Hypothesis strategy: (topk_experts, num_experts), from no tokens to more than two scan tiles."""
    num_experts = draw(st.integers(1, max_experts))
    k = draw(st.integers(1, num_experts))
    num_tokens = draw(st.integers(0, max_tokens))
    routing, seed = draw(st.sampled_from(ROUTINGS)), draw(st.integers(0, 2**32 - 1))
    return random_topk(num_tokens, num_experts, k, routing, seed), num_experts


def assert_same_dispatch(dispatch, expected):
    """Bit-equal arrays of int32, C-contiguous, and the same k."""
    assert dispatch.k == expected.k
    for name, array in expected.arrays().items():
        built = dispatch.arrays()[name]
        assert built.dtype == np.int32 and built.flags.c_contiguous
        np.testing.assert_array_equal(built, array, err_msg=name)


def assert_invariants(dispatch, topk_experts, num_experts):
    """What the four structures promise, derived from the choices alone."""
    num_tokens, k = topk_experts.shape
    offsets = dispatch.expert_token_offsets
    for array in dispatch.arrays().values():
        assert array.dtype == np.int32
    assert (dispatch.L, dispatch.E, dispatch.k) == (num_tokens, num_experts, k)
    np.testing.assert_array_equal(np.diff(offsets), np.bincount(topk_experts.ravel(), minlength=num_experts))
    assert offsets[0] == 0
    np.testing.assert_array_equal(dispatch.token_expert_indices, topk_experts.ravel())
    positions = dispatch.token_index_map
    np.testing.assert_array_equal(np.sort(positions), np.arange(num_tokens * k))  # one row, one position
    np.testing.assert_array_equal(dispatch.expert_token_indices[positions], np.repeat(np.arange(num_tokens), k))
    expert_of_position = np.repeat(np.arange(num_experts), np.diff(offsets))
    np.testing.assert_array_equal(expert_of_position[positions], topk_experts.ravel())
    for expert in range(num_experts):
        assert (np.diff(dispatch.expert_token_indices[offsets[expert] : offsets[expert + 1]]) > 0).all()


def with_value(array, index, value):
    """A copy of ``array`` with one element changed."""
    array = array.copy()
    array[index] = value
    return array


def changed(structure, changes):
    """The structure with some elements of its arrays replaced: {array: {index: value}}."""
    arrays = {name: getattr(structure, name).copy() for name in changes}
    for name, array in arrays.items():
        for index, value in changes[name].items():
            array[index] = value
    return replace(structure, **arrays)


class Shape(NamedTuple):
    """One layer's sizes and the routing that its router is biased to."""

    L: int
    d: int
    h: int
    E: int
    k: int
    routing: str = "uniform"

    def __str__(self):
        return f"L{self.L}-d{self.d}-h{self.h}-E{self.E}-k{self.k}-{self.routing}"

    def case(self, activation="swiglu") -> Case:
        """Random float64 numbers of this shape."""
        return make_case(*self, activation=activation)

    def topk_experts(self):
        """A random choice (L, k) of the same routing, for the stages that need no router."""
        return random_topk(self.L, self.E, self.k, self.routing)


RAGGED = Shape(37, 12, 20, 5, 3)  # no tile divides 37 tokens or 111 rows
SHAPES = (
    RAGGED,
    Shape(1, 8, 16, 4, 2),
    Shape(33, 8, 16, 4, 1),
    Shape(29, 8, 12, 4, 4),  # k = E
    Shape(19, 8, 12, 1, 1),
    Shape(53, 8, 16, 6, 1, "hot"),  # one expert gets every token
    Shape(53, 8, 16, 6, 2, "hot"),
    Shape(41, 8, 16, 8, 2, "empty"),
    Shape(131, 16, 8, 16, 4, "zipf"),
    Shape(300, 8, 4, 3, 2),  # two scan tiles
)


@contextmanager
def files_of_at_most(size):
    """The system refuses to let a file grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def assert_told_apart_in_grey(figure):
    """Whatever has a name in a panel, or in a legend of the figure's own, has a look of its own without colour too."""
    panels = [axes.get_legend_handles_labels() for axes in figure.axes]
    panels += [(legend.legend_handles, [text.get_text() for text in legend.texts]) for legend in figure.legends]
    assert any(labels for _, labels in panels)
    for handles, labels in panels:
        looks = dict(zip(labels, map(_ink, handles), strict=True))
        for (name, look), (other, beside) in combinations(looks.items(), 2):
            differs = np.abs(look - beside).sum() / max(look.sum(), beside.sum())
            assert differs > 0.2, f"{name} and {other} differ in {differs:.0%} of their ink"


def _ink(handle):
    """How dark each pixel of a legend's mark is, from 0 to 255."""
    figure = Figure(figsize=(1, 0.4), dpi=200)
    figure.legend([handle], [" "], loc="center", frameon=False, handlelength=4)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return 255 - np.asarray(canvas.buffer_rgba())[:, :, :3] @ [0.299, 0.587, 0.114]


def unmarked(text):
    """A page without what it says of records that are older than the code: no test fails because a record is old."""
    return re.sub(r" \(code (?:changed since|not recorded)[^)]*\)", "", text)


def returned(generator):
    """What a generator returns after all that it yields."""
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value
