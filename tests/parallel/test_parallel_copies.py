"""Experts with copies on several ranks: the single-device layer's results, and the same bits on every holder."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_parallel import Case, assert_as_on_one_device, error, instead, on_a_rank, one_case, with_fault

from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.parallel import local, threads
from moeblaze_ref.parallel.copies import Holders, SharedExperts
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.threads import ThreadRanks
from moeblaze_ref.placement.maps import Copies

WITHOUT_BOUND = 1e-6  # of gradients with copies, relative to those without
WEIGHTS = ("d_w1", "d_w2", "d_w3")


@dataclass(frozen=True)
class CopiesCase(Case):
    """A layer whose ``map`` has the ranks of each expert."""

    map: tuple[tuple[int, ...], ...]
    nodes: int = 1

    def placement(self) -> Copies:
        """With another layer before this one, in which every expert is everywhere."""
        held = np.ones((2, self.E, len(self.tokens)), bool)
        held[1] = [np.isin(np.arange(len(self.tokens)), ranks) for ranks in self.map]
        return Copies(held, self.nodes)

    def without_copies(self) -> Case:
        """The same layer, with the first copy of each expert alone."""
        return Case(
            self.name, tuple(ranks[0] for ranks in self.map), self.tokens, self.k, options=self.options, only=self.only
        )


MIXED = ((0,), (0, 1), (1,), (1,), (0, 1), (0,), (1,))
OF_FOUR = ((0, 1, 2, 3), (0,), (3, 1), (2,), (2, 3), (0, 2), (1,), (0, 3), (1, 2, 3))
CASES = {
    2: [
        *(CopiesCase(policy, MIXED, (37, 21), 3, options={"policy": policy}) for policy in POLICIES),
        CopiesCase("ungated", MIXED, (37, 21), options={"activation": "gelu", "renormalize": True}),
        CopiesCase("every expert of a token", MIXED, (37, 21), k=7),
        CopiesCase("every copy everywhere", ((0, 1),) * 5, (20, 9)),
        CopiesCase("all to one expert with copies", ((0,), (1,), (0, 1)), (20, 9), k=1, only=2),
        CopiesCase("bfloat16", MIXED, (37, 21), 3, dtype=torch.bfloat16),
        CopiesCase("a rank without tokens", MIXED, (0, 33), 3),
        CopiesCase("no token at all", MIXED, (0, 0)),
        CopiesCase("no copies after all", ((0,), (1,), (1,), (0,)), (20, 9)),
    ],
    4: [
        CopiesCase("four ranks", OF_FOUR, (19, 0, 40, 7), 4),
        CopiesCase("two nodes", OF_FOUR, (19, 5, 40, 7), 4, nodes=2),
        CopiesCase("a rank of copies alone", ((0, 3), (1, 3), (2,), (1, 3), (0,)), (5, 6, 7, 8), 3),
        CopiesCase("a rank without experts", ((0, 2), (3,), (0, 3), (2,)), (5, 6, 7, 8)),
        CopiesCase("all to one expert on three", ((0,), (1,), (2,), (3, 1, 2)), (9, 0, 14, 6), k=1, only=3, nodes=2),
    ],
}
EVERY_CASE = [(size, case) for size, cases in CASES.items() for case in cases]


# Outputs and gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "case"), EVERY_CASE, ids=lambda it: getattr(it, "name", it))
def test_all_is_as_on_one_device(size, case):
    found = threads.run(one_case, size, case)
    assert_as_on_one_device(case, found)
    assert_holders_have_the_same_bits(found)


@pytest.mark.parametrize(("size", "which"), [(2, [0, 2, 6, 10]), (4, [0, 1, 2])])
def test_processes_have_the_bits_of_threads(size, which):
    """Without sums over ranks, in which gloo may have another order: the losses and the router's gradient."""
    cases = [CASES[size][number] for number in which]
    found = local.run(on_a_rank, size, cases)
    for case in cases:
        of_processes = [each[case.name] for each in found]
        assert_as_on_one_device(case, of_processes)
        assert_holders_have_the_same_bits(of_processes)
        for mine, of_thread in zip(of_processes, threads.run(one_case, size, case), strict=True):
            for what in ("out", *WEIGHTS):
                assert torch.equal(mine[what], of_thread[what]), (case.name, what)


def assert_holders_have_the_same_bits(found):
    """Every copy of an expert has one gradient."""
    first = {}
    for mine in found:
        for what in mine.keys() & set(WEIGHTS):
            for expert, gradient in zip(mine["experts"], mine[what], strict=True):
                assert torch.equal(gradient, first.setdefault((what, expert), gradient)), (what, expert)


EXACT = [(size, case) for size, case in EVERY_CASE if case.dtype == torch.float32]


@pytest.mark.parametrize(("size", "case"), EXACT, ids=lambda it: getattr(it, "name", it))
def test_copies_change_nothing(size, case):
    without = threads.run(one_case, size, case.without_copies())
    for mine, same in zip(threads.run(one_case, size, case), without, strict=True):
        for what in mine.keys() - {"experts", "topk_experts", *WEIGHTS}:
            assert error(mine[what], same[what]) < WITHOUT_BOUND, what
        for what in mine.keys() & set(WEIGHTS):
            once = {expert: each[what][place] for each in without for place, expert in enumerate(each["experts"])}
            for expert, gradient in zip(mine["experts"], mine[what], strict=True):
                assert error(gradient, once[expert]) < WITHOUT_BOUND, (what, expert)


SMALL = np.array([[1, 1, 1], [0, 1, 0], [0, 1, 1]], bool)  # (E, G): rank 0 has expert 0, rank 1 all


