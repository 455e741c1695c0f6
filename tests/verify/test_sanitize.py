"""What compute-sanitizer is given to watch: every kernel that there is."""

import functools
from types import SimpleNamespace

import pytest
import torch
from expert_stages import blocks_that_stay
from planted import Quick, opened_raw
from typer.testing import CliRunner

from moeblaze_ref.backends.raw_cuda import block_sparse, packed
from moeblaze_ref.backends.raw_cuda.gemm import HOPPER
from moeblaze_ref.backends.registry import Status
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.declarations import Declarations
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import KernelSource, Module
from moeblaze_ref.verify import comparisons, sanitize
from moeblaze_ref.verify.cases import many_blocks_case, many_tiles_case, whole_block_case


class Witness(SimtExecutor):
    """Remembers which kernels of which files were launched. Only those that write indices run."""

    def __init__(self):
        super().__init__()
        self.launched = set()

    def load(self, file, text=None, **constants):
        runs = file.startswith(("gating/", "dispatch/", "parallel/")) or file == "block_sparse/structures.cu"
        module = super().load(file, text, **constants) if runs else None
        return Witnessed(KernelSource.read(file, constants, text), module, self.launched)


class Witnessed(Module):
    """A kernel file that runs by another module of it, or not at all; what is launched passes a launch's checks."""

    def __init__(self, source, module, launched):
        super().__init__(source)
        self.module, self.launched = module, launched

    def _run(self, kernel, *arguments):
        self.launched.add((self.source.file, kernel))
        if self.module:
            self.module._run(kernel, *arguments)


