"""Large cases of the dispatch kernels."""

import numpy as np

from moeblaze_ref.backends.raw_cuda import dispatch as stage
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime.sparse import ZEROS, Launch, Parts
from moeblaze_ref.verify.large.cases import ALL, Case, last_block

E = 1024
FEW = 8  # tokens of the last block
LAST = np.s_[-FEW:]
COLUMN = 2**21 + FEW  # tokens of which a block reads its expert's column: L E > 2**31
# A block that walks a column with a scan, or writes it, would take long and touch a page for each token. Its cases have
# fewer tokens, and more experts than dispatch takes: the kernels themselves have no such limit.
MANY, SHORT = 2**20, 2**12 + FEW  # MANY SHORT > 2**32
ENTRIES = 2**22 + FEW  # tokens whose entries have a thread each: L E > 2**32
BITS = 2**27 + 2**18 + FEW  # tokens: E L / 32 > 2**32
# 3_single_pass with the smallest tiles that its constants allow
K, STEPS, TEAMS = 32, 1, 8
TILES = 2**22 + 2**13  # E TILES > 2**32
TILE_TOKENS = STEPS * TEAMS
COUNTS = {"THREADS": stage.THREADS, "SCAN_THREADS": stage.SCAN_THREADS, "K": K, "STEPS": STEPS}
EXPERTS = np.random.default_rng(0).permuted(np.tile(np.arange(E), (FEW, 1)), axis=1).astype(np.int32)  # of each token


def cases() -> list[Case]:
    """Every kernel whose indices can pass 2**31; expert_offsets sees experts alone."""
    dense = [_map_of_tokens(), _lengths_of_map(), _route_map(), _location_map(), _write_indices()]
    return dense + [_bitmap(), _lengths_of_bits(), _route_bits(), _count_tiles(), _scan_tiles(), _route_tiles()]


def _case(version: str, launch: Launch, call, passes: str) -> Case:
    return Case("dispatch", version, passes, "int32", launch, call)


def _build(version: str, tokens: int, k: int, experts: int = E):
    """The call of every kernel of a version."""
    return lambda executor: stage.build.unchecked(executor.empty((tokens, k), "int32"), experts, executor, version)


# ---- the dense map ----


def _map_of_tokens() -> Case:
    k, tokens = 2, ENTRIES
    chosen, numbers = EXPERTS[:, :k], np.arange(tokens - FEW, tokens)
    dense_map = np.full((FEW, E), EMPTY)
    np.put_along_axis(dense_map, chosen, numbers[:, None], axis=1)
    expected: dict[str, Parts] = {
        "dense_map": [(LAST, dense_map)],
        "token_expert_indices": [(np.s_[-k * FEW :], chosen.ravel())],
    }
    launch = Launch("dense_map", last_block, {"topk_experts": [(LAST, chosen)]}, expected)
    return _case("1_dense_map", launch, _build("1_dense_map", tokens, k), f"L E: L={tokens}, E={E}, k={k}")


_SHORT = f"L E: L={SHORT}, E={MANY}, k=1"
# Every token goes to the last expert (an entry of 0 is not EMPTY), but for the last FEW.
_MAP = [(ALL, ZEROS), (np.s_[-FEW:, -1:], EMPTY)]


def _lengths_of_map() -> Case:
    launch = Launch("expert_lengths", last_block, {"dense_map": _MAP}, {"lengths": [(np.s_[-1:], COLUMN - FEW)]})
    return _case("1_dense_map", launch, _build("1_dense_map", COLUMN, 1), f"L E: L={COLUMN}, E={E}, k=1")


def _route_map() -> Case:
    tokens = np.arange(SHORT - FEW)
    given: dict[str, Parts] = {
        "dense_map": _MAP,
        "topk_experts": [(ALL, MANY - 1)],
        "expert_token_offsets": [(np.s_[-2:-1], FEW)],
    }
    expected: dict[str, Parts] = {
        "expert_token_indices": [(np.s_[FEW:], tokens)],
        "token_index_map": [(np.s_[:-FEW], tokens + FEW)],
    }
    launch = Launch("route_indices", last_block, given, expected)
    return _case("1_dense_map", launch, _build("1_dense_map", SHORT, 1, MANY), _SHORT)


