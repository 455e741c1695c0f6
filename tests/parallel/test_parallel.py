"""Expert parallelism: the single-device layer's output, losses and gradients, on ranks that share its experts."""

import itertools
import os
import signal
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_to_the_end

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.parallel import threads
from moeblaze_ref.parallel.batch import BatchGating
from moeblaze_ref.parallel.copies import Holders
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.local import run
from moeblaze_ref.parallel.ranks import Ranks, progress
from moeblaze_ref.parallel.threads import ThreadRanks
from moeblaze_ref.parallel.trip import Trip
from moeblaze_ref.parallel.watch import DONE, HEARD, LEFT, LOST_AFTER, SIGNS, WORKING, Seen, Watch, verdict
from moeblaze_ref.placement.maps import Placement

BOUND = 1e-5  # of the error's norm over the norm
NARROW_BOUND = 2**-6  # bfloat16: partial sums are rounded before they travel


@dataclass(frozen=True)
class Case:
    """A layer, its map, and how many tokens each rank has."""

    name: str
    map: tuple[int, ...]  # the rank of each expert
    tokens: tuple[int, ...]  # of each rank
    k: int = 2
    d: int = 16
    h: int = 24
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    only: int | None = None  # all tokens choose experts from this one on

    @property
    def E(self) -> int:
        return len(self.map)

    @property
    def sizes(self) -> dict:
        return {"d": self.d, "h": self.h, "E": self.E, "k": self.k, "dtype": self.dtype, **self.options}

    def placement(self) -> Placement:
        """With another layer before this one."""
        rows = np.stack([np.arange(self.E) % len(self.tokens), np.array(self.map)]).astype(np.int32)
        return Placement(rows, len(self.tokens))

    def whole(self, device="cpu") -> MoELayer:
        """The layer with all experts: alike on every rank."""
        torch.manual_seed(3)
        layer = MoELayer(**self.sizes)
        with torch.no_grad():
            layer.wg *= 3
        return layer.to(device)

    def inputs(self, device="cpu") -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x (L, d), the weight of each output, and a routing to replay, of all ranks' tokens."""
        generator = torch.Generator().manual_seed(5)
        shape = (sum(self.tokens), self.d)
        x, weight = (torch.randn(*shape, generator=generator).to(self.dtype) for _ in range(2))
        routing = None
        if self.only is not None:
            order = torch.rand(shape[0], self.E - self.only, generator=generator).argsort(dim=1)
            routing = (self.only + order[:, : self.k]).int()
        return tuple(None if tensor is None else tensor.to(device) for tensor in (x, weight, routing))


SKEWED = (0, 1, 1, 1, 0, 1, 1)
CASES = {
    2: [
        *(Case(policy, SKEWED, (37, 21), 3, options={"policy": policy}) for policy in POLICIES),
        Case("ungated", SKEWED, (37, 21), options={"activation": "gelu"}),
        Case("renormalized", SKEWED, (37, 21), options={"renormalize": True}),
        Case("one expert a token", SKEWED, (37, 21), k=1),
        Case("every expert", SKEWED, (37, 21), k=7),
        Case("bfloat16", SKEWED, (37, 21), 3, dtype=torch.bfloat16),
        Case("a rank without tokens", SKEWED, (0, 33), 3),
        Case("no token at all", SKEWED, (0, 0)),
        Case("a rank without experts", (1, 1, 1, 1), (20, 9)),
        Case("no token for a rank", (0, 0, 0, 1, 1, 1), (20, 9), only=3),
    ],
    4: [
        Case("four ranks", (3, 1, 0, 0, 2, 3, 3, 1, 0), (19, 0, 40, 7), 4),
        Case("an expert each", (2, 0, 3, 1), (5, 6, 7, 8)),
        Case("one rank has all", (2, 2, 2, 2, 2), (11, 3, 0, 8), 3),
    ],
}


