"""Room for rows that is known beforehand: the bits of exact numbers, no wait of the host, and a repeated step."""

import sys
import threading

import numpy as np
import processes
import pytest
import torch
from over_tensors import BridgeOverTensors
from test_parallel import CASES, Case, outcome
from test_parallel_copies import CASES as COPIES_CASES
from torch import nn

from moeblaze_ref.backends.raw_cuda.dispatch import build_open
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.nn import torch_node
from moeblaze_ref.parallel import layer as layer_module
from moeblaze_ref.parallel import local, threads
from moeblaze_ref.parallel.capacity import capacity_of
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.overflow import repeat_on_overflow
from moeblaze_ref.parallel.ranks import RankGroup, Ranks
from moeblaze_ref.parallel.trip import Capacity, Trip
from moeblaze_ref.placement.copies import choose
from moeblaze_ref.placement.maps import Copies, Placement

EVERY_CASE = [(size, case) for cases in (CASES, COPIES_CASES) for size, of_size in cases.items() for case in of_size]


def make(ranks, case, capacity):
    """The layer of a case on this rank, and its part of the inputs."""
    layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=ranks, capacity=capacity, **case.sizes)
    layer.take(case.whole())
    return layer, [None if each is None else each.split(case.tokens)[ranks.rank] for each in case.inputs()]


def on_a_rank(ranks, case, capacity):
    """What the layer computes on this rank, and whether it had too little room."""
    layer, inputs = make(ranks, case, capacity)
    return outcome(layer, *inputs), bool(layer.overflowed)


def least_room(size, case):
    """The smallest capacity with which the case does not overflow."""
    seen = []
    planned = Trip.planned

    def noted(*arguments):
        trip = planned(*arguments)
        seen.append(trip.counts)
        return trip

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trip, "planned", noted)
        threads.run(on_a_rank, size, case, None)
    assert len(seen) == size
    return Capacity(max(1, *(rows for each in seen for rows in each.sent)), max(1, *(each.choices for each in seen)))


def same_bits(found, expected):
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("extra", [0, 5], ids=["the least room", "more room"])
@pytest.mark.parametrize(
    ("size", "case"), EVERY_CASE, ids=lambda value: value.name if isinstance(value, Case) else None
)
def test_with_room_for_all_rows_the_bits_are_those_of_exact_numbers(size, case, extra):
    least = least_room(size, case)
    room = Capacity(least.rows + extra, least.choices + extra)
    exact = threads.run(on_a_rank, size, case, None)
    for (found, overflowed), (expected, _) in zip(threads.run(on_a_rank, size, case, room), exact, strict=True):
        assert not overflowed and same_bits(found, expected)


def on_a_process(case, capacity):
    return on_a_rank(Ranks(), case, capacity)


def test_processes_get_what_threads_get():
    """Over gloo, whose all_to_all takes the same number of rows from all."""
    room = least_room(2, MIXED)
    of_threads = threads.run(on_a_rank, 2, MIXED, room)
    for (found, overflowed), (expected, _) in zip(local.run(on_a_process, 2, MIXED, room), of_threads, strict=True):
        assert not overflowed and same_bits(found, expected)


MIXED = COPIES_CASES[2][0]
FOUR = next(case for case in CASES[4] if case.name == "four ranks")


@pytest.mark.parametrize("lacks", ["rows", "choices"])
def test_with_one_place_too_few_the_rows_that_lack_are_nan_and_noted(lacks):
    least = least_room(4, FOUR)
    room = least._replace(**{lacks: getattr(least, lacks) - 1})
    found = threads.run(on_a_rank, 4, FOUR, room)
    assert sum(overflowed for _, overflowed in found) == 1
    wrong = [bool(each["out"].isnan().any()) for each, _ in found]
    assert any(wrong)
    if lacks == "rows":  # the rank whose tokens did not go has none of its rows
        (rank,) = [rank for rank, (_, overflowed) in enumerate(found) if overflowed]
        assert found[rank][0]["out"].isnan().all() and sum(wrong) == 1
    exact = threads.run(on_a_rank, 4, FOUR, None)
    for (each, _), (expected, _), nan in zip(found, exact, wrong, strict=True):
        right = ~each["out"].isnan().any(dim=1)
        assert nan or right.all()
        assert torch.equal(each["out"][right], expected["out"][right])


@pytest.mark.parametrize("lacks", ["rows", "choices"])
def test_what_lacks_room_is_written_and_read_nowhere(monkeypatch, lacks):
    """No index leads beyond the rows, and no more choices are placed than there is room for."""
    room = least_room(4, FOUR)._replace(**{lacks: 1})
    calls = []

    def built(topk_experts, num_experts, executor, room=None):
        calls.append("built")
        assert (np.asarray(topk_experts) != EMPTY).sum() <= (topk_experts.size if room is None else room)
        return build_open(topk_experts, num_experts, executor, room)

    def back(trip, rows, right=Trip.back):
        calls.append("back")
        assert (trip._copies.token_index_map < sum(trip.counts.sent)).all()
        return right(trip, rows)

    monkeypatch.setattr(layer_module, "build_open", built)
    monkeypatch.setattr(Trip, "back", back)
    found = threads.run(on_a_rank, 4, FOUR, room)
    assert any(overflowed for _, overflowed in found)
    assert sorted(calls) == ["back"] * 12 + ["built"] * 4  # of four ranks; the output, d_x and d_gates come back


