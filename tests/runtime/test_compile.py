"""Every raw CUDA kernel compiles for the architectures that its header names, without a GPU and without spilling."""

import functools
import io
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from cuda.core import Program, ProgramOptions
from cuda.pathfinder import find_nvidia_header_directory

from moeblaze_ref.backends.raw_cuda import (
    block_sparse,
    combine,
    dispatch,
    expert_down,
    expert_up,
    gating,
    gemm,
    packed,
    parallel,
    tiles,
)
from moeblaze_ref.bench import ladder
from moeblaze_ref.core.config import ACTIVATIONS, CLAMPED_SWIGLU
from moeblaze_ref.core.layouts import LAYOUTS
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import KernelSource, kernel_text

FILES = sorted(path.relative_to(kernels_dir()).as_posix() for path in kernels_dir().glob("*/*.cu"))
EXPERT_STAGES = {"expert_up": expert_up, "expert_down": expert_down, "combine": combine}
# Of every file, on all architectures that its header names.
DTYPE, ACTIVATION = "float16", "geglu"
TYPED = {"Scalar": gemm.C_TYPE[DTYPE], "THREADS": gemm.THREADS, "ACTIVATION": ACTIVATION, "PACK": 8}
CONSTANTS = {
    "dispatch": dispatch.constants("3_single_pass", 1024, 8) | dispatch.constants("2_bitmap", 1024, 8),
    "gating": gating.constants("2_warp", 1024) | gating.fused_constants(1024),
    **dict.fromkeys((*EXPERT_STAGES, "activation"), TYPED),
    "packed": TYPED | {"LAYOUT": "linear"},
    "parallel": {"THREADS": parallel.THREADS, "RANKS": 256, "NODES": 32},
    "block_sparse": TYPED | {"BLOCK": block_sparse.BLOCK, "TRANSPOSE_LHS": 0, "TRANSPOSE_RHS": 0},
}
OF_DTYPE = {dtype: {"Scalar": name, "PACK": 16 // np.dtype(dtype).itemsize} for dtype, name in gemm.C_TYPE.items()}
ARCHITECTURES = {
    "sm_80 and newer; SIMT executor": ("sm_80", "sm_90", "sm_100"),
    "sm_90a; SIMT executor": ("sm_90a",),
}
HOPPER = ("sm_90", "sm_90a")
CUDA_HEADERS = find_nvidia_header_directory("cudart")
USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill "
    r"stores, (?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers"
    r"(?:[^\n]*? (?P<shared>\d+) bytes smem)?",
    re.DOTALL,
)


SERIALIZED = "wgmma.mma_async instructions are serialized"  # then each product waits for the one before


def read(file):
    stage, name = file.split("/")
    tile = tiles.DEFAULTS.get(name.removesuffix(".cu"))
    return KernelSource.read(file, CONSTANTS[stage] | (tile.constants(2) if tile else {}))


def architectures(source):
    """What the header's line "Runs on" stands for."""
    return ARCHITECTURES[source.runs_on]


def usage(source, architecture):
    """ptxas's report of a compiled file: registers, static shared memory, stack and spills of every kernel."""
    return _usage(source.text, tuple(source.constants.items()), tuple(source.include_dirs), architecture)


@functools.cache
def _usage(text, constants, include_dirs, architecture):
    log = io.StringIO()
    options = ProgramOptions(
        arch=architecture,
        std="c++17",
        include_path=[*map(str, include_dirs), CUDA_HEADERS],
        define_macro=[(name, str(value)) for name, value in constants] or None,
        ptxas_options="-v",
    )
    assert Program(text, "c++", options).compile("cubin", logs=log).code
    assert SERIALIZED not in log.getvalue(), log.getvalue()
    reports = (match.groupdict() for match in USAGE.finditer(log.getvalue()))
    return {report.pop("kernel"): {name: int(number or 0) for name, number in report.items()} for report in reports}


def assert_fits(source, on=HOPPER):
    """No kernel of the file spills or uses local memory on those of these architectures that it runs on."""
    tried = set(on) & set(architectures(source))
    assert tried, f"{source.file} runs on none of {on}"
    for architecture in tried:
        found = usage(source, architecture)
        assert found.keys() == source.kernels.keys()
        for kernel, used in found.items():
            report = f"{kernel} on {architecture}: {used}"
            print(report)
            assert used["stack"] == used["stores"] == used["loads"] == 0, report
            assert 0 < used["registers"] <= 255, report


@pytest.mark.parametrize("file", FILES)
def test_a_kernel_file_compiles_without_spills_or_stack(file):
    source = read(file)
    assert_fits(source, architectures(source))


def of(stage, dtype, tile=None, **constants):
    """Constants of a file of the stage."""
    of_tile = {} if tile is None else tile.constants(np.dtype(dtype).itemsize)
    return CONSTANTS[stage] | OF_DTYPE[dtype] | of_tile | constants


def but_for_the_band(candidates):
    """Tiles that differ in more than the band."""
    return dict.fromkeys(replace(tile, band=8) for tile in candidates)


def product(version, dtype, block, transposes):
    """The file of a version of the block-sparse products, and its constants."""
    turned = dict(zip(("TRANSPOSE_LHS", "TRANSPOSE_RHS"), transposes, strict=True))
    constants = of("block_sparse", dtype, block_sparse.tile_of(version, block), **turned, BLOCK=block)
    return gemm.file_of("block_sparse", version), constants


def builds_of_indices():
    """Builds beside those of every file: a name, the file, its constants, and the architectures."""
    for sizes in ((1, 1), (64, 8), (128, 8), (1024, 1), (1024, 6), (1024, 32)):
        constants = dispatch.constants("3_single_pass", *sizes)
        yield f"dispatch of E, k = {sizes}", "dispatch/3_single_pass.cu", constants, HOPPER
    for version, *options in itertools.product(gating.VERSIONS, (32, 64, 128, 256, 512, 1024), (False, True)):
        constants = gating.constants(version, *options)
        yield f"gating {version} of E, renormalize = {options}", f"gating/{version}.cu", constants, HOPPER
        narrow = gating.constants(version, *options, balance=True, z_loss=True, dtype="bfloat16")
        yield f"gating {version} of E, renormalize = {options}, all to bfloat16", f"gating/{version}.cu", narrow, HOPPER
    for options in itertools.product((32, 64, 128, 256, 512, 1024), (False, True)):
        constants = gating.fused_constants(*options)
        yield f"gating fused of E, renormalize = {options}", "gating/fused.cu", constants, HOPPER
    for file in ("combine/2_vector.cu", "expert_up/sum_rows.cu", "block_sparse/rows.cu", "packed/biases.cu"):
        for pack in (1, 2, 4, 8):
            yield f"{file} in packs of {pack}", file, CONSTANTS["combine"] | {"PACK": pack}, HOPPER


def builds_of_experts():
    """The same of the expert stages."""
    for stage, module in EXPERT_STAGES.items():
        for version, dtypes in getattr(module, "FORWARD_VERSIONS", module.VERSIONS).items():
            for dtype in (dtype for dtype in dtypes if dtype != DTYPE):
                constants = of(stage, dtype, tiles.DEFAULTS.get(version))
                yield f"{stage} {version} of {dtype}", gemm.file_of(stage, version), constants, HOPPER
    for stage in ("expert_up", "expert_down"):
        for version in ("3_mma", gemm.TF32):
            for tile in but_for_the_band(tiles.CANDIDATES[version][1:]):
                constants = of(stage, gemm.VERSIONS[version][-1], tile, ACTIVATION="swiglu")
                yield f"{stage} {version}, {tile}", gemm.file_of(stage, version), constants, ("sm_80",)
        # On sm_90, where version 4 is the default, expert_up of version 3 with gelu misses the fit by 8 bytes.
        for activation, architecture in zip(ACTIVATIONS, itertools.cycle(("sm_80", "sm_90")), strict=False):
            if activation != ACTIVATION:
                constants = of(stage, DTYPE, tiles.DEFAULTS["3_mma"], ACTIVATION=activation)
                yield f"{stage} 3_mma, {activation}", f"{stage}/3_mma.cu", constants, (architecture,)
        for dtype, activation in itertools.product(gemm.NARROW, ACTIVATIONS):
            constants = of(stage, dtype, ACTIVATION=activation)
            yield f"{stage} 7_persistent of {dtype}, {activation}", f"{stage}/7_persistent.cu", constants, HOPPER
    for file in ("expert_down/as_printed.cu", "expert_down/lesson_atomic.cu"):
        threads = {"THREADS": gemm.THREADS}
        for tile in but_for_the_band(tiles.CANDIDATES["3_mma"]):
            constants = OF_DTYPE["bfloat16"] | threads | tile.constants(itemsize=2)
            yield f"{file}, {tile}", file, constants, ARCHITECTURES["sm_80 and newer; SIMT executor"]
        for dtype in gemm.WIDE:
            yield f"{file} of {dtype}", file, OF_DTYPE[dtype] | threads, HOPPER
    for constants in sorted({step.constants for step in ladder.LADDER if step.version == ladder.HOPPER}):
        yield f"ladder {constants}", "expert_up/7_persistent.cu", CONSTANTS["expert_up"] | dict(constants), HOPPER


def builds_of_packed():
    """The same of weights as models store them: every layout, and every activation of one that has it."""
    layouts = [layout for layout in LAYOUTS if layout != "interleaved"]
    cells = [("swiglu", layout) for layout in LAYOUTS] + [("reglu", "interleaved")]
    cells += [(one, layout) for one, layout in zip(ACTIVATIONS, itertools.cycle(layouts), strict=False)]
    for (activation, layout), dtype in zip(cells, itertools.cycle(gemm.NARROW), strict=False):
        constants = of("packed", dtype, ACTIVATION=activation, LAYOUT=layout)
        yield f"packed 7_persistent of {dtype}, {activation}, {layout}", "packed/7_persistent.cu", constants, HOPPER
    for layout in LAYOUTS:  # on sm_90, where version 7 is the default, interleaved columns miss the fit by 8 bytes
        constants = of("packed", "bfloat16", tiles.DEFAULTS["3_mma"], ACTIVATION="swiglu", LAYOUT=layout)
        yield f"packed 3_mma, {layout}", "packed/3_mma.cu", constants, ("sm_80",)
        constants = of("packed", "float32", tiles.DEFAULTS[gemm.TF32], ACTIVATION="swiglu", LAYOUT=layout)
        yield f"packed 3_mma_tf32, {layout}", "packed/3_mma.cu", constants, ("sm_80",)
        constants = of("packed", "float32", ACTIVATION="swiglu", LAYOUT=layout)
        yield f"packed 2_tiled, {layout}", "packed/2_tiled.cu", constants, HOPPER
        yield from builds_of_biased(layout)


def builds_of_biased(layout):
    """The same of experts with biases, and of gpt-oss's activation."""
    clamped = {"ACTIVATION": CLAMPED_SWIGLU, "LAYOUT": layout, "BIASED": 1}
    for version, dtypes in packed.VERSIONS.items():
        constants = of("packed", dtypes[-1], tiles.DEFAULTS.get(version), **clamped)
        name = f"packed {version} with biases, {layout}"
        yield name, gemm.file_of("packed", version), constants, ("sm_80", "sm_90", "sm_90a")


def builds_of_blocks():
    """The same of the block-sparse stage."""
    for transposes in itertools.product((0, 1), repeat=2):
        # Two lists of lines at once: on sm_100, dds of 3_mma with lhs transposed misses the fit by 8 bytes.
        for version, dtypes in block_sparse.VERSIONS.items():
            build = product(version, dtypes[-1], block_sparse.BLOCK, transposes)
            yield f"block_sparse {version}, transposes {transposes}", *build, HOPPER
        for block in (8, 32, 64, 136):
            build = product("3_mma", "bfloat16", block, transposes)
            yield f"block_sparse 3_mma, block {block}, transposes {transposes}", *build, ("sm_80",)
        build = product(gemm.HOPPER, "bfloat16", 384, transposes)
        yield f"block_sparse 7_persistent, block 384, transposes {transposes}", *build, HOPPER
    for version, dtypes in block_sparse.VERSIONS.items():
        for dtype in dtypes[:-1]:
            yield f"block_sparse {version} of {dtype}", *product(version, dtype, block_sparse.BLOCK, (0, 0)), HOPPER
    for dtype, activation in itertools.product(gemm.WIDE, ACTIVATIONS):
        constants = of("block_sparse", dtype, ACTIVATION=activation)
        yield f"stored blocks of {dtype}, {activation}", "block_sparse/hidden.cu", constants, ("sm_80",)


BUILDS = [*builds_of_indices(), *builds_of_experts(), *builds_of_packed(), *builds_of_blocks()]


@pytest.mark.parametrize(("file", "constants", "on"), [pytest.param(*build, id=name) for name, *build in BUILDS])
def test_every_build_fits_into_registers(file, constants, on):
    assert_fits(KernelSource.read(file, constants), on)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "reglu", "silu", "swiglu"])
