"""Dispatch in every backend and version: the same bits, the invariants, and faults that cannot pass."""

import re
from functools import partial

import numpy as np
import pytest
from headers import assert_as_stated, evaluate, stated
from helpers import assert_invariants, assert_same_dispatch, routings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import Planted, Quick, numba_with_fault, without_barrier
from simulator import counted_launches, kernels_as_stated, only_simulated

from moeblaze_ref.backends.numpy_ref import dispatch as reference
from moeblaze_ref.backends.numpy_ref.dispatch import TILE, build_by_sort
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.backends.raw_cuda.dispatch import THREADS, VERSIONS
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.checks import MAX_EXPERTS
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime import ceil_div
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import MAX_SHARED_BYTES
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, ROUTINGS, random_topk
from moeblaze_ref.verify.cases import GOLDEN_TOPK_EXPERTS as GOLDEN_TOPK


def build(backend, version, topk_experts, num_experts):
    """A backend's Dispatch as numpy arrays, its outputs poisoned before they are written."""
    return BACKENDS[backend].open("dispatch", version).build(topk_experts, num_experts)


SPECIFICATION = {"numpy": reference.build, "numpy by sort": build_by_sort}
KERNELS = {"numba": partial(build, "numba", None)}
KERNELS |= {f"simt-{version}": partial(build, "simt", version) for version in VERSIONS}
BUILDS = SPECIFICATION | KERNELS  # what needs no GPU


def assert_right(build, topk_experts, num_experts):
    """A build gives the sort's structures, bit for bit."""
    assert_same_dispatch(build(topk_experts, num_experts), build_by_sort(topk_experts, num_experts))


every_build = pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
every_version = pytest.mark.parametrize("version", VERSIONS, ids="simt-{}".format)
random_routings = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture
def numba_dispatch():
    """The module of the Numba kernels. Only what uses it imports Numba."""
    return BACKENDS["numba"].stage("dispatch")


# ---- every backend -------------------------------------------------------------------------


@every_build
def test_the_papers_example(build):
    found = build(GOLDEN_TOPK, 4)
    assert_same_dispatch(found, GOLDEN_DISPATCH)
    assert (found.L, found.E, found.k, found.R) == (5, 4, 2, 10)


SIZES = {"numpy": (600, 40), "numba": (20, 6), "simt": (700, 40)}  # most tokens and experts


@pytest.mark.parametrize("name", BUILDS)
@random_routings
@given(data=st.data())
def test_invariants_of_random_routings(name, data):
    topk_experts, num_experts = data.draw(routings(*SIZES[re.match("[a-z]+", name)[0]]))
    if name in KERNELS:
        topk_experts = topk_experts[:, :32].copy()  # their limit
    assert_invariants(BUILDS[name](topk_experts, num_experts), topk_experts, num_experts)


EDGES = [(0, 4, 2, "uniform"), (1, 1, 1, "uniform"), (1, 1500, 1500, "uniform"), (3, 1500, 40, "uniform")]
OVER_TILES = [(tokens, 6, 3, each) for tokens in (TILE - 1, TILE, TILE + 1, 3 * TILE + 17) for each in ROUTINGS]
LIMITS = [
    (0, 7, 3, "uniform"),
    (1, 1, 1, "uniform"),
    (1, 1024, 32, "uniform"),
    (300, 1024, 32, "zipf"),
    (257, 1, 1, "uniform"),
    (1000, 32, 32, "uniform"),
    (2048, 33, 1, "uniform"),  # full tiles, full words
    (4096, 64, 6, "hot"),
    (9001, 5, 2, "empty"),
    (3001, 700, 8, "empty"),
    (65_536, 16, 4, "zipf"),
]
SHAPES = {"numpy": EDGES + OVER_TILES, "numpy by sort": EDGES, "numba": []}


@pytest.mark.parametrize(
    ("name", "num_tokens", "num_experts", "k", "routing"),
    [(name, *shape) for name in BUILDS for shape in SHAPES.get(name, LIMITS)],
)
def test_every_shape_gives_the_bits_of_the_sort(name, num_tokens, num_experts, k, routing):
    topk_experts = random_topk(num_tokens, num_experts, k, routing)
    assert build_by_sort(topk_experts, num_experts).R == num_tokens * k
    assert_right(BUILDS[name], topk_experts, num_experts)


IN_NUMBA = {  # of T threads in a block
    "one token": lambda T: (1, 1, 1),
    "one token, every expert": lambda T: (1, 5, 5),
    "one full tile": lambda T: (T, 3, 2),
    "k = E, and one token in the last tile": lambda T: (T + 1, 3, 3),
    "full tiles only": lambda T: (3 * T, 2, 1),
    "several tiles": lambda T: (2 * T + 3, 4, 2),
    "several tiles of experts, most of them empty": lambda T: (3, 2 * T + 3, 2),
    **{routing: lambda T, routing=routing: (2 * T + 3, 4, 1, routing) for routing in ("zipf", "hot", "empty")},
}