class Model(nn.Module):
    """Two layers, one after the other."""

    def __init__(self, ranks, case, capacities):
        super().__init__()
        made = [make(ranks, case, capacity) for capacity in capacities]
        self.layers = nn.ModuleList(layer for layer, _ in made)
        self.x, self.weight, _ = made[0][1]
        self.runs = 0

    def step(self):
        """Forward and backward from no gradients; the loss."""
        self.runs += 1
        self.zero_grad()
        x = self.x
        for layer in self.layers:
            x = x + layer(x).out
        loss = (x * self.weight).sum()
        loss.backward()
        return loss.detach()


def repeated(ranks, case, capacities):
    """The loss, the gradients and the number of runs of a step that may be repeated."""
    model = Model(ranks, case, capacities)
    loss = repeat_on_overflow(model, model.step)
    assert [layer.capacity for layer in model.layers] == capacities
    return {"loss": loss, **{name: each.grad for name, each in model.named_parameters()}}, model.runs


@pytest.mark.parametrize(
    ("changed", "runs"),
    [({}, 1), ({"rows": -1}, 2), ({"choices": -1}, 2)],
    ids=["room for all", "a row too few", "a choice too few"],
)
def test_a_step_that_overflows_runs_again_on_all_ranks_with_exact_numbers(changed, runs):
    least = least_room(4, FOUR)
    ample = Capacity(sum(FOUR.tokens), sum(FOUR.tokens) * FOUR.k)
    first = least._replace(**{name: getattr(least, name) + by for name, by in changed.items()})
    exact = threads.run(repeated, 4, FOUR, [None, None])
    for (found, times), (expected, once) in zip(threads.run(repeated, 4, FOUR, [first, ample]), exact, strict=True):
        assert (times, once) == (runs, 1) and same_bits(found, expected)


def repeated_twice(ranks, case, capacities):
    """The runs of a step that may be repeated, after one that overflowed and was not repeated."""
    model = Model(ranks, case, capacities)
    model.step()
    assert model.layers[0].overflowed
    model.layers[0].capacity = model.layers[1].capacity
    repeat_on_overflow(model, model.step)
    return model.runs


def test_an_overflow_before_the_step_does_not_count():
    assert threads.run(repeated_twice, 4, FOUR, [Capacity(1, 1), Capacity(99, 999)]) == [2] * 4


class OfOthers(RankGroup):
    """Ranks of which another had too little room, and that this step does not use otherwise."""

    def total(self, tensor):
        return tensor + 1

    exchange = spread = every = None


def test_an_overflow_of_other_ranks_of_the_step_repeats_it():
    def work(ranks):
        model = Model(ranks, FOUR, [Capacity(60, 300)])
        repeat_on_overflow(model, model.step)
        repeat_on_overflow(model, model.step, OfOthers())
        return model.runs

    assert threads.run(work, 4) == [3] * 4


def test_a_model_without_capacities_runs_once_and_exchanges_no_flags():
    def work(ranks):
        model = Model(ranks, FOUR, [None])
        repeat_on_overflow(model, model.step, OfOthers())
        return model.runs

    assert threads.run(work, 4) == [1] * 4


def test_a_step_that_fails_while_it_is_repeated_keeps_the_capacities():
    def work(ranks):
        model = Model(ranks, FOUR, [Capacity(1, 1)])

        def step():
            model.step()
            if model.layers[0].capacity is None:
                raise MemoryError

        with pytest.raises(MemoryError):
            repeat_on_overflow(model, step)
        return model.layers[0].capacity

    assert threads.run(work, 4) == [Capacity(1, 1)] * 4


WAITS = ("tolist", "item", "__bool__", "__int__", "__index__", "__float__", "nonzero")


@pytest.mark.parametrize("waits", [False, True], ids=["with a capacity", "without"])
@pytest.mark.parametrize("case", [FOUR, COPIES_CASES[4][0]], ids=lambda case: case.name)
def test_the_host_reads_nothing_from_the_device(monkeypatch, case, waits):
    monkeypatch.setattr(torch_node, "bridge_to", lambda device: BridgeOverTensors())
    read = []
    in_step = threading.local()

    def noting(name):
        real = getattr(torch.Tensor, name)

        def noted(*arguments, **named):
            if getattr(in_step, "now", False):
                read.append(name)
            return real(*arguments, **named)

        return noted

    def work(ranks):
        layer, inputs = make(ranks, case, None if waits else Capacity(60, 200))
        in_step.now = True
        outcome(layer, *inputs)

    for name in WAITS:  # before the ranks start: each of four threads would take another's for the real one
        monkeypatch.setattr(torch.Tensor, name, noting(name))
    threads.run(work, 4)
    assert (set(read) == {"tolist"}) if waits else not read


