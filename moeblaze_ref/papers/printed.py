"""Time and bytes of the steps that MoEBlaze prints one way and this project does another way.

`moeblaze-4.2` is the dispatch: as printed, with a location map, beside ours. `moeblaze-3.1` is the down-projection
whose epilogue sums over a token's experts, beside a stored y and the combine. All versions of a step are timed
interleaved, by replays of CUDA graphs, and each result is compared with plain torch's in the same run.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from moeblaze_ref.backends.raw_cuda import combine, dispatch, expert_down, gemm, layer, tiles
from moeblaze_ref.bench import accuracy, roofline
from moeblaze_ref.bench.expected import EXPECTED, results_of
from moeblaze_ref.bench.inputs import Inputs
from moeblaze_ref.bench.stages import input_sets
from moeblaze_ref.core import kernel_headers
from moeblaze_ref.core.config import PAPER_PRESETS, MoEConfig, preset
from moeblaze_ref.nn import oracle
from moeblaze_ref.papers.results import Rows
from moeblaze_ref.runtime import Executor, ceil_div
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.clock import interleave, replayed
from moeblaze_ref.runtime.device import Device
from moeblaze_ref.runtime.source import kernel_text
from moeblaze_ref.runtime.torch_bridge import Bridge

Job = Callable[[], Rows]

REPETITIONS = 15
COMBINE = ("combine/2_vector.cu", "combine")
GATE_ROWS = ("expert_down/gates.cu", "gate_rows")
ROUND_SUMS = ("expert_down/as_printed.cu", "round_sums")


class Version(NamedTuple):
    """One way to compute a step."""

    run: Callable[[Inputs, Executor], Any]  #: from `Inputs` and an executor to the result
    kernels: Sequence[tuple[str, str]]  #: file and kernel of each launch, for the bytes that their headers state
    filled: str  #: bytes that are written without a kernel of ours, as a formula
    extra: str  #: bytes of temporary buffers, as a formula
    version: str | None = None  #: whose tile the kernels are compiled for


# ---- section 4.2: the dispatch -------------------------------------------------------------------

EXTRA_OF_DISPATCH = {
    dispatch.AS_PRINTED: "8 L E + 4 E",  # dense map, location map, lengths
    "1_dense_map": "4 L E + 4 E",
    "2_bitmap": "4 E WORDS + 4 E",
    "3_single_pass": "4 E (TILES + 1)",
}


def dispatch_versions() -> dict[str, Version]:
    """The dispatch as printed, and ours, by the names of their kernel files."""
    return {version: _dispatch_version(version) for version in EXTRA_OF_DISPATCH}


def _dispatch_version(version: str) -> Version:
    def run(inputs, executor):
        return dispatch.build.unchecked(inputs.topk_experts, inputs.config.E, executor=executor, version=version)

    first_steps = _kernels("dispatch/1_dense_map.cu")[:-1] if version == dispatch.AS_PRINTED else []
    return Version(run, [*first_steps, *_kernels(f"dispatch/{version}.cu")], "0", EXTRA_OF_DISPATCH[version])


def _kernels(file: str) -> list[tuple[str, str]]:
    return [(file, kernel) for kernel in kernel_headers.table(kernel_text(file))]


# ---- section 3.1: the sum over a token's experts -------------------------------------------------


def sum_versions(config: MoEConfig, executor: Executor) -> dict[str, Version]:
    """The fused sums, and y stored and combined on the same version and on the layer's default version.

    They are ``as_printed``, ``lesson_atomic``, and one or two named after the version that stores y. The executor's
    device decides the default version.
    """
    same = gemm.portable_version(config.dtype, config.d, config.h)
    default = layer.default_version(config.dtype, config.d, config.h, executor)
    rounds = [] if config.dtype == "float32" else [ROUND_SUMS]
    sums = "0" if config.dtype == "float32" else "4 L d"  # float32 sums are the output
    fused = {
        "as_printed": (expert_down.summed_forward.unchecked, "add_expert"),
        "lesson_atomic": (expert_down.atomic_forward.unchecked, "add_rows"),
    }
    versions = {}
    for file, (forward, kernel) in fused.items():
        kernels = [GATE_ROWS, (f"expert_down/{file}.cu", kernel), *rounds]
        versions[file] = Version(partial(_fused, forward), kernels, "4 L d", f"4 R + {sums}", same)
    for version in dict.fromkeys((same, default)):
        kernels = [(gemm.file_of("expert_down", version), "expert_down"), COMBINE]
        versions[f"{version} + combine"] = Version(partial(_stored, version), kernels, "0", "s R d", version)
    return versions


def _fused(forward, inputs, executor):
    return forward(inputs.y_swi, inputs.w3, inputs.gates, inputs.dispatch, executor=executor)


def _stored(version, inputs, executor):
    y = expert_down.forward.unchecked(inputs.y_swi, inputs.w3, inputs.dispatch, executor=executor, version=version)
    return combine.forward.unchecked(y, inputs.gates, inputs.dispatch, executor=executor)


def _expected_sums(inputs: Inputs) -> tuple[Tensor]:
    order = oracle.expert_order(inputs.tensor("topk_experts"), inputs.config.E)
    y = oracle.expert_down(inputs.tensor("y_swi"), order, inputs.tensor("w3"))
    return (oracle.combine(y, inputs.tensor("gates"), order),)


# ---- bytes ---------------------------------------------------------------------------------------


def symbols(config: MoEConfig, offsets: Sequence[int], version: str | None, executor: Executor) -> dict[str, int]:
    """Return what the symbols in the headers' formulas stand for.

    Parameters
    ----------
    offsets : sequence of int
        expert_token_offsets (E + 1,) of the routing.
    version : str or None
        Of the down-projection, whose tile decides; None for the dispatch.
    """
    c, s = config, config.itemsize
    found = {**c.sizes, "R": c.R, "s": s, "THREADS": gemm.THREADS, "multiprocessors": executor.multiprocessors}
    if version is None:
        tiling = dispatch.Tiling.of(c.E, c.k)
        words = ceil_div(c.L, dispatch.THREADS) * dispatch.WARPS
        return found | {"WORDS": words, "TILES": ceil_div(c.L, tiling.tokens)}
    tile = tiles.choose(executor, version, "expert_down", c.R, c.E, c.d, c.h)
    rows, columns = (128, gemm.HOPPER_COLUMNS) if version == gemm.HOPPER else gemm.extent(tile)
    if isinstance(tile, tiles.MmaTile):
        found |= tile.constants(s)
    begins = [begin for first, end in pairwise(offsets) for begin in range(first, end, rows)]
    boxes = sum(min(rows, offsets[-1] - begin) for begin in begins)
    of_tiles = {"TILE_ROWS": rows, "TILE_COLUMNS": columns, "D": ceil_div(c.d, columns)}
    return found | of_tiles | {"tiles": len(begins), "boxes": boxes}


def moved(version: Version, values: dict[str, int]) -> dict[str, int]:
    """Return the bytes that a version's threads ask to read and to write, by the headers of its kernels.

    The values are those of `symbols`. The keys are bytes_read, bytes_written, and extra_bytes of the temporary buffers.
    """
    read = written = Fraction(0)
    for file, kernel in version.kernels:
        row = kernel_headers.table(kernel_text(file))[kernel]
        launches = values["E"] if kernel == "add_expert" else 1
        launched = values | {"blocks": launches * prod(kernel_headers.sizes(row["grid"], values))}
        read += kernel_headers.number(row["bytes read"], launched)
        written += kernel_headers.number(row["bytes written"], launched)
    filled, extra = (kernel_headers.number(formula, values) for formula in (version.filled, version.extra))
    return {"bytes_read": int(read), "bytes_written": int(written + filled), "extra_bytes": int(extra)}


# ---- rows ----------------------------------------------------------------------------------------


def time_dispatch(name: str, config: MoEConfig, device: Device) -> Rows:
    """Time every version of the dispatch of one layer; one row each, as `time_versions`."""
    return time_versions("dispatch", name, config, dispatch_versions(), device)


def time_sums(name: str, config: MoEConfig, device: Device) -> Rows:
    """Time every way from y_swi to the output of one layer; one row each, as `time_versions`."""
    versions = sum_versions(config, bridge_to(device.torch_device).executor)
    return time_versions("expert_down", name, config, versions, device)


def time_versions(stage: str, name: str, config: MoEConfig, versions: dict[str, Version], device: Device) -> Rows:
    """Time the versions of a step interleaved, and compare each result with plain torch's.

    The stage is "dispatch", or "expert_down" with the sum over a token's experts; ``name`` is the layer's in the rows.

    Returns
    -------
    list of dict
        preset, stage, kernel, shape, dtype; ms and quartiles_ms of one call; bytes_read, bytes_written, extra_bytes;
        error and row_error as `accuracy.Error`. A version that does not run or gives a wrong result has a message in
        place of the numbers.
    """
    bridge = bridge_to(device.torch_device)
    sets = [
        Inputs(config, bridge, device.torch_device)
        for _ in range(input_sets(roofline.cost_of(stage, config).bytes, device.cache_bytes))
    ]
    head: dict[str, Any] = {"preset": name, "stage": stage, "shape": config.sizes, "dtype": config.dtype}
    expected = _expected_sums(sets[0]) if stage == "expert_down" else EXPECTED[stage](sets[0])
    rows, replays = {}, {}
    for kernel, version in versions.items():
        rows[kernel] = head | {"kernel": kernel}
        try:
            rows[kernel] |= _checked(stage, version, sets[0], expected, bridge)
            replays[kernel] = replayed(device.captured(partial(_run, version, sets, bridge)))
        except Exception as error:  # one that fails must not end the others
            rows[kernel]["message"] = str(error).partition("\n")[0]
    samples = interleave(replays, REPETITIONS, device) if replays else {}
    offsets = bridge.executor.to_numpy(sets[0].dispatch.expert_token_offsets).tolist()
    for kernel, taken in samples.items():
        of_one, version = taken.shared_by(len(sets)), versions[kernel]
        rows[kernel] |= {"ms": of_one.median, "quartiles_ms": list(of_one.quartiles)}
        rows[kernel] |= moved(version, symbols(config, offsets, version.version, bridge.executor))
    return list(rows.values())


def _run(version: Version, sets: Sequence[Inputs], bridge: Bridge) -> list[Any]:
    with bridge.running():
        return [version.run(inputs, bridge.executor) for inputs in sets]


def _checked(stage, version, inputs, expected, bridge) -> dict[str, float]:
    """The columns of the result's error."""
    (result,) = _run(version, [inputs], bridge)
    error = accuracy.worst(results_of(stage, result, bridge), expected)
    if not (error.whole <= accuracy.BOUND and error.row <= accuracy.ROW_BOUND):
        raise ValueError(f"the result is wrong: its relative error is {error.whole:.2g}, that of a row {error.row:.2g}")
    return error.columns


# ---- jobs ----------------------------------------------------------------------------------------


def dispatch_jobs(device: Device) -> list[Job]:
    """Return a job for each configuration of MoEBlaze's table 1, see `time_dispatch`."""
    return _jobs(time_dispatch, device)


def sum_jobs(device: Device) -> list[Job]:
    """Return a job for each configuration of MoEBlaze's table 1, see `time_sums`."""
    return _jobs(time_sums, device)


def _jobs(measure: Callable[[str, MoEConfig, Device], Rows], device: Device) -> list[Job]:
    return [partial(measure, name, preset(name).config, device) for name in PAPER_PRESETS]