@pytest.mark.parametrize("shape", IN_NUMBA)
def test_every_shape_gives_the_bits_of_the_sort_in_numba(shape, numba_dispatch):
    num_tokens, num_experts, *routing = IN_NUMBA[shape](numba_dispatch.THREADS)
    assert_right(KERNELS["numba"], random_topk(num_tokens, num_experts, *routing), num_experts)


@every_build
def test_the_input_may_be_read_only_and_is_not_shared(build):
    fixed = GOLDEN_TOPK.copy()
    fixed.flags.writeable = False
    found = build(fixed, 4)
    assert_same_dispatch(found, GOLDEN_DISPATCH)
    assert not any(np.shares_memory(array, fixed) for array in found.arrays().values())


# ---- the specification ---------------------------------------------------------------------

GOLDEN = {name: array.tolist() for name, array in GOLDEN_DISPATCH.arrays().items()}


def test_golden_example_step_by_step():
    routed = reference.dense_map(GOLDEN_TOPK, 4)
    assert routed.dtype == np.int32
    assert routed.tolist() == [[-1, -1, 0, 0], [1, 1, -1, -1], [2, -1, -1, 2], [-1, 3, 3, -1], [4, -1, -1, 4]]
    lengths = reference.expert_lengths(routed)
    assert lengths.dtype == np.int32 and lengths.tolist() == [3, 2, 2, 3]
    offsets = reference.expert_offsets(lengths)
    assert offsets.dtype == np.int32 and offsets.tolist() == GOLDEN["expert_token_offsets"]
    assert reference.exclusive_scan(routed[:, 0] != reference.EMPTY).tolist() == [0, 0, 1, 2, 2]
    expert_token_indices, token_index_map = reference.route_indices(routed, offsets, GOLDEN_TOPK)
    assert expert_token_indices.tolist() == GOLDEN["expert_token_indices"]
    assert token_index_map.tolist() == GOLDEN["token_index_map"]


def test_golden_example_as_printed():
    routed, offsets = reference.dense_map(GOLDEN_TOPK, 4), GOLDEN_DISPATCH.expert_token_offsets
    locations = reference.location_map(routed, offsets)
    assert locations.dtype == np.int32
    assert locations.tolist() == [[0, 3, 5, 7], [0, 3, 6, 8], [1, 4, 6, 8], [2, 4, 6, 9], [2, 5, 7, 9]]
    expert_token_indices, token_index_map = reference.write_indices(routed, locations, GOLDEN_TOPK)
    assert expert_token_indices.dtype == token_index_map.dtype == np.int32
    assert expert_token_indices.tolist() == GOLDEN["expert_token_indices"]
    assert token_index_map.tolist() == GOLDEN["token_index_map"]


@random_routings
@given(routings())
def test_both_phases_as_printed_equal_the_third_step(routing):
    routed, topk_experts = reference.dense_map(*routing), routing[0]
    offsets = reference.expert_offsets(reference.expert_lengths(routed))
    found = reference.write_indices(routed, reference.location_map(routed, offsets), topk_experts)
    for array, expected in zip(found, reference.route_indices(routed, offsets, topk_experts), strict=True):
        np.testing.assert_array_equal(array, expected, strict=True)


@random_routings
@given(routings())
def test_three_steps_equal_the_sort(routing):
    assert_same_dispatch(reference.build(*routing), reference.build_by_sort(*routing))


@random_routings
@given(routings())
def test_expert_groups_are_ascending_and_complete(routing):
    topk_experts, num_experts = routing
    dispatch = reference.build(topk_experts, num_experts)
    for expert, group, tokens in reference.expert_groups(dispatch):
        assert np.array_equal(tokens, np.flatnonzero((topk_experts == expert).any(axis=1)))
        assert group.stop - group.start == len(tokens)


@pytest.mark.parametrize("tile", [1, 2, 7])
def test_the_tile_changes_nothing(tile, monkeypatch):
    topk_experts = random_topk(23, 5, 2, "zipf")
    expected = reference.build(topk_experts, 5)
    monkeypatch.setattr(reference, "TILE", tile)
    assert_same_dispatch(reference.build(topk_experts, 5), expected)


PLANTED_FAULTS = {
    "zeros": lambda arrays: {name: np.zeros_like(array) for name, array in arrays.items()},
    "off-by-one offset": lambda arrays: {**arrays, "expert_token_offsets": arrays["expert_token_offsets"] + 1},
    "dropped last row": lambda arrays: {**arrays, "token_index_map": arrays["token_index_map"][:-1]},
    "expert order reversed": lambda arrays: {**arrays, "expert_token_indices": arrays["expert_token_indices"][::-1]},
    "int64": lambda arrays: {name: array.astype(np.int64) for name, array in arrays.items()},
}


@pytest.mark.parametrize("fault", PLANTED_FAULTS)
def test_a_planted_fault_fails_the_comparison(fault):
    dispatch = reference.build(GOLDEN_TOPK, 4)
    faulty = type(dispatch)(**PLANTED_FAULTS[fault](dispatch.arrays()), k=dispatch.k)
    with pytest.raises(AssertionError):
        assert_same_dispatch(faulty, dispatch)


