"""Which tile a tensor-core kernel is compiled for: the committed table's for this GPU and layer, or the default.

Every candidate is right for every layer; they differ in time alone. ``moeblaze tune`` times them and writes the table,
tiles.json, a run for each class of GPU that was tuned:

    {"runs": [{device, clocks, versions, commit, capability,
               entries: [{version, kernel, groups, weights, tile, gain}]}]}
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from moeblaze_ref.core import checks, records
from moeblaze_ref.runtime import Executor, ceil_div

TABLE = Path(__file__).with_name("tiles.json")
KERNELS = ("expert_up", "d_x_rows", "d_w", "expert_down", "d_hidden", "d_w3")
WARP = 32
# Classes of layers. Short groups leave most of a tall tile empty; large weights do not stay in the L2 cache.
GROUPS, LONG_GROUP = ("short", "long"), 512  # rows of an expert on average from which on they are long
WEIGHTS, LARGE_WEIGHT = ("small", "large"), 2**23  # elements of one expert's matrix from which on they are large


@dataclass(frozen=True)
class MmaTile:
    """The constants of mma_matmul.cuh.

    Parameters
    ----------
    rows, columns : int
        Of a block's tile; two results that share their rows share the columns.
    depth : int
        Of a stage, in elements of 16 bits.
    stages : int
        Of the ring in shared memory.
    warp_rows, warp_columns : int
        A warp's part of the tile.
    band : int
        Row tiles that are worked on side by side.
    """

    rows: int = 128
    columns: int = 128
    depth: int = 32
    stages: int = 4
    warp_rows: int = 64
    warp_columns: int = 64
    band: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.rows // self.warp_rows * (self.columns // self.warp_columns) * WARP

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: elements of 32 bits go half as deep."""
        return self.stages * self.depth * (self.rows + self.columns) * 2

    def constants(self, itemsize: int) -> dict[str, int]:
        """Constants for the preprocessor; elements have ``itemsize`` bytes."""
        return {
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "TILE_DEPTH": self.depth * 2 // itemsize,
            "STAGES": self.stages,
            "WARP_ROWS": self.warp_rows,
            "WARP_COLUMNS": self.warp_columns,
            "BAND": self.band,
            "THREADS": self.threads,
        }

    def symbols(self, itemsize: int, d: int, h: int, projections: int) -> dict[str, int]:
        """Return the symbols of the headers of 3_mma: the constants, and sizes that follow from them for a layer."""
        constants = self.constants(itemsize)
        return constants | {
            "K": itemsize * constants["TILE_DEPTH"] // 16,
            "A": itemsize * self.rows // 16,
            "B": itemsize * self.columns // 16,
            "C": ceil_div(projections * h, self.columns),
            "J": ceil_div(h, self.columns),
            "D": ceil_div(d, self.columns),
            "H": ceil_div(h, self.rows),
            "W": ceil_div(d, self.rows),
        }


@dataclass(frozen=True)
class HopperTile:
    """The constant of hopper/scheduler.cuh that may be chosen.

    Parameters
    ----------
    band : int
        Row tiles that are worked on side by side.
    """

    band: int = 8

    def constants(self, itemsize: int) -> dict[str, int]:
        """Constants for the preprocessor."""
        return {"BAND": self.band}


