"""Every raw CUDA kernel compiles for the architectures that its header names, without a GPU and without spilling."""

import io
import re

import pytest
from cuda.core import Program, ProgramOptions

from moeblaze_ref.paths import kernels_dir
from moeblaze_ref.raw_cuda import dispatch
from moeblaze_ref.raw_cuda.runtime.source import KernelSource
from moeblaze_ref.simt.build import cuda_include_dirs

FILES = sorted(path.relative_to(kernels_dir()).as_posix() for path in kernels_dir().glob("*/*.cu"))
CONSTANTS = {"dispatch": dispatch.CONSTANTS}
ARCHITECTURES = {"sm_80 and newer; SIMT executor": ("sm_80", "sm_90", "sm_100")}
USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


def read(file):
    return KernelSource.read(file, CONSTANTS[file.split("/")[0]])


def architectures(source):
    """What the header's line "Runs on" stands for."""
    return ARCHITECTURES[re.search(r"^// Runs on +(.*?)\.?$", source.text, re.MULTILINE)[1]]


def usage(source, architecture):
    """ptxas's report of a compiled file: registers, stack and spills of every kernel."""
    log = io.StringIO()
    options = ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[str(path) for path in (*source.include_dirs, *cuda_include_dirs())],
        define_macro=[(name, str(value)) for name, value in source.constants.items()] or None,
        ptxas_options="-v",
    )
    assert Program(source.text, "c++", options).compile("cubin", logs=log).code
    reports = (match.groupdict() for match in USAGE.finditer(log.getvalue()))
    return {report.pop("kernel"): {name: int(number) for name, number in report.items()} for report in reports}


@pytest.mark.parametrize("file", FILES)
def test_a_kernel_file_compiles_without_spills_or_stack(file):
    source = read(file)
    for architecture in architectures(source):
        found = usage(source, architecture)
        assert found.keys() == source.kernels.keys()
        for kernel, used in found.items():
            report = f"{kernel} on {architecture}: {used}"
            print(report)
            assert used["stack"] == used["stores"] == used["loads"] == 0, report
            assert 0 < used["registers"] <= 255, report


def test_a_spill_would_be_seen():
    text = """
    // Runs on      sm_80 and newer; SIMT executor.
    extern "C" __global__ void spills(float* out, int n) {
        float row[64];
        for (int i = 0; i < 64; ++i) row[i] = out[i];
        for (int i = 0; i < n; ++i) out[i] = row[(i * 7) % 64];
    }"""
    source = KernelSource.read("test.cu", {}, text)
    assert usage(source, "sm_80")["spills"]["stack"] == 256