# ---- the steps of numpy and Numba ------------------------------------------------------------


def steps(stage, topk_experts, num_experts):
    """The results of the public steps, each made from those before it."""
    dense_map = stage.dense_map(topk_experts, num_experts)
    lengths = stage.expert_lengths(dense_map)
    offsets = stage.expert_offsets(lengths)
    locations = stage.location_map(dense_map, offsets)
    as_printed = stage.write_indices(dense_map, locations, topk_experts)
    return dense_map, lengths, offsets, *stage.route_indices(dense_map, offsets, topk_experts), locations, *as_printed


def assert_right_steps(stage, topk_experts, num_experts):
    """Every step gives what the specification's does, bit for bit."""
    expected = steps(reference, topk_experts, num_experts)
    for result, truth in zip(steps(stage, topk_experts, num_experts), expected, strict=True):
        np.testing.assert_array_equal(result, truth, strict=True)


@pytest.mark.parametrize("tiles", [0, 1, 2])
def test_each_step_of_numba_is_the_specifications(tiles, numba_dispatch):
    num_tokens = {0: 0, 1: 1, 2: 2 * numba_dispatch.THREADS + 3}[tiles]
    assert_right_steps(BACKENDS["numba"].open("dispatch"), random_topk(num_tokens, 3, 2), 3)


def test_numbas_offsets_of_the_most_experts(numba_dispatch):
    lengths = np.random.default_rng(0).integers(0, 2**20, MAX_EXPERTS, dtype=np.int32)
    found, expected = numba_dispatch.expert_offsets(lengths), reference.expert_offsets(lengths)
    np.testing.assert_array_equal(found, expected, strict=True)


def test_numbas_build_checks_its_input_once(numba_dispatch, monkeypatch):
    checked = []
    for owner, name in ((checks, "check_topk_experts"), (stage_contracts, "check_route_indices")):
        monkeypatch.setattr(owner, name, lambda *_, name=name, **__: checked.append(name))
    numba_dispatch.build(GOLDEN_TOPK, 4)
    assert checked == ["check_topk_experts"]


FAULTS_IN_NUMBA = {  # what sees them: {what goes wrong: (text in the module, what takes its place)}
    "build": {
        "maps to the next expert": (", topk_experts[token, j]", ", (topk_experts[token, j] + 1) % num_experts"),
        "counts the first tile only": ("range(thread, dense_map.shape[0], THREADS)", "range(thread, THREADS, THREADS)"),
        "offset off by one": ("offsets[expert] = start + before", "offsets[expert] = start + before + (expert == 1)"),
        "no last offset": ("offsets[num_experts] = start", "pass"),
        "tokens of zeros": ("expert_token_indices[position] = token", "expert_token_indices[position] = 0"),
        "positions of zeros": ("token_index_map[token * k + j] = position", "token_index_map[token * k + j] = 0"),
        "routes nothing": ("if routed:", "if False:"),
        "drops the last token": ("token < num_tokens and", "token < num_tokens - 1 and"),
        "forgets earlier tiles": ("] = position\n        start += total", "] = position"),
    },
    "steps": {
        "locations forget earlier tiles": (
            "location_map[token, expert] = start + before\n        start += total",
            "location_map[token, expert] = start + before",
        ),
        "locations of zeros": ("location_map[token, expert] = start + before", "location_map[token, expert] = 0"),
        "writes nothing": ("if entry < num_tokens * num_experts:", "if False:"),
        "drops the last entries": ("entry < num_tokens * num_experts:", "entry < (num_tokens - 1) * num_experts:"),
    },
}


@pytest.mark.parametrize(
    ("seen_by", "fault"), [(seen_by, fault) for seen_by, faults in FAULTS_IN_NUMBA.items() for fault in faults]
)
def test_a_fault_planted_in_the_numba_kernels_is_caught(seen_by, fault, numba_dispatch):
    stage = numba_with_fault("dispatch", *FAULTS_IN_NUMBA[seen_by][fault])
    topk_experts = random_topk(2 * numba_dispatch.THREADS + 3, 3, 2)
    with pytest.raises(AssertionError if seen_by == "build" else (AssertionError, ValueError)):
        if seen_by == "build":
            assert_right(stage.build, topk_experts, 3)
        else:
            assert_right_steps(stage, topk_experts, 3)


@only_simulated
def test_the_numba_kernels_move_the_bytes_that_their_headers_state(numba_dispatch, monkeypatch):
    L, E, k = 2 * numba_dispatch.THREADS + 3, numba_dispatch.THREADS + 1, 3
    sizes = {"L": L, "E": E, "k": k, "R": L * k, "THREADS": numba_dispatch.THREADS}
    launches = counted_launches(monkeypatch, numba_dispatch)
    assert_right(numba_dispatch.build, random_topk(L, E, k), E)
    assert kernels_as_stated(launches, sizes) == [
        numba_dispatch.dense_map_kernel,
        numba_dispatch.expert_lengths_kernel,
        numba_dispatch.expert_offsets_kernel,
        numba_dispatch.route_indices_kernel,
    ]
    steps(numba_dispatch, random_topk(L, 5, k), 5)
    as_printed = [numba_dispatch.location_map_kernel, numba_dispatch.write_indices_kernel]
    assert kernels_as_stated(launches, sizes | {"E": 5})[3:5] == as_printed


