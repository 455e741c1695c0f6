"""Every raw CUDA kernel under compute-sanitizer: memory errors, races, missing initialisation, barriers.

The kernels run on shapes that no tile divides, in memory that no pool hands out again, so that an access
beyond an array and a read of what nothing wrote are seen.
"""

import functools
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import biases, combine, expert_down, gemm, packed, parallel
from moeblaze_ref.backends.raw_cuda.dispatch import build_part
from moeblaze_ref.backends.registry import BACKENDS, OpenStage, refusal
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import LAYOUTS, Layout
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime import Executor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import Case, make_case, random_topk

# With each tool's options, the slowest first. CUDA's own bindings ask the driver for functions that it may not have: no
# error of ours.
TOOLS = {"racecheck": (), "initcheck": (), "memcheck": ("--report-api-errors", "no"), "synccheck": ()}
NO_TOOL = "no tool"


@dataclass(frozen=True)
class Finding:
    """A message of one tool on some kernels."""

    tool: str  #: one of ``TOOLS``, or ``NO_TOOL``
    part: str  #: one of `parts`
    ok: bool  #: whether it found nothing, and the kernels ran to their end
    report: tuple[str, ...]  #: the lines that it printed


def cases() -> list[Case]:
    """A gated and an ungated layer; several tiles, none of them full. Their policies leave out different results."""
    ragged = make_case(171, 24, 72, 7, 3, "empty", "gated")
    ungated = make_case(171, 24, 72, 7, 3, "zipf", "ungated", activation="gelu")
    return [replace(ragged, policy="conventional"), replace(ungated, policy="inputs", renormalize=True)]


RAW = BACKENDS["simt"]  # any backend over raw_cuda: they differ in the executor alone
OVERFLOWING = ("expert_up", "expert_down", "block_sparse")  # stages whose blocks can take more than one tile


def parts() -> dict[str, Callable[[Executor], None]]:
    """Return functions, by name, that together launch each kernel of kernels_cuda/ that an executor runs."""
    found: dict[str, Callable[[Executor], None]] = {
        f"{stage} {version}": functools.partial(_run_stage, stage, version)
        for stage in RAW.stages
        if stage in comparisons.RUN
        for version in RAW.versions(stage)
    }
    for version in packed.VERSIONS:
        found[f"packed {version}"] = functools.partial(_run_packed, version)
        found[f"biased {version}"] = functools.partial(_run_biased, version)
    return found | {"dispatch": _run_dispatch, "biases": _run_biases, "lessons": _run_lessons, "parallel": _run_trips}


def parts_of(chosen: Collection[str]) -> list[str]:
    """The parts that are named whole or by their first word; all if none is chosen.

    Raises
    ------
    ValueError
        If a name is neither.
    """
    all_parts = parts()
    first_words = dict.fromkeys(part.split()[0] for part in all_parts)
    for name in chosen:
        checks.check_name("part", name, dict.fromkeys((*first_words, *all_parts)))
    return [part for part in all_parts if not chosen or {part, part.split()[0]} & {*chosen}]


def run_every_kernel(executor: Executor) -> None:
    """Run all `parts`; results are not looked at."""
    for run in parts().values():
        run(executor)


def _opened(executor: Executor, stage: str, version: str | None) -> OpenStage:
    options = {"executor": executor, "version": version}
    functions = {name: one for name, one in vars(RAW.stage(stage)).items() if hasattr(one, "unchecked")}
    unchecked = SimpleNamespace(**{name: one.unchecked for name, one in functions.items()})  # no sorts, no scans
    return OpenStage(unchecked, nullcontext, executor.from_numpy, executor.to_numpy, options)


def _run_stage(stage: str, version: str | None, executor: Executor) -> None:
    """Launch the kernels of a stage in every dtype."""
    if refusal(executor, stage, version):
        return
    run, _ = comparisons.comparison(stage, version)
    dtypes = RAW.versions(stage)[version]
    for case, dtype in itertools.product(comparisons.extended(stage, version, cases()), dtypes):
        run(_opened(executor, stage, version), case.astype(dtype))
    if stage in OVERFLOWING and version == gemm.HOPPER:
        case = comparisons.overflowing(stage, executor.multiprocessors)[-1]
        comparisons.RUN[stage](_opened(executor, stage, version), case.astype("bfloat16"))