def over_holders(ranks, call, values, dtype):
    """What a call writes over the rows of this rank's experts, each of which is the rank's value."""
    rows = torch.full((int(SMALL[:, ranks.rank].sum()), 1, 2), values[ranks.rank], dtype=dtype)
    written = getattr(SharedExperts(ranks, SMALL), call)(rows)
    assert written is rows
    return written[:, 0, 0].tolist()


def test_holders_sum_in_the_order_of_ranks():
    """The values are such that another order, or sums in float16, give other numbers."""
    found = threads.run(over_holders, 3, "sum", (1e8, -1e8, 1.0), torch.float32)
    assert found == [[1.0], [1.0, -1e8, -1e8], [1.0, -1e8]]
    narrow = threads.run(over_holders, 3, "sum", (60000.0, 30000.0, -60000.0), torch.float16)
    assert narrow == [[30000.0], [30000.0, 30000.0, -30000.0], [30000.0, -30000.0]]


def test_holders_begin_with_the_first():
    assert threads.run(over_holders, 3, "spread", (5.0, 6.0, 7.0), torch.float32) == [
        [5.0],
        [5.0, 6.0, 6.0],
        [5.0, 6.0],
    ]


# What travels -------------------------------------------------------------------------------------------------------


class Told(ThreadRanks):
    """Ranks that note the rows of each exchange."""

    def exchange(self, rows, sent, received):
        """Note how many rows go to each rank, and their shape."""
        self.noted = [*getattr(self, "noted", []), (list(sent), tuple(rows.shape[1:]))]
        return super().exchange(rows, sent, received)


def exchanged(ranks, case):
    """What this rank sends in a forward and a backward."""
    ranks = Told(ranks._room, ranks.rank)
    one_case(ranks, case)
    return ranks.noted


def test_only_experts_with_copies_travel():
    case = CASES[4][0]
    of_an_expert = {(case.d, case.h), (case.h, case.d)}
    with_copies = threads.run(exchanged, 4, case)
    for rank, noted in enumerate(with_copies):
        shared = [sum(rank in on and other in on and len(on) > 1 for on in OF_FOUR) for other in range(4)]
        rows = [sent for sent, shape in noted if shape in of_an_expert]
        assert rows == [shared] * 6  # three weights at the start, three gradients
    for noted in threads.run(exchanged, 4, case.without_copies()):
        assert not [sent for sent, shape in noted if shape in of_an_expert]


def weights_at_the_start(ranks, case):
    """This rank's experts and weights, with nothing taken from a whole layer."""
    torch.manual_seed(100 + ranks.rank)
    layer = ExpertParallelMoE(placement=case.placement(), layer=1, ranks=ranks, **case.sizes)
    own = torch.manual_seed(100 + ranks.rank) and torch.randn(case.d, case.E) * case.d**-0.5
    return {"experts": layer.experts, "is own": torch.equal(own, layer.wg)} | {
        f"d_{name}": getattr(layer, name).detach().clone() for name in ("w1", "w2", "w3")
    }


def test_copies_start_alike():
    found = threads.run(weights_at_the_start, 4, CASES[4][0])
    assert [each["is own"] for each in found] == [True, False, False, False]
    assert_holders_have_the_same_bits(found)
    assert all(len(mine["d_w1"].flatten(1).unique(dim=0)) == len(mine["experts"]) for mine in found)


# What must be caught --------------------------------------------------------------------------------------------------


FAULTS = {
    "gradients of copies are not summed": instead(SharedExperts, "sum", lambda right, self, rows: rows),
    "gradients of copies are means": instead(SharedExperts, "sum", lambda right, self, rows: right(self, rows) / 2),
    "experts of the neighbours": instead(Holders, "places", lambda right, *it: rolled(right(*it))),
    "no copy is filled but the first": instead(
        ExpertParallelMoE, "take", lambda right, self, whole: take_the_first(right, self, whole)
    ),
}


def rolled(places):
    """Each place by the next one; those that are empty as they are."""
    here = places.here
    return places._replace(here=np.where(here == EMPTY, EMPTY, (here + 1) % (here.max() + 1)).astype(here.dtype))


def take_the_first(right, layer, whole):
    right(layer, whole)
    with torch.no_grad():
        for place, expert in enumerate(layer.experts):
            if layer.holders.held[expert].int().argmax() != layer.ranks.rank:
                layer.w3[place].zero_()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_caught(fault):
    case = CASES[2][2]
    found = with_fault(FAULTS[fault], case, 2)
    with pytest.raises(AssertionError):
        assert_as_on_one_device(case, found)


def test_ranks_with_unlike_copies_are_refused():
    def refused(ranks, unlike):
        case = CASES[4][1]
        if ranks.rank == 2:
            case = replace(case, **unlike)
        with pytest.raises(ValueError) as caught:
            ExpertParallelMoE(placement=case.placement(), layer=1, ranks=ranks, **case.sizes)
        return str(caught.value)

    for unlike in ({"nodes": 1}, {"map": (*OF_FOUR[:-1], (1, 2))}):
        for said in threads.run(refused, 4, unlike):
            assert said.startswith("the placement of rank 2 is not that of rank 0, but all ranks need the same map")


def test_a_map_for_other_ranks_is_refused():
    def refused(ranks):
        with pytest.raises(ValueError) as caught:
            ExpertParallelMoE(8, 8, 4, 2, Copies(np.ones((1, 4, 3), bool)), ranks=ranks)
        return str(caught.value)

    assert threads.run(refused, 2) == ["the map is for 3 GPUs, but the group has 2 ranks"] * 2