# ---- the raw kernels -------------------------------------------------------------------------


def test_the_default_of_simt_is_the_last_version():
    assert raw_dispatch.DEFAULT_VERSION == list(VERSIONS)[-1] == "3_single_pass"
    executor = SimtExecutor()
    with executor.recording() as launches:
        raw_dispatch.build(GOLDEN_TOPK, 4, executor=executor)
    assert [launch.kernel for launch in launches] == ["count_tiles", "scan_tiles", "route_tiles"]


@every_version
def test_the_plain_build_gives_the_same_bits(version):
    topk_experts = random_topk(5000, 16, 4, "zipf")
    assert_right(
        partial(raw_dispatch.build, executor=SimtExecutor(instrumented=False), version=version), topk_experts, 16
    )


@every_version
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_order_of_threads_gives_the_same_bits(version, seed):
    in_another_order = partial(raw_dispatch.build, executor=SimtExecutor(seed=seed), version=version)
    assert_right(in_another_order, random_topk(600, 8, 3, "zipf"), 8)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 17, 32])
def test_the_tiles_fit_every_number_of_experts(k):
    for num_experts in range(k, MAX_EXPERTS + 1):
        tiling = raw_dispatch.Tiling.of(num_experts, k)
        assert tiling.teams == tiling.threads // 32 * (32 // k) <= 64
        wanted, rows = 32 * num_experts, tiling.tokens * k
        assert rows >= wanted or tiling.steps == 32
        assert rows // 2 < wanted or tiling.steps == 4
        assert 4 * rows + 4 * num_experts + 2 * num_experts * tiling.teams + 32 <= MAX_SHARED_BYTES
        bits = raw_dispatch.constants("2_bitmap", num_experts, k)["EXPERT_BITS"]
        assert num_experts <= 2**bits <= max(2, 2 * num_experts - 1)


def symbols(num_tokens, num_experts, k):
    """Those of the headers' formulas."""
    tiling = raw_dispatch.Tiling.of(num_experts, k)
    return {
        "L": num_tokens,
        "E": num_experts,
        "k": k,
        "R": num_tokens * k,
        "THREADS": THREADS,
        "WORDS": ceil_div(num_tokens, THREADS) * THREADS // 32,
        "TILES": ceil_div(num_tokens, tiling.tokens),
    }


@every_version
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k"), [(1000, 16, 4), (513, 8, 1), (70, 300, 32), (3001, 130, 8), (1, 1024, 2)]
)
def test_the_kernels_ask_for_the_bytes_that_their_header_states(version, num_tokens, num_experts, k):
    executor = SimtExecutor()
    with executor.recording() as launches:
        topk_experts = random_topk(num_tokens, num_experts, k, "zipf")
        raw_dispatch.build(topk_experts, num_experts, executor=executor, version=version)
    headers, sizes = stated(f"dispatch/{version}.cu"), symbols(num_tokens, num_experts, k)
    if version == raw_dispatch.AS_PRINTED:  # its first two steps are another file's
        first_two = stated("dispatch/1_dense_map.cu")
        del first_two["route_indices"]
        headers = first_two | headers
    assert [launch.kernel for launch in launches] == list(headers)
    for launch in launches:
        assert_as_stated(launch, headers, sizes)


class Allocating(SimtExecutor):
    """Adds up the bytes of the arrays that it makes."""

    allocated = 0

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        self.allocated += array.nbytes
        return array


BESIDE_THE_OUTPUTS = {
    "as_printed": "8 L E + 4 E",
    "1_dense_map": "4 L E + 4 E",
    "2_bitmap": "4 E WORDS + 4 E",
    "3_single_pass": "4 E (TILES + 1)",
}


@every_version
def test_what_each_version_needs_beside_its_outputs(version):
    executor = Allocating()
    found = raw_dispatch.build(random_topk(3001, 130, 8), 130, executor=executor, version=version)
    outputs = sum(array.nbytes for array in found.arrays().values())
    assert executor.allocated - outputs == evaluate(BESIDE_THE_OUTPUTS[version], symbols(3001, 130, 8))


IN_A_ROW = {"2_bitmap": {"bitmap"}, "3_single_pass": {"topk_experts", "token_expert_indices", "token_index_map"}}


@pytest.mark.parametrize("version", IN_A_ROW, ids="simt-{}".format)
def test_what_is_read_or_written_in_a_row_fills_its_sectors(version):
    executor, buffers = SimtExecutor(), IN_A_ROW[version]
    with executor.recording() as launches:
        raw_dispatch.build(random_topk(4096, 16, 8), 16, executor=executor, version=version)
    counts = [(name, traffic) for launch in launches for name, traffic in launch.buffers.items() if name in buffers]
    assert {name for name, _ in counts} == buffers
    for name, traffic in counts:
        assert 32 * traffic.read_sectors == traffic.read_bytes, name
        assert 32 * traffic.written_sectors == traffic.written_bytes, name