def test_blocks_of_the_last_version_take_more_than_one_tile():
    executor = SimtExecutor()
    case = many_tiles_case(executor.multiprocessors)
    rows, (_, d, h) = case.L * case.k // 128, case.weights.w1.shape
    tiles = {"of rows": rows * -(-d // 256), "of weights": case.E * -(-d // 128) * -(-h // 256)}
    assert min(tiles.values()) > executor.multiprocessors and min(d, h) > 4 * 64  # deeper than the stages of a ring


def test_the_last_version_of_every_stage_of_products_takes_more_tiles_than_blocks(monkeypatch):
    given = []

    def note(stage, opened, case):
        given.append((stage, opened._options["version"], case.shape))

    monkeypatch.setattr(comparisons, "_OF_VERSIONS", {})
    monkeypatch.setattr(comparisons, "RUN", {stage: functools.partial(note, stage) for stage in comparisons.RUN})
    executor, parts = SimtExecutor(), sanitize.parts()
    for part in sanitize.parts_of(sanitize.OVERFLOWING):
        parts[part](executor)
    many = many_tiles_case(executor.multiprocessors).shape
    whole = many_blocks_case(executor.multiprocessors).shape
    assert {("expert_up", HOPPER, many), ("expert_down", HOPPER, many), ("block_sparse", HOPPER, whole)} <= set(given)
    assert {
        version for stage, version, shape in given if (stage, shape) == ("block_sparse", whole_block_case().shape)
    } == set(block_sparse.VERSIONS)


def test_no_kernel_is_left_out(monkeypatch):
    few = [case.head(48) for case in sanitize.cases()]
    monkeypatch.setattr(sanitize, "cases", lambda: few)
    witness = Witness()
    sanitize.run_every_kernel(witness)
    constants = {"Scalar": "float"}
    files = {path.relative_to(kernels_dir()).as_posix(): path.read_text() for path in kernels_dir().glob("*/*.cu")}
    assert witness.launched == {
        (file, kernel) for file, text in files.items() for kernel in Declarations.read(text, constants).kernels
    }


PACKED_RUNS = [
    (version, layout, case)
    for version in packed.VERSIONS
    for layout, case in sanitize.packed_runs(version, blocks_that_stay(2, seed=0))
]


def test_stored_weights_run_in_every_layout_version_and_dtype():
    tall = many_tiles_case(2).shape
    found = {(version, layout.name, str(case.x.dtype), case.activation) for version, layout, case in PACKED_RUNS}
    cells = [*((name, "swiglu") for name in LAYOUTS), ("linear", "gelu"), ("matmul", "gelu")]
    assert found == {
        (version, layout, dtype, activation)
        for version, dtypes in packed.VERSIONS.items()
        for dtype in dtypes
        for layout, activation in cells
    }
    assert {layout.name for version, layout, case in PACKED_RUNS if case.shape == tall} == {*LAYOUTS}


@pytest.mark.parametrize(
    ("version", "layout", "case"), PACKED_RUNS, ids=lambda one: getattr(one, "shape", getattr(one, "name", one))
)
def test_what_it_runs_of_stored_weights_is_right(version, layout, case):
    """The results on the executor, within the check's bounds; two blocks stay, so that each has several tiles."""
    executor, dtype = Quick(seed=1), str(case.x.dtype)
    executor.multiprocessors = 2
    found = comparisons.run_packed(opened_raw(packed, executor, version), case, layout)
    exact, rounded = (comparisons.expect_experts(case, getattr(torch, name)) for name in ("float64", dtype))
    assert {*found["backward"]} == {*exact["backward"]}
    for way in exact:
        precision = comparisons.precision("layer", version, dtype)
        error, bound = comparisons.compare(found[way], exact[way], precision, rounded[way])
        assert error <= bound, (way, error, bound)


def test_without_a_gpu_it_says_so(monkeypatch):
    absent = SimpleNamespace(status=lambda: Status(False, "no CUDA device"))
    monkeypatch.setattr(sanitize, "BACKENDS", {"cuda": absent})
    result = CliRunner().invoke(app, ["sanitize"])
    assert result.exit_code == 2
    assert "compute-sanitizer needs the backend cuda: no CUDA device" in result.output


def test_without_the_tool_it_says_so(monkeypatch):
    monkeypatch.setattr(sanitize, "BACKENDS", {"cuda": SimpleNamespace(status=lambda: Status(True, "a GPU"))})
    monkeypatch.setenv("PATH", "")
    result = CliRunner().invoke(app, ["sanitize"])
    assert result.exit_code == 2
    assert "compute-sanitizer is not on the PATH" in result.output


@pytest.fixture
def gpu_with_tool(monkeypatch, tmp_path):
    """A GPU that is there by its word alone, and a function that puts a script in the place of compute-sanitizer."""
    tool = tmp_path / "compute-sanitizer"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sanitize, "BACKENDS", {"cuda": SimpleNamespace(status=lambda: Status(True, "a GPU"))})

    def put(status):
        tool.write_text(f"#!/bin/sh\necho ========= ERROR SUMMARY\nexit {status}\n")
        tool.chmod(0o755)

    return put


@pytest.mark.parametrize(("status", "verdict"), [(0, "memcheck, biases: clean"), (9, "memcheck, biases: NOT CLEAN")])
def test_a_finding_decides_the_verdict(status, verdict, gpu_with_tool, monkeypatch):
    gpu_with_tool(status)
    monkeypatch.setattr(sanitize, "_run_alone", functools.partial(dict.fromkeys, ()))  # no findings; can be pickled
    result = CliRunner().invoke(app, ["sanitize", "--part", "biases", "--part", "dispatch"])
    assert result.exit_code == (1 if status else 0)
    assert verdict in result.output and "ERROR SUMMARY" in result.output
    assert all(f"{tool}, {part}: " in result.output for tool in sanitize.TOOLS for part in ("biases", "dispatch"))
    assert "packed" not in result.output


def test_a_part_that_fails_by_itself_is_a_finding(gpu_with_tool, monkeypatch):
    gpu_with_tool(0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # so that no part can run, not even where there is a GPU
    result = CliRunner().invoke(app, ["sanitize", "--part", "dispatch"])
    assert result.exit_code == 1
    assert "no tool, dispatch: NOT CLEAN" in result.output and "memcheck, dispatch: clean" in result.output
    assert "Error" in result.output


def test_a_first_word_names_all_its_parts():
    assert sanitize.parts_of(["packed"]) == [f"packed {version}" for version in packed.VERSIONS]
    assert sanitize.parts_of(["biases", f"expert_up {HOPPER}"]) == [f"expert_up {HOPPER}", "biases"]
    assert sanitize.parts_of([]) == [*sanitize.parts()]


def test_an_unknown_part_is_named():
    result = CliRunner().invoke(app, ["sanitize", "--part", "biase"])
    assert result.exit_code == 2
    assert "unknown part 'biase'. Did you mean 'biase" in result.output
