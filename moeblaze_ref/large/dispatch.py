"""Large cases of the dispatch kernels."""

import numpy as np

from moeblaze_ref.large.cases import ALL, Case, last_block
from moeblaze_ref.raw_cuda import dispatch as stage
from moeblaze_ref.raw_cuda.runtime.sparse import ZEROS, Launch
from moeblaze_ref.structures import EMPTY

E = 1024
FEW = 8  # tokens of the last block
LAST = np.s_[-FEW:]
COLUMN = 2**21 + FEW  # tokens of which a block reads its expert's column: L E > 2**31
# A block that writes its column touches a page for each token: fewer tokens of more experts than dispatch takes.
WRITTEN, MANY = 2**11 + FEW, 2**20
ENTRIES = 2**22 + FEW  # tokens whose entries have a thread each: L E > 2**32
BITS = 2**27 + 2**18 + FEW  # tokens: E L / 32 > 2**32
# 3_single_pass with the smallest tiles that its constants allow: E tiles > 2**32
K, STEPS, TEAMS = 32, 1, 8
TILES = 2**22 + 2**13
TILE_TOKENS = STEPS * TEAMS
COUNTS = {"THREADS": stage.THREADS, "SCAN_THREADS": stage.SCAN_THREADS, "K": K, "STEPS": STEPS}
EXPERTS = np.random.default_rng(0).permuted(np.tile(np.arange(E), (FEW, 1)), axis=1).astype(np.int32)  # of each token


def cases() -> list[Case]:
    """Every kernel whose indices can pass 2**31; expert_offsets sees experts alone."""
    dense = [_map_of_tokens(), _lengths_of_map(), _route_map(), _location_map(), _write_indices()]
    return dense + [_bitmap(), _lengths_of_bits(), _route_bits(), _count_tiles(), _scan_tiles(), _route_tiles()]


def _case(rung: str, launch: Launch, call, passes: str) -> Case:
    return Case("dispatch", rung, passes, "int32", launch, call)


def _build(rung: str, tokens: int, k: int, experts: int = E):
    """The call of every kernel of a rung."""
    return lambda executor: stage.build(executor.empty((tokens, k), "int32"), experts, executor, rung)


# ---- the dense map ----


def _map_of_tokens() -> Case:
    k, tokens = 2, ENTRIES
    chosen, numbers = EXPERTS[:, :k], np.arange(tokens - FEW, tokens)
    dense_map = np.full((FEW, E), EMPTY)
    np.put_along_axis(dense_map, chosen, numbers[:, None], axis=1)
    expected = {"dense_map": [(LAST, dense_map)], "token_expert_indices": [(np.s_[-k * FEW :], chosen.ravel())]}
    launch = Launch("dense_map", last_block, {"topk_experts": [(LAST, chosen)]}, expected)
    return _case("1_dense_map", launch, _build("1_dense_map", tokens, k), f"L E: L={tokens}, E={E}, k={k}")


# Every token goes to the last expert (an entry of 0 is not EMPTY), but for the last FEW.
_MAP = [(ALL, ZEROS), (np.s_[-FEW:, -1:], EMPTY)]
_PASSES = f"L E: L={COLUMN}, E={E}, k=1"
_ROUTED = COLUMN - FEW


def _lengths_of_map() -> Case:
    launch = Launch("expert_lengths", last_block, {"dense_map": _MAP}, {"lengths": [(np.s_[-1:], _ROUTED)]})
    return _case("1_dense_map", launch, _build("1_dense_map", COLUMN, 1), _PASSES)


def _route_map() -> Case:
    tokens = np.arange(_ROUTED, dtype=np.int32)
    given = {"dense_map": _MAP, "topk_experts": [(ALL, E - 1)], "expert_token_offsets": [(np.s_[-2:-1], FEW)]}
    expected = {"expert_token_indices": [(np.s_[FEW:], tokens)], "token_index_map": [(np.s_[:-FEW], tokens + FEW)]}
    launch = Launch("route_indices", last_block, given, expected)
    return _case("1_dense_map", launch, _build("1_dense_map", COLUMN, 1), _PASSES)


def _location_map() -> Case:
    given = {"dense_map": [(ALL, ZEROS), (np.s_[-FEW:, -1:], EMPTY)], "expert_token_offsets": [(np.s_[-2:-1], 0)]}
    places = np.minimum(np.arange(WRITTEN), WRITTEN - FEW)
    launch = Launch("location_map", last_block, given, {"location_map": [(np.s_[:, -1:], places[:, None])]})
    call = _build("as_printed", WRITTEN, 1, MANY)
    return _case("as_printed", launch, call, f"L E: L={WRITTEN}, E={MANY}, k=1")