# ---- planted faults ------------------------------------------------------------------------

# name: (text in the kernel file or in common.cuh or dispatch.cuh, what takes its place)
IN_BLOCK_SCANS = {
    "inclusive scan": ("return inclusive - value;", "return inclusive;"),
    "missing barrier before the totals are read": ("+ value;\n    __syncthreads();", "+ value;"),
    "missing barrier before the totals are written again": without_barrier("warp_totals may"),
}
IN_BOTH_MAPS = {
    "writes zeros": ("expert_token_indices[position] = token;", "expert_token_indices[position] = 0;"),
    "writes nothing": ("token_index_map[token * k + slot] = position;", ""),
    "forgets earlier tiles": ("        base += rank.total;\n", ""),
    "forgets earlier experts": ("        base += scan.total;\n", ""),
    "offset off by one": ("sums[i] = base + scan.exclusive;", "sums[i] = base + scan.exclusive + (i > 0);"),
    "no last offset": ("expert_token_offsets[E] = total;", ";"),
    "wrong slot": ("while (experts_of_token[j] != expert) ++j;", ";"),
    **IN_BLOCK_SCANS,
}
IN_VOTES = {
    "votes on one bit less": ("bit < BITS", "bit < BITS - 1"),
    "absent lanes vote, too": ("unsigned same = among;", "unsigned same = FULL_WARP;"),
    "those who vote against it": ("set ? voted : ~voted", "voted"),
}
FAULTS = {
    "as_printed": {
        **IN_BLOCK_SCANS,
        "writes zeros": ("expert_token_indices[location] = token;", "expert_token_indices[location] = 0;"),
        "writes nothing": ("token_index_map[token * k + slot] = location;", ""),
        "writes past its buffer": ("int location = location_map[entry];", "int location = location_map[entry] + 1;"),
        "drops the last token": (">= (long long)L * E) return;", ">= (long long)(L - 1) * E) return;"),
        "drops the last location": ("if (token < L) location_map", "if (token < L - 1) location_map"),
        "forgets earlier tiles": ("        base += rank.total;\n", ""),
        "every entry is routed": ("token < L && dense_map[entry] != EMPTY", "token < L"),
        "a token counts itself": ("base + rank.exclusive;", "base + rank.exclusive + 1;"),
        "reads the wrong expert": ("topk_experts + token * k, entry % E", "topk_experts + token * k, entry / L"),
        "wrong expert's offset": ("expert_token_offsets[expert];", "expert_token_offsets[(expert + 1) % E];"),
        "wrong slot": ("while (experts_of_token[j] != expert) ++j;", ";"),
    },
    "1_dense_map": {
        **IN_BOTH_MAPS,
        "writes past its buffer": ("position = base + rank.exclusive;", "position = base + rank.exclusive + 1;"),
        "drops the last token": ("token < L && dense_map", "token < L - 1 && dense_map"),
        "reads the wrong expert": ("rows[slot / k * E + expert] =", "rows[slot / k * E + (expert + 1) % E] ="),
        "map not cleared": ("rows[entry] = EMPTY;", ";"),
        "counts empty entries": ("* E + expert] != EMPTY;", "* E + expert] >= EMPTY;"),
        "missing barrier after clearing the map": ("    __syncwarp();\n", ""),
    },
    "2_bitmap": {
        **IN_BOTH_MAPS,
        **IN_VOTES,
        "drops the last token": ("lane_id() < tokens;", "lane_id() < tokens - (first_token + tokens == L);"),
        "copies one slot less": ("slot < tokens * k;", "slot < tokens * k - 1;"),
        "words not cleared": ("words[word] = 0;", ";"),
        "keeps the last slot's bits only": ("|= chosen_by;", "= chosen_by;"),
        "wrong block's words": ("stride + blockIdx.x * WARPS", "stride + (gridDim.x - 1 - blockIdx.x) * WARPS"),
        "wrong warp's words": ("words[expert * WARPS + warp_id()]", "words[expert * WARPS + (warp_id() ^ 1)]"),
        "wrong expert's words": ("[word / WARPS * stride +", "[(word / WARPS + 1) % E * stride +"),
        "counts words, not bits": ("tokens += __popc(column[word]);", "tokens += column[word] != 0;"),
        "scans words, not bits": ("(__popc(bits));", "(bits != 0);"),
        "all bits of a word in one place": (" + __popc(bits & (lowest - 1));", ";"),
        "a bit counts itself": ("__popc(bits & (lowest - 1));", "__popc(bits & (lowest | (lowest - 1)));"),
        "upper bits first": ("__popc(bits & (lowest - 1));", "__popc(bits & ~lowest & -lowest);"),
        "drops a word's last bit": ("left != 0;", "(left & (left - 1)) != 0;"),
        "missing barrier after clearing the words": ("words[word] = 0;\n    __syncthreads();", "words[word] = 0;"),
        "missing barrier before the words are written out": without_barrier("the words are"),
    },
    "3_single_pass": {
        **IN_BLOCK_SCANS,
        "writes zeros": ("= first_token + here.token;", "= 0;"),
        "writes nothing": ("token_index_map[tile.first + slot_in_tile(step)] = place;", ""),
        "writes past its buffer": ("row + shift[", "row + 1 + shift["),
        "drops the last slot": ("slot_in_tile(step) < tile.slots;", "slot_in_tile(step) < tile.slots - 1;"),
        "drops a tile's last row": ("row < rows;", "row < rows - 1;"),
        "copies one slot less": ("== NONE ? EMPTY : expert", "== E - 1 ? EMPTY : expert"),
        "next tile's base": ("offset + bases[blockIdx.x]", "offset + bases[blockIdx.x + 1]"),
        "no tile's base": ("offset + bases[blockIdx.x]", "offset"),
        "forgets earlier tiles": ("        base += scan.total;\n", ""),
        "forgets earlier experts": ("        offset_below += length.total;\n", ""),
        "forgets the tile's earlier experts": ("        rows_below += rows.total;\n", ""),
        "no expert's length": ("bases[tiles] = length;", ";"),
        "no last offset": ("expert_token_offsets[E] = offset_below;", ";"),
        "forgets earlier tokens of the team": ("const int rank = count;", "const int rank = 0;"),
        "a slot counts itself": ("|= rank << 16;", "|= (rank + 1) << 16;"),
        "every step the same token": ("team() * STEPS + step", "team() * STEPS"),
        "idle lanes take the next team's slots": ("in_team() && slot", "slot"),
        "higher teams first": ("counts_of_expert + team * E;", "counts_of_expert + (TEAMS - AT_ONCE - team) * E;"),
        "a team's rows begin where the last one's did": ("            first += rows[i];\n", ""),
        "leaves out a team": ("rows += counts_of_expert[", "rows += team == 0 ? 0 : counts_of_expert["),
        "counts not cleared": ("counts[i] = 0;", ";"),
        "token of the tile, not of all": ("first_token + here.token", "here.token"),
        "missing barrier after clearing the counts": without_barrier("the counts are zeros"),
        "missing barrier between a team's tokens": without_barrier("the team's next", "__syncwarp()"),
        "missing barrier before the teams' counts are added up": without_barrier("every team has counted"),
        "missing barrier before the places are read": without_barrier("every expert and team"),
        "missing barrier before the rows are written out": without_barrier("the rows lie"),
    },
}
# (choices, experts): several tiles of tokens in every version, several turns of experts
HARD = [
    (random_topk(700, 300, 3, "zipf"), 300),
    (random_topk(1500, 20, 3, "zipf"), 20),
    (random_topk(8500, 3, 2, "zipf"), 3),
]


