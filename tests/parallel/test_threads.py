"""Ranks that are threads: the same results as processes, and errors that name what ranks do otherwise."""

import pytest
import torch

from moeblaze_ref.parallel import local, threads
from moeblaze_ref.parallel.ranks import LostRank, Ranks

SIZE = 3


def every_call(ranks):
    """What each call of a group returns on this rank."""
    rank, size = ranks.rank, ranks.size
    rows = torch.arange(sum(range(size)) + rank * size).reshape(-1, 1) + 100.0 * rank
    sent = [rank + other for other in range(size)]  # rank 0 sends none to itself
    written = torch.full((2,), 10.0**rank)
    total = ranks.total(written)
    first = torch.tensor([rank, 7])
    return {
        "exchange": ranks.exchange(rows, sent, sent),  # the matrix of counts is symmetric
        "total": total,
        "total is written": written,
        "spread": ranks.spread(first),
        "every": ranks.every(torch.tensor([rank, rank + 1])),
        "rank": torch.tensor([rank, size]),
    }


def every_call_of_processes():
    return every_call(Ranks())


def test_threads_get_what_processes_get():
    of_processes = local.run(every_call_of_processes, SIZE)
    for of_thread, of_process in zip(threads.run(every_call, SIZE), of_processes, strict=True):
        for name, expected in of_process.items():
            assert torch.equal(of_thread[name], expected), name


def test_a_sum_of_threads_is_in_the_order_of_ranks():
    values = torch.tensor([1e8, -1e8, 1.0])  # in another order, the sum is 0
    sums = threads.run(lambda ranks: ranks.total(values[ranks.rank].clone()), 3)
    assert sums == [1.0] * 3


def work_unlike(ranks, unlike):
    rows = torch.ones(2, 1)
    if unlike == "rows" and ranks.rank == 1:
        return ranks.exchange(rows, [2, 0], [1, 0])
    if unlike == "calls" and ranks.rank == 1:
        return ranks.every(rows)
    if unlike == "the end" and ranks.rank == 1:
        return None
    if unlike == "failed" and ranks.rank == 1:
        raise MemoryError("no room for x")
    return ranks.exchange(rows, [1, 1], [1, 1])


@pytest.mark.parametrize(
    ("unlike", "error", "says"),
    [
        ("rows", ValueError, "rank 1 sends 2 rows to rank 0, which expects 1"),
        ("calls", RuntimeError, "rank 0 calls exchange, but rank 1 calls every: all make the same calls"),
        ("the end", RuntimeError, "rank 0 calls exchange, but rank 1 calls the end: all make the same calls"),
        ("failed", MemoryError, "no room for x"),
    ],
)
def test_ranks_that_do_otherwise_are_named(unlike, error, says):
    with pytest.raises(error, match=says):
        threads.run(work_unlike, 2, unlike)


def test_who_waits_for_a_failed_rank_is_told():
    told = []

    def wait(ranks):
        if ranks.rank == 1:
            raise MemoryError
        told.append(str(pytest.raises(LostRank, ranks.total, torch.ones(1)).value))

    with pytest.raises(MemoryError):
        threads.run(wait, 2)
    assert told == ["another rank has ended by an error"]