def outcome(layer, x, weight, routing):
    """The output, the losses and every gradient, by name."""
    x = x.clone().requires_grad_()
    result = layer(x, routing)
    loss = (result.out.float() * weight.float()).sum() + 0.7 * result.load_balancing_loss + 0.3 * result.router_z_loss
    leaves = {"x": x, **dict(layer.named_parameters())}
    gradients = torch.autograd.grad(loss, leaves.values())
    return {
        "out": result.out.detach(),
        "load_balancing_loss": result.load_balancing_loss.detach(),
        "router_z_loss": result.router_z_loss.detach(),
        "topk_experts": result.topk_experts,
        **{f"d_{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)},
    }


def on_a_rank(cases, device="cpu"):
    """The outcome of every case on this process's tokens."""
    return {case.name: one_case(Ranks(), case, device) for case in cases}


def one_case(ranks, case, device="cpu"):
    """The outcome of a case on this rank's tokens, and its experts."""
    torch.manual_seed(100 + ranks.rank)  # the router is rank 0's all the same
    layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=ranks, device=device, **case.sizes)
    layer.take(case.whole(device))
    mine = [None if tensor is None else tensor.split(case.tokens)[ranks.rank] for tensor in case.inputs(device)]
    return {name: tensor.cpu() for name, tensor in outcome(layer, *mine).items()} | {"experts": layer.experts}


@pytest.fixture(scope="module", params=CASES, ids=lambda size: f"{size} ranks")
def outcomes(request):
    """Of each case, by name: the case and every rank's outcome."""
    found = run(on_a_rank, request.param, CASES[request.param])
    return {case.name: (case, [each[case.name] for each in found]) for case in CASES[request.param]}


def part_of(case, rank, experts, what, whole):
    """This rank's part of what the single-device layer gives: of its tokens, of its experts, or all."""
    if what in ("out", "d_x", "topk_experts"):
        return whole.split(case.tokens)[rank]
    return whole[experts] if what in ("d_w1", "d_w2", "d_w3") else whole


def error(found, expected):
    """The norm of the difference over the norm; of what is zero or empty, the norm alone."""
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / (expected.norm() or 1))


def assert_as_on_one_device(case, found, device="cpu"):
    """Every rank's part of a case is that of the single-device layer on all tokens."""
    expected = {name: tensor.cpu() for name, tensor in outcome(case.whole(device), *case.inputs(device)).items()}
    bound = BOUND if case.dtype == torch.float32 else NARROW_BOUND
    for rank, mine in enumerate(found):
        for what, whole in expected.items():
            part = part_of(case, rank, mine["experts"], what, whole)
            assert mine[what].shape == part.shape and mine[what].dtype == part.dtype, (case.name, rank, what)
            same = error(mine[what], part) < bound if part.is_floating_point() else torch.equal(mine[what], part)
            assert same, (case.name, rank, what)


def test_all_is_as_on_one_device(outcomes):
    for case, found in outcomes.values():
        assert_as_on_one_device(case, found)


# What must be caught


def instead(of, name, fault):
    """A fault: ``fault(right, *arguments)`` in the place of a function."""
    return of, name, lambda right: lambda *arguments: fault(right, *arguments)


FAULTS = {
    "rows of the neighbours": instead(Trip, "there", lambda right, self, rows: right(self, rows.roll(1, 0))),
    "gates of the neighbours": instead(Holders, "places", lambda right, *it: neighbours_gates(right(*it))),
    "nothing comes back": instead(Trip, "back", lambda right, self, rows: right(self, rows).zero_()),
    "experts of the neighbours": instead(ExpertParallelMoE, "take", lambda right, it, whole: right(it, rolled(whole))),
    "nothing is summed": instead(ThreadRanks, "total", lambda right, self, tensor: tensor),
    "the router's gradient is a mean": instead(
        ThreadRanks, "total", lambda right, self, tensor: right(self, tensor) / (2 if tensor.ndim == 2 else 1)
    ),
    "shares of own tokens": instead(BatchGating, "_count", lambda right, *it: count_own(right, *it)),
    "losses of own tokens": instead(BatchGating, "_count", lambda right, *it: count_too_much(right, *it)),
}


def neighbours_gates(places):
    """Each row's gates by those of the one before."""
    return places._replace(gates=np.roll(places.gates, 1, axis=0))


@torch.no_grad()
def rolled(whole):
    """The layer, its experts one further."""
    for weight in whole.weights[1:]:
        weight.copy_(weight.roll(1, 0))
    return whole


def count_own(right, batch, topk_experts, num_experts):
    right(batch, topk_experts, num_experts)
    counts = np.bincount(topk_experts.ravel(), minlength=num_experts)
    batch.shares = torch.from_numpy(counts / topk_experts.size).float()


def count_too_much(right, batch, *chosen):
    right(batch, *chosen)
    batch.part = torch.ones(())


