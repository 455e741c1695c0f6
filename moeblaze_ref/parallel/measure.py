"""Times of a model's MoE layers over ranks, and the costs on even loads by which they are foretold.

A step is a forward through all layers under the routing of a trace. Its time is taken as it is. The parts of a layer
are taken in steps of their own, where the ranks line up before each exchange, so that waiting for the slowest rank's
experts does not count as transfer.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from moeblaze_ref.parallel.costs import Costs, rows_of, travel_seconds
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.simulate import Cluster
from moeblaze_ref.runtime.clock import Clock
from moeblaze_ref.runtime.device import Gpu
from moeblaze_ref.systems.layer import MoEWeights

WARM_UP = 3  # steps that do not count
PARTS = ("there", "experts", "back")  # of a layer
EVEN_LAYERS = 4  # of the model whose loads are even
EXCHANGES = 4  # of a forward: counts, rows, slots, and the way back


class Host:
    """Clock of a process on CPUs, which needs no synchronisation."""

    torch_device = torch.device("cpu")

    def settle(self) -> None:
        """Do nothing: a CPU has no queue."""

    def mark(self) -> float:
        """Now, seconds."""
        return time.perf_counter()

    def milliseconds(self, start: float, end: float) -> float:
        """Milliseconds between two moments."""
        return 1e3 * (end - start)


def clock_of(device: str) -> Gpu | Host:
    """The clock of "cuda", its current device, or of "cpu"."""
    return Gpu() if device == "cuda" else Host()


class MarkedRanks(Ranks):
    """Ranks that mark when each exchange begins and ends; if ``lines_up``, all ranks begin an exchange together."""

    def __init__(self, clock: Gpu | Host):
        super().__init__()
        self.clock, self.lines_up = clock, False
        self.marks: list[tuple[Any, Any]] = []
        self._nothing = torch.zeros(1, device=clock.torch_device)

    def line_up(self):
        """Wait on the device until every rank has come; the host does not wait."""
        self.total(self._nothing)

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows, see `Ranks.exchange`; if ``lines_up``, all ranks begin together."""
        if self.lines_up:
            self.line_up()
        begin = self.clock.mark()
        arrived = super().exchange(rows, sent, received)
        self.marks.append((begin, self.clock.mark()))
        return arrived

    def parts(self) -> np.ndarray:
        """Milliseconds of ``PARTS`` in every layer that has been marked, (layers, 3)."""
        layers = [self.marks[first : first + EXCHANGES] for first in range(0, len(self.marks), EXCHANGES)]
        between = self.clock.milliseconds
        return np.array(
            [
                (between(*rows) + between(*slots), between(slots[1], back[0]), between(*back))
                for _, rows, slots, back in layers
            ]
        )


class Model:
    """The MoE layers of a model with random weights, under a placement; the same tokens go into each."""

    def __init__(self, placement: Placement | Copies, d: int, h: int, k: int, ranks: MarkedRanks, dtype: torch.dtype):
        self.ranks, device = ranks, ranks.clock.torch_device
        self.layers = [
            ExpertParallelMoE(d, h, placement.E, k, placement, layer, ranks=ranks, device=device, dtype=dtype)
            for layer in range(placement.layers)
        ]

    @torch.no_grad()
    def step(self, x: Tensor, topk: Tensor):
        """A forward of this rank's tokens x (tokens, d) by the choices topk (layers, tokens, k)."""
        for layer, chosen in zip(self.layers, topk, strict=True):
            layer._run(x, MoEWeights(*layer.weights), chosen)  # its argument check would wait for the device

    def times(self, x: Tensor, steps: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray]:
        """Milliseconds of every rank's steps (ranks, steps), and of the parts (ranks, steps, layers, 3)."""
        for topk in steps[:WARM_UP]:
            self.step(x, topk)
        self.ranks.lines_up = False
        whole = [self._timed(x, topk)[0] for topk in steps]
        self.ranks.lines_up = True
        parts = [self._timed(x, topk)[1] for topk in steps]
        return every_rank(np.array(whole)), every_rank(np.array(parts))

    def _timed(self, x, topk):
        """Milliseconds of a step, and of its parts (layers, 3)."""
        clock: Clock = self.ranks.clock
        self.ranks.line_up()
        self.ranks.marks = []
        begin = clock.mark()
        self.step(x, topk)
        end = clock.mark()
        clock.settle()
        return clock.milliseconds(begin, end), self.ranks.parts()


def every_rank(mine: np.ndarray) -> np.ndarray:
    """The arrays of all ranks, stacked."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return np.stack(found)


def even_costs(d: int, h: int, k: int, E: int, tokens: int, repetitions: int, ranks: MarkedRanks, dtype) -> Costs:
    """The costs of a layer on these ranks, with ``tokens`` tokens each: medians. E is at least their number."""
    even = np.arange(E, dtype=np.int32) * ranks.size // E
    placement = Placement(np.tile(even, (EVEN_LAYERS, 1)), ranks.size)
    device = ranks.clock.torch_device
    chosen = torch.arange(tokens * k, dtype=torch.int32, device=device).reshape(tokens, k) % E
    topk = chosen.expand(EVEN_LAYERS, -1, -1).contiguous()
    model = Model(placement, d, h, k, ranks, dtype)
    x = torch.randn(tokens, d, device=device, dtype=dtype)
    for _ in range(2):  # the first seconds of a process are slower, and do not count
        whole, parts = model.times(x, [topk] * repetitions)
    there, experts, back = np.median(parts.max(axis=0), axis=(0, 1)) / 1e3
    layer = np.median(whole.max(axis=0)) / 1e3 / EVEN_LAYERS
    window = topk.transpose(0, 1).repeat(ranks.size, 1, 1).cpu().numpy()  # of all ranks' tokens
    row_bytes = d * dtype.itemsize
    on = Cluster(
        bandwidths(tokens, row_bytes, repetitions, ranks), row_bytes, experts / rows_of(placement, window).max()
    )
    return Costs(on, there + back - travel_seconds(placement, window, on)[0], layer - there - experts - back)


def bandwidths(rows: int, row_bytes: int, repetitions: int, ranks: MarkedRanks) -> np.ndarray:
    """Bytes/s from rank to rank (G, G) while each sends ``rows`` of ``row_bytes`` bytes to every other: the median."""
    block = torch.zeros(ranks.size * rows, row_bytes, dtype=torch.uint8, device=ranks.clock.torch_device)
    taken = []
    ranks.lines_up = True
    for _ in range(WARM_UP + repetitions):
        ranks.marks = []
        ranks.exchange(block, [rows] * ranks.size, [rows] * ranks.size)
        ranks.clock.settle()
        taken.append(ranks.clock.milliseconds(*ranks.marks.pop()))
    seconds = np.median(every_rank(np.array(taken[WARM_UP:])).max(axis=0)) / 1e3
    return np.full((ranks.size, ranks.size), rows * row_bytes / seconds)