def _run_dispatch(executor: Executor) -> None:
    """Launch the kernels of the dispatch, with few experts and with many."""
    for version in RAW.versions("dispatch"):
        for L, E, k in ((2_100, 7, 3), (300, 300, 32)):
            _opened(executor, "dispatch", version).build(random_topk(L, E, k), E)


def _run_packed(version: str, executor: Executor) -> None:
    """Launch the kernels of experts whose weights lie as a model stores them."""
    for layout, case in packed_runs(version, executor):
        comparisons.run_packed(_opened(executor, "expert_up", version), case, layout)


def packed_runs(version: str, executor: Executor) -> Iterator[tuple[Layout, Case]]:
    """Every run of a version of the experts whose weights lie as a model stores them: the layout, and the case."""
    if refusal(executor, "packed", version):
        return
    chosen = [case.astype(dtype) for case, dtype in itertools.product(cases(), packed.VERSIONS[version])]
    if version == gemm.HOPPER:  # blocks that take more than one tile
        chosen += [case.astype("bfloat16") for case in comparisons.overflowing("packed", executor.multiprocessors)]
    for case, layout in itertools.product(chosen, LAYOUTS.values()):
        if is_gated(case.activation) or not layout.interleaved:
            yield layout, case


def _run_biases(executor: Executor):
    """Launch the kernels of biases, of rows that are no multiple of a block's."""
    case = cases()[0].astype("float32")
    dispatch = build_by_sort(case.topk_experts, case.E)
    y, d_gates = case.x[dispatch.expert_token_indices], case.logits[:, : case.k].copy()
    gates, routes = executor.from_numpy(d_gates), dispatch.map(executor.from_numpy)
    for dtype in gemm.WIDE:
        d_out, rows, bias = [executor.from_numpy(array.astype(dtype)) for array in (case.x, y, case.x[: case.E])]
        biases.sum_rows(executor, rows, bias, gates, routes, executor.empty(d_out.shape, dtype))
        biases.up_gradient(executor, rows, routes)
        tile_sums = biases.empty_tile_sums(executor, routes, d_out.shape[1])
        executor.assign(tile_sums, executor.full(tile_sums.shape, "float32", 0))
        biases.up_gradient_of_tiles(executor, tile_sums, dtype, routes)
        biases.down_gradients(executor, d_out, bias, expert_down.gates_of_rows(executor, routes, gates), routes)


def _run_biased(version: str, executor: Executor) -> None:
    """Launch the kernels that biases change, in every run of `packed_runs`."""
    for layout, case in packed_runs(version, executor):
        E, d, h = case.weights.w1.shape
        gated = is_gated(case.activation)
        routes = build_by_sort(case.topk_experts, E).map(executor.from_numpy)
        x, gates = executor.from_numpy(case.x), executor.from_numpy(case.logits[:, : case.k].copy())
        gate_up, down, up_bias, down_bias = [
            executor.from_numpy(np.ones(shape, case.x.dtype))
            for shape in (*layout.shapes(E, d, h, gated), (E, h * (1 + gated)), (E, d))
        ]
        stage = packed.Packed(layout, gated, executor, version, biases.Biases(up_bias, down_bias, ("up", "down")))
        ab, _, _ = stage.project(x, gate_up, None, routes, case.activation)
        assert ab is not None  # it is stored
        stage.hidden_gradients(x, gates, ab, None, down, routes, case.activation)