def with_fault(fault, case, size):
    """Every rank's outcome of the case under a fault."""
    of, name, planted = fault
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of, name, planted(getattr(of, name)))
        return threads.run(one_case, size, case)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault):
    case = Case("faults", SKEWED, (37, 21), 3)
    assert_as_on_one_device(case, threads.run(one_case, 2, case))
    found = with_fault(FAULTS[fault], case, 2)
    with pytest.raises(AssertionError):
        assert_as_on_one_device(case, found)


# Argument checks


SIZES = {"d": 8, "h": 8, "E": 4, "k": 2}


def refused(ranks, error=ValueError, **wrong):
    """What this rank says of a wrong layer."""
    return str(pytest.raises(error, ExpertParallelMoE, ranks=ranks, **(SIZES | wrong)).value)


def refusals(ranks):
    """What is said of wrong maps and layers, on a group of one."""
    one, two = Placement(np.zeros((2, 4), np.int32), 1, "m"), Placement(np.arange(4, dtype=np.int32)[None] % 2, 2)
    return (
        refused(ranks, placement=two),
        refused(ranks, placement=one, E=6),
        refused(ranks, placement=one, layer=2),
        refused(ranks, TypeError, placement=[[0, 1, 2, 3]]),
        refused(ranks, placement=one, policy="papre"),
    )


def test_wrong_maps_and_layers_are_refused():
    ranks, experts, layer, kind, policy = threads.run(refusals, 1)[0]
    assert ranks == "the map is for 2 GPUs, but the group has 1 ranks"
    assert experts == "the map is for 2 layers of 4 experts, but the model has 2 layers of 6"
    assert layer == "layer is 2, but it must be 0..1"
    assert kind == "placement is a list, but it must be a Placement or a Copies"
    assert policy.startswith("unknown policy 'papre'. Did you mean 'paper'?")


def refusals_of_unlike_maps(ranks):
    """What every rank says where a rank has another map, another layer of it, or a map of more experts."""
    rank, rows = ranks.rank, np.arange(16, dtype=np.int32).reshape(2, 8) % 3
    return (
        refused(ranks, placement=Placement(rows if rank < 2 else 2 - rows, 3), E=8),
        refused(ranks, placement=Placement(rows, 3), layer=int(rank == 1), E=8),
        refused(ranks, placement=Placement(rows[:, : 8 - (rank == 2)].copy(), 3), E=8 - (rank == 2)),
    )


def test_ranks_with_unlike_maps_are_refused():
    for map, layer, experts in threads.run(refusals_of_unlike_maps, 3):
        assert map.startswith("the placement of rank 2 is not that of rank 0, but all ranks need the same map")
        assert layer.startswith("the placement of rank 1 is not")
        assert experts == "E is 8 on rank 0 and 7 on rank 2, but all ranks need the same layer"


UNLIKE = {  # what rank 1 says otherwise: (what, what all say)
    "d": (16, "d is 8 on rank 0 and 16 on rank 1"),
    "h": (16, "h is 8 on rank 0 and 16 on rank 1"),
    "k": (3, "k is 2 on rank 0 and 3 on rank 1"),
    "activation": ("gelu", "activation is swiglu on rank 0 and gelu on rank 1"),
    "renormalize": (True, "renormalize is False on rank 0 and True on rank 1"),
    "dtype": (torch.bfloat16, "dtype is torch.float32 on rank 0 and torch.bfloat16 on rank 1"),
}


def refusals_of_unlike_layers(ranks):
    alike = Placement(np.arange(4, dtype=np.int32)[None] % 2, 2)
    return [
        refused(ranks, placement=alike, **({name: value} if ranks.rank else {})) for name, (value, _) in UNLIKE.items()
    ]


def test_ranks_with_unlike_layers_are_refused():
    for said in threads.run(refusals_of_unlike_layers, 2):
        assert said == [f"{differs}, but all ranks need the same layer" for _, differs in UNLIKE.values()]


# What rank 0 makes for all


def waited_for_rank_0():
    """What came from rank 0, what it could not make, and how many collectives a watch has seen begun meanwhile."""
    ranks, before = Ranks(), progress()
    made = ranks.from_first(lambda: {"by": ranks.rank})
    error = pytest.raises(OSError, ranks.from_first, lambda: open(f"/nowhere/{ranks.rank}")).value
    return made, error.filename, progress() - before


def test_all_get_what_rank_0_makes_and_nobody_is_behind():
    assert run(waited_for_rank_0, 2) == [({"by": 0}, "/nowhere/0", 0)] * 2


