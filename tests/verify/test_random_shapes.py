"""A thousand random shapes and routings through every stage and version that a CPU runs, against the oracle."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import ROUTINGS, make_case

RUNS = [
    (backend, stage, version)
    for name in ("numpy", "simt")
    for backend in [BACKENDS[name]]
    for stage in backend.stages
    for version in backend.versions(stage)
]
# Tiles are multiplied whole, however small the shape or the block: seconds each on a CPU, so these get fewer.
SLOW = [run for run in RUNS if run[2] == gemm.HOPPER] + [(BACKENDS["simt"], "block_sparse", "2_tiled")]
# A share a stage, so that they run side by side. A whole layer, and blocks, take many times longer than a step.
EXAMPLES = {"layer": 50, "block_sparse": 50}
SHARES = {
    stage: (EXAMPLES.get(stage, 180), [run for run in RUNS if run[1] == stage and run not in SLOW])
    for _, stage, _ in RUNS
}
SHARES |= {f"{run[1]}, {run[2]}": (8, [run]) for run in SLOW}


@st.composite
def checks(draw, runs):
    """(backend, stage, version, case): from no tokens to several tiles of a small block.

    Where a router decides, it has a choice: gates that are always 1 have no gradient but rounding. And narrow types
    and tf32 get 32 tokens or none, at least 8 wide: their bound is a ratio of errors, and that of a few dot products,
    or of one that all tokens share (an x of width 1 is 1 or -1), is noise. One routed row alone has one gate, whose
    gradient is a single dot product: where that nearly cancels, its relative error is rounding too (seen: 1.003e-5 in
    float32, of a gradient of 0.03). So is that of the output of one token of width 1, a single number (seen: 8.1e-5).
    So one token with one expert or of width 1 becomes two. In block_sparse a block divides h: of 8
    at least, or a matrix is tens of thousands of blocks, each a group of threads to simulate; version 4 takes blocks of
    whole 128s, so that h is of such, and few experts, each with its padding. Who multiplies whole tiles there gets few
    slots a token: the kernels that know of these are those of all versions.
    """
    run = backend, stage, version = draw(st.sampled_from(runs))
    routes, narrow = stage in ("gating", "layer"), "float16" in backend.versions(stage)[version] or version == gemm.TF32
    whole_blocks = (stage, version) == ("block_sparse", gemm.HOPPER)
    E = draw(st.integers(2 if routes else 1, 3 if whole_blocks else 12))
    k = draw(st.integers(1, min(E, 3) if stage == "block_sparse" and run in SLOW else E))
    tokens = st.one_of(st.just(0), st.integers(32, 90)) if narrow else st.integers(0, 90)
    eights = st.sampled_from([8, 16, 40, 72])
    widths = eights if version in gemm.TENSOR_CORES else st.integers(8 if narrow else 1, 70)
    blocked = st.sampled_from([128, 384]) if whole_blocks else eights
    L, d = draw(tokens), draw(widths)
    case = make_case(
        L=2 if 1 in (L * k, L * d) else L,
        d=d,
        h=draw(blocked if stage == "block_sparse" else widths),
        E=E,
        k=k,
        routing=draw(st.sampled_from(ROUTINGS)),
        activation=draw(st.sampled_from(["swiglu", "silu"])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    renormalize = draw(st.booleans()) and k > 1
    return backend, stage, version, replace(case, policy=draw(st.sampled_from(list(POLICIES))), renormalize=renormalize)


def test_the_shares_are_a_thousand():
    assert sum(examples for examples, _ in SHARES.values()) >= 1_000
    assert {run for _, runs in SHARES.values() for run in runs} == set(RUNS)


def rows_of(backend, stage, version, case):
    return list(check.check_of(stage)(backend, version, case))


@pytest.mark.parametrize("share", SHARES)
def test_random_shapes_in_every_stage(share):
    examples, runs = SHARES[share]
    seen = Counter()

    @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
    @given(checks(runs))
    def every_row_passes(drawn):
        backend, stage, version, _ = drawn
        seen[backend, stage, version] += 1
        rows = rows_of(*drawn)
        assert check.passed(rows), rows

    every_row_passes()
    assert seen.total() >= examples
    assert seen.keys() == set(runs)


@pytest.mark.parametrize("stage", ["gating", "expert_up", "expert_down", "combine", "layer"])
def test_a_wrong_row_is_caught(stage, monkeypatch):
    module = BACKENDS["numpy"].stage(stage)
    right = module.forward

    def wrong(*arguments, **options):
        result = right(*arguments, **options)
        first = result[0] if isinstance(result, tuple) else result
        first[-1] = 0.0
        return result

    monkeypatch.setattr(module, "forward", wrong)
    case = make_case(21, 8, 16, 4, 2)
    assert not check.passed(rows_of(BACKENDS["numpy"], stage, None, case))