def test_a_layer_does_not_import_what_reads_traces():
    """Numba takes half a second, and only `capacity_of` needs it."""
    code = "import sys, moeblaze_ref.parallel.layer; print('numba' in sys.modules)"
    assert processes.run([sys.executable, "-c", code]).stdout == "False\n"


# From a trace ---------------------------------------------------------------------------------------------------------


def random_trace(tokens, layers=3, E=8, k=3):
    rng = np.random.default_rng(7)
    scores = rng.gumbel(size=(tokens, layers, E)) - np.log(np.arange(1, E + 1))  # expert 0 is the most popular
    return RoutingTrace(np.argsort(-scores, axis=2)[:, :, :k].astype(np.int16), E)


def random_placement(copies, layers=3, E=8, G=4):
    rng = np.random.default_rng(11)
    assignment = np.stack([rng.permutation(np.arange(E) % G) for _ in range(layers)]).astype(np.int32)
    placement = Placement(assignment, G)
    if not copies:
        return placement
    held = Copies.of(placement).held.copy()
    held[:, 0] = True
    return Copies(held, 2)


def counted(trace, placement, layer, tokens):
    """Rows and choices of each batch, token by token."""
    G = placement.num_gpus
    copies = placement if isinstance(placement, Copies) else Copies.of(placement)
    for first in range(0, trace.tokens - G * tokens + 1, G * tokens):
        topk = trace.topk[first : first + G * tokens, layer]
        homes = choose(topk, np.arange(len(topk)) % G, copies.held[layer], copies.num_nodes)
        rows, choices = np.zeros((G, G), int), np.zeros(G, int)
        for token, ranks in enumerate(homes):
            for rank in set(ranks.tolist()):
                rows[token % G, rank] += 1
            for rank in ranks:
                choices[rank] += 1
        yield rows.max(), choices.max()


@pytest.mark.parametrize("copies", [False, True], ids=["one each", "copies"])
def test_the_room_is_that_of_the_fullest_batch(copies):
    trace, placement = random_trace(333), random_placement(copies)
    for layer in range(3):
        rows, choices = map(max, zip(*counted(trace, placement, layer, 20), strict=True))
        assert capacity_of(trace, placement, layer, 20, margin=0) == Capacity(rows, choices)
        more = capacity_of(trace, placement, layer, 20, margin=0.1)
        assert more == Capacity(min(20, int(np.ceil(1.1 * rows))), int(np.ceil(1.1 * choices)))


def test_a_short_trace_counts_as_one_batch_that_grows():
    trace, placement = random_trace(100), random_placement(copies=False)
    ((rows, choices),) = counted(trace, placement, 1, 25)
    assert capacity_of(trace, placement, 1, 100, margin=0) == Capacity(4 * rows, 4 * choices)
    assert capacity_of(trace, placement, 1, 100, margin=1e9) == Capacity(100, 4 * 100 * 3)


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"layer": 3}, ValueError, "layer is 3, but it must be 0..2"),
        ({"tokens": 0}, ValueError, "tokens is 0, but it must be >= 1"),
        ({"margin": -0.5}, ValueError, "margin is -0.5, but it must be >= 0"),
        ({"trace": random_trace(0)}, ValueError, "tokens of the trace is 0, but it must be >= 1"),
        ({"trace": random_trace(9, layers=2)}, ValueError, "has 2 layers of 8"),
        ({"trace": random_trace(9, E=9)}, ValueError, "has 3 layers of 9"),
    ],
)
def test_what_is_no_trace_of_the_map_is_refused(changed, error, says):
    given = {"trace": random_trace(40), "placement": random_placement(copies=False), "layer": 0, "tokens": 5}
    with pytest.raises(error, match=says):
        capacity_of(**given | changed)


@pytest.mark.parametrize(
    ("capacity", "error", "says"),
    [
        (Capacity(0, 5), ValueError, "capacity.rows is 0, but it must be >= 1"),
        (Capacity(5, 0), ValueError, "capacity.choices is 0, but it must be >= 1"),
        (Capacity(2.5, 5), TypeError, "capacity.rows is 2.5"),
        (Capacity(2**31, 5), ValueError, "rows"),
        ((9, 9), TypeError, "capacity is a tuple, but it must be a Capacity"),
    ],
)
def test_a_capacity_that_is_none_is_refused(capacity, error, says):
    with pytest.raises(error, match=says):
        threads.run(on_a_rank, 4, FOUR, capacity)


def test_more_choices_than_the_rows_have_take_no_memory(monkeypatch):
    rooms = []

    def built(topk_experts, num_experts, executor, room=None):
        rooms.append(room)
        return build_open(topk_experts, num_experts, executor, room)

    monkeypatch.setattr(layer_module, "build_open", built)
    threads.run(on_a_rank, 4, FOUR, Capacity(40, 2**40))
    assert rooms == [4 * 40 * FOUR.k] * 4


def test_ranks_with_other_room_are_named():
    def work(ranks):
        make(ranks, FOUR, None if ranks.rank == 2 else Capacity(9, 9))

    with pytest.raises(ValueError, match=r"capacity\.rows is 9 on rank 0 and 0 on rank 2, but all ranks need the same"):
        threads.run(work, 4)