def rank_0_dies_at_work():
    """Rank 0 dies while the other waits for what it makes."""
    with Watch(WATCHED):
        Ranks().from_first(killed)


def test_a_rank_0_that_dies_at_work_is_named():
    _, (status, output) = run_to_the_end(rank_0_dies_at_work, 2)
    assert status != 0 and "rank 0 has died" in output


def test_without_a_group_the_remedy_is_said():
    with pytest.raises(RuntimeError, match="start by torchrun, and call init_process_group"):
        Ranks()


# A rank that is lost

WATCHED = 6.0  # seconds of the time-out
SAID = f"{LOST_AFTER * WATCHED:g} s"


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def hung():
    time.sleep(3600)


def failed():
    raise MemoryError("no room for x")


def step_until(rank, exchanges, end):
    """A training step under watch, in which one rank ends as ``end`` does, in the midst of it."""
    case = CASES[2][1]
    ranks = Ranks()
    layer = ExpertParallelMoE(placement=Placement(np.zeros((1, 7), np.int32), ranks.size), ranks=ranks, **case.sizes)
    outcome(layer, *case.inputs())  # compiles, which may take longer than a rank is waited for
    with Watch(WATCHED):
        if dist.get_rank() == rank:
            ranks.exchange = ending(ranks.exchange, exchanges, end)
        outcome(layer, *case.inputs())


def ending(exchange, after, end):
    """The exchange, and in its place the end once so many have been."""
    calls = itertools.count()
    return lambda *arguments: end() if next(calls) == after else exchange(*arguments)


@pytest.mark.parametrize(
    ("size", "lost", "after", "end", "says"),
    [
        (3, 1, 2, killed, f"rank 1 has died: no sign of it for {SAID}"),
        (2, 1, 5, killed, f"rank 1 has died: no sign of it for {SAID}"),
        (2, 0, 2, killed, "rank 0 has died"),  # and with it the store
        (2, 1, 5, hung, f"rank 1 hangs: for {SAID} it has not come to collective"),
        (2, 1, 2, failed, "rank 1 has failed: MemoryError: no room for x"),
    ],
    ids=["killed in the forward", "killed in the backward", "killed with the store", "hung", "failed"],
)
def test_a_lost_rank_ends_all_by_name(size, lost, after, end, says):
    ends = run_to_the_end(step_until, size, lost, after, end)
    assert all(status != 0 for status, _ in ends)
    for rank, (_, output) in enumerate(ends):
        if rank != lost:
            assert says in output, (rank, output)


def hang_at_the_end():
    """Rank 1 hangs when all have done what they do together."""
    ranks = Ranks()
    with Watch(WATCHED):
        ranks.total(torch.ones(1))
        if ranks.rank == 1:
            hung()


def test_a_rank_that_hangs_after_the_last_collective_ends_all_by_name():
    for status, output in run_to_the_end(hang_at_the_end, 2):
        assert status != 0 and f"rank 1 hangs: for {SAID} it has not come to the end" in output


class SilentStore:
    """A store whose host is stopped."""

    def set(self, *_):
        hung()

    check = get = set


def wait_for_the_store():
    """Rank 1 waits for a store that does not answer, in its work too."""
    with Watch(WATCHED) as watch:
        if dist.get_rank() == 1:
            watch._store = SilentStore()
            hung()


def test_a_store_that_does_not_answer_ends_who_waits_for_it():
    (first, of_first), (second, of_second) = run_to_the_end(wait_for_the_store, 2)
    assert first != 0 and second != 0
    assert "rank 1 has died" in of_first and f"its store does not answer (for {SAID})" in of_second


def test_the_watch_lets_all_go_as_soon_as_they_are_done():
    assert [status for status, _ in run_to_the_end(watched_twice, 2)] == [0, 0]
    assert run(watched_twice, 2) == [[0, 1], [1, 0]]


def watched_twice():
    """What came from the other rank, under two watches."""
    ranks, came = Ranks(), []
    for turn in range(2):
        with Watch(SIGNS * 86_400.0):  # signs are a day apart
            mine = torch.tensor([(ranks.rank + turn) % 2] * 2)
            came.append(int(ranks.exchange(mine, [1, 1], [1, 1])[ranks.rank]))
    return came


def seen(*signs):
    names = "progress", "state", "beat_at", "progress_at"
    return [Seen(**dict(zip(names, sign, strict=True))) for sign in signs]


