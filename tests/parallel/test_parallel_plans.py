"""Launch plans of a layer over ranks with room for its rows: each replay calls the collectives again."""

import pytest
import torch
from over_simt import SimtTensorBridge, SimtTensors
from test_parallel import Case, outcome
from test_parallel_capacity import EVERY_CASE, FOUR, MIXED, least_room, make, same_bits
from test_parallel_copies import Told

from moeblaze_ref.nn import clear_launch_plans, launch_plan_counts, torch_node, use_launch_plans, without_launch_plans
from moeblaze_ref.parallel import threads
from moeblaze_ref.parallel.trip import Capacity


@pytest.fixture(autouse=True)
def device(monkeypatch):
    """The pretended device that layers run on."""
    executor = SimtTensors()
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: SimtTensorBridge(executor))
    clear_launch_plans()
    before = use_launch_plans()
    yield executor
    use_launch_plans(before)
    clear_launch_plans()


def steps(ranks, case, capacity, count):
    """What the layer computes on this rank in each of so many steps, and whether it had too little room."""
    layer, inputs = make(ranks, case, capacity)
    found = []
    for _ in range(count):
        layer.overflowed.zero_()
        found.append((outcome(layer, *inputs), bool(layer.overflowed)))
    return found


def by_stages(size, case, room):
    """One step of each rank, without plans."""
    before = use_launch_plans(False)
    found = [each for (each,) in threads.run(steps, size, case, room, 1)]
    use_launch_plans(before)
    return found


@pytest.mark.parametrize(
    ("size", "case"), EVERY_CASE, ids=lambda value: value.name if isinstance(value, Case) else None
)
def test_a_replay_gives_the_bits_of_the_stages(size, case):
    room = least_room(size, case)
    clear_launch_plans()
    found = threads.run(steps, size, case, room, 4)
    calls = 2 if any(case.tokens) else 1  # the backward of no token at all adds to a number: it has no plan
    assert launch_plan_counts().replayed == 2 * calls * size
    for mine, (expected, overflowed) in zip(found, by_stages(size, case, room), strict=True):
        assert not overflowed
        assert all(same_bits(each, expected) and not over for each, over in mine)


@pytest.mark.parametrize("lacks", ["rows", "choices"])
def test_a_replay_notes_that_there_was_too_little_room(lacks):
    least = least_room(4, FOUR)
    room = least._replace(**{lacks: getattr(least, lacks) - 1})
    found = threads.run(steps, 4, FOUR, room, 3)
    assert launch_plan_counts().replayed == 8
    for mine, (expected, overflowed) in zip(found, by_stages(4, FOUR, room), strict=True):
        assert [over for _, over in mine] == [overflowed] * 3
        for each, _ in mine:
            assert all(torch.equal(each[name].nan_to_num(7), one.nan_to_num(7)) for name, one in expected.items())
    assert any(over for mine in found for _, over in mine)


def changed_room(ranks, case, rooms):
    """Steps of one layer with each of the rooms, three each."""
    layer, inputs = make(ranks, case, rooms[0])
    found = []
    for room in rooms:
        layer.capacity = room
        found += [outcome(layer, *inputs) for _ in range(3)]
    return found


def test_another_room_has_a_plan_of_its_own():
    least = least_room(2, MIXED)
    clear_launch_plans()
    rooms = least, Capacity(least.rows + 3, least.choices + 5), None, least
    found = threads.run(changed_room, 2, MIXED, rooms)
    assert launch_plan_counts().replayed == 2 * 2 * (1 + 1 + 0 + 3)  # without room no call has a plan
    for mine, (expected, _) in zip(found, by_stages(2, MIXED, least), strict=True):
        assert all(same_bits(each, expected) for each in mine)


def two_layers(ranks, case, room):
    """Three steps of each of two layers, in turn."""
    layers = [make(ranks, case, room) for _ in range(2)]
    with torch.no_grad():
        layers[1][0].w3 *= 2
    return [[outcome(layer, *inputs)["out"] for layer, inputs in layers] for _ in range(3)]


def test_each_layer_has_its_own_plan():
    room = least_room(2, MIXED)
    clear_launch_plans()
    for of_steps in threads.run(two_layers, 2, MIXED, room):
        assert all(torch.equal(second, 2 * first) for first, second in of_steps)
    assert launch_plan_counts().replayed == 2 * 2 * 2


def told(ranks, case, room):
    """What this rank sends in each of four steps."""
    ranks = Told(ranks._room, ranks.rank)
    layer, inputs = make(ranks, case, room)
    found = []
    for _ in range(4):
        ranks.noted = []
        outcome(layer, *inputs)
        found.append(ranks.noted)
    return found


def test_a_replay_calls_what_a_group_makes_of_an_exchange():
    for first, *others in threads.run(told, 2, MIXED, least_room(2, MIXED)):
        assert len(first) == 9 and all(other == first for other in others)
    assert launch_plan_counts().replayed == 8


def with_other_tokens(ranks, case, room):
    """Replays on other tokens and weights, beside the stages: whether all bits are the same."""
    layer, inputs = make(ranks, case, room)
    for _ in range(2):
        outcome(layer, *inputs)
    same = []
    for factor in (0.5, -2.0):
        x, weight, routing = inputs
        other = x.flip(0) * factor, weight * factor, routing
        found = outcome(layer, *other)
        with without_launch_plans():
            same.append(same_bits(found, outcome(layer, *other)))
    return same


def test_the_rows_that_travel_may_be_others_in_each_step():
    rows = max(MIXED.tokens)
    room = Capacity(rows, rows * 2 * MIXED.k)
    clear_launch_plans()
    assert threads.run(with_other_tokens, 2, MIXED, room) == [[True, True]] * 2
    assert launch_plan_counts().replayed == 8
