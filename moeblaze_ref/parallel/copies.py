"""Experts with copies on several ranks: which copy a token uses, and what the holders of an expert send each other."""

import numpy as np
import torch
from torch import Tensor, nn

from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.parallel.ranks import RankGroup
from moeblaze_ref.runtime.launch_plan import called


def choose(topk_experts: Tensor, rank: int, held: Tensor, num_nodes: int) -> Tensor:
    """Choose the copy that each token of a rank uses of each of its experts: `placement.copies.choose` in torch.

    All tokens choose together, expert by expert. The host does not wait.

    Parameters
    ----------
    topk_experts : Tensor (L, k) of integers
        The experts of this rank's tokens.
    rank : int
        This rank, where the tokens are.
    held : Tensor (E, G) bool
        Whether rank g has a copy of expert e.
    num_nodes : int
        Nodes of equally many neighbouring ranks.

    Returns
    -------
    Tensor (L, k) int32
        The rank of each copy.
    """
    copies = held[topk_experts.long()]  # (L, k, G)
    tokens, k, G = copies.shape
    per_node = G // num_nodes
    single = copies.sum(dim=2, keepdim=True) == 1  # (L, k, 1)
    goes = (copies & single).any(dim=1)  # (L, G): ranks that a token goes to already
    goes[:, rank].fill_(True)
    number = torch.arange(tokens, device=held.device)
    homes = torch.empty(tokens, k, dtype=torch.int32, device=held.device)
    for j in range(k):
        nodes = goes.view(tokens, num_nodes, per_node).any(dim=2).repeat_interleave(per_node, dim=1)
        distance = (2 - nodes.int() - goes.int()).masked_fill(~copies[:, j], 3)
        nearest = distance == distance.amin(dim=1, keepdim=True)
        turn = (number + topk_experts[:, j]) % nearest.sum(dim=1)
        chosen = nearest & (nearest.cumsum(dim=1) == turn[:, None] + 1)  # one rank of each token
        homes[:, j] = chosen.int().argmax(dim=1)
        goes |= chosen
    return homes


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
    owners: Tensor  # (E,) int32: each expert's first rank
    here: Tensor  # (G * E + 1,) int32: the place of each copy on this rank, or EMPTY; the last is that of EMPTY itself

    def __init__(self, held: np.ndarray, num_nodes: int, rank: int, device: torch.device | None = None):
        super().__init__()
        (self.E, G), self.num_nodes, self.rank = held.shape, num_nodes, rank
        self.any_copied = bool((held.sum(axis=1) > 1).any())
        here = np.full((G, self.E), EMPTY, np.int32)
        here[rank, held[:, rank]] = np.arange(held[:, rank].sum())
        owners, places = held.argmax(axis=1).astype(np.int32), np.append(here, np.int32(EMPTY))
        for name, array in {"held": held, "owners": owners, "here": places}.items():
            self.register_buffer(name, torch.from_numpy(array.copy()).to(device), persistent=False)

    def homes(self, topk_experts: Tensor) -> Tensor:
        """The rank (L, k) int32 whose copy each token of this rank uses, from its experts (L, k) int32."""
        if self.any_copied:
            return choose(topk_experts, self.rank, self.held, self.num_nodes)
        return self.owners[topk_experts.long()]

    def numbers(self, topk_experts: Tensor, homes: Tensor) -> Tensor:
        """The number of each copy, (L, k) int32."""
        return homes * self.E + topk_experts

    def places(self, numbers: Tensor) -> Tensor:
        """The place on this rank of each copy, int32, from its number; ``EMPTY`` if it is elsewhere, or none."""
        return self.here[numbers.long()]


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
