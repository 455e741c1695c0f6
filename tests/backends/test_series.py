"""The series of expert_up's forward: each version keeps most of the one below, and stays short."""

import re
from itertools import pairwise

import pytest

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.raw_cuda.expert_up import FORWARD_VERSIONS
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.source import kernel_text

MOST_LINES = 120
CALL = re.compile(r"\b(\w+)(?:<[^;{}]*?>)?\(")
# Of each part the functions that a kernel may call; those of the ring are what 6_specialized and Hopper's version
# share.
PARTS = ("barrier", "tma", "wgmma", "ring")


def code_lines(text):
    """Lines with code, without comments and indentation; a lone brace is none."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and line not in ("}", "};", "});")]


def kept(lower, upper):
    """The share of a version's code lines that stand in the next version."""
    below, above = (code_lines(kernel_text(f"expert_up/{version}.cu")) for version in (lower, upper))
    return sum(line in above for line in below) / len(below)


@pytest.mark.parametrize(("lower", "upper"), [*pairwise(gemm.TEACHING)])
def test_at_least_half_of_a_version_stands_in_the_next(lower, upper):
    assert kept(lower, upper) >= 0.5


def test_without_the_versions_between_there_would_be_a_cliff():
    assert kept("3_mma", gemm.HOPPER) < 0.25


@pytest.mark.parametrize("version", gemm.TEACHING)
def test_a_version_is_short_and_its_main_loop_stands_in_the_file(version):
    text = kernel_text(f"expert_up/{version}.cu")
    assert len(text.splitlines()) <= MOST_LINES
    _, loop = text.split("TileSums sums;")
    for word in ("for (int step = 0; step < steps;", "wgmma_m64n128k16<", "wgmma_commit();", "wgmma_wait<"):
        assert word in loop


def test_4_wgmma_keeps_the_loads_of_3_mma():
    """`Copies` of the same stages; what comes by it is the first thing that 5_tma replaces."""
    for version, keeps in (("4_wgmma", True), ("5_tma", False)):
        text = kernel_text(f"expert_up/{version}.cu")
        assert ("Copies<" in text) == ("cp_async_wait<STAGES - 2>();" in text) == keeps
    assert "Copies<" in kernel_text("include/mma_matmul.cuh")


def functions_of(part):
    return {*re.findall(r"__forceinline__ [\w ]+?(\w+)\(", kernel_text(f"include/hopper/{part}.cuh"))}


def calls(*files):
    return {name for file in files for line in code_lines(kernel_text(file)) for name in CALL.findall(line)}


def test_6_specialized_and_the_hopper_version_call_the_same_functions():
    parts = ("consumers", "epilogue", "gradients", "grouped_matmul", "scheduler")
    hopper = calls(f"expert_up/{gemm.HOPPER}.cu", *(f"include/hopper/{part}.cuh" for part in parts))
    found = calls("expert_up/6_specialized.cu")
    for part in PARTS:
        shared = found & functions_of(part)
        assert shared and shared <= hopper, part


def test_the_header_of_the_hopper_version_names_a_file_for_each_part_that_it_adds():
    text = kernel_text(f"expert_up/{gemm.HOPPER}.cu")
    header = text[: text.index("#include")]
    for part in ("scheduler", "consumers", "epilogue", "gradients"):
        assert f"hopper/{part}.cuh" in header and (kernels_dir() / f"include/hopper/{part}.cuh").is_file()


def test_the_series_is_in_order():
    assert [version for version in FORWARD_VERSIONS if version not in gemm.VERSIONS] == list(gemm.TEACHING)
    assert FORWARD_VERSIONS | gemm.VERSIONS == FORWARD_VERSIONS
