"""Exchange between ranks, independent of experts.

A layer needs a `RankGroup`. `Ranks` are the processes of ``torch.distributed``. `threads.ThreadRanks` are the threads
of one process, for tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

ALONE = timedelta(hours=1)  # that rank 0 may work while the others wait for what it makes
_progress = 0


class LostRank(ConnectionError):
    """Another rank did not take part."""


def progress() -> int:
    """Return the number of collectives that this process has begun."""
    return _progress


def check_initialised():
    """``torch.distributed`` is ready."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: start by torchrun, and call init_process_group")


class RankGroup(ABC):
    """The ranks that share a layer's experts, as one of them sees them. All make the same calls in the same order.

    A group is hashable, as objects are that define no ``__eq__``: launch plans belong to it.

    Attributes
    ----------
    rank : int
        This rank's number in the group.
    size : int
        How many ranks there are.
    """

    rank: int
    size: int

    @abstractmethod
    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows of every rank, from those that this one sends to every rank.

        Parameters
        ----------
        rows : Tensor (sum of ``sent``, ...)
            Contiguous; those for rank 0 first, then those for rank 1, and so on.
        sent, received : sequence of int
            How many rows go to, and come from, each rank; any may be 0.

        Returns
        -------
        Tensor (sum of ``received``, ...)
            Those of rank 0 first.

        Raises
        ------
        LostRank
            If another rank has gone.
        """

    @abstractmethod
    def total(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, written over this one's; `LostRank` as in `exchange`."""

    @abstractmethod
    def spread(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor, written over this one's; `LostRank` as in `exchange`."""

    @abstractmethod
    def every(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, alike in shape and dtype, (size, ...); `LostRank` as in `exchange`."""


class Ranks(RankGroup):
    """The processes of a group of ``torch.distributed``.

    The group is of NCCL for tensors on GPUs, of gloo for tensors on CPUs; by default it has all processes.

    Raises
    ------
    RuntimeError
        If ``torch.distributed`` is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        check_initialised()
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows by all_to_all_single, see `RankGroup.exchange`."""
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        _together(dist.all_to_all_single, arrived, rows, list(received), list(sent), group=self.group)
        return arrived

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks by all_reduce, see `RankGroup.total`."""
        _together(dist.all_reduce, tensor, group=self.group)
        return tensor

    def spread(self, tensor: Tensor) -> Tensor:
        """Send rank 0's tensor by broadcast, see `RankGroup.spread`."""
        _together(dist.broadcast, tensor, group=self.group, group_src=0)
        return tensor

    def every(self, tensor: Tensor) -> Tensor:
        """Collect all ranks' tensors by all_gather, see `RankGroup.every`."""
        found = [tensor.new_empty(tensor.shape) for _ in range(self.size)]
        _together(dist.all_gather, found, tensor, group=self.group)
        return torch.stack(found)

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return on every rank what ``make()`` returns on rank 0, or raise the error that it raises there.

        Rank 0 may take up to ``ALONE`` for it: the others wait in a group of their own, by gloo, which counts as no
        collective, so that a watch does not take rank 0 for one that hangs. Pickle must take what it returns or raises.

        Raises
        ------
        LostRank
            If another rank has gone, or nothing has come for so long.
        """
        members = dist.get_process_group_ranks(self.group)
        patient = dist.new_group(members, timeout=ALONE, backend="gloo", use_local_synchronization=True)
        made: list[Any] = [_outcome(make) if self.rank == 0 else None]
        _or_lost(dist.broadcast_object_list, made, group=patient, group_src=0)
        value, error = made[0]
        if error is not None:
            raise error
        return value


def _outcome(make):
    """Return the result of a call and its error; one of them is None."""
    try:
        return make(), None
    except Exception as error:
        return None, error


def _together(collective, *arguments, **options):
    """Begin what all ranks take part in."""
    global _progress
    _progress += 1
    _or_lost(collective, *arguments, **options)


def _or_lost(collective, *arguments, **options):
    """Turn an error of a collective into `LostRank`."""
    try:
        collective(*arguments, **options)
    except RuntimeError as error:
        raise LostRank(str(error)) from error