def wrong(version, executor, topk_experts, num_experts):
    """Whether a build raises or is not what the sort gives."""
    try:
        assert_right(partial(raw_dispatch.build, executor=executor, version=version), topk_experts, num_experts)
    except (AssertionError, KernelFault):
        return True
    return False


@pytest.fixture
def few_scan(monkeypatch):
    """An expert's counts are scanned by so few threads that those of a test take several turns."""
    monkeypatch.setattr(raw_dispatch, "SCAN_THREADS", 32)


@pytest.mark.parametrize(
    ("version", "fault"),
    [pytest.param(version, fault, id=f"simt-{version}-{fault}") for version in FAULTS for fault in FAULTS[version]],
)
def test_a_planted_fault_is_caught(version, fault, few_scan):
    executor = Planted(f"dispatch/{version}.cu", *FAULTS[version][fault], seed=1)
    assert any(wrong(version, executor, *hard) for hard in HARD)


@every_version
def test_the_same_inputs_without_a_fault_pass(version, few_scan):
    assert not any(wrong(version, Quick(seed=1), *hard) for hard in HARD)


def test_writing_past_a_buffer_of_simt_names_the_buffer_and_the_thread():
    executor = Planted("dispatch/1_dense_map.cu", *FAULTS["1_dense_map"]["writes past its buffer"], seed=0)
    thread = r"kernel route_indices, block \(0, 0, 0\), thread \(39, 0, 0\)"
    with pytest.raises(KernelFault, match=rf"{thread}: .*of expert_token_indices, which has 160 bytes"):
        raw_dispatch.build(np.zeros((40, 1), np.int32), 1, executor=executor, version="1_dense_map")


# ---- bad input -------------------------------------------------------------------------------

TAKING_CHOICES = BUILDS | {
    "numpy dense_map": reference.dense_map,
    "numba dense_map": lambda *arguments: BACKENDS["numba"].open("dispatch").dense_map(*arguments),
}


