"""Experts on several ranks: what travels, as it was sent, and how many rows a map of experts to ranks sends."""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from moeblaze_ref.core.drawing import centered, heading, panels
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.memory.plots import BLUE, GREY, ORANGE, VERMILLION, filled
from moeblaze_ref.nn.torch_layer import MoELayer, MoEOutput
from moeblaze_ref.parallel.findings import short_names
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.local import run
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.parallel.specification import first_slots
from moeblaze_ref.placement.copies import routes
from moeblaze_ref.placement.maps import Copies, Placement

GRADIENTS = ("d_x", "d_wg", "d_w1", "d_w2", "d_w3")
# Data that `ExpertParallelMoE` sends in a forward and a backward, in its order.
FORWARD = ("how many rows come", "tokens' rows", "expert ids and gates", "weighted sums, back")
BACKWARD = ("gradients of the output", "gradients of the rows, back", "gradients of the gates, back")


class Lesson(NamedTuple):
    """A small layer whose experts are on ``placement.num_gpus`` ranks, and tokens for each of them."""

    placement: Placement | Copies
    tokens: tuple[int, ...]  #: of each rank
    d: int = 16
    h: int = 24
    k: int = 2

    @property
    def sizes(self) -> dict[str, Any]:
        """The layer's sizes."""
        return {"d": self.d, "h": self.h, "E": self.placement.E, "k": self.k}

    def layer(self) -> MoELayer:
        """Return the layer with all experts, the same at every call."""
        torch.manual_seed(0)
        return MoELayer(**self.sizes)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x (L, d) of all ranks together, and the gradient of their outputs."""
        generator = torch.Generator().manual_seed(1)
        x, d_out = (torch.randn(sum(self.tokens), self.d, generator=generator) for _ in range(2))
        return x, d_out


class Parcel(NamedTuple):
    """The rows that one rank sent in one exchange."""

    rows: list[int]  #: to each rank
    row_bytes: int


class Step(NamedTuple):
    """A forward and a backward of some tokens."""

    out: torch.Tensor  #: (L, d)
    gradients: dict[str, torch.Tensor]  #: those of the experts: of the experts that are there
    parcels: list[Parcel]


class LoggedRanks(Ranks):
    """Remembers what is sent."""

    def __init__(self):
        super().__init__()
        self.parcels: list[Parcel] = []

    def exchange(self, rows, sent, received):
        """Exchange rows and record them; see `Ranks.exchange`."""
        self.parcels.append(Parcel(list(sent), rows[:1].numel() * rows.itemsize if len(rows) else 0))
        return super().exchange(rows, sent, received)


def on_one_device(lesson: Lesson) -> Step:
    """Run all tokens through the layer with all experts."""
    return _step(lesson.layer(), *lesson.inputs(), [])


def on_ranks(lesson: Lesson) -> list[Step]:
    """The same on processes of this machine, one a rank, started for it."""
    return run(_on_this_rank, lesson.placement.num_gpus, lesson)


def _on_this_rank(lesson: Lesson) -> Step:
    ranks = LoggedRanks()
    layer = ExpertParallelMoE(**lesson.sizes, placement=lesson.placement, ranks=ranks)
    layer.take(lesson.layer())
    ranks.parcels.clear()  # of experts with copies, which begin alike
    x, d_out = (whole.split(lesson.tokens)[dist.get_rank()] for whole in lesson.inputs())
    return _step(layer, x, d_out, ranks.parcels)


def _step(layer, x, d_out, parcels) -> Step:
    x = x.clone().requires_grad_()
    result: MoEOutput = layer(x)
    losses = result.load_balancing_loss + result.router_z_loss
    leaves = [x, layer.wg, layer.w1, layer.w2, layer.w3]
    gradients = torch.autograd.grad([result.out, losses], leaves, [d_out, torch.ones(())])
    return Step(result.out.detach(), dict(zip(GRADIENTS, gradients, strict=True)), parcels)


def gathered(lesson: Lesson, steps: Sequence[Step]) -> dict[str, torch.Tensor]:
    """Output and gradients of all ranks as one device has them: tokens in order, experts by their ids.

    Of an expert with copies it is the first one's.
    """
    hosted = sum(lesson.placement.hosts(0), [])
    order = [hosted.index(expert) for expert in range(lesson.placement.E)]

    def side_by_side(name):
        return torch.cat([step.gradients[name] for step in steps])

    return {
        "out": torch.cat([step.out for step in steps]),
        "d_x": side_by_side("d_x"),
        "d_wg": steps[0].gradients["d_wg"],  # summed over the ranks already, the same on each
        **{name: side_by_side(name)[order] for name in ("d_w1", "d_w2", "d_w3")},
    }


def parcels_table(steps: Sequence[Step]) -> list[dict]:
    """Every exchange of a step, with what each rank sent to each."""
    return [
        {
            "what": name,
            "bytes of a row": max(step.parcels[number].row_bytes for step in steps),
            **{f"rank {rank} sends": str(step.parcels[number].rows) for rank, step in enumerate(steps)},
        }
        for number, name in enumerate((*FORWARD, *BACKWARD))
    ]


# Rows of a map -------------------------------------------------------------------------------------------------------


def ranks_of(topk_experts: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The ranks (L, k) that get a copy of each token's row, ``EMPTY`` in slots that need none; ``owners`` is (E,)."""
    return first_slots(owners[topk_experts])