@dataclass(frozen=True)
class WarpgroupTile:
    """The constants of expert_up/4_wgmma.cu, 5_tma.cu and 6_specialized.cu: one warpgroup multiplies (128, 128).

    Parameters
    ----------
    threads : int
        Of a block.
    stages : int
        In shared memory.
    stage_barriers : int
        mbarriers of each stage.
    """

    threads: int
    stages: int
    stage_barriers: int
    rows: ClassVar[int] = 128
    columns: ClassVar[int] = 128
    depth: ClassVar[int] = 64
    band: ClassVar[int] = 8

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the stages begin at a multiple of 1024 bytes."""
        return 1024 + self.stages * (self.depth * (self.rows + self.columns) * 2 + self.stage_barriers * 8)

    def constants(self, itemsize: int) -> dict[str, int]:
        """Constants for the preprocessor."""
        return {
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
            "TILE_DEPTH": self.depth,
            "STAGES": self.stages,
            "BAND": self.band,
            "THREADS": self.threads,
        }


Tile = MmaTile | HopperTile | WarpgroupTile

MMA_TILES = (MmaTile(), MmaTile(columns=256), MmaTile(columns=256, band=16), MmaTile(rows=256))  # of 3_mma
# By version; the first is the default. Those of version 3 take at most 99 KiB of shared memory, which every GPU from
# sm_80 on gives a block.
CANDIDATES: dict[str, tuple[Tile, ...]] = {
    "3_mma": MMA_TILES,
    "3_mma_tf32": (MmaTile(warp_rows=32), MmaTile(columns=64, warp_rows=32)),
    "7_persistent": (HopperTile(), HopperTile(band=4), HopperTile(band=16)),
}
# Of versions that leave nothing to choose. Two blocks of each fit on a multiprocessor, or more.
FIXED: dict[str, Tile] = {
    "4_wgmma": WarpgroupTile(threads=128, stages=2, stage_barriers=0),
    "5_tma": WarpgroupTile(threads=128, stages=2, stage_barriers=2),
    "6_specialized": WarpgroupTile(threads=192, stages=3, stage_barriers=2),
}
DEFAULTS = {version: candidates[0] for version, candidates in CANDIDATES.items()} | FIXED
# Of 3_mma in layers on a CPU. Groups are short there, and a tile's empty rows cost as much as the others. It has the
# default's columns, since the accounting counts a term of each gate's gradient for so many columns of h.
CPU_TILE = MmaTile(rows=32, warp_rows=32)

_trial: ContextVar[Tile | None] = ContextVar("trial", default=None)


@contextmanager
def trying(tile: Tile) -> Iterator[None]:
    """Context in which every kernel whose version has a choice of tiles is compiled for this one."""
    token = _trial.set(tile)
    try:
        yield
    finally:
        _trial.reset(token)


def choose(executor: Executor, version: str, kernel: str, rows: int, num_experts: int, d: int, h: int) -> Tile | None:
    """The tile of a kernel.

    Parameters
    ----------
    executor : Executor
        A GPU decides by its table. The SIMT executor that checks takes the default, as most GPUs do.
    version, kernel : str
        A kernel of ``KERNELS``.
    rows, num_experts, d, h : int
        R, E and the widths of the layer.

    Returns
    -------
    MmaTile, HopperTile, WarpgroupTile or None
        None for a version without tile constants.

    Raises
    ------
    ValueError
        As `load`, if the table is broken.
    """
    if version not in CANDIDATES:
        return FIXED.get(version)
    chosen = _trial.get()
    if chosen is None and executor.name == "cuda":
        chosen = _table().get((executor.capability, version, kernel, *shape_class(rows, num_experts, d, h)))
    elif chosen is None and version == "3_mma" and not getattr(executor, "instrumented", True):
        chosen = CPU_TILE
    return chosen or DEFAULTS[version]


def shape_class(rows: int, num_experts: int, d: int, h: int) -> tuple[str, str]:
    """Return the class of a layer's shape: one of ``GROUPS`` and one of ``WEIGHTS``."""
    return GROUPS[rows >= LONG_GROUP * num_experts], WEIGHTS[d * h >= LARGE_WEIGHT]


@functools.cache
def _table() -> dict[tuple, Tile]:
    """The committed table as `choose` asks it: {(capability, version, kernel, groups, weights): tile}."""
    return {
        (tuple(map(int, run["capability"].split("."))), *(entry[name] for name in KEY)): entry["tile"]
        for run in load(TABLE)
        for entry in run["entries"]
    }


KEY = ("version", "kernel", "groups", "weights")
RUN = {"device", "clocks", "versions", "commit", "capability", "entries"}
ENTRY = {*KEY, "tile", "gain"}


def load(path: Path) -> list[dict[str, Any]]:
    """The runs of a table, their tiles as `MmaTile` and `HopperTile`.

    Raises
    ------
    OSError
        If there is no such file.
    ValueError
        If it is no table: the message names the file and the element.
    """
    found = records.read(path, {"runs"})
    if others := found.keys() - {"runs"}:  # such as a file of results, which may have no runs to check
        raise ValueError(f"{path.name} has {', '.join(sorted(others))} beside its runs, so it is not a table of tiles")
    runs = records.check_list(f"{path.name}: runs", found["runs"])
    for number, run in enumerate(runs):
        _check_run(f"{path.name}: runs[{number}]", run)
    return runs


def _check_run(name: str, run: dict[str, Any]):
    """A run and its entries have what `RUN` and `ENTRY` name; tiles become objects."""
    records.check_object(name, run, RUN)
    major, dot, minor = str(run["capability"]).partition(".")
    if not (dot and major.isdigit() and minor.isdigit()):
        raise ValueError(f"{name} has the capability {run['capability']!r}, but it must be as '9.0'")
    for number, entry in enumerate(records.check_list(f"{name}.entries", run["entries"])):
        of_entry = f"{name}.entries[{number}]"
        records.check_object(of_entry, entry, ENTRY)
        allowed = zip(KEY, (CANDIDATES, KERNELS, GROUPS, WEIGHTS), strict=True)
        for key, values in allowed:
            checks.check_name(f"{key} of {of_entry}", entry[key], values)
        entry["tile"] = _candidate(of_entry, entry["version"], entry["tile"])


def _candidate(name: str, version: str, tile: Any) -> Tile:
    """The candidate with these fields."""
    for candidate in CANDIDATES[version]:
        if tile == {field.name: getattr(candidate, field.name) for field in fields(candidate)}:
            return candidate
    raise ValueError(f"the tile of {name} is {tile}, which is no candidate of {version}: run moeblaze tune again")