@pytest.mark.parametrize("taking", TAKING_CHOICES)
@pytest.mark.parametrize(
    ("topk_experts", "num_experts", "error", "message"),
    [
        (GOLDEN_TOPK, 3, ValueError, r"topk_experts\[0, 1\] is 3, but there are only 3 experts \(valid: 0..2\)"),
        (np.int32([[0, 9]]), 8, ValueError, r"topk_experts\[0, 1\] is 9, but .* only 8 experts \(valid: 0..7\)"),
        (GOLDEN_TOPK - 1, 4, ValueError, r"topk_experts\[1, 0\] is -1, but there are only 4 experts"),
        (np.int32([[0, 1], [2, 2]]), 4, ValueError, r"topk_experts\[1\] names expert 2 twice"),
        (np.zeros((3, 2), np.int32), 4, ValueError, r"topk_experts\[0\] names expert 0 twice"),
        (GOLDEN_TOPK, 1, ValueError, "k is 2, but there are only 1 experts"),
        (GOLDEN_TOPK, 0, ValueError, "num_experts is 0, but it must be >= 1"),
        (GOLDEN_TOPK, 4.0, TypeError, "num_experts is 4.0"),
        (GOLDEN_TOPK[:, :0], 4, ValueError, "k is 0, but it must be >= 1"),
        (GOLDEN_TOPK[0], 4, ValueError, r"topk_experts has shape \(2,\), but it must have 2 dimensions"),
        (GOLDEN_TOPK.astype(np.int64), 4, TypeError, "topk_experts has dtype int64, but it must be int32"),
        (GOLDEN_TOPK.tolist(), 4, TypeError, "topk_experts is a list"),
        (GOLDEN_TOPK[:, ::-1], 4, ValueError, "topk_experts is not C-contiguous"),
        (np.asfortranarray(GOLDEN_TOPK), 4, ValueError, "topk_experts is not C-contiguous"),
    ],
)
def test_bad_choices_are_refused(taking, topk_experts, num_experts, error, message):
    with pytest.raises(error, match=message):
        TAKING_CHOICES[taking](topk_experts, num_experts)


@pytest.mark.parametrize("taking", [name for name in TAKING_CHOICES if not name.startswith("numpy")])
def test_the_kernels_limits_are_named(taking):
    with pytest.raises(ValueError, match="num_experts is 2000, but it must be 1..1024"):
        TAKING_CHOICES[taking](np.zeros((1, 1), np.int32), 2000)
    with pytest.raises(ValueError, match="k is 40, but it must be 1..32"):
        TAKING_CHOICES[taking](random_topk(1, 64, 40), 64)


@pytest.mark.parametrize("taking", [name for name in TAKING_CHOICES if name.startswith("numpy")])
def test_more_rows_than_int32_counts_are_refused_unread(taking, tmp_path):
    sparse = np.memmap(tmp_path / "topk_experts", dtype=np.int32, mode="w+", shape=(2**30, 2))  # a file of holes
    with pytest.raises(ValueError, match=r"R = L \* k = 1073741824 \* 2 = 2147483648, but int32 indices allow"):
        TAKING_CHOICES[taking](sparse, 4)


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="unknown version of dispatch '2_bitmaps'. Did you mean '2_bitmap'"):
        raw_dispatch.build(GOLDEN_TOPK, 4, version="2_bitmaps")


def test_too_many_rows_are_refused_before_anything_is_allocated():
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**31, 1), (0, 4))
    with pytest.raises(ValueError, match="not C-contiguous|2147483648, but int32 indices allow at most"):
        raw_dispatch.build(wide, 4)


DENSE = reference.dense_map(GOLDEN_TOPK, 4)
OFFSETS = np.array(GOLDEN["expert_token_offsets"], dtype=np.int32)
LOCATIONS = reference.location_map(DENSE, OFFSETS)


