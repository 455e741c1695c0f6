"""Send a batch's tokens to the ranks of their experts and back: a dispatch with ranks in place of experts."""

from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda.dispatch import build_part
from moeblaze_ref.core import checks
from moeblaze_ref.core.structures import EMPTY, STRUCTURES, Array, Dispatch
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.runtime.torch_bridge import Bridge
from moeblaze_ref.systems.layer import Stages


class Counts(NamedTuple):
    """Row counts of a trip, on the host."""

    sent: list[int]  #: rows to each rank
    received: list[int]  #: rows from each rank
    choices: int  #: of the received rows, those of their slots whose experts are here


class Trip:
    """The rows that go to each rank, and their way back.

    ``copies`` is a partial dispatch of L tokens over the ranks, of tensors: slot (token, j) has a row if its expert is
    on a rank that no earlier slot of the token is for. The stages are of this rank's device, ``bridge`` is the way to
    it.
    """

    def __init__(self, ranks: RankGroup, stages: Stages, bridge: Bridge, copies: Dispatch, counts: Counts):
        self._ranks, self._combine, self._bridge = ranks, stages.combine, bridge
        self._copies, self.counts = copies, counts

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
    def again(
        cls, ranks: RankGroup, stages: Stages, bridge: Bridge, arrays: dict[str, Array], k: int, counts: Counts
    ) -> "Trip":
        """The same trip, from what `tensors` and `counts` gave; ``arrays`` loses those of `tensors`."""
        copies = Dispatch(**{name: arrays.pop(_kept(name)) for name in STRUCTURES}, k=k)
        return cls(ranks, stages, bridge, copies.map(bridge.tensor), counts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trip's tensors to save for backward, by name."""
        return {_kept(name): tensor for name, tensor in self._copies.arrays().items()}

    def there(self, rows: Tensor) -> Tensor:
        """Rows (L, n) of this rank's tokens to the ranks of their experts: what came here, rank by rank."""
        sent, received, _ = self.counts
        return self._ranks.exchange(rows[self._copies.expert_token_indices], sent, received)

    def back(self, rows: Tensor) -> Tensor:
        """Rows, one for each that came, to their tokens' rank: the sum (L, n) of what came back of each token."""
        sent, received, _ = self.counts
        returned = self._ranks.exchange(rows, received, sent)
        weights = torch.ones(self._copies.L, self._copies.k, device=rows.device)
        arrays = self._bridge.arrays([returned, weights])
        return self._bridge.tensor(self._combine.forward(*arrays, self._copies.map(self._bridge.array)))


def _kept(name: str) -> str:
    return f"trip {name}"


def first_slots(homes: Tensor) -> Tensor:
    """The ranks (L, k) of tokens' experts, but ``EMPTY`` where an earlier slot of the token is for the same rank."""
    earlier = (homes[:, :, None] == homes[:, None, :]).tril(-1).any(dim=-1)
    return homes.masked_fill(earlier, EMPTY)


def _counts(ranks: RankGroup, copies: Tensor, homes: Tensor) -> Counts:
    """Exchange the numbers of rows and choices to and from each rank; the host waits for them."""
    each = torch.arange(ranks.size, device=homes.device)
    sent = torch.stack([(slots[:, :, None] == each).sum(dim=(0, 1)) for slots in (copies, homes)], dim=1)  # (G, 2)
    received = ranks.exchange(sent, [1] * ranks.size, [1] * ranks.size)
    sent, received = torch.stack([sent, received]).tolist()
    return Counts([rows for rows, _ in sent], [rows for rows, _ in received], sum(choices for _, choices in received))
