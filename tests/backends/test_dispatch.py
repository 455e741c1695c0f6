"""Dispatch in every backend and version: the same bits, the invariants, and faults that cannot pass."""

import re

import numpy as np
import pytest
from headers import evaluate, stated
from helpers import assert_invariants, assert_same_dispatch, routings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted import Planted, Quick

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort, build_part
from moeblaze_ref.backends.raw_cuda import dispatch as raw_dispatch
from moeblaze_ref.backends.raw_cuda.dispatch import THREADS, VERSIONS
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.checks import MAX_EXPERTS
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime import ceil_div
from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import MAX_SHARED_BYTES
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, GOLDEN_NUM_EXPERTS, GOLDEN_TOPK_EXPERTS, random_topk
from moeblaze_ref.verify.check import differing_elements

HERE = [("numpy", None), ("numba", None), *(("simt", version) for version in VERSIONS)]  # what needs no GPU

every_backend = pytest.mark.parametrize(("backend", "version"), HERE)
every_version = pytest.mark.parametrize("version", VERSIONS)


def build(backend, version, topk_experts, num_experts):
    """A backend's Dispatch as numpy arrays, its outputs poisoned before they are written."""
    return BACKENDS[backend].open("dispatch", version).build(topk_experts, num_experts)


@every_backend
def test_the_papers_example(backend, version):
    found = build(backend, version, GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS)
    assert differing_elements(found, GOLDEN_DISPATCH) == 0


def test_the_default_is_the_last_version():
    assert raw_dispatch.DEFAULT_VERSION == list(VERSIONS)[-1] == "3_single_pass"
    executor = SimtExecutor()
    with executor.recording() as launches:
        raw_dispatch.build(GOLDEN_TOPK_EXPERTS, GOLDEN_NUM_EXPERTS, executor=executor)
    assert [launch.kernel for launch in launches] == ["count_tiles", "scan_tiles", "route_tiles"]


SIZES = {"numpy": (400, 40), "numba": (20, 6), "simt": (700, 40)}  # most tokens and experts


@every_backend
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_invariants_of_random_routings(backend, version, data):
    most_tokens, most_experts = SIZES[backend]
    topk_experts, num_experts = data.draw(routings(most_tokens, most_experts))
    topk_experts = topk_experts[:, :32].copy()  # the kernels' limit
    assert_invariants(build(backend, version, topk_experts, num_experts), topk_experts, num_experts)


@every_version
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "routing"),
    [
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
    ],
)
def test_the_raw_kernels_at_their_limits(version, num_tokens, num_experts, k, routing):
    topk_experts = random_topk(num_tokens, num_experts, k, routing)
    found = build("simt", version, topk_experts, num_experts)
    assert differing_elements(found, build_by_sort(topk_experts, num_experts)) == 0


@every_version
def test_the_plain_build_gives_the_same_bits(version):
    topk_experts = random_topk(5000, 16, 4, "zipf")
    found = raw_dispatch.build(topk_experts, 16, executor=SimtExecutor(instrumented=False), version=version)
    assert differing_elements(found, build_by_sort(topk_experts, 16)) == 0


@every_version
@pytest.mark.parametrize("seed", range(1, 6))
def test_every_order_of_threads_gives_the_same_bits(version, seed):
    topk_experts = random_topk(600, 8, 3, "zipf")
    found = raw_dispatch.build(topk_experts, 8, executor=SimtExecutor(seed=seed), version=version)
    assert differing_elements(found, build_by_sort(topk_experts, 8)) == 0


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


# ---- what the headers state ----------------------------------------------------------------


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
        headers = {
            name: row for name, row in stated("dispatch/1_dense_map.cu").items() if name != "route_indices"
        } | headers
    assert [launch.kernel for launch in launches] == list(headers)
    for launch in launches:
        header = headers[launch.kernel]
        assert launch.read_bytes == evaluate(header.read, sizes), f"{launch.kernel} reads {header.read}"
        assert launch.written_bytes == evaluate(header.written, sizes), f"{launch.kernel} writes {header.written}"


class Allocating(SimtExecutor):
    """Adds up the bytes of the arrays that it makes."""

    allocated = 0

    def empty(self, shape, dtype):
        array = super().empty(shape, dtype)
        self.allocated += array.nbytes
        return array


