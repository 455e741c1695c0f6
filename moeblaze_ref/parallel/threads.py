"""Ranks that are threads of one process: tests start no process, and every error is seen where it happens."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.parallel.local import TIMEOUT
from moeblaze_ref.parallel.ranks import LostRank, RankGroup


class Room:
    """A place where the threads of one process meet. One thread runs at a time, the others wait for their turn."""

    def __init__(self, size: int):
        self.size = size
        self._turn = threading.Lock()
        self._all_here = threading.Barrier(size)
        self._told: list[tuple[str, Any]] = [("", None)] * size

    def meet(self, rank: int, call: str, told: Any, combine: Callable[[list[Any]], Any]) -> Any:
        """Return ``combine`` of what every rank has told in the call of this name.

        Raises
        ------
        LostRank
            If another rank has ended by an error.
        RuntimeError
            If another rank makes another call.
        """
        self._told[rank] = call, told
        self._wait()
        first = self._told[0][0]
        for other, (name, _) in enumerate(self._told):
            if name != first:
                raise RuntimeError(f"rank 0 calls {first}, but rank {other} calls {name}: all make the same calls")
        combined = combine([each for _, each in self._told])
        self._wait()  # until all have read: a rank may write over what it told
        return combined

    def be(self, rank: int, work: Callable[..., Any], arguments: tuple) -> Any:
        """Do the work as this rank, and wait until all have done it; an error ends the others' waiting."""
        with self._turn:
            try:
                done = work(ThreadRanks(self, rank), *arguments)
                return self.meet(rank, "the end", None, lambda _: done)
            except BaseException:
                self._all_here.abort()
                raise

    def _wait(self):
        self._turn.release()
        try:
            self._all_here.wait(TIMEOUT.total_seconds())
        except threading.BrokenBarrierError:
            raise LostRank("another rank has ended by an error") from None
        finally:
            self._turn.acquire()


class ThreadRanks(RankGroup):
    """Ranks that are threads of one process, in a `Room`. Sums are in the order of ranks."""

    def __init__(self, room: Room, rank: int):
        self.rank, self.size = rank, room.size
        self._room = room

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows, see `RankGroup.exchange`.

        Raises
        ------
        ValueError
            If a rank sends another number of rows than this one expects.
        """

        def arrived(told: list[Any]) -> Tensor:
            blocks = [rows.split(sent)[self.rank] for rows, sent in told]
            for other, (block, expected) in enumerate(zip(blocks, received, strict=True)):
                if len(block) != expected:
                    raise ValueError(
                        f"rank {other} sends {len(block)} rows to rank {self.rank}, which expects {expected}"
                    )
            return torch.cat(blocks)

        return self._meet("exchange", (rows, list(sent)), arrived)

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks, see `RankGroup.total`."""
        return tensor.copy_(self._meet("total", tensor, lambda told: reduce(torch.add, told)))

    def spread(self, tensor: Tensor) -> Tensor:
        """Copy rank 0's tensor, see `RankGroup.spread`."""
        return tensor.copy_(self._meet("spread", tensor, lambda told: told[0].clone()))

    def every(self, tensor: Tensor) -> Tensor:
        """Collect all ranks' tensors, see `RankGroup.every`."""
        return self._meet("every", tensor, torch.stack)

    def _meet(self, call: str, told: Any, combine: Callable[[list[Any]], Tensor]) -> Tensor:
        combined: Tensor = self._room.meet(self.rank, call, told, combine)
        return combined


def run(work: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Run ``work(ranks, *arguments)`` on each of ``size`` ranks, threads of this process, and return the results.

    No process starts and nothing is pickled, so this is faster than `local.run`. The threads run one at a time.

    Raises
    ------
    Exception
        What a rank raised first, if one did.
    """
    room = Room(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [pool.submit(room.be, rank, work, arguments) for rank in range(size)]
    errors = [error for error in (each.exception() for each in ranks) if error is not None]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, LostRank))  # the others only waited for it
    return [each.result() for each in ranks]