BAD_STEPS = [  # (a call of a room's dispatch module, the error, its message)
    (lambda room: room.dense_map(GOLDEN_TOPK, 3), ValueError, r"topk_experts\[0, 1\] is 3, .* \(valid: 0..2\)"),
    (lambda room: room.expert_lengths(DENSE.astype(np.int64)), TypeError, "dense_map has dtype int64"),
    (lambda room: room.expert_lengths(DENSE[0]), ValueError, "dense_map has shape"),
    (lambda room: room.expert_offsets(np.array([3, -2], np.int32)), ValueError, r"lengths\[1\] is -2"),
    (lambda room: room.expert_offsets(np.full(2, 2**30, np.int32)), ValueError, "sum of the lengths, is 2147483648"),
    (lambda room: room.expert_offsets(np.ones(2)), TypeError, "lengths has dtype float64"),
    (lambda room: room.expert_offsets(DENSE), ValueError, "must have 1 dimensions"),
    (lambda room: room.route_indices(DENSE, OFFSETS + 1, GOLDEN_TOPK), ValueError, r"offsets\[0\] is 1, .* must be 0"),
    (lambda room: room.route_indices(DENSE, OFFSETS // 2, GOLDEN_TOPK), ValueError, r"offsets\[1\] is 1, .* must be 3"),
    (lambda room: room.route_indices(DENSE + 1, OFFSETS, GOLDEN_TOPK), ValueError, r"dense_map\[0, 0\] is 0, .* -1"),
    (lambda room: room.route_indices(DENSE[0], OFFSETS, GOLDEN_TOPK), ValueError, "dense_map has shape"),
    (lambda room: room.route_indices(DENSE, OFFSETS.astype(np.int64), GOLDEN_TOPK), TypeError, "offsets has dtype"),
    (lambda room: room.route_indices(DENSE, OFFSETS, GOLDEN_TOPK - 1), ValueError, r"topk_experts\[1, 0\] is -1"),
    (lambda room: room.route_indices(DENSE[:4], OFFSETS, GOLDEN_TOPK), ValueError, r"must be \(L=4, k\)"),
    (lambda room: room.route_indices(DENSE, OFFSETS[[0, 1, 4]], GOLDEN_TOPK), ValueError, r"must be \(E \+ 1=5\)"),
    (lambda room: room.location_map(DENSE[0], OFFSETS), ValueError, "dense_map has shape"),
    (lambda room: room.location_map(DENSE, OFFSETS[:4]), ValueError, r"must be \(E \+ 1=5\)"),
    (lambda room: room.location_map(DENSE, OFFSETS + 1), ValueError, r"offsets\[0\] is 1, .* must be 0"),
    (lambda room: room.location_map(DENSE, OFFSETS / 1.0), TypeError, "offsets has dtype float64"),
    (lambda room: room.write_indices(DENSE + 1, LOCATIONS, GOLDEN_TOPK), ValueError, r"dense_map\[0, 0\] is 0, .* -1"),
    (
        lambda room: room.write_indices(DENSE, LOCATIONS + 1, GOLDEN_TOPK),
        ValueError,
        r"location_map\[0, 0\] is 1, .* 0",
    ),
    (lambda room: room.write_indices(DENSE, LOCATIONS[:4], GOLDEN_TOPK), ValueError, r"must be \(L=5, E=4\)"),
    (lambda room: room.write_indices(DENSE, LOCATIONS.astype(int), GOLDEN_TOPK), TypeError, "location_map has dtype"),
]


@pytest.mark.parametrize("room", ["numpy", "numba"])
@pytest.mark.parametrize(("call", "error", "message"), BAD_STEPS)
def test_bad_input_of_the_steps(room, call, error, message):
    with pytest.raises(error, match=message):
        call(BACKENDS[room].stage("dispatch"))


def test_bad_input_of_the_scan():
    with pytest.raises(TypeError, match="flags has dtype int32, but it must be bool"):
        reference.exclusive_scan(DENSE[:, 0])


# ---- partial structures, where some experts are elsewhere -------------------------------------


@st.composite
def partial_routings(draw):
    """(topk_experts, num_experts): routings over twice as many experts, of which only the first half is here."""
    topk_experts, twice = draw(routings(700, 40))
    num_experts = twice // 2
    here = topk_experts[:, :32] < num_experts
    return np.where(here, topk_experts[:, :32], EMPTY).astype(np.int32), num_experts


@random_routings
@given(partial_routings())
def test_a_part_of_the_structures_by_simt(routing):
    topk_experts, num_experts = routing
    here = topk_experts != EMPTY
    found = raw_dispatch.build_part(topk_experts, num_experts, int(here.sum()), SimtExecutor())
    assert_same_dispatch(found, reference.build_part(topk_experts, num_experts, int(here.sum())))
    tokens, slots = here.nonzero()
    positions = found.token_index_map.reshape(topk_experts.shape)
    assert (positions[~here] == EMPTY).all()
    assert sorted(positions[here]) == list(range(found.R))
    np.testing.assert_array_equal(found.expert_token_indices[positions[here]], tokens)
    lengths = np.bincount(topk_experts[tokens, slots], minlength=num_experts)
    np.testing.assert_array_equal(np.diff(found.expert_token_offsets), lengths)


def test_simts_part_that_is_all_is_the_whole():
    topk_experts = random_topk(300, 9, 4, "zipf", 1)
    assert_same_dispatch(raw_dispatch.build_part(topk_experts, 9, topk_experts.size), build_by_sort(topk_experts, 9))


@pytest.mark.parametrize("stage", [reference.build_part, raw_dispatch.build_part], ids=["numpy", "simt"])
@pytest.mark.parametrize(
    ("topk_experts", "num_routed", "message"),
    [
        ([[0, EMPTY], [EMPTY, 3]], 2, r"topk_experts[1, 1] is 3, but there are only 3 experts (valid: 0..2)"),
        ([[0, -2], [EMPTY, 1]], 3, "topk_experts[0, 1] is -2, but there are only 3 experts (valid: 0..2)"),
        ([[0, EMPTY], [2, 2]], 3, "topk_experts[1] names expert 2 twice"),
        ([[0, EMPTY], [EMPTY, 2]], 3, "num_routed is 3, but topk_experts names 2 experts"),
        ([[0, EMPTY], [EMPTY, 2]], 5, "num_routed is 5, but it must be 0..4"),
    ],
)
def test_wrong_parts_are_refused(stage, topk_experts, num_routed, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        stage(np.array(topk_experts, np.int32), 3, num_routed)