def _write_indices() -> Case:
    """The last block has the last 256 entries of the last token, which has gone to the last two experts."""
    k, token, row = 2, ENTRIES - 1, 2 * ENTRIES - 4
    entries = np.s_[-1:, -stage.THREADS :]
    dense_map, locations = (np.full((1, stage.THREADS), EMPTY) for _ in range(2))
    dense_map[0, -k:], locations[0, -k:] = token, (row + 2, row)
    given = {"dense_map": [(entries, dense_map)], "location_map": [(entries, locations)]}
    given |= {"topk_experts": [(np.s_[-1:], (E - 2, E - 1))]}
    expected = {"expert_token_indices": [(np.s_[at : at + 1], token) for at in (row, row + 2)]}
    expected |= {"token_index_map": [(np.s_[-k:], (row + 2, row))]}
    launch = Launch("write_indices", last_block, given, expected)
    return _case("as_printed", launch, _build("as_printed", ENTRIES, k), f"L E: L={ENTRIES}, E={E}, k={k}")


# ---- the bitmap ----

_WORDS = -(-BITS // stage.THREADS) * stage.WARPS
_BIT_PASSES = f"E L / 32: L={BITS}, E={E}, k=1"


def _bitmap() -> Case:
    """The words of the last block: the last FEW tokens are bits of its first word."""
    chosen = EXPERTS[:, :1]
    words = np.zeros((E, stage.WARPS), np.uint32)
    np.bitwise_or.at(words[:, 0], chosen[:, 0], np.uint32(1) << np.arange(FEW, dtype=np.uint32))
    expected = {"bitmap": [(np.s_[:, -stage.WARPS :], words)], "token_expert_indices": [(LAST, chosen.ravel())]}
    launch = Launch("bitmap", last_block, {"topk_experts": [(LAST, chosen)]}, expected)
    return _case("2_bitmap", launch, _build("2_bitmap", BITS, 1), _BIT_PASSES)


def _bits_of_last_expert() -> list:
    """The words of the last expert: the last tokens and no others."""
    word = (BITS - 1) // 32 - _WORDS
    return [(np.s_[-1:], ZEROS), (np.s_[-1:, word : word + 1], (1 << FEW) - 1)]


def _lengths_of_bits() -> Case:
    given = {"bitmap": _bits_of_last_expert()}
    launch = Launch("expert_lengths", last_block, given, {"lengths": [(np.s_[-1:], FEW)]})
    return _case("2_bitmap", launch, _build("2_bitmap", BITS, 1), _BIT_PASSES)


def _route_bits() -> Case:
    first = BITS - FEW
    given = {"bitmap": _bits_of_last_expert(), "expert_token_offsets": [(np.s_[-2:-1], first)]}
    given |= {"topk_experts": [(LAST, E - 1)]}
    rows = np.arange(first, BITS)
    expected = {"expert_token_indices": [(LAST, rows)], "token_index_map": [(LAST, rows)]}
    launch = Launch("route_indices", last_block, given, expected)
    return _case("2_bitmap", launch, _build("2_bitmap", BITS, 1), _BIT_PASSES)


# ---- tiles ----

_SLOTS = TILES * TILE_TOKENS * K
_SHARED = {"counts": 2 * E * TEAMS, "ordered": 4 * TILE_TOKENS * K + 4 * E}
_TILE = np.s_[-TILE_TOKENS * K :]
_TILE_PASSES = f"E tiles: {TILES} tiles of {TILE_TOKENS} tokens, E={E}, k={K}"
_CHOSEN = EXPERTS[:TILE_TOKENS, :K]
_COUNTS = np.bincount(_CHOSEN.ravel(), minlength=E)


def _launch(kernel: str, grid: int, threads: int, shared_bytes: int, *names: str, **sizes: int):
    """The launch of a kernel with those constants, which `raw_cuda.dispatch` would not choose for so many experts."""
    shapes = {
        "topk_experts": (_SLOTS // K, K),
        "tile_bases": (E, TILES + 1),
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
    expected = {"tile_bases": [(np.s_[:, -2:-1], _COUNTS[:, None])], "token_expert_indices": [(_TILE, _CHOSEN.ravel())]}
    launch = Launch("count_tiles", last_block, {"topk_experts": [(np.s_[-TILE_TOKENS:], _CHOSEN)]}, expected)
    return _case("3_single_pass", launch, call, _TILE_PASSES)


def _scan_tiles() -> Case:
    """The counts of the last expert are zeros, but for one tile."""
    call = _launch("scan_tiles", E, stage.SCAN_THREADS, 0, "tile_bases", tiles=TILES)
    given = {"tile_bases": [(np.s_[-1:], ZEROS), (np.s_[-1:, -4:-3], 5)]}
    launch = Launch("scan_tiles", last_block, given, {"tile_bases": [(np.s_[-1:, -5:], (0, 0, 5, 5, 5))]})
    return _case("3_single_pass", launch, call, _TILE_PASSES)


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
    given = {"topk_experts": [(np.s_[-TILE_TOKENS:], _CHOSEN)], "tile_bases": [(np.s_[:, -2:], bases)]}
    return _case("3_single_pass", Launch("route_tiles", last_block, given, expected), call, _TILE_PASSES)
