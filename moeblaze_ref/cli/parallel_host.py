"""Time what a layer over ranks costs beside its products: in a group of one rank, where nothing travels.

    python -m moeblaze_ref.cli.parallel_host --record FILE

The layer has so few tokens that the GPU waits for the host. Beside it stands the same layer on one device. Without room
for its rows a forward waits for the device, so it has no launch plan; with room it has one (`parallel.capacity`).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.table import Table
from torch import nn
from torch.profiler import ProfilerActivity, profile

from moeblaze_ref.bench import host
from moeblaze_ref.cli.shared import Force, stdout, to_file, user_errors
from moeblaze_ref.core import config as configs
from moeblaze_ref.core import provenance, source_hashes
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.launch_plans import without_launch_plans
from moeblaze_ref.parallel import findings
from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.trip import Capacity
from moeblaze_ref.placement.maps import from_hosts
from moeblaze_ref.runtime.device import Device, Gpu

COMMAND = "parallel.host"  # in its records
MEASURED = (source_hashes.CUDA, source_hashes.LAYERS, source_hashes.PARALLEL)
REPETITIONS = 15
STEPS = 10  # under the profiler


def over_ranks(config: MoEConfig, room: bool, **place: Any) -> nn.Module:
    """The layer over the ranks of ``torch.distributed``, of which there is one."""
    sizes = config.d, config.h, config.E, config.k
    capacity = Capacity(config.L, config.L * config.k) if room else None
    alone = from_hosts([[list(range(config.E))]], num_experts=config.E)
    return ExpertParallelMoE(*sizes, alone, activation=config.activation, capacity=capacity, **place)


LAYERS: dict[str, host.Make] = {
    "MoELayer": host.layer_of,
    "ExpertParallelMoE": partial(over_ranks, room=False),
    "ExpertParallelMoE with room": partial(over_ranks, room=True),
}


def measure(config: MoEConfig, repetitions: int, device: Device) -> list[dict[str, Any]]:
    """A row for each layer, work and use of launch plans: `bench.host.Row`, and for steps what `profiled` finds."""
    rows = []
    for name, make in LAYERS.items():
        found = host.time_host(name, config, repetitions, device, make)
        step = host.works_of(config, device, make)["step"]
        for row in found:
            if row["work"] in host.WORKS:
                rows.append(row | (profiled(step, row["plans"], device) if row["work"] == "step" else {}))
    return rows


def profiled(step: Callable[[], object], plans: bool, device: Device) -> dict[str, float]:
    """Return microseconds of the device's kernels in a step, their number, and that of torch's operations."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.torch_device.type == "cuda" else [])]
    call = step if plans else without_launch_plans()(step)
    for _ in range(host.WARM_UP):
        call()
    device.settle()
    with profile(activities=activities) as found:
        for _ in range(STEPS):
            call()
        device.settle()
    averages = found.key_averages()
    kernels = [event for event in found.events() or () if event.device_type.name == "CUDA"]
    return {
        "device_us": sum(each.self_device_time_total for each in averages) / STEPS,
        "kernels": len(kernels) / STEPS,
        "torch_operations": sum(each.count for each in averages if each.key.startswith("aten::")) / STEPS,
    }


def table(rows: list[dict[str, Any]]) -> Table:
    """A line a row."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for place, heading in enumerate(findings.HOST_HEADINGS):
        shown.add_column(heading, justify="left" if place < findings.HOST_WORDS else "right", no_wrap=place > 0)
    for row in rows:
        shown.add_row(*findings.host_cells(row))
    return shown


def main(
    preset: Annotated[str, typer.Option(help="Sizes of the layer, but for the tokens: a preset's name.")] = "conf3",
    repetitions: Annotated[int, typer.Option(help="Samples of each contender.", min=1)] = REPETITIONS,
    record: Annotated[Path | None, to_file(help="Also write the rows here.")] = None,
    force: Force = False,
):
    """Time a layer over one rank beside the layer on one device: the host's time and the device's."""
    with user_errors():
        if record:
            provenance.check_place(record, COMMAND, force)
        if not torch.cuda.is_available():
            raise OSError("there is no GPU here, but the host's time of a launch is that of a GPU's machine")
        config = replace(configs.preset(preset).config, L=host.TOKENS)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        try:
            rows = measure(config, repetitions, Gpu())
        finally:
            dist.destroy_process_group()
        stdout().print(table(rows))
        if record:
            provenance.record(record, COMMAND, {"preset": preset, "rows": rows}, force, MEASURED)


if __name__ == "__main__":
    typer.run(main)
