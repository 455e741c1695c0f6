"""The stated order of sums: numpy's float32, Numba and the executor give the same bits, and another order does not."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from planted import quick_builds

from moeblaze_ref import check, orders
from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.numba_cuda import combine as numba_combine
from moeblaze_ref.numba_cuda.runtime import ZERO, cuda
from moeblaze_ref.numpy_ref import capacity as numpy_capacity
from moeblaze_ref.raw_cuda import expert_down
from moeblaze_ref.raw_cuda.runtime.simt import SimtExecutor
from moeblaze_ref.raw_cuda.runtime.source import inlined

ROOT = Path(check.__file__).parents[1]
HERE = ("numpy", "numba", "simt")


def jobs(stage, backend, rung=None) -> Iterator:
    """The checks of the order alone, of those that `moeblaze check` runs of a stage."""
    planned = check.plan([stage], [backend])
    return (job for job in planned if isinstance(job.args[4], orders.Sum) and rung in (None, job.args[3]))


def rows(stage, backend, rung=None):
    return [row for job in jobs(stage, backend, rung) for row in job()]


PROMISED = sorted({(one.stage, backend) for one in orders.SUMS for backend in one.backends if backend in HERE})


@pytest.mark.parametrize(("stage", "backend"), PROMISED)
def test_every_stated_order_is_kept_to_the_bit(stage, backend):
    found = rows(stage, backend)
    assert found and all(row.ok and row.error == row.bound == 0.0 and row.direction == "order" for row in found), found
    for rung in BACKENDS[backend].rungs(stage):
        stated = {one.shape for one in orders.promises(stage, backend, rung)}
        assert {row.shape for row in found if row.rung == rung} == stated


@pytest.mark.parametrize("one", orders.SUMS, ids=lambda one: f"{one.stage}-{one.result}-{one.order}")
def test_no_rotated_or_reversed_order_gives_these_bits(one):
    """Most elements differ, in every dtype."""
    backend = "numpy" if "numpy" in one.backends else "simt"
    rung = next(rung for rung in BACKENDS[backend].rungs(one.stage) if one.promised(backend, rung))
    for dtype in orders.dtypes_that_tell(BACKENDS[backend].rungs(one.stage)[rung]):
        found, terms = one.run(BACKENDS[backend].open(one.stage, rung), orders.cast_to(dtype))
        others = [terms[::-1], *(np.roll(terms, shift, axis=0) for shift in range(1, len(terms)))]
        assert all((orders.in_order(other).astype(found.dtype) != found).mean() > 0.5 for other in others), dtype


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
    """Another order in a kernel file, or in a header of it, of a rung."""

    name: str
    stage: str
    rung: str
    file: str
    right: str
    wrong: str


SLOT, LANE = "const long long slot = token * k + j;", "const long long slot = token * k + lane_id();"
ROTATED_LANE = LANE.replace("lane_id()", "(lane_id() + 1) % k")
FAULTS = [
    Fault("reversed", "combine", "1_gather", "combine/1_gather.cu", SLOT, SLOT.replace("+ j", "+ k - 1 - j")),
    Fault("rotated", "combine", "1_gather", "combine/1_gather.cu", SLOT, SLOT.replace("+ j", "+ (j + 1) % k")),
    Fault("reversed", "combine", "2_vector", "combine/2_vector.cu", LANE, LANE.replace("+ lane", "+ k - 1 - lane")),
    Fault("rotated", "combine", "2_vector", "combine/2_vector.cu", LANE, ROTATED_LANE),
    *(
        Fault("reversed", "expert_up", rung, "expert_up/0_sum_rows.cu", LANE, LANE.replace("+ lane", "+ k - 1 - lane"))
        for rung in ("2_tiled", "3_mma", "3_mma_tf32", "4_hopper")
    ),
    Fault(
        "d_x reversed",
        "expert_up",
        "1_naive",
        "expert_up/1_naive.cu",
        "for (int j = 0; j < k; ++j)",
        "for (int j = k - 1; j >= 0; --j)",
    ),
    Fault(
        "depth reversed",
        "expert_up",
        "1_naive",
        "expert_up/1_naive.cu",
        "for (int p = 0; p < d; ++p)",
        "for (int p = d - 1; p >= 0; --p)",
    ),
    Fault(
        "rows rotated",
        "expert_up",
        "2_tiled",
        "expert_up/2_tiled.cu",
        "for (int p = 0; p < TILE_DEPTH; ++p)",
        "for (int i = 1, p; p = i % TILE_DEPTH, i <= TILE_DEPTH; ++i)",
    ),
    Fault(
        "depth reversed",
        "expert_down",
        "1_naive",
        "expert_down/1_naive.cu",
        "for (int p = 0; p < d; ++p)",
        "for (int p = d - 1; p >= 0; --p)",
    ),
    Fault(
        "terms reversed",
        "expert_down",
        "1_naive",
        "expert_down/0_gates.cu",
        "for (int term = 0; term < terms; ++term)",
        "for (int term = terms - 1; term >= 0; --term)",
    ),
    Fault(
        "depth reversed",
        "block_sparse",
        "1_naive",
        "block_sparse/1_naive.cu",
        "for (int p = 0; p < BLOCK; ++p)",
        "for (int p = BLOCK - 1; p >= 0; --p)",
    ),
    Fault(
        "blocks reversed",
        "block_sparse",
        "2_tiled",
        "block_sparse/2_tiled.cu",
        "for (int n = 0; n < blocks.count; ++n)",
        "for (int n = blocks.count - 1; n >= 0; --n)",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.stage}-{fault.rung}-{fault.name}")
def test_another_order_in_a_kernel_fails(fault, monkeypatch):
    load, text = SimtExecutor.load, inlined(fault.file)
    assert fault.right in text, f"{fault.file} no longer holds {fault.right!r}: update the fault"

    def load_faulty(self, file, **options):
        if file != fault.file:
            return load(self, file, **options)
        with quick_builds():
            return load(self, file, text=text.replace(fault.right, fault.wrong), **options)

    monkeypatch.setattr(SimtExecutor, "load", load_faulty)
    found = next((row for job in jobs(fault.stage, "simt", fault.rung) for row in job() if not row.ok), None)
    assert found is not None and found.error > 0, found


def in_another_order(forward, slots):
    """A numpy combine that adds a token's slots in another order."""

    def faulty(y, gates, dispatch):
        def permute(array):
            return np.ascontiguousarray(array.reshape(gates.shape)[:, slots])

        maps = {name: permute(getattr(dispatch, name)).ravel() for name in ("token_index_map", "token_expert_indices")}
        return forward(y, permute(gates), replace(dispatch, **maps))

    return faulty