@pytest.mark.parametrize(
    ("signs", "expected"),
    [
        ([(5, "working", 99, 0), (5, "working", 99, 0)], None),  # both work for long
        ([(5, "working", 99, 0), (4, "working", 99, 95)], None),  # behind, but not for long
        ([(5, "working", 99, 98), (4, "working", 99, 0)], None),  # its work was long, but others wait since 98 alone
        ([(5, "working", 99, 0), (4, "working", 99, 80)], "rank 1 hangs: for 7 s it has not come to collective 5"),
        ([(5, "working", 99, 0), (4, "working", 99, 90), (3, "working", 99, 90)], "rank 2 hangs"),  # rank 1 may wait
        ([(5, "working", 99, 0), (4, "working", 95, 80)], None),  # it may have died, but a sign may come yet
        ([(4, "working", 99, 80), (5, "working", 95, 95)], None),  # and so may who is ahead
        ([(5, "working", 80, 80), (5, "working", 99, 0)], "rank 0 has died: no sign of it for 7 s"),
        ([(5, "done", 80, 80), (5, "done", 99, 99)], None),  # who is done gives no more signs
        ([(5, "done", 99, 80), (5, "working", 99, 0)], "rank 1 hangs: for 7 s it has not come to the end"),
        ([(5, "done", 99, 95), (5, "working", 99, 0)], None),  # the others are done, but not for long
        ([(4, "working", 80, 80), (5, "ValueError: x", 99, 99)], "rank 1 has failed: ValueError: x"),
    ],
)
def test_the_verdict(signs, expected):
    found = verdict(seen(*signs), 100.0, 10.0)
    assert found is None if expected is None else found.startswith(expected)


def test_who_is_done_is_beyond_every_collective():
    rank = Seen(0.0, 0.0)
    rank.update(3.0, 1, 5, WORKING)
    rank.update(4.0, 2, 5, WORKING)
    assert (rank.beat_at, rank.progress_at, rank.reached) == (4.0, 3.0, 5)
    rank.update(6.0, 3, 5, DONE)
    rank.update(7.0, 4, 5, DONE)
    assert (rank.progress_at, rank.reached) == (6.0, float("inf"))


GOES_ON = {"working": (1, WORKING), "ahead": (2, WORKING), "done": (1, DONE)}


def watched_on_a_clock(phases, others, dies, timeout):
    """Simulated: what is found when rank 0 comes no further from 0 s on, and the second at which all have ended.

    Each rank gives a sign and looks at the others' every pause, in a phase of its own; ``others`` says what they go on
    to.
    """
    pause, signs, found, ends = timeout / SIGNS, {}, None, {}
    seen = [[Seen(-timeout, -timeout) for _ in phases] for _ in phases]
    looks = sorted((pause * (n + phase), rank) for rank, phase in enumerate(phases) for n in range(-SIGNS, 2 * SIGNS))
    for beat, (now, rank) in enumerate(looks):
        if now < 0 or rank == 0:
            signs[rank] = signs[0] if dies and now >= 0 else (beat, *GOES_ON["working"])
        else:
            signs[rank] = (beat, *GOES_ON[others])
        for number, sign in signs.items():
            seen[rank][number].update(now, *sign)
        if rank > 0:
            found = found or verdict(seen[rank], now, timeout)
            if found:
                ends.setdefault(rank, now + (HEARD + LEFT) * pause)
    return found, max(ends.values(), default=None)


@pytest.mark.parametrize("phases", [(0, 0.9, 0.5), (0.9, 0, 0.1), (0.99, 0.98, 0.97), (0, 0.01, 0.99)])
@pytest.mark.parametrize(
    ("others", "dies", "says"),
    [
        ("working", True, "rank 0 has died"),
        ("ahead", True, "rank 0 has died"),
        ("done", True, "rank 0 has died"),
        ("ahead", False, "rank 0 hangs"),
        ("done", False, "rank 0 hangs"),
    ],
)
def test_all_have_ended_within_the_time_out(phases, others, dies, says):
    found, end = watched_on_a_clock(phases, others, dies, timeout=16.0)
    assert found.startswith(says) and 0.5 * 16 < end <= 16


def test_long_work_of_all_is_no_hang():
    assert watched_on_a_clock((0, 0.5), "working", dies=False, timeout=16.0) == (None, None)


@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_wrong_time_out_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout is .*, but it must be"):
        Watch(timeout)
