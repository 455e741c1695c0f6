"""Every raw CUDA kernel under compute-sanitizer: memory errors, races, missing initialisation, barriers.

The kernels run on shapes that no tile divides, in memory that no pool hands out again, so that an access
beyond an array and a read of what nothing wrote are seen.
"""

import functools
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import biases, combine, expert_down, gemm, packed, parallel
from moeblaze_ref.backends.raw_cuda.dispatch import build_part
from moeblaze_ref.backends.registry import BACKENDS, OpenStage, refusal
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import LAYOUTS, Layout
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime import Executor
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import Case, make_case, random_topk

# With each tool's options. CUDA's own bindings ask the driver for functions that it may not have: no error of ours.
TOOLS = {"memcheck": ("--report-api-errors", "no"), "racecheck": (), "initcheck": (), "synccheck": ()}


@dataclass(frozen=True)
class Finding:
    """A message of one tool."""

    tool: str  #: one of ``TOOLS``
    ok: bool  #: whether it found nothing, and the kernels ran to their end
    report: tuple[str, ...]  #: the lines that it printed


def cases() -> list[Case]:
    """A gated and an ungated layer; several tiles, none of them full. Their policies leave out different results."""
    ragged = make_case(171, 24, 72, 7, 3, "empty", "gated")
    ungated = make_case(171, 24, 72, 7, 3, "zipf", "ungated", activation="gelu")
    return [replace(ragged, policy="conventional"), replace(ungated, policy="inputs", renormalize=True)]


def run_every_kernel(executor: Executor):
    """Launch each kernel of kernels_cuda/ that this executor runs at least once; results are not looked at."""
    raw = BACKENDS["simt"]  # any backend over raw_cuda: they differ in the executor alone

    def opened(stage: str, version: str | None) -> OpenStage:
        options = {"executor": executor, "version": version}
        functions = {name: one for name, one in vars(raw.stage(stage)).items() if hasattr(one, "unchecked")}
        unchecked = SimpleNamespace(**{name: one.unchecked for name, one in functions.items()})  # no sorts, no scans
        return OpenStage(unchecked, nullcontext, executor.from_numpy, executor.to_numpy, options)

    for stage in (stage for stage in raw.stages if stage in comparisons.RUN):
        for version, dtypes in raw.versions(stage).items():
            if refusal(executor, stage, version):
                continue
            for case, dtype in itertools.product(comparisons.extended(stage, version, cases()), dtypes):
                run, _ = comparisons.comparison(stage, version)
                run(opened(stage, version), case.astype(dtype))
    for version in raw.versions("dispatch"):
        opened("dispatch", version).build(random_topk(2_100, 7, 3), 7)
        opened("dispatch", version).build(random_topk(300, 300, 32), 300)
    if not refusal(executor, "expert_up", gemm.HOPPER):
        for stage in ("expert_up", "expert_down", "block_sparse"):  # blocks that take more than one tile
            case = comparisons.overflowing(stage, executor.multiprocessors)[-1]
            comparisons.RUN[stage](opened(stage, gemm.HOPPER), case.astype("bfloat16"))
    for version, layout, case in packed_runs(executor):
        comparisons.run_packed(opened("expert_up", version), case, layout)
    _run_biases(executor)
    _run_lessons(executor)
    _run_trips(executor)


def packed_runs(executor: Executor) -> Iterator[tuple[str, Layout, Case]]:
    """Every run of the experts whose weights lie as a model stores them: the version, the layout, and the case."""
    for version, dtypes in packed.VERSIONS.items():
        if refusal(executor, "packed", version):
            continue
        chosen = [case.astype(dtype) for case, dtype in itertools.product(cases(), dtypes)]
        if version == gemm.HOPPER:  # blocks that take more than one tile
            chosen += [case.astype("bfloat16") for case in comparisons.overflowing("packed", executor.multiprocessors)]
        for case, layout in itertools.product(chosen, LAYOUTS.values()):
            if is_gated(case.activation) or not layout.interleaved:
                yield version, layout, case


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


def run_on_gpu():
    """`run_every_kernel` on the GPU, each array in an allocation of its own and nothing written beforehand."""
    import cupy

    from moeblaze_ref.runtime.cupy import CupyExecutor

    cupy.cuda.set_allocator(None)
    run_every_kernel(CupyExecutor())
    cupy.cuda.Device().synchronize()


def plan() -> list[Callable[[], list[Finding]]]:
    """One job a tool.

    Raises
    ------
    ValueError
        If there is no CUDA device, or no compute-sanitizer on the PATH.
    """
    status = BACKENDS["cuda"].status()
    if not status.available:
        raise ValueError(f"compute-sanitizer needs the backend cuda: {status.detail}")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        raise ValueError("compute-sanitizer is not on the PATH; it is a part of the CUDA toolkit")
    return [functools.partial(_examine, sanitizer, tool) for tool in TOOLS]


def _examine(sanitizer: str, tool: str) -> list[Finding]:
    program = "from moeblaze_ref.verify.sanitize import run_on_gpu; run_on_gpu()"
    command = [sanitizer, "--tool", tool, *TOOLS[tool], "--error-exitcode", "9", sys.executable, "-c", program]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    return [Finding(tool, result.returncode == 0, tuple(result.stdout.splitlines()))]
