"""The stated order of sums: numpy's float32, Numba and the executor give the same bits, and another order does not."""

import inspect
import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest
from planted import plant, with_fault

from moeblaze_ref.backends.numba_cuda import block_sparse as numba_block_sparse
from moeblaze_ref.backends.numba_cuda import combine as numba_combine
from moeblaze_ref.backends.numba_cuda import expert_up as numba_expert_up
from moeblaze_ref.backends.raw_cuda import expert_down, gemm, tiles
from moeblaze_ref.backends.raw_cuda.tiles import WARP
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.runtime.simt.executor import SimtModule
from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.verify import check, orders

HERE = ("numpy", "numba", "simt")


def jobs(stage, backend, version=None) -> Iterator:
    """The checks of the order alone, of those that `moeblaze check` runs of a stage."""
    planned = check.plan([stage], [backend])
    return (job for job in planned if isinstance(job.args[4], orders.Sum) and version in (None, job.args[3]))


def rows(stage, backend, version=None):
    return [row for job in jobs(stage, backend, version) for row in job()]


def name_of(one):
    """Such as "d_x by slots"."""
    return f"{one.result} by {one.order}"


PROMISED = sorted({(one.stage, backend) for one in orders.SUMS for backend in one.backends if backend in HERE})


@pytest.mark.parametrize(("stage", "backend"), PROMISED)
def test_every_stated_order_is_kept_to_the_bit(stage, backend):
    found = rows(stage, backend)
    assert found and all(row.ok and row.error == row.bound == 0.0 and row.direction == "order" for row in found), found
    for version in BACKENDS[backend].versions(stage):
        stated = {one.shape_at(one.sizes[0]) for one in orders.promises(stage, backend, version)}
        assert {row.shape for row in found if row.version == version} == stated


