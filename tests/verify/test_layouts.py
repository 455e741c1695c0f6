"""Layouts of weights: what they say, and what is refused."""

import pytest
import torch

from moeblaze_ref.verify.layers.layouts import ROLES, Layout, gather, places, scatter

SIZES = {"E": 3, "d": 4, "h": 5, "s": 6}


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def test_a_layout_gives_views_in_the_axes_of_the_reference():
    stored = numbers(3, 5, 4)  # (E, h, d)
    (part,) = Layout.parse("gate: E h d").parts(stored).values()
    assert part.shape == (3, 4, 5) and torch.equal(part, stored.mT)
    part.zero_()
    assert not stored.any()  # the same memory


@pytest.mark.parametrize(("text", "shape"), [("gate_up: E 2h d", (3, 10, 4)), ("gate_up: E d h2", (3, 4, 10))])
def test_fused_columns(text, shape):
    layout = Layout.parse(text)
    assert layout.shape(SIZES) == shape
    stored = numbers(*shape)
    parts = layout.parts(stored)
    columns = stored if shape[1] == 4 else stored.mT  # (E, d, 2h)
    halves = (columns[..., :5], columns[..., 5:]) if "2h" in text else (columns[..., 0::2], columns[..., 1::2])
    assert torch.equal(parts["gate"], halves[0]) and torch.equal(parts["up"], halves[1])
    swapped = Layout.parse(text.replace("gate_up", "up_gate")).parts(stored)
    assert torch.equal(swapped["up"], halves[0]) and torch.equal(swapped["gate"], halves[1])


@pytest.mark.parametrize(
    "layouts",
    [
        {"w1": "gate: E d h", "w2": "up: E h d", "w3": "down: E d h"},
        {"both": "gate_up: E 2h d", "b": "gate_up_bias: E h2", "w3": "down: d E h", "c": "down_bias: E d"},
        {"experts.*.a": "gate_up: d 2h", "experts.*.b": "down: d h"},
        {"w1": "gate_up: E*2h d", "w3": "down: E*h d"},
        {"r": "router: E d", "rb": "router_bias: E", "s": "shared_gate_up: 2s d", "t": "shared_down: d s"},
    ],
)
def test_what_is_scattered_is_gathered(layouts):
    found = [(place, torch.zeros(place.layout.shape(SIZES))) for place in places(layouts, SIZES["E"])]
    roles = {role for place, _ in found for role in place.layout.roles}
    weights = {role: torch.randn([SIZES[axis] for axis in ROLES[role]]) for role in roles}
    scatter(found, weights)
    again = gather(found)
    assert again.keys() == weights.keys() and all(torch.equal(again[role], weights[role]) for role in roles)


def test_the_rows_of_all_experts_on_one_axis():
    layout = Layout.parse("gate: E*h d", 3)
    assert layout.shape(SIZES) == (15, 4) and layout.text == "E*h d"
    stored = numbers(15, 4)
    (part,) = layout.parts(stored).values()
    assert torch.equal(part, stored.view(3, 5, 4).mT)


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ({"w": "gates: E d h"}, "names 'gates', but a weight is one of router, router_bias"),
        ({"w": "gate: E d d"}, "has the axes 'E d d', but it must have those of 'E d h'"),
        ({"w": "gate_up: E h d"}, "has the axes 'E h d', but it must have those of 'E d 2h' or 'E d h2', in any order"),
        ({"w": "gate_up E d h2"}, "the layout 'gate_up E d h2' has no colon"),
        ({"w": "down: E 2h d"}, "has the axes 'E 2h d', but it must have those of 'E h d', in any order"),
        ({"w": "gate: d h"}, "'w' stands for all experts, so its layout has an E"),
        ({"w.*": "gate: hh d"}, "'gate: hh d' has the axes 'hh d', but it must have those of 'd h', in any order"),
        ({"w.*": "gate_up: d d"}, "has the axes 'd d', but it must have those of 'd 2h' or 'd h2', in any order"),
        ({"w": "gate: hh d"}, "has the axes 'hh d', but it must have those of 'E d h', in any order"),
        ({"w.*": "gate: E d h"}, "'w.*' stands for one parameter an expert, so its layout has no E"),
        ({"a": "gate: E d h", "b": "gate_up: E 2h d"}, "'a' and 'b' both have the weight 'gate'"),
        ({"a": "gate_up: E 2h2 d"}, "the layout 'gate_up: E 2h2 d' has the axes 'E 2h2 d', but it must have those of"),
        (
            {"a": "gate_up: E h 2d"},
            "has the axes 'E h 2d', but it must have those of 'E d 2h' or 'E d h2', in any order",
        ),
        ({"a": "gate_up: 2E h d"}, "has the axes '2E h d', but it must have those of"),
        ({"a": "down: d E*h"}, "has the axes 'd E*h', but it must have those of 'E h d', in any order"),
    ],
)
def test_a_layout_that_cannot_be_read(layouts, message):
    with pytest.raises(ValueError) as raised:
        places(layouts, 3)
    assert message in str(raised.value)