@pytest.mark.parametrize(
    ("version", "formula"),
    [
        ("as_printed", "8 L E + 4 E"),
        ("1_dense_map", "4 L E + 4 E"),
        ("2_bitmap", "4 E WORDS + 4 E"),
        ("3_single_pass", "4 E (TILES + 1)"),
    ],
)
def test_what_each_version_needs_beside_its_outputs(version, formula):
    executor = Allocating()
    found = raw_dispatch.build(random_topk(3001, 130, 8), 130, executor=executor, version=version)
    outputs = sum(array.nbytes for array in found.arrays().values())
    assert executor.allocated - outputs == evaluate(formula, symbols(3001, 130, 8))


@pytest.mark.parametrize(
    ("version", "buffers"),
    [("2_bitmap", {"bitmap"}), ("3_single_pass", {"topk_experts", "token_expert_indices", "token_index_map"})],
)
def test_what_is_read_or_written_in_a_row_fills_its_sectors(version, buffers):
    executor = SimtExecutor()
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
    "missing barrier before the totals are read": (
        "= below_in_warp + value;\n    __syncthreads();",
        "= below_in_warp + value;",
    ),
    "missing barrier before the totals are written again": (
        "    __syncthreads();  // warp_totals may",
        "    // warp_totals may",
    ),
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
        "missing barrier before the words are written out": (
            "    __syncthreads();  // the words are",
            "    // the words are",
        ),
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
        "missing barrier after clearing the counts": (
            "    __syncthreads();  // the counts are zeros",
            "    // the counts are zeros",
        ),
        "missing barrier between a team's tokens": (
            "        __syncwarp();  // the team's next",
            "        // the team's next",
        ),
        "missing barrier before the teams' counts are added up": (
            "    __syncthreads();  // every team has counted",
            "    // every team has counted",
        ),
        "missing barrier before the places are read": (
            "    __syncthreads();  // every expert and team",
            "    // every expert and team",
        ),
        "missing barrier before the rows are written out": (
            "    __syncthreads();  // the rows lie",
            "    // the rows lie",
        ),
    },
}
every_fault = pytest.mark.parametrize(
    ("version", "fault"), [(version, fault) for version in FAULTS for fault in FAULTS[version]]
)

# (choices, experts): several tiles of tokens in every version, several turns of experts
HARD = [
    (random_topk(700, 300, 3, "zipf"), 300),
    (random_topk(1500, 20, 3, "zipf"), 20),
    (random_topk(8500, 3, 2, "zipf"), 3),
]


def planted(version, fault, seed):
    """An executor whose dispatch file has this fault."""
    return Planted(f"dispatch/{version}.cu", *FAULTS[version][fault], seed)


def wrong(version, executor, topk_experts, num_experts):
    """Whether a build raises or is not what the sort gives."""
    try:
        found = raw_dispatch.build(topk_experts, num_experts, executor=executor, version=version)
    except KernelFault:
        return True
    return differing_elements(found, build_by_sort(topk_experts, num_experts)) > 0


@pytest.fixture
def few_scan(monkeypatch):
    """An expert's counts are scanned by so few threads that those of a test take several turns."""
    monkeypatch.setattr(raw_dispatch, "SCAN_THREADS", 32)


@every_fault
def test_a_planted_fault_is_caught(version, fault, few_scan):
    assert any(wrong(version, planted(version, fault, seed=1), *hard) for hard in HARD)


@every_version
def test_the_same_inputs_without_a_fault_pass(version, few_scan):
    assert not any(wrong(version, Quick(seed=1), *hard) for hard in HARD)


def test_writing_past_a_buffer_names_the_buffer_and_the_thread():
    topk_experts = np.zeros((40, 1), np.int32)
    with pytest.raises(
        KernelFault,
        match=(
            r"kernel route_indices, block \(0, 0, 0\), thread \(39, 0, 0\): .*of expert_token_indices, which has "
            r"160 bytes"
        ),
    ):
        executor = planted("1_dense_map", "writes past its buffer", 0)
        raw_dispatch.build(topk_experts, 1, executor=executor, version="1_dense_map")


# ---- bad input ---------------------------------------------------------------------------


