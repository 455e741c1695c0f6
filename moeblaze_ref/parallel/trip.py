"""Send a batch's tokens to the ranks of their experts and back: a dispatch with ranks in place of experts."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import parallel as kernels
from moeblaze_ref.backends.raw_cuda.dispatch import build_part
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import size_of
from moeblaze_ref.core.structures import STRUCTURES, Array, Dispatch
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.runtime.launch_plan import called
from moeblaze_ref.runtime.torch_bridge import Bridge


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


class Visits(NamedTuple):
    """Where the rows of L tokens go, and what travels with them: `raw_cuda.parallel.choose_ranks`."""

    ranks: Array  #: (L, k) int32, `EMPTY` where an earlier slot of the token is for the same rank
    words: Array  #: (L, 2k) int32, the numbers of copies and the bits of gates
    num_experts: int  #: E, of all ranks


class Trip:
    """The rows that go to each rank, and their way back.

    ``copies`` is a partial dispatch of L tokens over the ranks, of tensors: slot (token, j) has a row if its expert is
    on a rank that no earlier slot of the token is for. ``bridge`` is the way to this rank's device. ``words`` are those
    that travel with the rows.
    """

    def __init__(
        self,
        ranks: RankGroup,
        bridge: Bridge,
        copies: Dispatch,
        counts: Counts,
        words: Tensor | None = None,
    ):
        self._ranks, self._bridge = ranks, bridge
        self._copies, self.counts, self._words = copies, counts, words

    @classmethod
    def planned(cls, ranks: RankGroup, bridge: Bridge, visits: Visits) -> "Trip":
        """The trip of tokens to their experts; the host learns how many rows come.

        Parameters
        ----------
        ranks, bridge
            As in `Trip`.
        visits : Visits

        Raises
        ------
        ValueError
            If more rows come than the kernels number.
        """
        chosen, words = bridge.tensors([visits.ranks, visits.words])
        counts = _counts(ranks, chosen, words[:, : chosen.shape[1]] // visits.num_experts)
        kernels.check_words(sum(counts.received), chosen.shape[1])
        found = build_part.unchecked(visits.ranks, ranks.size, sum(counts.sent), bridge.executor)
        copies = found.map(bridge.tensor)
        return cls(ranks, bridge, copies, counts, words[copies.expert_token_indices])

    @classmethod
    def within(
        cls, ranks: RankGroup, bridge: Bridge, visits: Visits, capacity: Capacity, noted: Tensor
    ) -> tuple["Trip", Tensor]:
        """The trip with the same number of rows to every rank; the host does not wait.

        Parameters
        ----------
        ranks, bridge, visits
            As in `planned`.
        capacity : Capacity
        noted : Tensor () bool
            Set to True if more rows are due to a rank than there is room for.

        Returns
        -------
        trip : Trip
        overflowed : Tensor () bool
            The same. Then what comes back reaches no token.

        Raises
        ------
        ValueError
            If the room is for more rows than the kernels number.
        """
        G, k = ranks.size, visits.ranks.shape[1]
        kernels.check_words(G * capacity.rows, k)
        most = size_of(visits.ranks)  # rows; the host does not know how many there are, and the others stay unwritten
        found = build_part.unchecked(visits.ranks, G, most, bridge.executor)
        room = kernels.make_room(found, visits.words, capacity.rows, bridge.array(noted), bridge.executor)
        words, overflowed = bridge.tensors(room[1:])
        return cls(ranks, bridge, room.copies.map(bridge.tensor), counts_within(capacity, G, k), words), overflowed

    @classmethod
    def again(cls, ranks: RankGroup, bridge: Bridge, arrays: dict[str, Array], k: int, counts: Counts) -> "Trip":
        """The same trip, from what `tensors` and `counts` gave; ``arrays`` loses those of `tensors`."""
        copies = Dispatch(**{name: arrays.pop(_kept(name)) for name in STRUCTURES}, k=k)
        return cls(ranks, bridge, copies.map(bridge.tensor), counts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trip's tensors to save for backward, by name."""
        copies: dict[str, Any] = self._copies.arrays()
        return {_kept(name): tensor for name, tensor in copies.items()}

    def there(self, rows: Tensor) -> Tensor:
        """Rows (L, n) of this rank's tokens to the ranks of their experts: what came here, rank by rank.

        Rows of no token are zeros.
        """
        indices: Any = self._copies.expert_token_indices
        given, tokens = self._bridge.arrays([rows, indices])
        return self._exchanged(self._bridge.tensor(kernels.gather(given, tokens, self._bridge.executor)))

    def words_there(self) -> Tensor:
        """The words of what came here; those of rows of no token are ``EMPTY``."""
        assert self._words is not None  # but after `again`
        return self._exchanged(self._words)

    def _exchanged(self, rows: Tensor) -> Tensor:
        sent, received, _ = self.counts
        return called(self._ranks, "exchange", rows, sent, received)

    def back(self, rows: Tensor) -> Tensor:
        """Send one row for each received row to its token's rank; return each token's sum, (L, n)."""
        sent, received, _ = self.counts
        returned = self._bridge.array(called(self._ranks, "exchange", rows, received, sent))
        copies = self._copies.map(self._bridge.array)
        return self._bridge.tensor(kernels.sum_rows(returned, copies, self._bridge.executor))


def counts_within(capacity: Capacity, G: int, k: int) -> Counts:
    """The row counts of every trip over G ranks with this room."""
    sent = [capacity.rows] * G
    return Counts(sent, sent, min(capacity.choices, G * capacity.rows * k))


def _kept(name: str) -> str:
    return f"trip {name}"


def _counts(ranks: RankGroup, chosen: Tensor, homes: Tensor) -> Counts:
    """Exchange the numbers of rows and choices to and from each rank; the host waits for them."""
    each = torch.arange(ranks.size, device=homes.device)
    sent = torch.stack([(slots[:, :, None] == each).sum(dim=(0, 1)) for slots in (chosen, homes)], dim=1)  # (G, 2)
    received = ranks.exchange(sent, [1] * ranks.size, [1] * ranks.size)
    sent, received = torch.stack([sent, received]).tolist()
    return Counts([rows for rows, _ in sent], [rows for rows, _ in received], sum(choices for _, choices in received))
