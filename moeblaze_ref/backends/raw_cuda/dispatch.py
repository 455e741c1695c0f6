"""Dispatch in raw CUDA: launches kernels_cuda/dispatch/."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import EMPTY, Array, Dispatch
from moeblaze_ref.runtime import Executor, KernelArguments, ceil_div, executor_for
from moeblaze_ref.runtime.source import Module

AS_PRINTED = "as_printed"  # step 3 with its location map; it belongs to no version of the series
VERSIONS = dict.fromkeys((AS_PRINTED, "1_dense_map", "2_bitmap", "3_single_pass"), ("int32",))
DEFAULT_VERSION = "3_single_pass"
THREADS = 256
WARP = 32
WARPS = THREADS // WARP
SCAN_THREADS = 256  # of a block that scans an expert's counts


@dataclass(frozen=True)
class Tiling:
    """How 3_single_pass cuts the tokens into tiles.

    Parameters
    ----------
    threads : int
        Of a block, in whole warps.
    teams : int
        Of a block: k lanes of a warp each.
    steps : int
        Tokens that a team takes, one after the other.
    """

    threads: int
    teams: int
    steps: int

    @classmethod
    @functools.cache
    def of(cls, num_experts: int, k: int) -> "Tiling":
        """Tiles of 32 rows or more for each of E experts, as far as 32 steps reach.

        An expert's rows in a tile are one run of writes and cost one count: few rows waste both. But few experts
        need only small tiles, and more tiles keep a GPU busy when L is small; registers set the limit of the steps,
        shared memory, where each team counts each expert, that of the teams.
        """
        teams_of_warp = WARP // k
        warps = next(warps for warps in (WARPS, 4, 2) if warps * teams_of_warp <= 64)
        teams = warps * teams_of_warp
        steps = next(steps for steps in (4, 8, 16, 32) if steps * teams * k >= 32 * num_experts or steps == 32)
        return cls(warps * WARP, teams, steps)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return self.teams * self.steps


def constants(version: str, num_experts: int, k: int) -> dict[str, Any]:
    """Return the constants that a version's file is compiled with.

    Parameters
    ----------
    version : str
        One of ``VERSIONS``.
    num_experts, k : int
        E and the experts of a token, which decide the bits of an id and the size of a tile.

    Returns
    -------
    dict
        Preprocessor constants by name.
    """
    if version == "3_single_pass":
        tiling = Tiling.of(num_experts, k)
        return {"THREADS": tiling.threads, "SCAN_THREADS": SCAN_THREADS, "K": k, "STEPS": tiling.steps}
    if version == "2_bitmap":
        return {"THREADS": THREADS, "EXPERT_BITS": max(1, (num_experts - 1).bit_length())}
    return {"THREADS": THREADS}


@implements(stage_contracts.BUILD_IN_KERNELS, gemm.ARRAYS)
def build(
    topk_experts: Array, num_experts: int, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Dispatch:
    """A version is the paper's three steps as printed, the same without a location map, the same over a bitmap, or
    tiles without a map. All give the same bits.
    """
    L, k = topk_experts.shape
    E = num_experts
    checks.check_name("version of dispatch", version, VERSIONS)
    return _build(executor or executor_for(topk_experts), version, topk_experts, E, L * k)


@implements(stage_contracts.BUILD_PART, gemm.ARRAYS)
def build_part(topk_experts: Array, num_experts: int, num_routed: int, executor: Executor | None = None) -> Dispatch:
    """The host must know R, to allocate the rows."""
    return _build(executor or executor_for(topk_experts), DEFAULT_VERSION, topk_experts, num_experts, num_routed)


def build_open(topk_experts: Array, num_experts: int, executor: Executor, room: int | None = None) -> Dispatch:
    """The structures where some ids are ``EMPTY``, the device alone knows how many.

    They have ``room`` for so many rows, by default for all; more there must not be. Rows beyond the last expert's are
    in no group. Their tokens are 0, so that a gather of all rows finds one.
    """
    L, k = topk_experts.shape
    rows = L * k if room is None else room
    return _build(executor, DEFAULT_VERSION, topk_experts, num_experts, rows, rows=partial(executor.full, value=0))


def _build(
    executor: Executor,
    version: str,
    topk_experts: Array,
    E: int,
    R: int,
    rows: Callable[[tuple[int, ...], str], Array] | None = None,
) -> Dispatch:
    """The structures of R rows of checked ids; ``rows`` makes the array of the rows' tokens, by default unwritten."""
    rows = rows or executor.empty
    L, k = topk_experts.shape
    ids = executor.empty if R else partial(executor.full, value=EMPTY)
    dispatch = Dispatch(
        expert_token_indices=rows((R,), "int32"),
        expert_token_offsets=executor.empty((E + 1,), "int32") if R else executor.full((E + 1,), "int32", 0),
        token_expert_indices=ids((L * k,), "int32"),
        token_index_map=ids((L * k,), "int32"),
        k=k,
    )
    if R:
        module = executor.load(f"dispatch/{version}.cu", **constants(version, E, k))
        _FILL[version](executor, module, topk_experts, dispatch)
    return dispatch


