"""Measure placements on this machine's GPUs, and compare the modelled times with the measured ones.

    torchrun --nproc-per-node 4 -m moeblaze_ref.cli.parallel_bench --trace FILE --map greedy.npz --map moetuner.npz

Every rank of torchrun is a GPU, or a process on CPUs where there is none. The layers have random weights; tokens of the
trace are replayed, those of the held-out half if it says which sequences they belong to (`moeblaze place --out` fits
maps to the other half). The costs by which a step is foretold (`parallel.costs`) are measured first, on even loads,
never on what they are to foretell.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich import box
from rich.table import Table

from moeblaze_ref.cli.shared import Force, stdout, to_file, user_errors
from moeblaze_ref.core import checks, provenance, source_hashes, traces
from moeblaze_ref.core.traces import RoutingTrace
from moeblaze_ref.parallel import findings, measure
from moeblaze_ref.parallel.costs import Costs, homes
from moeblaze_ref.parallel.measure import MarkedRanks, Model
from moeblaze_ref.parallel.ranks import Ranks
from moeblaze_ref.parallel.watch import TIMEOUT, Watch
from moeblaze_ref.placement import maps
from moeblaze_ref.placement.copies import Routes
from moeblaze_ref.placement.maps import Copies, Placement
from moeblaze_ref.placement.simulate import Cluster, step
from moeblaze_ref.placement.trace import Profile, counts, profile, split

WIDTHS = {"mixtral": (4096, 14336), "gpt-oss": (2880, 2880), "toy": (16, 24)}  # d and h
COMMAND = "parallel.bench"  # in its records
MEASURED = (source_hashes.CUDA, source_hashes.LAYERS, source_hashes.PARALLEL)
TURNS = 4  # of each map


@dataclass(frozen=True)
class Found:
    """Measured and modelled milliseconds of a step under a placement.

    The experts' and the exchange's are one number a layer, medians over the steps.
    """

    name: str  #: of the map
    step_ms: float  #: of the slowest rank, the median over the steps
    step_p99_ms: float
    modelled_step_ms: float  #: `Costs.step_seconds`
    #: `simulate.step`, by which `moeblaze place` compares: only tokens that go from expert to expert take time.
    simulated_step_ms: float
    experts_ms: list[float]  #: the slowest rank's experts
    modelled_experts_ms: list[float]
    exchange_ms: list[float]  #: the slowest rank's way there and back
    modelled_exchange_ms: list[float]


class Taken(NamedTuple):
    """Milliseconds of every rank."""

    whole: np.ndarray  #: (ranks, steps)
    parts: np.ndarray  #: (ranks, steps, layers, 3), of ``measure.PARTS``


# Replayed batches -----------------------------------------------------------------------------------------------------


def batches(trace: RoutingTrace, tokens: int, steps: int) -> list[np.ndarray]:
    """Windows (tokens, layers, k) of the trace, one a step, from the beginning again when it is over.

    Raises
    ------
    ValueError
        If the trace has fewer tokens than a step.
    """
    whole = trace.tokens // tokens
    if whole == 0:
        raise ValueError(f"a step has {tokens} tokens, but the trace only {trace.tokens}: ask for fewer tokens a rank")
    return [trace.topk[first * tokens : (first + 1) * tokens] for first in np.arange(steps) % whole]


def placement_of(name: str, trace: RoutingTrace, sample: RoutingTrace, on: Cluster) -> Placement | Copies:
    """A map from a file, or by a method's name, fitted to the sample: for this trace's model and this cluster.

    Raises
    ------
    ValueError, TypeError, OSError
        If there is no such file or method, or it is for another model or another number of GPUs.
    """
    found: Placement | Copies | None
    if name.endswith(".npz"):
        found = maps.load(Path(name))
    else:
        from moeblaze_ref.placement import methods  # it needs OR-Tools, which a file does not

        checks.check_name("method of placement", name, methods.METHODS)
        found = methods.fit(name, profile(sample), on).placement
    if found is None:
        raise ValueError(f"{name} replicates experts for tokens that choose at random, but here they choose by a rule")
    found.check_fits(trace.topk.shape[1], trace.num_experts, trace.model)
    if found.num_gpus != on.num_gpus:
        raise ValueError(f"{name} is for {found.num_gpus} GPUs, but there are {on.num_gpus} ranks")
    return found


def placements_of(
    names: Sequence[str], trace: RoutingTrace, sample: RoutingTrace, on: Cluster, ranks: Ranks
) -> list[Placement | Copies]:
    """Every `placement_of`, by rank 0 for all: a time limit may end a search on one rank alone.

    Raises
    ------
    ValueError, TypeError, OSError
        As in `placement_of`, on every rank.
    """
    return ranks.from_first(lambda: [placement_of(name, trace, sample, on) for name in names])


# Measured and modelled ------------------------------------------------------------------------------------------------


def replay(
    placements: Sequence[Placement | Copies], windows: list[np.ndarray], d: int, h: int, ranks, dtype
) -> list[Taken]:
    """Run the windows under every placement, interleaved, so that drift affects all of them alike.

    A step's window is an array (ranks * tokens, layers, k), of which each rank has its part.
    """
    device = ranks.clock.torch_device
    mine = [torch.from_numpy(np.split(window, ranks.size)[ranks.rank].astype(np.int32)) for window in windows]
    steps = [topk.transpose(0, 1).contiguous().to(device) for topk in mine]  # (layers, tokens, k)
    x = torch.randn(steps[0].shape[1], d, device=device, dtype=dtype)
    turns = [
        [
            Model(placement, d, h, steps[0].shape[2], ranks, dtype).times(x, steps[turn::TURNS])
            for placement in placements
        ]
        for turn in range(min(TURNS, len(steps)))
    ]
    return [
        Taken(*(np.concatenate(parts, axis=1) for parts in zip(*each, strict=True)))
        for each in zip(*turns, strict=True)
    ]


def beside_model(
    name: str, taken: Taken, placement: Placement | Copies, windows: list[np.ndarray], costs: Costs
) -> Found:
    """Return the measured times of a placement beside those modelled from the measured costs."""
    whole, slowest = taken.whole.max(axis=0), np.median(taken.parts.max(axis=0), axis=0)  # (steps,), (layers, 3)
    served = Routes(np.concatenate([homes(placement, window) for window in windows]), placement.num_gpus)
    replayed = Profile(*counts(served.topk, served.num_experts), served.tokens)
    return Found(
        name,
        float(np.median(whole)),
        float(np.percentile(whole, 99)),
        1e3 * costs.step_seconds(placement, windows),
        step(replayed, served.shares(), costs.on, len(windows[0])).ms,
        slowest[:, 1].tolist(),
        (1e3 * costs.expert_seconds(placement, windows)).tolist(),
        (slowest[:, 0] + slowest[:, 2]).tolist(),
        (1e3 * costs.exchange_seconds(placement, windows)).tolist(),
    )


# Shown ----------------------------------------------------------------------------------------------------------------


def table(rows: list[Found], caption: str) -> Table:
    """A line a map."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    shown.add_column(findings.HEADINGS[0], overflow="fold")
    for heading in findings.HEADINGS[1:]:
        shown.add_column(heading, justify="right", no_wrap=True)
    for name, row in zip(findings.short_names([row.name for row in rows]), rows, strict=True):
        shown.add_row(name, *findings.cells(asdict(row)))
    return shown