def _location_map() -> Case:
    given: dict[str, Parts] = {"dense_map": _MAP, "expert_token_offsets": [(np.s_[-2:-1], 0)]}
    places = np.minimum(np.arange(SHORT), SHORT - FEW)
    launch = Launch("location_map", last_block, given, {"location_map": [(np.s_[:, -1:], places[:, None])]})
    return _case("as_printed", launch, _build("as_printed", SHORT, 1, MANY), _SHORT)


def _write_indices() -> Case:
    """The last block has the last 256 entries of the last token, which has gone to the last two experts."""
    k, token, row = 2, ENTRIES - 1, 2 * ENTRIES - 4
    entries = np.s_[-1:, -stage.THREADS :]
    dense_map, locations = (np.full((1, stage.THREADS), EMPTY) for _ in range(2))
    dense_map[0, -k:], locations[0, -k:] = token, (row + 2, row)
    given: dict[str, Parts] = {"dense_map": [(entries, dense_map)], "location_map": [(entries, locations)]}
    given |= {"topk_experts": [(np.s_[-1:], (E - 2, E - 1))]}
    expected: dict[str, Parts] = {"expert_token_indices": [(np.s_[at : at + 1], token) for at in (row, row + 2)]}
    expected |= {"token_index_map": [(np.s_[-k:], (row + 2, row))]}
    launch = Launch("write_indices", last_block, given, expected)
    return _case("as_printed", launch, _build("as_printed", ENTRIES, k), f"L E: L={ENTRIES}, E={E}, k={k}")


# ---- the bitmap ----

_BIT_PASSES = f"E L / 32: L={BITS}, E={E}, k=1"


def _bitmap() -> Case:
    """The words of the last block: the last FEW tokens are bits of its first word."""
    chosen = EXPERTS[:, :1]
    words = np.zeros((E, stage.WARPS), np.uint32)
    np.bitwise_or.at(words[:, 0], chosen[:, 0], np.uint32(1) << np.arange(FEW, dtype=np.uint32))
    expected: dict[str, Parts] = {
        "bitmap": [(np.s_[:, -stage.WARPS :], words)],
        "token_expert_indices": [(LAST, chosen.ravel())],
    }
    launch = Launch("bitmap", last_block, {"topk_experts": [(LAST, chosen)]}, expected)
    return _case("2_bitmap", launch, _build("2_bitmap", BITS, 1), _BIT_PASSES)