def _run_lessons(executor: Executor):
    """Launch the kernels that no stage uses."""
    case = cases()[0].astype("float32")
    dispatch = build_by_sort(case.topk_experts, case.E)
    y, gates = case.x[dispatch.expert_token_indices], case.logits[:, : case.k].copy()
    routes = dispatch.map(executor.from_numpy)
    combine.scatter.unchecked(executor.from_numpy(y), executor.from_numpy(gates), routes, executor=executor)
    for dtype in gemm.WIDE:
        y_swi, w3 = (
            executor.from_numpy(array.astype(dtype)) for array in (comparisons.hidden(case)[2], case.weights.w3)
        )
        expert_down.atomic_forward.unchecked(y_swi, w3, executor.from_numpy(gates), routes, executor=executor)


def _run_trips(executor: Executor):
    """Launch the kernels of a layer over ranks: some have too little room, some experts have copies."""
    G, (L, k) = 5, (300, 3)
    held = np.arange(7)[:, None] % np.arange(1, G + 1) == 0  # expert e is on rank g if g + 1 divides e
    sole = np.where(held.sum(axis=1) > 1, EMPTY, held.argmax(axis=1)).astype(np.int32)
    topk, gates = random_topk(L, len(held), k), np.full((L, k), 0.5, np.float32)
    copies = parallel.Copies(executor.from_numpy(sole), executor.from_numpy(held), num_nodes=G)
    on_device = executor.from_numpy(topk), executor.from_numpy(gates)
    for rows, choices in ((L, L * k), (1, 1)):
        ranks, words = parallel.choose_ranks(*on_device, copies, 2, executor)
        found, noted = build_part.unchecked(ranks, G, L * k, executor), executor.full((), "bool", False)
        room = parallel.make_room(found, words, rows, noted, executor)
        here = np.where(held.T, np.arange(len(held)), EMPTY).astype(np.int32, order="C")
        parallel.find_places(room.words, executor.from_numpy(here), executor, parallel.Limit(choices, noted))
    shares = executor.from_numpy(np.full(len(held), 1 / len(held), np.float32))
    parallel.batch_rows(executor.empty((len(held),), "float32"), 0, executor)
    shares, part = parallel.batch_shares(parallel.batch_rows(shares, L, executor), L, executor)
    parallel.weigh_losses(part, part, part, executor)


def run_on_gpu(part: str) -> None:
    """Run one of `parts` on the GPU, each array in an allocation of its own and nothing written beforehand."""
    import cupy

    from moeblaze_ref.runtime.cupy import CupyExecutor

    cupy.cuda.set_allocator(None)
    parts()[part](CupyExecutor())
    cupy.cuda.Device().synchronize()


def rounds(chosen: Collection[str] = ()) -> dict[str, list[Callable[[], list[Finding]]]]:
    """Two rounds of jobs by their names, for the ``chosen`` parts or for all; those of a round can run side by side.

    In the first round every part runs without a tool. So its kernels are compiled once, and not by each tool. In the
    second round every tool takes every part; the first tool's jobs come first.

    Raises
    ------
    ValueError
        If a part is unknown, there is no CUDA device, or no compute-sanitizer on the PATH.
    """
    names = parts_of(chosen)
    status = BACKENDS["cuda"].status()
    if not status.available:
        raise ValueError(f"compute-sanitizer needs the backend cuda: {status.detail}")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise ValueError("compute-sanitizer is not on the PATH; it is a part of the CUDA toolkit")
    watched = itertools.product(TOOLS, names)
    return {
        "compiling": [functools.partial(_run_alone, part) for part in names],
        "sanitizing": [functools.partial(_examine, sanitizer, tool, part) for tool, part in watched],
    }


def _run_alone(part: str) -> list[Finding]:
    """Run a part in a process of its own; a finding only if it fails."""
    found = _run(NO_TOOL, part)
    return [] if found.ok else [found]


def _examine(sanitizer: str, tool: str, part: str) -> list[Finding]:
    return [_run(tool, part, sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9")]


def _run(tool: str, part: str, *command: str) -> Finding:
    program = f"from moeblaze_ref.verify.sanitize import run_on_gpu; run_on_gpu({part!r})"
    result = subprocess.run(
        [*command, sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return Finding(tool, part, result.returncode == 0, tuple(result.stdout.splitlines()))