# The command ----------------------------------------------------------------------------------------------------------


def main(
    trace: Annotated[Path, typer.Option(help="Routing trace: the npz file of moeblaze trace.")],
    placement: Annotated[
        list[str],
        typer.Option("--map", help="Map: the npz file of moeblaze place --out, or a method's name; repeatable."),
    ],
    preset: Annotated[str, typer.Option(help=f"Widths of the layers, one of {', '.join(WIDTHS)}.")] = "gpt-oss",
    tokens: Annotated[int, typer.Option(help="Tokens of each rank in a step.", min=1)] = 1024,
    steps: Annotated[int, typer.Option(help="Measured steps of each map.", min=1)] = 50,
    timeout: Annotated[float, typer.Option(help="Seconds after which a rank that is missing ends all.")] = TIMEOUT,
    record: Annotated[Path | None, to_file(help="Also write every layer's times here.")] = None,
    force: Force = False,
):
    """Measure placements, beside what the model says of them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=2 * timeout))
    with user_errors(), Watch(timeout):
        d, h = WIDTHS[checks.check_name("preset", preset, WIDTHS)]
        asked = {"trace": trace.name, "preset": preset, "d": d, "h": h, "tokens": tokens, "steps": steps}
        _run(traces.load(trace), placement, asked, MarkedRanks(measure.clock_of(device)), record, force)
    dist.destroy_process_group()


def _run(
    trace: RoutingTrace,
    names: list[str],
    asked: dict[str, Any],
    ranks: MarkedRanks,
    record: Path | None,
    force: bool = False,
):
    d, h, tokens, steps = (asked[name] for name in ("d", "h", "tokens", "steps"))
    sample, held_out = (trace, trace) if trace.seq is None else split(trace, seed=0)
    windows = batches(held_out, ranks.size * tokens, steps)
    if record and ranks.rank == 0:
        provenance.check_place(record, COMMAND, force)
    k, dtype = trace.topk.shape[2], torch.bfloat16 if ranks.clock.torch_device.type == "cuda" else torch.float32
    costs = measure.even_costs(d, h, k, trace.num_experts, tokens, steps, ranks, dtype)
    placements = placements_of(names, trace, sample, costs.on, ranks)
    taken = replay(placements, windows, d, h, ranks, dtype)
    found = [
        beside_model(Path(name).stem, times, placement, windows, costs)
        for name, times, placement in zip(names, taken, placements, strict=True)
    ]
    if ranks.rank == 0:
        model = {"model": trace.model, "layers": trace.topk.shape[1], "experts": trace.num_experts, "k": k}
        on = {"gpus": ranks.size, "token_s": costs.on.token_s, "bandwidth": costs.on.bandwidth.tolist()}
        run = asked | model | on | {"exchange_s": costs.exchange_s, "rest_s": costs.rest_s}
        stdout().print(table(found, "\n".join([findings.what(run), *findings.doubts(run)])))
        if record:
            provenance.record(record, COMMAND, run | {"rows": [asdict(row) for row in found]}, force, MEASURED)


if __name__ == "__main__":
    typer.run(main)