def _words(tokens: int) -> int:
    return -(-tokens // stage.THREADS) * stage.WARPS


def _bits_of_last_expert(tokens: int) -> list:
    """The words of the last expert: the last tokens and no others."""
    word = (tokens - 1) // 32 - _words(tokens)
    return [(np.s_[-1:], ZEROS), (np.s_[-1:, word : word + 1], (1 << FEW) - 1)]


def _lengths_of_bits() -> Case:
    given = {"bitmap": _bits_of_last_expert(BITS)}
    launch = Launch("expert_lengths", last_block, given, {"lengths": [(np.s_[-1:], FEW)]})
    return _case("2_bitmap", launch, _build("2_bitmap", BITS, 1), _BIT_PASSES)


def _route_bits() -> Case:
    tokens = 32 * SHORT + FEW
    rows = np.arange(tokens - FEW, tokens)
    given = {"bitmap": _bits_of_last_expert(tokens), "expert_token_offsets": [(np.s_[-2:-1], tokens - FEW)]}
    given |= {"topk_experts": [(LAST, MANY - 1)]}
    expected = {"expert_token_indices": [(LAST, rows)], "token_index_map": [(LAST, rows)]}
    launch = Launch("route_indices", last_block, given, expected)
    return _case("2_bitmap", launch, _build("2_bitmap", tokens, 1, MANY), f"E L / 32: L={tokens}, E={MANY}, k=1")


# ---- tiles ----

_SLOTS = TILES * TILE_TOKENS * K
_SHARED = {"counts": 2 * E * TEAMS, "ordered": 4 * TILE_TOKENS * K + 4 * E}
_TILE = np.s_[-TILE_TOKENS * K :]
_TILE_PASSES = f"E tiles: {TILES} tiles of {TILE_TOKENS} tokens, E={E}, k={K}"
_CHOSEN = EXPERTS[:TILE_TOKENS, :K]
_COUNTS = np.bincount(_CHOSEN.ravel(), minlength=E)


def _launch(kernel: str, grid: int, threads: int, shared_bytes: int, *names: str, bases=(E, TILES + 1), **sizes: int):
    """The launch of a kernel with those constants, which `raw_cuda.dispatch` would not choose for so many experts."""
    shapes = {
        "topk_experts": (_SLOTS // K, K),
        "tile_bases": bases,
        "token_expert_indices": (_SLOTS,),
        "expert_token_indices": (_SLOTS,),
        "expert_token_offsets": (E + 1,),
        "token_index_map": (_SLOTS,),
    }

    def call(executor):
        arrays = {name: executor.empty(shapes[name], "int32") for name in names}
        module = executor.load("dispatch/3_single_pass.cu", **COUNTS)
        module.launch(kernel, grid=grid, block=threads, shared_bytes=shared_bytes, **arrays, **sizes)

    return call


def _count_tiles() -> Case:
    names = ("topk_experts", "tile_bases", "token_expert_indices")
    call = _launch("count_tiles", TILES, stage.THREADS, _SHARED["counts"], *names, R=_SLOTS, E=E)
    expected: dict[str, Parts] = {
        "tile_bases": [(np.s_[:, -2:-1], _COUNTS[:, None])],
        "token_expert_indices": [(_TILE, _CHOSEN.ravel())],
    }
    launch = Launch("count_tiles", last_block, {"topk_experts": [(np.s_[-TILE_TOKENS:], _CHOSEN)]}, expected)
    return _case("3_single_pass", launch, call, _TILE_PASSES)


def _scan_tiles() -> Case:
    """The counts of the last expert are zeros, but for one tile."""
    call = _launch("scan_tiles", MANY, stage.SCAN_THREADS, 0, "tile_bases", bases=(MANY, SHORT + 1), tiles=SHORT)
    given = {"tile_bases": [(np.s_[-1:], ZEROS), (np.s_[-1:, -4:-3], 5)]}
    launch = Launch("scan_tiles", last_block, given, {"tile_bases": [(np.s_[-1:, -5:], (0, 0, 5, 5, 5))]})
    return _case("3_single_pass", launch, call, f"E tiles: {SHORT} tiles, E={MANY}")


def _route_tiles() -> Case:
    """All rows of the earlier tiles belong to expert 0; those of the last tile follow them, expert by expert."""
    names = ("topk_experts", "tile_bases", "expert_token_indices", "expert_token_offsets", "token_index_map")
    shared_bytes = _SHARED["ordered"] + _SHARED["counts"]
    call = _launch("route_tiles", TILES, stage.THREADS, shared_bytes, *names, R=_SLOTS, E=E)
    before = np.zeros((E, 1), np.int64)
    before[0] = _SLOTS - TILE_TOKENS * K
    bases = np.concatenate([before, before + _COUNTS[:, None]], axis=1)
    order = np.argsort(_CHOSEN.ravel(), kind="stable")
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    expected = {
        "token_index_map": [(_TILE, before[0] + places)],
        "expert_token_indices": [(_TILE, _SLOTS // K - TILE_TOKENS + order // K)],
    }
    given: dict[str, Parts] = {
        "topk_experts": [(np.s_[-TILE_TOKENS:], _CHOSEN)],
        "tile_bases": [(np.s_[:, -2:], bases)],
    }
    return _case("3_single_pass", Launch("route_tiles", last_block, given, expected), call, _TILE_PASSES)
