"""Experts with copies on several ranks: which copy a token uses, and what the holders of an expert send each other."""

import numpy as np
import torch
from torch import Tensor, nn

from moeblaze_ref.backends.raw_cuda import parallel as kernels
from moeblaze_ref.core.structures import EMPTY, Array
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.parallel.trip import Visits
from moeblaze_ref.runtime.launch_plan import called
from moeblaze_ref.runtime.torch_bridge import Bridge


class Holders(nn.Module):
    """The ranks that hold each expert, as one of them sees them.

    A copy's number is that of its rank, times E, and the expert: a row says by it which copy it is for.

    Parameters
    ----------
    held : array (E, G) bool
        Whether rank g has a copy of expert e.
    num_nodes : int
        Nodes of equally many neighbouring ranks.
    rank : int
        This rank.
    device : optional
    """

    held: Tensor  # (E, G) bool
    sole: Tensor  # (E,) int32: the rank of an expert that one rank alone holds, EMPTY of the others
    here: Tensor  # (G, E) int32: the place of each copy on this rank, or EMPTY

    def __init__(self, held: np.ndarray, num_nodes: int, rank: int, device: torch.device | None = None):
        super().__init__()
        (self.E, G), self.num_nodes, self.rank = held.shape, num_nodes, rank
        copied = held.sum(axis=1) > 1
        self.any_copied = bool(copied.any())
        here = np.full((G, self.E), EMPTY, np.int32)
        here[rank, held[:, rank]] = np.arange(held[:, rank].sum())
        sole = np.where(copied, EMPTY, held.argmax(axis=1)).astype(np.int32)
        for name, array in {"held": held, "sole": sole, "here": here}.items():
            self.register_buffer(name, torch.from_numpy(array.copy()).to(device), persistent=False)

    def visits(self, bridge: Bridge, topk_experts: Array, gates: Array) -> Visits:
        """Where the rows of this rank's tokens go: each token uses the copy that `placement.copies.choose` names.

        Parameters
        ----------
        bridge : Bridge
        topk_experts : array (L, k) int32
        gates : array (L, k) float32

        Raises
        ------
        ValueError
            If the tokens are more than the kernels number.
        """
        kernels.check_words(*topk_experts.shape)
        sole, held = bridge.arrays([self.sole, self.held])
        copies = kernels.Copies(sole, held, self.num_nodes)
        return Visits(*kernels.choose_ranks(topk_experts, gates, copies, self.rank, bridge.executor), self.E)

    def places(self, bridge: Bridge, arrived: Tensor, limit: kernels.Limit | None) -> kernels.Places:
        """The places on this rank of the experts of rows that arrived, from their words (rows, 2k)."""
        words, here = bridge.arrays([arrived, self.here])
        return kernels.find_places(words, here, bridge.executor, limit)


class SharedExperts(nn.Module):
    """Experts of this rank that others hold too, and the exchange of their rows: nothing else travels.

    Every holder sends its row of an expert to all other holders, and adds the rows that come, its own among them, in
    the order of ranks. So all holders have the same bits.

    Parameters
    ----------
    ranks : RankGroup
    held : array (E, G) bool
        Whether rank g has a copy of expert e.
    device : optional
    """

    places: Tensor  # (n,) int64: where the experts with copies stand among those of this rank
    shared: Tensor  # (sum of counts,) int64: rank by rank, which of these n experts that rank holds too

    def __init__(self, ranks: RankGroup, held: np.ndarray, device: torch.device | None = None):
        super().__init__()
        self.ranks = ranks
        mine = held[held[:, ranks.rank]]  # (experts here, G)
        copied = mine.sum(axis=1) > 1
        shared = [np.flatnonzero(on_rank) for on_rank in mine[copied].T]
        self.counts = [len(each) for each in shared]  #: of each rank, how many experts it holds too
        for name, array in {"places": np.flatnonzero(copied), "shared": np.concatenate(shared)}.items():
            self.register_buffer(name, torch.from_numpy(array).to(device), persistent=False)

    def sum(self, rows: Tensor) -> Tensor:
        """Sum over the holders, in float32, written over ``rows`` (experts here, ...) of the experts with copies."""
        total = torch.zeros(len(self.places), *rows.shape[1:], dtype=torch.float32, device=rows.device)
        for which, came in self._exchange(rows):
            total.index_add_(0, which, came.float())  # no expert twice, so the order is that of ranks
        rows[self.places] = total.to(rows.dtype)
        return rows

    def spread(self, rows: Tensor) -> Tensor:
        """Write the first holder's row over ``rows`` (experts here, ...) of the experts with copies."""
        first = torch.empty(len(self.places), *rows.shape[1:], dtype=rows.dtype, device=rows.device)
        for which, came in reversed(self._exchange(rows)):
            first[which] = came
        rows[self.places] = first
        return rows

    def _exchange(self, rows):
        """Return which of the n experts each rank holds too, and its rows of them."""
        came = called(self.ranks, "exchange", rows[self.places[self.shared]], self.counts, self.counts)
        return list(zip(self.shared.split(self.counts), came.split(self.counts), strict=True))
