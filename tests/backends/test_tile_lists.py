"""How the tiles of a weight gradient are assigned to blocks: tile_lists.cuh against a plain model of it."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeblaze_ref.runtime.simt.executor import KernelFault, SimtExecutor
from moeblaze_ref.runtime.source import inlined

SIMT = SimtExecutor()
TEXT = """// Runs on      sm_70 and later; SIMT executor.
#include "tile_lists.cuh"
extern "C" __global__ void assign(const int* ends, int* counts, int* listed, int E, int of_expert, int most) {
    __shared__ TileList own_tiles;
    __shared__ TileAssignment assignment;
    assign_tiles(own_tiles, assignment, ends, E, of_expert);
    if (threadIdx.x == 0) counts[blockIdx.x] = own_tiles.count;
    for (int i = threadIdx.x; i < most; i += blockDim.x) listed[blockIdx.x * most + i] = own_tiles.tile(i);
}
"""
THREADS = 64
EVEN, MOST_ROUNDS, MOST, MOST_LOAD = 16, 64, 400, 2**22 - 2


def assigned(rows, of_expert, blocks, text=TEXT, executor=SIMT):
    """The tiles of each block, and whether they are interleaved, as the kernel says."""
    tiles = len(rows) * of_expert
    ends = executor.from_numpy(np.cumsum([0, *rows]).astype("int32"))
    counts, listed = executor.empty((blocks,), "int32"), executor.empty((blocks, tiles + 1), "int32")
    executor.load("test.cu", text=text).launch(
        "assign",
        blocks,
        THREADS,
        ends=ends,
        counts=counts,
        listed=listed,
        E=len(rows),
        of_expert=of_expert,
        most=tiles + 1,
    )
    assert len(np.unique(counts < 0)) == 1
    return [[int(tile) for tile in own if tile < tiles] for own in executor.to_numpy(listed)], bool(counts[0] < 0)


def steps_of(rows):
    return -(-np.asarray(rows) // 64) + 3


def work(own_tiles, rows, of_expert):
    """The steps of each block."""
    return np.array([sum(steps_of(rows)[tile // of_expert] for tile in own) for own in own_tiles])


def interleaved(tiles, blocks):
    return [list(range(block, tiles, blocks)) for block in range(blocks)]


def model(rows, of_expert, blocks):
    """The same without a GPU's means: whole lists, sorted anew in every round."""
    tiles = len(rows) * of_expert
    strided = interleaved(tiles, blocks)
    loads = work(strided, rows, of_expert)
    even = loads.max() * blocks <= loads.sum() + loads.sum() // EVEN
    if even or tiles > MOST_ROUNDS * blocks or loads.sum() // blocks + 2 * loads.max() > MOST_LOAD:
        return strided
    waiting = [
        expert * of_expert + i for expert in np.argsort(-np.asarray(rows), kind="stable") for i in range(of_expert)
    ]
    own_tiles, loads = [[] for _ in range(blocks)], np.zeros(blocks, int)
    while waiting:
        limit = loads.min() + steps_of(rows)[waiting[0] // of_expert]
        takers = [block for block in np.argsort(loads, kind="stable") if loads[block] < limit]
        for block in takers[: len(waiting)]:
            own_tiles[block].append(int(waiting.pop(0)))
            loads[block] += steps_of(rows)[own_tiles[block][-1] // of_expert]
    return strided if max(map(len, own_tiles)) > MOST else own_tiles


SKEWED = [int(20_000 / (i + 1)) for i in range(24)]
CASES = {
    "skewed": (SKEWED, 12, 33),
    "one expert has all": ([0, 0, 5000, 0], 3, 5),
    "as many blocks as threads": (SKEWED, 7, THREADS),
    "one block": (SKEWED, 2, 1),
    "more blocks than tiles": ([700, 10], 2, 9),
    "even": ([640 + i % 2 * 64 for i in range(12)], 6, 6),
    "a round too many": ([10_000, *[64] * 384], 1, 6),
    "no round too many": ([10_000, *[64] * 383], 1, 6),
    "no rows": ([0] * 5, 2, 3),
    "loads that are too large": ([300_000_000, 70_000_000, 0, 0], 2, 3),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_as_the_model_says(case):
    own_tiles, _ = assigned(*CASES[case])
    assert own_tiles == model(*CASES[case])


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.integers(0, 300) | st.integers(2_000, 9_000), min_size=1, max_size=40),
    of_expert=st.integers(1, 6),
    blocks=st.integers(1, 20),
)
def test_every_tile_is_taken_once_as_the_model_says(rows, of_expert, blocks):
    own_tiles, _ = assigned(rows, of_expert, blocks)
    assert sorted(itertools.chain(*own_tiles)) == list(range(len(rows) * of_expert))
    assert own_tiles == model(rows, of_expert, blocks)


def test_skew_costs_next_to_nothing():
    rows, of_expert, blocks = CASES["skewed"]
    own_tiles, strided_order = assigned(rows, of_expert, blocks)
    loads, strided = (work(of, rows, of_expert) for of in (own_tiles, interleaved(len(rows) * of_expert, blocks)))
    assert not strided_order
    assert strided.max() > 1.3 * strided.mean()
    assert loads.max() < 1.03 * loads.mean()


@pytest.mark.parametrize("case", ["one block", "even", "a round too many", "loads that are too large"])
def test_tiles_are_interleaved_where_that_is_even_or_there_are_many(case):
    assert assigned(*CASES[case])[1]


@pytest.mark.parametrize(("others", "too_many"), [(MOST, False), (MOST + 1, True)])
def test_a_list_that_is_too_long_is_none(others, too_many):
    blocks = 9
    one_in_nine = [300_000, *[0] * (blocks - 1)]  # interleaved, one block has all
    rows = one_in_nine * (blocks - 1) + [0] * (others - (blocks - 1) ** 2)
    own_tiles, strided_order = assigned(rows, 1, blocks)
    assert strided_order == too_many
    assert max(map(len, own_tiles)) == (MOST if not too_many else -(-len(rows) // blocks))


FAULTS = {
    "deepest tiles not first": ("order[place] = expert;", "order[expert] = expert;"),
    "experts alike in one place": ("(rows(other) == rows(expert) && other < expert)", "false"),
    "tiles as deep as rows alone": ("/ STEP + STORING", "/ STEP"),
    "blocks alike have one rank": ("put(load * MOST_BLOCKS + threadIdx.x);", "put(load * MOST_BLOCKS);"),
    "who has more takes one too": ("stands() && load < limit", "stands()"),
    "loads not told": ("        __syncthreads();\n        if (stands()) loads", "        if (stands()) loads"),
    "loads told too late": ("[threadIdx.x] = load;\n        __syncthreads();", "[threadIdx.x] = load;"),
    "only the first has a tile": ("next += takers", "next += takers + 1"),
    "a list of another block": ("if (threadIdx.x == blockIdx.x && count", "if (threadIdx.x == 0 && count"),
    "a count of another block": (
        "if (threadIdx.x == blockIdx.x) own_tiles.count",
        "if (threadIdx.x == 0) own_tiles.count",
    ),
    "never even": ("<= sum + sum / EVEN", "< 0"),
    "always even": ("<= sum + sum / EVEN", ">= 0"),
    "list beyond its end": ("return taken < count ? tiles[taken] : NONE;", "return tiles[taken];"),
    "a stride of another length": ("blockIdx.x + taken * gridDim.x", "blockIdx.x + taken * blockDim.x"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    right, wrong = FAULTS[fault]
    text = TEXT.replace('#include "tile_lists.cuh"\n', inlined("include/tile_lists.cuh"))
    assert right in text
    assert any(differs(case, text.replace(right, wrong)) for case in CASES)


def differs(case, text):
    try:
        return assigned(*CASES[case], text, SimtExecutor(seed=3))[0] != model(*CASES[case])
    except KernelFault:
        return True