def _by_dense_map(executor: Executor, module: Module, topk_experts: Array, dispatch: Dispatch):
    dense_map = {"dense_map": executor.empty((dispatch.L, dispatch.E), "int32")}
    _route(module, _offsets_by_map(executor, module, topk_experts, dispatch, dense_map), topk_experts, dispatch)


def _by_location_map(executor: Executor, module: Module, topk_experts: Array, dispatch: Dispatch):
    """Steps 1 and 2 of 1_dense_map, then the two phases of the paper's step 3."""
    L, E = dispatch.L, dispatch.E
    dense_map: KernelArguments = {"dense_map": executor.empty((L, E), "int32")}
    location_map: KernelArguments = {"location_map": executor.empty((L, E), "int32")}
    first_steps = executor.load("dispatch/1_dense_map.cu", THREADS=THREADS)
    operands = _offsets_by_map(executor, first_steps, topk_experts, dispatch, dense_map)
    module.launch("location_map", grid=E, block=THREADS, **operands, **location_map, L=L, E=E)
    module.launch(
        "write_indices",
        grid=ceil_div(L * E, THREADS),
        block=THREADS,
        **dense_map,
        **location_map,
        **_route_of(topk_experts, dispatch),
    )


def _by_bitmap(executor: Executor, module: Module, topk_experts: Array, dispatch: Dispatch):
    words = ceil_div(dispatch.L, THREADS) * WARPS
    bitmap = {"bitmap": executor.empty((dispatch.E, words), "uint32")}  # a bit for each token, and for none at the end
    shared_bytes = 4 * dispatch.E * WARPS
    operands = _offsets_by_map(executor, module, topk_experts, dispatch, bitmap, shared_bytes)
    _route(module, operands, topk_experts, dispatch)


def _offsets_by_map(
    executor: Executor,
    module: Module,
    topk_experts: Array,
    dispatch: Dispatch,
    routed: KernelArguments,
    shared_bytes: int = 0,
) -> KernelArguments:
    """Steps 1 and 2: fill the map and the offsets, and return both by name. The map's kernel has the map's name."""
    L, E, k = dispatch.L, dispatch.E, dispatch.k
    (name,) = routed
    lengths = executor.empty((E,), "int32")
    offsets: KernelArguments = {"expert_token_offsets": dispatch.expert_token_offsets}
    module.launch(
        name,
        grid=ceil_div(L, THREADS),
        block=THREADS,
        shared_bytes=shared_bytes,
        topk_experts=topk_experts,
        **routed,
        token_expert_indices=dispatch.token_expert_indices,
        L=L,
        E=E,
        k=k,
    )
    module.launch("expert_lengths", grid=E, block=THREADS, **routed, lengths=lengths, L=L, E=E)
    module.launch("expert_offsets", grid=1, block=THREADS, lengths=lengths, **offsets, E=E)
    return routed | offsets


def _route(module: Module, operands: KernelArguments, topk_experts: Array, dispatch: Dispatch):
    """Step 3 in one kernel, a block an expert."""
    outputs = _route_of(topk_experts, dispatch)
    module.launch("route_indices", grid=dispatch.E, block=THREADS, **operands, **outputs)


def _route_of(topk_experts: Array, dispatch: Dispatch) -> dict[str, Any]:
    """Return the arguments of step 3's last kernel besides the map: the choices, two index structures, the sizes."""
    return {
        "topk_experts": topk_experts,
        "expert_token_indices": dispatch.expert_token_indices,
        "token_index_map": dispatch.token_index_map,
        "L": dispatch.L,
        "E": dispatch.E,
        "k": dispatch.k,
    }


def _by_tiles(executor: Executor, module: Module, topk_experts: Array, dispatch: Dispatch):
    """Count every tile, scan the counts of each expert, route every tile."""
    R, E, k = dispatch.slots, dispatch.E, dispatch.k  # the kernels count slots
    tiling = Tiling.of(E, k)
    tiles = ceil_div(dispatch.L, tiling.tokens)
    tile_bases = executor.empty((E, tiles + 1), "int32")  # counts, then the rows of earlier tiles; the length last
    counts_bytes = 2 * E * tiling.teams
    module.launch(
        "count_tiles",
        grid=tiles,
        block=tiling.threads,
        shared_bytes=counts_bytes,
        topk_experts=topk_experts,
        tile_bases=tile_bases,
        token_expert_indices=dispatch.token_expert_indices,
        R=R,
        E=E,
    )
    module.launch("scan_tiles", grid=E, block=SCAN_THREADS, tile_bases=tile_bases, tiles=tiles)
    module.launch(
        "route_tiles",
        grid=tiles,
        block=tiling.threads,
        shared_bytes=4 * tiling.tokens * k + 4 * E + counts_bytes,
        topk_experts=topk_experts,
        tile_bases=tile_bases,
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        token_index_map=dispatch.token_index_map,
        R=R,
        E=E,
    )


_FILL = {
    AS_PRINTED: _by_location_map,
    "1_dense_map": _by_dense_map,
    "2_bitmap": _by_bitmap,
    "3_single_pass": _by_tiles,
}