@every_backend
@pytest.mark.parametrize(
    ("topk_experts", "num_experts", "error", "message"),
    [
        ([[0, 9]], 8, ValueError, r"topk_experts\[0, 1\] is 9, but there are only 8 experts \(valid: 0..7\)"),
        ([[0, 1], [-1, 2]], 8, ValueError, r"topk_experts\[1, 0\] is -1, but there are only 8 experts"),
        ([[0, 1], [5, 5]], 8, ValueError, r"topk_experts\[1\] names expert 5 twice"),
        ([[0, 1, 2]], 2, ValueError, r"k is 3, but there are only 2 experts"),
        ([0, 1], 2, ValueError, r"topk_experts has shape \(2,\), but it must have 2 dimensions"),
    ],
)
def test_bad_choices_are_refused(backend, version, topk_experts, num_experts, error, message):
    with pytest.raises(error, match=message):
        build(backend, version, np.array(topk_experts, np.int32), num_experts)


@every_backend
def test_bad_arrays_are_refused(backend, version):
    with pytest.raises(TypeError, match="topk_experts has dtype int64, but it must be int32"):
        build(backend, version, GOLDEN_TOPK_EXPERTS.astype(np.int64), 4)
    with pytest.raises(ValueError, match="topk_experts is not C-contiguous"):
        build(backend, version, np.asfortranarray(GOLDEN_TOPK_EXPERTS), 4)
    with pytest.raises(TypeError, match="topk_experts is a list"):
        BACKENDS[backend].stage("dispatch").build([[0, 1]], 4)


@every_backend
def test_read_only_choices_are_fine(backend, version):
    fixed = GOLDEN_TOPK_EXPERTS.copy()
    fixed.flags.writeable = False
    assert differing_elements(build(backend, version, fixed, 4), GOLDEN_DISPATCH) == 0


@pytest.mark.parametrize(("backend", "version"), HERE[1:])
def test_the_kernels_limits_are_named(backend, version):
    with pytest.raises(ValueError, match="num_experts is 2000, but it must be 1..1024"):
        build(backend, version, np.zeros((1, 1), np.int32), 2000)
    with pytest.raises(ValueError, match="k is 40, but it must be 1..32"):
        build(backend, version, random_topk(1, 64, 40), 64)


def test_an_unknown_version_is_refused():
    with pytest.raises(ValueError, match="unknown version of dispatch '2_bitmaps'. Did you mean '2_bitmap'"):
        raw_dispatch.build(GOLDEN_TOPK_EXPERTS, 4, version="2_bitmaps")


def test_too_many_rows_are_refused_before_anything_is_allocated():
    wide = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (2**31, 1), (0, 4))
    with pytest.raises(ValueError, match="not C-contiguous|2147483648, but int32 indices allow at most"):
        raw_dispatch.build(wide, 4)


# Partial structures, where some experts are elsewhere


@st.composite
def partial_routings(draw):
    """(topk_experts, num_experts): routings over twice as many experts, of which only the first half is here."""
    topk_experts, twice = draw(routings(700, 40))
    num_experts = twice // 2
    here = topk_experts[:, :32] < num_experts
    return np.where(here, topk_experts[:, :32], EMPTY).astype(np.int32), num_experts


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(partial_routings())
def test_a_part_of_the_structures(routing):
    topk_experts, num_experts = routing
    here = topk_experts != EMPTY
    executor = SimtExecutor()
    found = raw_dispatch.build_part(topk_experts, num_experts, int(here.sum()), executor)
    assert_same_dispatch(found, build_part(topk_experts, num_experts, int(here.sum())))
    tokens, slots = here.nonzero()
    positions = found.token_index_map.reshape(topk_experts.shape)
    assert (positions[~here] == EMPTY).all()
    assert sorted(positions[here]) == list(range(found.R))
    np.testing.assert_array_equal(found.expert_token_indices[positions[here]], tokens)
    lengths = np.bincount(topk_experts[tokens, slots], minlength=num_experts)
    np.testing.assert_array_equal(np.diff(found.expert_token_offsets), lengths)


def test_a_part_that_is_all_is_the_whole():
    topk_experts = random_topk(300, 9, 4, "zipf", 1)
    assert_same_dispatch(raw_dispatch.build_part(topk_experts, 9, topk_experts.size), build_by_sort(topk_experts, 9))


@pytest.mark.parametrize("stage", [build_part, raw_dispatch.build_part], ids=["numpy", "simt"])
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
