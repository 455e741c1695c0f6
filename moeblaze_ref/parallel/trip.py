"""Send a batch's tokens to the ranks of their experts and back: a dispatch with ranks in place of experts."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from moeblaze_ref.backends.raw_cuda.dispatch import build_open, build_part
from moeblaze_ref.core import checks
from moeblaze_ref.core.structures import EMPTY, STRUCTURES, Array, Dispatch
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.runtime.launch_plan import called
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems.layer import Stages


class Capacity(NamedTuple):
    """The room of a layer over several ranks."""

    rows: int  #: that a rank sends to each rank; the same on all ranks
    choices: int  #: of experts of one rank, by all rows that come


def check_capacity(capacity: Capacity | None) -> Capacity | None:
    """Return it, if it is None or both numbers are whole and at least 1; else a TypeError or ValueError says so."""
    if capacity is not None:
        checks.check_type("capacity", capacity, Capacity)
        for name, value in capacity._asdict().items():
            checks.check_int(f"capacity.{name}", value, 1)
    return capacity


class Counts(NamedTuple):
    """Row counts of a trip, on the host; with a capacity, the room for them."""

    sent: list[int]  #: rows to each rank
    received: list[int]  #: rows from each rank
    choices: int  #: of the received rows, those of their slots whose experts are here


class Trip:
    """The rows that go to each rank, and their way back.

    ``copies`` is a partial dispatch of L tokens over the ranks, of tensors: slot (token, j) has a row if its expert is
    on a rank that no earlier slot of the token is for. The stages are of this rank's device, ``bridge`` is the way to
    it. ``spare`` says which rows are of no token, if some are.
    """

    def __init__(
        self,
        ranks: RankGroup,
        stages: Stages,
        bridge: Bridge,
        copies: Dispatch,
        counts: Counts,
        spare: Tensor | None = None,
    ):
        self._ranks, self._combine, self._bridge = ranks, stages.combine, bridge
        self._copies, self.counts, self._spare = copies, counts, spare

    @classmethod
    def planned(cls, ranks: RankGroup, stages: Stages, bridge: Bridge, homes: Tensor) -> "Trip":
        """The trip of tokens to their experts; the host learns how many rows come.

        Parameters
        ----------
        ranks, stages, bridge
            As in `Trip`.
        homes : Tensor (L, k) int32
            The rank of each expert that a token uses.

        Raises
        ------
        ValueError
            If more rows come than the index structures take.
        """
        copies = first_slots(homes)
        counts = _counts(ranks, copies, homes)
        checks.check_routed_rows(sum(counts.received), homes.shape[1])
        dispatch = build_part.unchecked(bridge.array(copies), ranks.size, sum(counts.sent), bridge.executor)
        return cls(ranks, stages, bridge, dispatch.map(bridge.tensor), counts)

    @classmethod
    def within(
        cls, ranks: RankGroup, stages: Stages, bridge: Bridge, homes: Tensor, capacity: Capacity
    ) -> tuple["Trip", Tensor]:
        """The trip with the same number of rows to every rank; the host does not wait.

        Parameters
        ----------
        ranks, stages, bridge, homes
            As in `planned`.
        capacity : Capacity

        Returns
        -------
        trip : Trip
        overflowed : Tensor () bool
            More rows were due to a rank than there is room for. Then what comes back reaches no token.

        Raises
        ------
        ValueError
            If the room is for more rows than the index structures take.
        """
        G, rows = ranks.size, capacity.rows
        checks.check_routed_rows(G * rows, homes.shape[1])
        found = build_open(bridge.array(first_slots(homes)), G, bridge.executor)
        copies, spare, overflowed = _padded(found.map(bridge.tensor), rows)
        return cls(ranks, stages, bridge, copies, counts_within(capacity, G, homes.shape[1]), spare), overflowed

    @classmethod
    def again(
        cls, ranks: RankGroup, stages: Stages, bridge: Bridge, arrays: dict[str, Array], k: int, counts: Counts
    ) -> "Trip":
        """The same trip, from what `tensors` and `counts` gave; ``arrays`` loses those of `tensors`."""
        copies = Dispatch(**{name: arrays.pop(_kept(name)) for name in STRUCTURES}, k=k)
        return cls(ranks, stages, bridge, copies.map(bridge.tensor), counts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trip's tensors to save for backward, by name."""
        return {_kept(name): tensor for name, tensor in self._copies.arrays().items()}

    def there(self, rows: Tensor, absent: int | None = None) -> Tensor:
        """Rows (L, n) of this rank's tokens to the ranks of their experts: what came here, rank by rank.

        A row that is of no token is all ``absent``, if that is given.
        """
        sent, received, _ = self.counts
        rows = rows if len(rows) else rows.new_zeros(1, *rows.shape[1:])  # what rows of no token are taken from
        picked = rows[self._copies.expert_token_indices]
        if self._spare is not None and absent is not None:
            picked.masked_fill_(self._spare[:, None], absent)
        return called(self._ranks, "exchange", picked, sent, received)

    def back(self, rows: Tensor) -> Tensor:
        """Rows, one for each that came, to their tokens' rank: the sum (L, n) of what came back of each token."""
        sent, received, _ = self.counts
        returned = called(self._ranks, "exchange", rows, received, sent)
        weights = torch.ones(self._copies.L, self._copies.k, device=rows.device)
        arrays = self._bridge.arrays([returned, weights])
        return self._bridge.tensor(self._combine.forward(*arrays, self._copies.map(self._bridge.array)))


