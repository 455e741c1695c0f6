"""Times every candidate tile of every tensor-core kernel, and makes the table that `raw_cuda.tiles` chooses by."""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from rich.table import Table

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.backends.registry import refusal
from moeblaze_ref.bench import plan, report, stages
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.bench.roofline import cost_of
from moeblaze_ref.core import checks, provenance, records
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.clock import interleave, replayed
from moeblaze_ref.runtime.device import Device

# Presets, some with another L: each class of layers has one at least.
SHAPES = (("conf3", None), ("qwen3", None), ("mixtral", None), ("qwen3", 2**11), ("mixtral", 2**10))
STAGE_OF_KERNEL = {kernel: kernel for kernel in tiles.KERNELS} | {"d_x_rows": "d_x", "d_w": "d_w1"}
LEAST_GAIN = 1.02  # over the default: less is noise


@dataclass(frozen=True)
class Time:
    """Time of one tile."""

    preset: str
    version: str  #: this and the next three as in `tiles.KEY`
    kernel: str
    groups: str
    weights: str
    tile: tiles.Tile
    ms: float  #: median, on the device's own time


def jobs(presets: Sequence[str], tokens: int | None, versions: Sequence[str], repetitions: int) -> list[Callable]:
    """One job for each layer, version and kernel; each takes the keyword ``device`` and returns `Time` s.

    Without presets the layers are those of ``SHAPES``, without versions those of ``tiles.CANDIDATES`` that run here.
    ``tokens`` stands in place of L of each preset.

    Raises
    ------
    ValueError
        If a name is unknown, a number is out of range, or a version does not run on this GPU.
    """
    for version in versions:
        checks.check_name("version with a choice of tiles", version, tiles.CANDIDATES)
    checks.check_int("repetitions", repetitions, at_least=1)
    if tokens is not None:
        checks.check_int("L", tokens, at_least=1)
    layers = plan.layers(plan.Request(presets=presets, tokens=tokens), SHAPES)
    device_versions = _versions(versions, stages.executor_here())
    return [
        partial(time_tiles, name, _in_dtype_of(version, config), version, kernel, repetitions)
        for name, config in layers
        for version in device_versions
        for kernel in tiles.KERNELS
    ]


def _versions(asked: Sequence[str], executor: Executor) -> list[str]:
    """Return the requested versions that run here, by default every version that does."""
    refusals = {version: refusal(executor, "expert_up", version) for version in asked or tiles.CANDIDATES}
    for version in asked:
        if refusals[version]:
            raise ValueError(refusals[version])
    return [version for version, why in refusals.items() if not why]


def _in_dtype_of(version: str, config: MoEConfig) -> MoEConfig:
    """Return the layer in its own dtype, or in a dtype that the version computes in."""
    able = gemm.VERSIONS[version]
    return config if config.dtype in able else config.replace(dtype=able[0])


def time_tiles(
    preset: str, config: MoEConfig, version: str, kernel: str, repetitions: int, device: Device
) -> list[Time]:
    """Time one kernel in every candidate tile, interleaved, by replays of CUDA graphs."""
    stage, bridge = STAGE_OF_KERNEL[kernel], bridge_to(device.torch_device)
    count = stages.input_sets(cost_of(stage, config).bytes, device.cache_bytes)
    sets = [Inputs(config, bridge, device.torch_device) for _ in range(count)]
    contenders = {}
    for tile in tiles.CANDIDATES[version]:
        with tiles.trying(tile):
            contenders[tile] = replayed(device.captured(partial(stages.run_ours, stage, version, sets, bridge)))
    samples = interleave(contenders, repetitions, device)
    key = version, kernel, *tiles.shape_class(config.R, config.E, config.d, config.h)
    return [Time(preset, *key, tile, samples[tile].shared_by(count).median) for tile in contenders]


def entries(times: Sequence[Time]) -> list[dict[str, Any]]:
    """Return the table's entries: the fastest tile of each kernel and class of layers, if it is not the default.

    Returns
    -------
    list of dict
        {version, kernel, groups, weights, tile, gain}. The gain is the default's time over the tile's, the geometric
        mean over the layers of the class; the tile with the largest is taken, if it is at least ``LEAST_GAIN``.
    """
    by_class = defaultdict(list)
    for time in times:
        by_class[tuple(getattr(time, name) for name in tiles.KEY)].append(time)
    found = []
    for key, of_class in by_class.items():
        gains = _gains(of_class, tiles.DEFAULTS[key[0]])
        best = max(gains, key=gains.__getitem__)
        if gains[best] >= LEAST_GAIN:
            head = dict(zip(tiles.KEY, key, strict=True))
            found.append(head | {"tile": asdict(best), "gain": round(gains[best], 3)})
    return found


def _gains(times: Sequence[Time], default: tiles.Tile) -> dict[tiles.Tile, float]:
    """Return each tile's speed-up over the default."""
    base = {time.preset: time.ms for time in times if time.tile == default}
    ratios = defaultdict(list)
    for time in times:
        ratios[time.tile].append(base[time.preset] / time.ms)
    return {tile: statistics.geometric_mean(of_one) for tile, of_one in ratios.items()}


def run_of(times: Sequence[Time], clocks: str | None, capability: tuple[int, int]) -> dict[str, Any]:
    """One run of a table: where and when, and its entries."""
    place = provenance.environment() | {"clocks": clocks, "capability": ".".join(map(str, capability))}
    return place | {"entries": entries(times)}


def check_place(path: Path, force: bool = False):
    """A run of now may be added here; errors as in `records.check_writable`."""
    records.check_writable(path, tiles.load, force)


def add(path: Path, run: dict[str, Any], force: bool = False):
    """Write a run into a table, in the place of an earlier one for the same class of GPU.

    Another file that is there is replaced with ``force`` alone.
    """
    earlier = records.earlier(path, _runs_of, force) or []
    kept = [other for other in earlier if other["capability"] != run["capability"]]
    records.write(path, {"runs": [*kept, run]}, tiles.load, force)


def _runs_of(path: Path) -> list[dict[str, Any]]:
    """The runs of a table, as the file has them."""
    tiles.load(path)
    return json.loads(path.read_text())["runs"]


def table(times: Sequence[Time]) -> Table:
    """Table of every tile's time and its gain over the default, for the terminal."""
    base = {
        (time.preset, time.version, time.kernel): time.ms for time in times if time.tile == tiles.DEFAULTS[time.version]
    }
    columns: list[report.Column] = [(name, attrgetter(name)) for name in ("preset", *tiles.KEY)]
    columns += [
        ("tile", lambda time: _in_short(time.tile)),
        ("ms", lambda time: f"{time.ms:.4g}"),
        ("gain", lambda time: f"{base[time.preset, time.version, time.kernel] / time.ms:.2f}"),
    ]
    return report.table(times, columns)


def _in_short(tile: tiles.Tile) -> str:
    if isinstance(tile, tiles.HopperTile):
        return f"band {tile.band}"
    return (
        f"{tile.rows} x {tile.columns} x {tile.depth}, {tile.stages} stages, {tile.threads} threads, band {tile.band}"
    )