@pytest.mark.parametrize("slots", [[3, 2, 1, 0], [1, 2, 3, 0], [0, 1, 3, 2]], ids=["reversed", "rotated", "last two"])
def test_another_order_in_numpy_fails(slots, monkeypatch):
    module = BACKENDS["numpy"].stage("combine")
    monkeypatch.setattr(module, "forward", in_another_order(module.forward, slots))
    (row,) = rows("combine", "numpy")
    assert not row.ok and row.error > 0


def test_another_order_in_numpys_capacity_fails(monkeypatch):
    monkeypatch.setattr(numpy_capacity, "enumerate", lambda items: reversed([*enumerate(items)]), raising=False)
    (row,) = rows("capacity", "numpy")
    assert not row.ok and row.error > 0


@cuda.jit
def reversed_combine(y, gates, token_index_map, out):
    """The kernel of the combine, from the last slot to the first."""
    element = cuda.grid(1)
    token, column = element // out.shape[1], element % out.shape[1]
    if token < out.shape[0]:
        k = gates.shape[1]
        total = ZERO
        for j in range(k - 1, -1, -1):
            total += gates[token, j] * y[token_index_map[token * k + j], column]
        out[token, column] = total


def test_another_order_in_numba_fails(monkeypatch):
    monkeypatch.setattr(numba_combine, "combine_kernel", reversed_combine)
    (row,) = rows("combine", "numba")
    assert not row.ok and row.error > 0


def test_experts_launched_from_the_last_to_the_first_fail(monkeypatch):
    monkeypatch.setattr(expert_down, "range", lambda count: reversed(range(count)), raising=False)
    assert all(not row.ok for row in rows("expert_down", "simt", "as_printed"))


# ---- nothing is stated and not checked --------------------------------------------------------------

HEADER = re.compile(r"sums run in order|in the order of (?:the slots|its experts|the columns)")
BY_NAME = r"in the order (?:j = 0|of (?:the|its) (?:slots|experts))"
DOCSTRING = re.compile(rf"{BY_NAME}|slots of a token in their order|ascending expert id: always")


def files_that_state(pattern, folder, ending):
    """Kernel files or modules, with what their texts say in one line."""
    texts = {path: " ".join(path.read_text().split()) for path in (ROOT / folder).rglob(f"*.{ending}")}
    return [path for path, text in texts.items() if pattern.search(text)]


def test_every_order_that_a_header_states_is_checked():
    files = files_that_state(HEADER, "kernels_cuda", "cu")
    assert {path.parent.name for path in files} == {one.stage for one in orders.SUMS if "simt" in one.backends}
    numbered = [path for path in files if path.stem in BACKENDS["simt"].rungs(path.parent.name)]
    assert {path.name for path in files} - {path.name for path in numbered} == {"0_gates.cu", "0_sum_rows.cu"}
    assert all(orders.promises(path.parent.name, "simt", path.stem) for path in numbered)


@pytest.mark.parametrize("backend", HERE)
def test_every_order_that_a_docstring_states_is_checked(backend):
    folder = "moeblaze_ref/" + BACKENDS[backend].package.rpartition(".")[2]
    stated = {path.stem for path in files_that_state(DOCSTRING, folder, "py")}
    assert stated == {one.stage for one in orders.SUMS if backend in one.backends}


def test_tensor_cores_promise_a_fixed_order_and_no_more():
    """An instruction adds several products at once, in an order that the hardware decides."""
    for path in (ROOT / "kernels_cuda").rglob("*.cu"):
        if path.stem in ("3_mma", "4_hopper"):
            assert "sums run in order" not in path.read_text() and "sums have a fixed order" in path.read_text(), path