def counts_within(capacity: Capacity, G: int, k: int) -> Counts:
    """The row counts of every trip over G ranks with this room."""
    sent = [capacity.rows] * G
    return Counts(sent, sent, min(capacity.choices, G * capacity.rows * k))


def _kept(name: str) -> str:
    return f"trip {name}"


def first_slots(homes: Tensor) -> Tensor:
    """The ranks (L, k) of tokens' experts, but ``EMPTY`` where an earlier slot of the token is for the same rank."""
    earlier = (homes[:, :, None] == homes[:, None, :]).tril(-1).any(dim=-1)
    return homes.masked_fill(earlier, EMPTY)


def _padded(found: Dispatch, rows: int) -> tuple[Dispatch, Tensor, Tensor]:
    """A dispatch with so many rows for each of G ranks, which of them (G * rows,) are of none, and if more were due.

    If more were due, no slot has a row: what comes back has no place for them.
    """
    starts, lengths = found.expert_token_offsets[:-1], found.expert_token_offsets.diff()  # (G,)
    overflowed = (lengths > rows).any()
    room = torch.arange(rows, device=starts.device)
    spare = room >= lengths[:, None]  # (G, rows)
    tokens = pad(found.expert_token_indices, (0, 1))  # a spare row has the last, which is 0
    at = (starts[:, None] + room).masked_fill(spare, len(tokens) - 1)
    offsets = rows * torch.arange(len(starts) + 1, dtype=torch.int32, device=starts.device)
    moved = found.token_index_map + (offsets[:-1] - starts)[found.token_expert_indices.long()]  # (L * k,)
    copies = replace(
        found,
        expert_token_indices=tokens[at].flatten(),
        expert_token_offsets=offsets,
        token_index_map=moved.masked_fill((found.token_index_map == EMPTY) | overflowed, EMPTY),
    )
    return copies, spare.flatten(), overflowed


def _counts(ranks: RankGroup, copies: Tensor, homes: Tensor) -> Counts:
    """Exchange the numbers of rows and choices to and from each rank; the host waits for them."""
    each = torch.arange(ranks.size, device=homes.device)
    sent = torch.stack([(slots[:, :, None] == each).sum(dim=(0, 1)) for slots in (copies, homes)], dim=1)  # (G, 2)
    received = ranks.exchange(sent, [1] * ranks.size, [1] * ranks.size)
    sent, received = torch.stack([sent, received]).tolist()
    return Counts([rows for rows, _ in sent], [rows for rows, _ in received], sum(choices for _, choices in received))