def copies_by_chance(E: int, k: int, num_ranks: int) -> float:
    """Ranks that a token visits in the mean, if k of E experts are chosen evenly and a rank has E / num_ranks."""
    return num_ranks * (1 - comb(E - E // num_ranks, k) / comb(E, k))


def visits_picture(topk_experts: np.ndarray, owners: np.ndarray, tokens: Sequence[int]) -> Figure:
    """Draw which token's row goes to which rank; a cell counts the token's experts there.

    Parameters
    ----------
    topk_experts : array (L, k)
    owners : array (E,)
        Every expert's rank.
    tokens : sequence of int
        Tokens of each rank, in order.
    """
    homes = np.repeat(np.arange(len(tokens)), tokens)  # (L,)
    experts = (owners[topk_experts][:, :, None] == np.arange(len(tokens))).sum(axis=1)  # (L, ranks)
    shades = np.where(experts == 0, 0, np.where(np.arange(len(tokens)) == homes[:, None], 1, 2))
    figure, axes = panels(2.2 + 0.45 * len(homes), 0.9 + 0.5 * len(tokens), framed=True)
    axes.imshow(shades.T, cmap=ListedColormap(["white", GREY, ORANGE]), vmin=0, vmax=2, aspect="auto")
    for token, rank in zip(*np.nonzero(experts), strict=True):
        centered(axes, token, rank, experts[token, rank])
    axes.set_xticks(range(len(homes)), range(len(homes)))
    axes.set_yticks(range(len(tokens)), [f"rank {rank}" for rank in range(len(tokens))])
    axes.set_xticks(np.arange(len(homes) + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(tokens) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="black", linewidth=0.4)
    axes.tick_params(which="both", length=0)
    for border in np.cumsum(tokens)[:-1]:
        axes.axvline(border - 0.5, color="black", linewidth=2)
    axes.set_xlabel("token; a thick line parts those of one rank from the next")
    heading(axes, "orange: the row travels; grey: it is at home; number: its experts there")
    return figure


def copies_picture(E: int, k: int) -> Figure:
    """Rows that leave a token's own rank, in the mean, by the number of ranks: a copy a rank, and a copy an expert.

    Raises
    ------
    ValueError
        If k is more than E.
    """
    if k > E:
        raise ValueError(f"k is {k}, but a token can choose {E} experts at most")
    ranks = [count for count in (2, 4, 8, 16, 32, 64) if E % count == 0]
    away = [(count - 1) / count for count in ranks]  # of what a token needs; its own rank is as likely as any other
    by_rank = [copies_by_chance(E, k, count) * part for count, part in zip(ranks, away, strict=True)]
    by_expert = [k * part for part in away]
    figure, axes = panels(7, 3.2, framed=True)
    places = np.arange(len(ranks))
    axes.bar(places - 0.2, by_expert, 0.38, color=GREY, label="a copy for each expert", hatch="//", edgecolor="white")
    axes.bar(places + 0.2, by_rank, 0.38, color=BLUE, label="a copy for each rank")
    axes.set_xticks(places, ranks)
    axes.set_xlabel(f"ranks that share {E} experts, {k} of them for each token")
    axes.set_ylabel("rows to other ranks, of a token")
    axes.legend()
    return figure


class Traffic(NamedTuple):
    """Traffic of recorded tokens under a map in one layer, with the tokens spread evenly over the ranks."""

    routed: np.ndarray  #: (ranks,) choices of experts that are there
    arrived: np.ndarray  #: (ranks,) rows that came, those of its own tokens not counted

    @classmethod
    def of(cls, homes: np.ndarray, num_ranks: int) -> "Traffic":
        """Count the traffic of choices on the ranks ``homes`` (L, k); token i is on rank i modulo their number."""
        visits = first_slots(homes)
        own = np.arange(len(homes))[:, None] % num_ranks
        travelled = visits[(visits != EMPTY) & (visits != own)]
        return cls(*(np.bincount(ranks.ravel(), minlength=num_ranks) for ranks in (homes, travelled)))


def traffic_picture(trace: RoutingTrace, placements: Mapping[str, Placement | Copies]) -> Figure:
    """Draw the fullest rank of each named map: its choices and its rows that came over links, over an even share.

    Every point is a layer; a line is the mean over the layers.
    """
    figure, axes = panels(8, 3.4, framed=True)
    for place, placement in enumerate(placements.values()):
        ranks = placement.num_gpus
        copies = placement if isinstance(placement, Copies) else Copies.of(placement)
        layers = [Traffic.of(homes, ranks) for homes in routes(trace, copies).topk.swapaxes(0, 1)]
        even = trace.topk.shape[0] / ranks
        for shift, color, marker, values in (
            (-0.13, BLUE, "o", [t.routed.max() / t.routed.mean() for t in layers]),
            (0.13, VERMILLION, "^", [t.arrived.max() / even for t in layers]),
        ):
            axes.plot([place + shift] * len(values), values, marker, color=color, alpha=0.6)
            axes.hlines(np.mean(values), place + shift - 0.1, place + shift + 0.1, color=color, linewidth=3)
    axes.plot([], [], "o", color=BLUE, label="choices of its experts / mean over ranks")
    axes.plot([], [], "^", color=VERMILLION, label="rows that came to it / tokens of a rank")
    axes.set_xticks(range(len(placements)), placements)
    axes.set_ylabel("fullest rank / an even share")
    axes.legend()
    return figure


# Measured ------------------------------------------------------------------------------------------------------------


def parts_of(row: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Milliseconds of a step's parts under a map, (measured, modelled), from a row of a record of `parallel.bench`.

    What is left of a measured step is its rest; on the modelled side it is the cost of every layer beside the others.
    """
    experts, exchange = ((sum(row[f"{part}_ms"]), sum(row[f"modelled_{part}_ms"])) for part in ("experts", "exchange"))
    rest = row["step_ms"] - experts[0] - exchange[0], 1e3 * found["rest_s"] * found["layers"]
    return {"experts": experts, "exchange": exchange, "rest of the layers": rest}


def measured_picture(records: Sequence[Mapping[str, Any]]) -> Figure:
    """Records of `parallel.bench` beside each other: a step under each map, and thinner below it the model's."""
    figure, shown = panels(4.6 * len(records), 3.4, 1, len(records), framed=True, squeeze=False)
    for axes, found in zip(shown[0], records, strict=True):
        _bars(axes, found)
        heading(axes, f"{found['model']}, {found['gpus']} GPUs")
        axes.set_xlabel("ms of a step; thin: modelled")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _bars(axes, found):
    places, names = np.arange(len(found["rows"])), short_names([row["name"] for row in found["rows"]])
    parts = [parts_of(row, found) for row in found["rows"]]  # a dict a map
    ends = np.zeros((2, len(places)))
    for part, color in zip(parts[0], (BLUE, VERMILLION, GREY), strict=True):
        measured, modelled = np.array([of_one[part] for of_one in parts]).T
        axes.barh(places - 0.12, measured, 0.44, left=ends[0], label=part, **filled(color))
        axes.barh(places + 0.26, modelled, 0.2, left=ends[1], alpha=0.6, **filled(color))
        ends += measured, modelled
    axes.set_yticks(places, names)
    axes.invert_yaxis()