@pytest.mark.parametrize("one", orders.SUMS, ids=lambda one: f"{one.stage}-{one.result}-{one.order}")
def test_no_rotated_or_reversed_order_gives_these_bits(one):
    """Most elements differ, in every dtype and at all sizes; 500 of them and 30 rotations are enough."""
    backend = "numpy" if "numpy" in one.backends else "simt"
    version = next(version for version in BACKENDS[backend].versions(one.stage) if one.promised(backend, version))
    dtypes = orders.dtypes_that_tell(BACKENDS[backend].versions(one.stage)[version])
    for dtype, sizes in itertools.product(dtypes, one.sizes):
        found, terms = one.run(BACKENDS[backend].open(one.stage, version), orders.cast_to(dtype), sizes)
        some = slice(None, None, max(1, found.size // 500))
        found, terms = found.ravel()[some], terms.reshape(len(terms), -1)[:, some]
        shifts = {*range(1, len(terms), -(-len(terms) // 30)), len(terms) - 1}
        others = [terms[::-1], *(np.roll(terms, shift, axis=0) for shift in shifts)]
        differ = [(orders.in_order(other).astype(found.dtype) != found).mean() for other in others]
        assert min(differ) > 0.5, (dtype, sizes)


def test_four_terms_tell_every_order():
    """But that of the first two, whose sum is the same: a + b is b + a."""
    terms = orders.telling_terms(4, (1000,), seed=0)
    right = orders.in_order(terms)
    for order in itertools.permutations(range(4)):
        same = order[2:] == (2, 3)
        assert (orders.in_order(terms[list(order)]) != right).mean() > 0.3 or same, order


def test_products_and_inputs_are_exact():
    """So that a fused multiply-add gives the bits of a multiplication and an addition."""
    terms, factors = orders.telling_terms(16, (64,), seed=1), orders.powers_of_two(64)
    assert np.array_equal(terms.astype(np.float64) * factors, (terms * factors).astype(np.float64))
    for dtype in ("float16", "bfloat16"):
        for array in (terms, terms * factors, terms / factors):
            assert np.array_equal(array.astype(dtype).astype(np.float32), array)
    assert not np.any((terms / factors).view(np.uint32) & 0x1FFF), "tf32 keeps 10 bits"


# ---- planted faults -----------------------------------------------------------------------------


class Fault(NamedTuple):
    """Another order in a kernel file, or in a header of it, of a version; ``fails`` are the sums that must show it."""

    name: str
    stage: str
    version: str
    file: str
    right: str
    wrong: str
    fails: tuple[str, ...]


class Loop(NamedTuple):
    """A loop that adds terms, tiles, groups or blocks in their order, in a kernel file or in a header of it."""

    stage: str
    version: str
    file: str
    fails: tuple[str, ...]
    counter: str
    end: str
    begin: str = "0"
    step: str = "1"

    def faults(self):
        """The same steps from the last to the first, and from the second on with the first at the end."""
        counter, count = self.counter, f"(({self.end} - {self.begin} + {self.step} - 1) / {self.step})"
        increment = f"++{counter}" if self.step == "1" else f"{counter} += {self.step}"
        right = f"for (int {counter} = {self.begin}; {counter} < {self.end}; {increment})"
        for name, place in (("reversed", f"{count} - 1 - turn"), ("rotated", f"(turn + 1) % {count}")):
            now = f"{counter} = {self.begin} + ({place}) * {self.step}"
            wrong = f"for (int turn = 0, {counter}; {now}, turn < {count}; ++turn)"
            what = f"{counter} to {self.end} {name}"
            yield Fault(what, self.stage, self.version, self.file, right, wrong, self.fails)


PACKED = {"ab": "depth", "d_ab": "columns", "d_gates": "depth, tile by tile"}
OUT, D_X = ("out by slots",), ("d_x by slots",)
SDD = ("sdd by depth", "sdd of D^T by depth")
DDS = ("dds by rows", "dds of D^T by rows")
DSD = ("dsd by depth", "dsd of D^T by depth", "dsd of S^T by rows", "dsd of S^T, D^T by rows")
UP, DOWN, NAIVE, TILED = "expert_up", "expert_down", "1_naive", "2_tiled"
OF_LAYOUTS = {name: tuple(f"{name} of {layout} by {order}" for layout in LAYOUTS) for name, order in PACKED.items()}
SLOTS_IN_GROUPS = {"counter": "first", "end": "k", "step": "IN_FLIGHT"}
DEPTH_IN_TILES = {"counter": "first", "end": "depth", "step": "TILE_DEPTH"}
OF_UP_TILES = ("a, b by depth", "d_x by depth, w1 before w2", "d_w1 by rows")
OF_DOWN_TILES = ("y by depth", "d_a, d_b by columns", "d_w3 by rows")
LOOPS = [
    Loop("combine", "1_gather", "combine/1_gather.cu", OUT, "j", "k"),
    Loop("combine", "1_gather", "combine/1_gather.cu", ("d_gates by columns",), "p", "d"),
    Loop("combine", "2_vector", "combine/2_vector.cu", OUT, **SLOTS_IN_GROUPS),
    Loop(UP, TILED, "expert_up/sum_rows.cu", D_X, **SLOTS_IN_GROUPS),
    Loop("block_sparse", TILED, "combine/2_vector.cu", OUT, **SLOTS_IN_GROUPS),
    Loop("block_sparse", TILED, "expert_up/sum_rows.cu", D_X, **SLOTS_IN_GROUPS),
    Loop(UP, NAIVE, "expert_up/1_naive.cu", D_X, "j", "k"),
    Loop(UP, NAIVE, "expert_up/1_naive.cu", ("a, b by depth",), "p", "d"),
    Loop(UP, NAIVE, "expert_up/1_naive.cu", ("d_x by depth, w1 and w2 alternating",), "p", "h"),
    Loop(UP, NAIVE, "expert_up/1_naive.cu", ("d_w1 by rows",), "row", "end", "begin"),
    Loop(UP, TILED, "expert_up/2_tiled.cu", OF_UP_TILES, **DEPTH_IN_TILES),
    Loop(UP, TILED, "expert_up/2_tiled.cu", OF_UP_TILES, "p", "TILE_DEPTH"),
    Loop(DOWN, NAIVE, "expert_down/1_naive.cu", ("y by depth",), "p", "h"),
    Loop(DOWN, NAIVE, "expert_down/1_naive.cu", ("d_a, d_b by columns",), "p", "d"),
    Loop(DOWN, NAIVE, "expert_down/1_naive.cu", ("d_w3 by rows",), "row", "end", "begin"),
    Loop(DOWN, NAIVE, "expert_down/gates.cu", ("d_gates by depth",), "term", "terms"),
    Loop(DOWN, TILED, "expert_down/gates.cu", ("d_gates by depth, tile by tile",), "term", "terms"),
    Loop(DOWN, TILED, "expert_down/2_tiled.cu", ("d_gates by depth, tile by tile",), "column", "TILE"),
    Loop(DOWN, TILED, "expert_down/2_tiled.cu", OF_DOWN_TILES, **DEPTH_IN_TILES),
    Loop(UP, TILED, "packed/2_tiled.cu", OF_LAYOUTS["ab"], **DEPTH_IN_TILES),
    Loop(UP, TILED, "packed/2_tiled.cu", OF_LAYOUTS["ab"], "p", "TILE_DEPTH"),
    Loop(DOWN, TILED, "packed/2_tiled.cu", OF_LAYOUTS["d_ab"], **DEPTH_IN_TILES),
    Loop(DOWN, TILED, "packed/2_tiled.cu", OF_LAYOUTS["d_ab"], "p", "TILE_DEPTH"),
    Loop(DOWN, TILED, "packed/2_tiled.cu", OF_LAYOUTS["d_gates"], "column", "TILE"),
    Loop(DOWN, TILED, "expert_down/gates.cu", OF_LAYOUTS["d_gates"], "term", "terms"),
    Loop("block_sparse", NAIVE, "block_sparse/1_naive.cu", SDD, "p", "K"),
    Loop("block_sparse", NAIVE, "block_sparse/1_naive.cu", DSD + DDS, "i", "blocks.count"),
    Loop("block_sparse", NAIVE, "block_sparse/1_naive.cu", DSD + DDS, "p", "BLOCK"),
    Loop("block_sparse", TILED, "block_sparse/2_tiled.cu", DSD + DDS, "n", "blocks.count"),
    Loop("block_sparse", TILED, "block_sparse/2_tiled.cu", SDD + DSD + DDS, **DEPTH_IN_TILES),
]

LANE = "const long long slot = token * k + lane_id();"
REVERSED_LANE = LANE.replace("lane_id()", "k - 1 - lane_id()")
LAST_GROUP = "k / IN_FLIGHT * IN_FLIGHT"
REVERSED_LAST = LANE.replace("lane_id()", f"(lane_id() < {LAST_GROUP} ? lane_id() : {LAST_GROUP} + k - 1 - lane_id())")
SLOTS = "for (int j = 0; j < k; ++j)"
# The slots of some tokens alone are in another order.
SOME = {"for small k": "k <= 8", "from the tenth token on": "token >= 10", "after the first block": "blockIdx.x > 0"}


def slots_of_some_reversed(stage, version, file, fails):
    """The slots reversed under each condition of ``SOME``: of a warp's lanes, or of a thread's loop."""
    for name, condition in SOME.items():
        if LANE in inlined(file):
            right, wrong = LANE, LANE.replace("lane_id()", f"({condition} ? k - 1 - lane_id() : lane_id())")
        else:
            right, wrong = SLOTS, f"for (int turn = 0, j; j = {condition} ? k - 1 - turn : turn, turn < k; ++turn)"
        yield Fault(f"slots reversed {name}", stage, version, file, right, wrong, fails)


LAST_TILE = "first + TILE_DEPTH > depth ? depth - first - 1 - turn : turn"
GROUPS = "weight_of_lane, first, column,"
PACK = "weight_of_lane, first_column ? (k - 1) / IN_FLIGHT * IN_FLIGHT - first : first, column,"
OF_B = "b_sum += x_p * to_float(w2[weight + (long long)p * h]);"
B_REVERSED = "b_sum += to_float(x_row[d - 1 - p]) * to_float(w2[weight + (long long)(d - 1 - p) * h]);"
W2_FIRST = """for (int p = 0; p < h; ++p) {
if (GATED) sum += to_float(d_b[row + p]) * to_float(w2[weight + p]);
sum += to_float(d_a[row + p]) * to_float(w1[weight + p]);
if (p + 1) continue;"""
ADDS_BOTH = "add(d_a, w1);\n    if (GATED) add(d_b, w2);", "if (GATED) add(d_b, w2);\n    add(d_a, w1);"
OF_DDS = "number = blocks.number({}), first = row_indices[number] * BLOCK;"
IN_BLOCK = "for (int p = 0; p < BLOCK; ++p)"
LAST_BLOCK = "for (int turn = 0, p; p = i + 1 == blocks.count ? BLOCK - 1 - turn : turn, turn < BLOCK; ++turn)"
IN_TILE = "for (int p = 0; p < TILE_DEPTH; ++p)"
IN_LAST_TILE = f"for (int turn = 0, p; p = {LAST_TILE}, turn < min(TILE_DEPTH, depth - first); ++turn)"
AFTER_FOURTH = "for (int turn = 0, j; j = turn < 4 ? turn : k + 3 - turn, turn < k; ++turn)"
BY_COLUMN = (*DSD[2:], *DDS)
OUT_PLACE, D_X_PLACE = ("combine", "2_vector", "combine/2_vector.cu"), (UP, TILED, "expert_up/sum_rows.cu")
UP_PLACE, SPARSE_PLACE = (UP, NAIVE, "expert_up/1_naive.cu"), ("block_sparse", NAIVE, "block_sparse/1_naive.cu")
OTHER_FAULTS = [
    *(
        Fault(name, *place, LANE, wrong, fails)
        for place, fails in ((OUT_PLACE, OUT), (D_X_PLACE, D_X))
        for name, wrong in (("all slots reversed", REVERSED_LANE), ("slots of the last group reversed", REVERSED_LAST))
    ),
    *(
        Fault("all slots reversed", UP, version, "expert_up/sum_rows.cu", LANE, REVERSED_LANE, D_X)
        for version in ("3_mma", "3_mma_tf32", "7_persistent")
    ),
    *slots_of_some_reversed("combine", "1_gather", "combine/1_gather.cu", OUT),
    *slots_of_some_reversed(*OUT_PLACE, OUT),
    *slots_of_some_reversed(*UP_PLACE, D_X),
    *slots_of_some_reversed(*D_X_PLACE, D_X),
    *slots_of_some_reversed("block_sparse", TILED, "combine/2_vector.cu", OUT),
    *slots_of_some_reversed("block_sparse", TILED, "expert_up/sum_rows.cu", D_X),
    Fault("groups of the second pack of columns reversed", *OUT_PLACE, GROUPS, PACK, OUT),
    Fault("slots after the fourth reversed", *UP_PLACE, SLOTS, AFTER_FOURTH, D_X),
    Fault("b reversed", *UP_PLACE, OF_B, B_REVERSED, ("a, b by depth",)),
    Fault(
        "w2 before w1 of each hidden element",
        *UP_PLACE,
        W2_FIRST.partition("\n")[0],
        W2_FIRST,
        ("d_x by depth, w1 and w2 alternating",),
    ),
    Fault("w2 before w1", UP, TILED, "expert_up/2_tiled.cu", *ADDS_BOTH, ("d_x by depth, w1 before w2",)),
    *(
        Fault("last tile of the depth reversed", stage, TILED, f"{folder}/2_tiled.cu", IN_TILE, IN_LAST_TILE, fails)
        for stage, folder, fails in (
            (UP, UP, OF_UP_TILES),
            (DOWN, DOWN, OF_DOWN_TILES),
            (UP, "packed", OF_LAYOUTS["ab"]),
            (DOWN, "packed", OF_LAYOUTS["d_ab"]),
            ("block_sparse", "block_sparse", SDD + DSD + DDS),
        )
    ),
    Fault(
        "blocks of dds alone reversed", *SPARSE_PLACE, OF_DDS.format("i"), OF_DDS.format("blocks.count - 1 - i"), DDS
    ),
    Fault("last block reversed", *SPARSE_PLACE, IN_BLOCK, LAST_BLOCK, DSD + DDS),
    *(
        Fault("blocks of a column reversed", *place, "order[first + i]", "order[first + count - 1 - i]", BY_COLUMN)
        for place in (SPARSE_PLACE, ("block_sparse", TILED, "block_sparse/2_tiled.cu"))
    ),
]
FAULTS = [fault for loop in LOOPS for fault in loop.faults()] + OTHER_FAULTS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}-{fault.version}-{fault.name}")
def test_another_order_in_a_kernel_fails(fault, monkeypatch):
    """Every sum that the fault reorders, in the first of its dtypes."""
    plant(monkeypatch, fault.file, with_fault(fault.file, fault.right, fault.wrong))
    jobs_of = {name_of(job.args[4]): job for job in jobs(fault.stage, "simt", fault.version)}
    first_rows = {name: next(jobs_of[name]()) for name in fault.fails}
    assert all(not row.ok and row.error > 0 for row in first_rows.values()), first_rows


def in_another_order(forward, slots, first_token=0, most_slots=np.inf):
    """A numpy combine that adds the slots of tokens in another order, from one token on and up to one k."""

    def faulty(y, gates, dispatch):
        if dispatch.k > most_slots:
            return forward(y, gates, dispatch)

        def permute(array):
            found = array.reshape(gates.shape).copy()
            found[first_token:] = found[first_token:, slots(np.arange(dispatch.k))]
            return found

        maps = {name: permute(getattr(dispatch, name)).ravel() for name in ("token_index_map", "token_expert_indices")}
        return forward(y, permute(gates), replace(dispatch, **maps))

    return faulty


OTHER_SLOTS = {
    "reversed": np.flip,
    "rotated": lambda slots: np.roll(slots, -1),
    "last two": lambda slots: np.r_[slots[:-2], slots[:-3:-1]],
    "after the fourth reversed": lambda slots: np.r_[slots[:4], slots[:3:-1]],
}


@pytest.mark.parametrize(
    ("slots", "where"),
    [*((slots, {}) for slots in OTHER_SLOTS.values()), (np.flip, {"first_token": 10}), (np.flip, {"most_slots": 8})],
    ids=[*OTHER_SLOTS, "of some tokens", "for small k"],
)
def test_another_order_in_numpy_fails(slots, where, monkeypatch):
    module = BACKENDS["numpy"].stage("combine")
    monkeypatch.setattr(module, "forward", in_another_order(module.forward, slots, **where))
    (row,) = rows("combine", "numpy")
    assert not row.ok and row.error > 0


def reversed_if(some, items):
    """The items, from the last to the first if ``some`` says so of their number."""
    items = [*items]
    return items[::-1] if some(len(items)) else items


HOW_MANY = {
    "any": lambda number: True,
    "at most 8": lambda number: number <= 8,
    "4 to 8": lambda number: 3 < number < 9,
}
how_many = pytest.mark.parametrize("some", HOW_MANY.values(), ids=HOW_MANY)


@how_many
@pytest.mark.parametrize("stage", ["block_sparse", "capacity"])
def test_another_order_of_the_slots_in_numpy_fails(stage, some, monkeypatch):
    module = BACKENDS["numpy"].stage(stage)
    monkeypatch.setattr(module, "enumerate", lambda items: reversed_if(some, enumerate(items)), raising=False)
    found = rows(stage, "numpy")
    assert len(found) == 2 and all(not row.ok and row.error > 0 for row in found)


@how_many
@pytest.mark.parametrize("stage", ["expert_up", "expert_down"])
def test_another_order_of_the_experts_in_numpy_fails(stage, some, monkeypatch):
    module = BACKENDS["numpy"].stage(stage)
    groups = module.expert_groups
    monkeypatch.setattr(module, "expert_groups", lambda dispatch: reversed_if(some, groups(dispatch)))
    (row,) = rows(stage, "numpy")
    assert not row.ok and row.error > 0


class NumbaLoop(NamedTuple):
    """A loop over a token's slots in the module of a stage, and the function that holds or makes the kernel."""

    stage: str
    module: ModuleType
    kernel: str
    counter: str
    begin: str
    end: str

    def reversed_where(self, condition):
        """The kernel that takes the slots from the last to the first where the condition holds."""
        ends = self.end if self.begin == "0" else f"{self.begin}, {self.end}"
        right, text = f"for {self.counter} in range({ends}):", inspect.getsource(self.module)
        assert right in text, f"{self.module.__name__} no longer holds {right!r}: update the fault"
        first = f"{self.end} - 1 if {condition} else {self.begin}"
        last = f"{self.begin} - 1 if {condition} else {self.end}"
        names = {"__name__": self.module.__name__}
        wrong = f"for {self.counter} in range({first}, {last}, -1 if {condition} else 1):"
        exec(compile(text.replace(right, wrong), self.module.__file__, "exec"), names)
        return names[self.kernel]


OF_A_TOKEN = {"counter": "slot", "begin": "token * k", "end": "(token + 1) * k"}
IN_NUMBA = [
    NumbaLoop("combine", numba_combine, "combine_kernel", "j", "0", "k"),
    NumbaLoop("expert_up", numba_expert_up, "d_x_kernel", **OF_A_TOKEN),
    NumbaLoop("block_sparse", numba_block_sparse, "sum_rows_kernel", **OF_A_TOKEN),
]


@pytest.mark.parametrize("condition", ["True", "k <= 8", "token >= 10", "cuda.blockIdx.x > 0"])
@pytest.mark.parametrize("loop", IN_NUMBA, ids=lambda loop: loop.stage)
def test_another_order_in_numba_fails(loop, condition, monkeypatch):
    monkeypatch.setattr(loop.module, loop.kernel, loop.reversed_where(condition))
    assert any(not row.ok and row.error > 0 for job in jobs(loop.stage, "numba") for row in job())


@how_many
def test_experts_launched_from_the_last_to_the_first_fail(some, monkeypatch):
    monkeypatch.setattr(expert_down, "range", lambda count: reversed_if(some, range(count)), raising=False)
    assert all(not row.ok for row in rows("expert_down", "simt", "as_printed"))


# ---- the sizes cross every tile and group -----------------------------------------------------------


class Launch(NamedTuple):
    """A kernel that a sum launches: its file, the constants for which that is compiled, and its blocks."""

    file: str
    kernel: str
    constants: dict[str, int]
    blocks: int


ON_THE_EXECUTOR = [
    (one, version)
    for one in orders.SUMS
    for version in (BACKENDS["simt"].versions(one.stage) if "simt" in one.backends else ())
    if one.promised("simt", version)
]
# Constants that cut no sum: threads, what is inside a tile, and switches.
NO_TILES = {
    *("WARP", "THREADS", "CORNER", "NEIGHBOURS", "STAGES", "BAND", "WARP_ROWS", "WARP_COLUMNS"),
    *("TRANSPOSE_LHS", "TRANSPOSE_RHS", "STORE_PROJECTIONS", "STORE_Y_SWI"),
}


def launches(one, version, monkeypatch):
    """What a sum launches, in all dtypes; nothing runs."""
    found = []

    def note(module, kernel, grid, *_):
        source = module.source
        found.append(Launch(source.file, kernel, constants_of(inlined(source.file), source.constants), math.prod(grid)))

    monkeypatch.setattr(SimtModule, "_run", note)
    list(check.check_order(BACKENDS["simt"], version, one))
    return found


def constants_of(text, options):
    """The whole numbers that a kernel file defines, or is compiled with."""
    definitions = re.findall(r"constexpr int ([^;{}()]+);", text)
    numbers = [pair for line in definitions for pair in re.findall(r"(\w+) = (\d+)(?=,|$)", line)]
    options = {name: value for name, value in options.items() if isinstance(value, int)}
    return {name: int(value) for name, value in numbers} | options


def cuts(sizes, constants):
    """By constant: how many of it are one part of some of the sizes, these, and how many parts they must have."""
    L, d, h, E, block = sizes
    of_a_tile = (block, d) if "BLOCK" in constants else (L, d, h)
    return {
        "IN_FLIGHT": (1, (E,), 3),
        "PACK": (WARP, (d,), 2),
        "TILE": (1, of_a_tile, 2),
        "TILE_DEPTH": (1, of_a_tile, 3),
        "TILE_ROWS": (1, (L,), 2),
        "TILE_COLUMNS": (1, (d,), 2),
        "BLOCK": (1, (L, h), 2),
    }


def uncrossed(one, constants):
    """What has too few parts, or a last part that is full, at each of the sum's sizes: blocks alone are never cut."""
    for name in constants.keys() - NO_TILES:
        at_each = [[*uncrossed_by(name, constants, sizes)] for sizes in one.sizes]
        if all(at_each):
            yield from (f"{name_of(one)}: {line}" for line in at_each[0])


def uncrossed_by(name, constants, sizes):
    known = cuts(sizes, constants)
    assert name in known, f"{name} = {constants[name]}: which sizes does it cut?"
    times, lengths, parts = known[name]
    part = times * constants[name]
    for length in lengths:
        if -(-length // part) < parts or (length % part == 0) != (name == "BLOCK"):
            yield f"{length} by {name} = {constants[name]}"


def stating(one, found):
    """The launches of files whose text states the order of a sum, by its name, or else by "sums run in order"."""
    word = one.order.partition(",")[0]
    for statement in (f"in the order of (the|its) {word}", "sums run in order"):
        files = files_that_state(re.compile(statement), "kernels_cuda", "cu")
        if stated := [launch for launch in found if ROOT / "kernels_cuda" / launch.file in files]:
            return stated
    raise AssertionError(f"no file states the order of {name_of(one)}")


@pytest.mark.parametrize(("one", "version"), ON_THE_EXECUTOR, ids=lambda value: getattr(value, "result", value))
def test_the_sizes_cross_every_tile_and_group_of_the_kernels(one, version, monkeypatch):
    stated = stating(one, launches(one, version, monkeypatch))
    assert not [line for launch in stated for line in uncrossed(one, launch.constants)]


def test_the_sizes_cross_every_tile_that_a_gpu_may_choose():
    largest = {name: max(getattr(tile, name) for tile in tiles.CANDIDATES["3_mma"]) for name in ("rows", "columns")}
    assert any(sizes.L > largest["rows"] and sizes.d > largest["columns"] for sizes in orders.FUSED)


OVER_SLOTS = [(one, version) for one, version in ON_THE_EXECUTOR if one.order == "slots"]
NUMBA_THREADS = 128  # of a block on a GPU; the simulator has fewer


@pytest.mark.parametrize("k", range(3, 9))
@pytest.mark.parametrize(("one", "version"), OVER_SLOTS, ids=lambda value: getattr(value, "result", value))
def test_sums_over_slots_run_for_every_small_k_on_more_tokens_than_a_block_has(one, version, k, monkeypatch):
    """In each kernel that states the order, so that a block after the first has the last tokens."""
    (sizes,) = (sizes for sizes in one.sizes if sizes.k == k)
    stated = stating(one, launches(replace(one, sizes=(sizes,)), version, monkeypatch))
    assert all(launch.blocks > 1 for launch in stated) and sizes.L * sizes.d > NUMBA_THREADS


@pytest.mark.parametrize("one", orders.SUMS, ids=lambda one: f"{one.stage}-{one.result}-{one.order}")
def test_sums_over_slots_or_experts_run_for_small_k_and_for_a_larger_one(one):
    if one.order in ("slots", "experts"):
        found = {sizes.k for sizes in one.sizes}
        assert found > {*range(3, 9)} and max(found) > 8


def test_a_larger_tile_than_the_sizes_cross_is_noticed():
    by_name = {name_of(one): one for one in orders.SUMS if one.stage != "block_sparse"}
    tiled, grouped = by_name["y by depth"], by_name["out by slots"]
    assert not [*uncrossed(tiled, {"TILE": 64, "TILE_DEPTH": 16}), *uncrossed(grouped, {"IN_FLIGHT": 4})]
    assert [*uncrossed(tiled, {"TILE": 128})] and [*uncrossed(tiled, {"TILE_DEPTH": 64})]
    assert [*uncrossed(grouped, {"IN_FLIGHT": 16})] and [*uncrossed(grouped, {"PACK": 16})]
    with pytest.raises(AssertionError, match="UNROLL = 4: which sizes"):
        list(uncrossed(tiled, {"UNROLL": 4}))


# ---- nothing is stated and not checked --------------------------------------------------------------

HEADER = re.compile(r"sums run in order|in the order of (?:the slots|its experts|the columns)")
BY_NAME = r"in the order (?:j = 0|of (?:the|its) (?:slots|experts))"
DOCSTRING = re.compile(rf"{BY_NAME}|slots of a token in their order|ascending expert id: always")


def files_that_state(pattern, folder, ending):
    """Kernel files or modules, with what their texts say in one line."""
    texts = {path: " ".join(path.read_text().split()) for path in (ROOT / folder).rglob(f"*.{ending}")}
    assert texts, folder
    return [path for path, text in texts.items() if pattern.search(text)]


KERNEL = re.compile(r"__launch_bounds__\([^)]*\)\s+(\w+)\(")
SUM_NOTHING = {"gate_rows", "d_y", "round_sums"}


def test_every_kernel_of_a_file_that_states_an_order_is_run(monkeypatch):
    run = {
        (launch.file, launch.kernel)
        for one, version in ON_THE_EXECUTOR
        for launch in launches(one, version, monkeypatch)
    }
    for path in files_that_state(HEADER, "kernels_cuda", "cu"):
        file, kernels = path.relative_to(ROOT / "kernels_cuda").as_posix(), {*KERNEL.findall(path.read_text())}
        assert kernels, file
        assert {kernel for kernel in kernels - SUM_NOTHING if (file, kernel) not in run} == set(), file


def test_every_order_that_a_header_states_is_checked():
    files = files_that_state(HEADER, "kernels_cuda", "cu")
    promised = {(one.folder, version) for one, version in ON_THE_EXECUTOR}
    assert {path.parent.name for path in files} == {folder for folder, _ in promised}
    shared = [path for path in files if path.name in ("gates.cu", "sum_rows.cu")]
    assert {path.name for path in shared} == {"gates.cu", "sum_rows.cu"}
    assert {(path.parent.name, path.stem) for path in {*files} - {*shared}} <= promised


@pytest.mark.parametrize("backend", HERE)
def test_every_order_that_a_docstring_states_is_checked(backend):
    folder = BACKENDS[backend].package.replace(".", "/")
    stated = {path.stem for path in files_that_state(DOCSTRING, folder, "py")}
    assert stated == {one.stage for one in orders.SUMS if backend in one.backends}


def test_tensor_cores_promise_a_fixed_order_and_no_more():
    """An instruction adds several products at once, in an order that the hardware decides."""
    for path in (ROOT / "kernels_cuda").rglob("*.cu"):
        if path.stem in gemm.TENSOR_CORES:
            assert "sums run in order" not in path.read_text() and "sums have a fixed order" in path.read_text(), path