@pytest.mark.parametrize("version", gemm.TEACHING)
def test_two_blocks_of_each_teaching_version_fit_on_a_multiprocessor(version, activation):
    tile = tiles.FIXED[version]
    source = KernelSource.read(f"expert_up/{version}.cu", gemm.constants("bfloat16", activation, tile))
    assert_fits(source)
    used = usage(source, "sm_90a")["expert_up"]
    assert 2 * tile.threads * -(-used["registers"] // 8) * 8 <= 2**16
    assert 2 * (tile.shared_bytes + used["shared"] + 1024) <= 228 * 1024  # of each block the driver takes 1 KiB


def test_a_serialized_product_is_seen():
    """A product that adds to sums which other instructions have set, while the one before it is under way."""
    file = "expert_up/6_specialized.cu"
    text = kernel_text(file).replace("TileSums sums;", "TileSums sums = {};").replace("step + i > 0", "true")
    source = KernelSource.read(file, gemm.constants("bfloat16", "swiglu", tiles.FIXED["6_specialized"]), text)
    with pytest.raises(AssertionError, match=SERIALIZED):
        usage(source, "sm_90a")


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


def test_static_shared_memory_is_reported():
    assert usage(read("expert_up/1_naive.cu"), "sm_80")["expert_up"]["shared"] == 0
    assert usage(read("expert_up/2_tiled.cu"), "sm_80")["expert_up"]["shared"] == 268 + 4352 * 3  # as its header states


def test_a_device_that_is_too_old_is_told_what_it_lacks():
    source = read("expert_up/3_mma.cu")
    source.check_gpu((8, 0), "a GPU")
    source.check_gpu((10, 0), "a GPU")
    message = r"expert_up/3_mma.cu needs compute capability 8.0 or newer, but Tesla T4 has 7.5"
    with pytest.raises(ValueError, match=message):
        source.check_gpu((7, 5), "Tesla T4")


def test_an_architecture_of_its_own_runs_on_no_other():
    source = KernelSource.read("test.cu", {}, "// Runs on      sm_90a; SIMT executor.\n")
    source.check_gpu((9, 0), "NVIDIA H200")
    assert source.gpu_options == ("-arch=sm_90a",) and read("expert_up/3_mma.cu").gpu_options == ()
    for capability in ((8, 0), (10, 0)):
        with pytest.raises(ValueError, match="test.cu needs compute capability 9.0 exactly, but a GPU has"):
            source.check_gpu(capability, "a GPU")


def test_a_file_that_leaves_the_executor_out_is_not_run_on_it():
    text = '// Runs on      sm_90a.\nextern "C" __global__ void nothing(int* out) {}'
    with pytest.raises(ValueError, match="nothing.cu does not run on the SIMT executor: its header says 'sm_90a'"):
        SimtExecutor().load("nothing.cu", text=text)
