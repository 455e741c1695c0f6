"""Hardware counters of one kernel at a time: each step of the series, each product of a training step, and cuBLAS.

ncu runs this very module in a process of its own, under which the kernels in question are launched once each, in an
order that both processes know. A metric that ncu does not know, or has no number for, is an error that names it.
"""

import contextlib
import csv
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.bench import ladder, stages
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.device import PRODUCT, Device, Gpu

PRESETS = ("conf3", "conf4", "mixtral", "qwen3", "fine-grained")  # what conf1 lacks is work, not speed
# Columns of a row: the metric by ncu's own name, and what its base unit is divided by.
METRICS = {
    "duration_ms": ("gpu__time_duration.sum", 1e6),  # from ns
    "sm_clock_ghz": ("sm__cycles_elapsed.avg.per_second", 1e9),
    "tensor_pct": ("sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "issue_pct": ("smsp__issue_active.avg.pct_of_peak_sustained_active", 1),
    "dram_pct": ("dram__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "dram_read_bytes": ("dram__bytes_read.sum", 1),
    "dram_written_bytes": ("dram__bytes_write.sum", 1),
    "l2_pct": ("lts__throughput.avg.pct_of_peak_sustained_elapsed", 1),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", 1),
    "l2_link_pct": ("lts__ltcfabric2ltc_cycles_active.avg.pct_of_peak_sustained_elapsed", 1),
    "sectors_per_load": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio", 1),
    "sectors_per_store": ("l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio", 1),
    "registers": ("launch__registers_per_thread", 1),
    "shared_bytes": ("launch__shared_mem_per_block", 1),
}
# Of all cycles that its warps are resident, what they wait for; "selected" is no wait: a warp issues.
ISSUING = "selected"
STALLS = (
    *("barrier", "branch_resolving", "dispatch_stall", "drain", "gmma", "imc_miss", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "misc", "no_instruction", "not_selected", ISSUING),
    *("short_scoreboard", "sleeping", "tex_throttle", "wait"),
)
STALL_METRIC = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
SHOWN_STALLS = 3
HOW = {"--replay-mode": "kernel", "--clock-control": "none", "--cache-control": "all"}

# Of each product of a step but expert_up, which the series has: the stage, and the kernel that multiplies.
PRODUCTS = {"expert_down": "expert_down", "d_hidden": "d_hidden", "d_w3": "d_w3", "d_x": "d_x_rows", "d_w1": "d_w"}

DENSE = "nvjet.*|.*gemm.*"  # what cuBLAS calls its kernels


@dataclass(frozen=True)
class Row:
    """One launch under ncu."""

    kind: str  #: "counters"
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k} of the layer, {M, N, K} of the dense product
    dtype: str  #: of the layer's activations
    version: str  #: "" of the dense product
    kernel: str
    idea: str  #: which step of the series it is, or which stage of a training step; or that it is the dense product
    duration_ms: float  #: after a pause and with cold caches: not comparable with interleaved times
    sm_clock_ghz: float  #: cycles of a multiprocessor in a nanosecond
    tensor_pct: float  #: of the time in which the tensor cores' pipe is busy
    issue_pct: float  #: of a scheduler's active cycles in which one issues
    dram_pct: float  #: of the peak rate; so is ``l2_pct``
    dram_read_bytes: int
    dram_written_bytes: int
    l2_pct: float
    l2_hit_pct: float  #: of the sectors, those that are found in the cache
    l2_link_pct: float  #: of the time in which the link between the cache's two halves is busy
    #: Sectors of 32 bytes for each request of a warp; copies by TMA and cp.async are no such requests.
    sectors_per_load: float
    sectors_per_store: float
    registers: int  #: of a thread at the launch
    shared_bytes: int  #: of a block
    #: The three that take most of the warps' time, by ncu's names, with their percentages.
    stalls: list[tuple[str, float]]
    tool: str  #: ncu's version, and the options that bear on the figures


class Launch(NamedTuple):
    """A counted launch and its work."""

    idea: str
    version: str
    kernel: str  #: a pattern
    shape: dict[str, int]


def launches(config: MoEConfig) -> list[Launch]:
    """Return the launches that are counted, in their order."""
    steps = [
        Launch(step.idea, step.version, "expert_up", step.config(config).sizes) for step in ladder.steps_of(config)
    ]
    halves = {"d_x": len(gemm.parts_of_rows(ladder.HOPPER, config.R, config.d, config.h))}  # of its columns
    products = [
        Launch(stage, ladder.HOPPER, kernel, config.sizes)
        for stage, kernel in PRODUCTS.items()
        for _ in range(halves.get(stage, 1))
    ]
    return [*steps, *products, Launch("dense product by cuBLAS", "", DENSE, dict.fromkeys("MNK", PRODUCT))]


def count(preset: str, config: MoEConfig, device: Device) -> list[dict[str, Any]]:
    """Count the `launches` of a layer; return a `Row` as dict for each, in their order.

    ``preset`` is the layer's name in the rows. ``device`` is not used: ncu's process has its own.

    Raises
    ------
    ValueError
        If ncu is not on the PATH or refuses to count, does not know a metric, or counts other launches.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise ValueError("ncu is not on the PATH; it is a part of the CUDA toolkit (Nsight Compute)")
    only_these = f"regex:^({'|'.join(sorted({launch.kernel for launch in launches(config)}))})$"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        program = [sys.executable, "-m", __name__, json.dumps(asdict(config))]
        options = [*(part for option in HOW.items() for part in option), "--metrics", ",".join(metrics())]
        only = ["--profile-from-start", "off", "--kernel-name-base", "function", "--kernel-name", only_these]
        output = ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        found = subprocess.run([ncu, *options, *only, *output, *program], check=False, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if found.returncode:
        raise ValueError(f"ncu ended with status {found.returncode}: {_complaint(text + found.stderr + found.stdout)}")
    head: dict[str, Any] = {"kind": "counters", "preset": preset, "dtype": config.dtype, "tool": _tool(ncu)}
    return [asdict(Row(**head, **row)) for row in rows_of(text, launches(config))]


def metrics() -> list[str]:
    """Return the names of ncu's metrics that are counted."""
    return [*(name for name, _ in METRICS.values()), *map(STALL_METRIC.format, STALLS)]


def _complaint(text: str) -> str:
    """Return ncu's error lines, or its whole output if none is marked as an error."""
    lines = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    return " ".join(lines) or text[-2000:]


def _tool(ncu: str) -> str:
    said = subprocess.run([ncu, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    options = " ".join(f"{option} {value}" for option, value in HOW.items())
    return f"ncu {said.splitlines()[-1].removeprefix('Version ')}, {options}"


# Output of ncu --------------------------------------------------------------------------------------------------------


def rows_of(text: str, expected: Sequence[Launch]) -> Iterator[dict[str, Any]]:
    """Yield the columns of a `Row` that are a launch's own, from ncu's page "raw" as CSV in base units.

    ``text`` has two lines of names and units, a line for each launch, and other lines that begin with ``==``.

    Raises
    ------
    ValueError
        If a metric is missing or is no number, or other kernels were counted than those that are expected.
    """
    lines = [line for line in text.splitlines() if line and not line.startswith("==")]
    _, *counted = csv.DictReader(lines) if lines else [{}]  # the first has the units
    kernels, names = [launch.kernel for launch in expected], [row["Kernel Name"] for row in counted]
    if len(names) != len(kernels) or not all(map(re.fullmatch, kernels, names)):
        raise ValueError(f"ncu counted {', '.join(names) or 'nothing'}, but launched were {', '.join(kernels)}")
    for launch, row in zip(expected, counted, strict=True):
        values = {column: _number(row, name) / unit for column, (name, unit) in METRICS.items()}
        whole = {column: round(value) for column, value in values.items() if column.endswith(("bytes", "registers"))}
        own = {"version": launch.version, "kernel": row["Kernel Name"], "idea": launch.idea, "shape": launch.shape}
        yield own | values | whole | {"stalls": _stalls(row)}


def _number(row: dict[str, str], metric: str) -> float:
    """A cell, which may have commas between thousands."""
    cell = row.get(metric) or ""
    with contextlib.suppress(ValueError):
        if not math.isnan(value := float(cell.replace(",", ""))):
            return value
    raise ValueError(f"ncu has no number for the metric {metric} of kernel {row['Kernel Name']}, but {cell!r}")


def _stalls(row: dict[str, str]) -> list[tuple[str, float]]:
    """The largest shares of the warps' time, in percent, from the average number of warps in each state."""
    warps = {reason: _number(row, STALL_METRIC.format(reason)) for reason in STALLS}
    waiting = sorted((reason for reason in warps if reason != ISSUING), key=warps.__getitem__, reverse=True)
    return [(reason, 100 * warps[reason] / sum(warps.values())) for reason in waiting[:SHOWN_STALLS]]


# The process that ncu runs --------------------------------------------------------------------------------------------


def launch_all(config: MoEConfig, device: Device, counted: Any):
    """Run every work that has one of `launches`, in order: once to compile and warm up, once within ``counted()``."""
    works: list[Callable[[], Any]] = [trial.run for trial in ladder.trials_of(config, ladder.steps_of(config), device)]
    bridge = bridge_to(device.torch_device)
    inputs = Inputs(config, bridge, device.torch_device)
    works += [partial(stages.run_ours, stage, ladder.HOPPER, [inputs], bridge) for stage in PRODUCTS]
    product = device.ceilings()["product"]
    for work in (*works, lambda: product(0, lambda: None)):
        work()
        with counted():
            work()


def main(text: str):
    """Run `launch_all` of the layer that ``text`` describes on the GPU; ncu starts this."""
    launch_all(MoEConfig(**json.loads(text)), Gpu(), torch.cuda.profiler.profile)


if __name__ == "__main__":
    main(sys.argv[1])
