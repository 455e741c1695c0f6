"""Planted faults that `moeblaze check` must catch, in every operation; the constant FAULT switches one on."""

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
from planted import Effort, counted_effort, quick_builds

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.verify import cases, check


class Fault(NamedTuple):
    """A place in a kernel file, or in a header of it, and what stands there if FAULT is this fault's number."""

    name: str
    stage: str
    version: str
    right: str
    wrong: str
    file: str | None = None  # the version's own

    @property
    def path(self):
        return self.file or gemm.file_of(self.stage, self.version)


FAULTS = [
    Fault("gates never written", "gating", "1_naive", "gates[token * k + j] = weight;", ";"),
    Fault("last token dropped", "gating", "1_naive", "if (token >= L) return;", "if (token >= L - 1) return;"),
    Fault("gradient without its mean", "gating", "1_naive", " - shift - mean)", ")"),
    Fault(
        "renormalised gates over all experts",
        "gating",
        "1_naive",
        "RENORMALIZE ? exponentials_of_chosen(row, chosen, k) : all;",
        "all;",
    ),
    Fault("renormalised mean for all", "gating", "1_naive", "= RENORMALIZE ? z : z - mean;", "= z - mean;"),
    Fault("renormalised weights not divided", "gating", "2_warp", "= weight / warp_sum(weight);", "= weight;"),
    Fault("balance left out of the chosen", "gating", "1_naive", "(BALANCE ? z + balance", "(false ? z + balance"),
    Fault("peak of one lane", "gating", "2_warp", "return warp_max(peak);", "return peak;"),
    Fault(
        "column beyond the row written", "gating", "2_warp", "(column(i) < E) store_pack", "(column(i) <= E) store_pack"
    ),
    Fault(
        "missing barrier",
        "gating",
        "2_warp",
        "__syncwarp();  // the chosen are written over what another lane may have written",
        "",
    ),
    Fault(
        "wrong expert counted",
        "gating",
        "2_warp",
        "tile * E + expert]",
        "tile * E + (expert + 1) % E]",
        "gating/0_sums.cu",
    ),
    *(
        Fault(f"{what} after the 16th", "gating", version, right, right.replace("k", "min(k, 16)"), file)
        for version, what, right, file in (
            ("1_naive", "choices", "choice = {-1, BEST};\n    for (int j = 0; j < k; ++j)", None),
            ("2_warp", "choices", "has_choice = lane_id() < k;", None),
            ("2_warp", "gradients", "if (lane_id() < k) {", None),
            ("2_warp", "counts", "if (lane_id() < k) histogram", "gating/0_sums.cu"),
        )
    ),
    Fault("earlier tiles forgotten", "dispatch", "as_printed", "base += rank.total;", ";"),
    Fault(
        "locations of the wrong expert",
        "dispatch",
        "as_printed",
        "= location_map[entry];",
        "= location_map[token * E];",
    ),
    Fault("writes past its buffer", "dispatch", "1_dense_map", "rank.exclusive;", "rank.exclusive + 1;"),
    Fault("map not cleared", "dispatch", "1_dense_map", "rows[entry] = EMPTY;", ";"),
    Fault(
        "wrong expert's words", "dispatch", "2_bitmap", "[word / WARPS * stride +", "[(word / WARPS + 1) % E * stride +"
    ),
    Fault("words not cleared", "dispatch", "2_bitmap", "words[word] = 0;", ";"),
    Fault("last slot dropped", "dispatch", "3_single_pass", "< tile.slots;", "< tile.slots - 1;"),
    Fault("off-by-one offset", "dispatch", "3_single_pass", "= offset_below;", "= offset_below + 1;"),
    Fault(
        "earlier tiles forgotten", "dispatch", "3_single_pass", "offset + bases[blockIdx.x] - first", "offset - first"
    ),
    Fault("missing barrier", "dispatch", "3_single_pass", "__syncthreads();  // the rows lie in order", ""),
    Fault("wrong expert's weights", "expert_up", "1_naive", "(long long)blockIdx.y * d * h + at.column", "at.column"),
    Fault(
        "rows not gathered",
        "expert_up",
        "1_naive",
        "x + (long long)expert_token_indices[at.row] * d",
        "x + at.row % 7 * d",
    ),
    Fault("a slot dropped", "expert_up", "1_naive", "for (int j = 0; j < k; ++j)", "for (int j = 1; j < k; ++j)"),
    Fault(
        "rows of the next expert",
        "expert_up",
        "2_tiled",
        "if (row < tile.rows && j < h) store_hidden",
        "if (j < h) store_hidden",
    ),
    Fault(
        "missing barrier",
        "expert_up",
        "2_tiled",
        "__syncthreads();  // all have read before the tiles are written again",
        "",
    ),
    Fault("activation without its gate", "expert_up", "2_tiled", "GATED ? act_a * b : act_a", "act_a"),
    Fault("copies not awaited", "expert_up", "3_mma", "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
    Fault("stale buffer", "expert_up", "3_mma", "cp_async_or_zero(stage +", "if (begin) cp_async_or_zero(stage +"),
    Fault(
        "fragments not transposed", "expert_up", "3_mma", "ldmatrix_x4_transposed(registers,", "ldmatrix_x4(registers,"
    ),
    Fault("depths swapped", "expert_up", "3_mma_tf32", "m / 2 : m % 2) * CHUNK;", "m % 2 : m / 2) * CHUNK;"),
    Fault("fewer bits", "expert_down", "3_mma_tf32", "+ 0x1000u) & ~0x1fffu", "+ 0x4000u) & ~0x7fffu"),
    Fault("stage filled too early", "expert_up", "4_wgmma", "load(step + STAGES - 1);", "load(step + STAGES);"),
    Fault("missing fence", "expert_up", "4_wgmma", "        fence_async_proxy();", ";"),
    Fault("full without its rows", "expert_up", "5_tma", "cp_async_arrive(full);", "barrier_arrive(full);"),
    Fault("wrong expert's weights", "expert_up", "5_tma", "TILE_DEPTH, tile.expert);", "TILE_DEPTH, 0);"),
    Fault("last product not awaited", "expert_up", "6_specialized", "    wgmma_wait<0>();\n", ""),
    Fault("no stage is freed", "expert_up", "6_specialized", "barrier_arrive(read);", ";"),
    Fault(
        "last step dropped", "expert_up", "7_persistent", "(depth + TILE_DEPTH - 1) / TILE_DEPTH", "depth / TILE_DEPTH"
    ),
    Fault("wrong expert's weights", "expert_up", "7_persistent", "PANEL, p, tile.expert);", "PANEL, p, 0);"),
    Fault("copies not awaited", "expert_up", "7_persistent", "cp_async_arrive(full);", "barrier_arrive(full);"),
    Fault("missing wait", "expert_down", "7_persistent", "barrier_wait(&shared.full[now], state.parity);", ";"),
    Fault(
        "row tail stored",
        "expert_down",
        "7_persistent",
        "width, tile.rows, width - column);",
        "width, TILE_ROWS, width - column);",
    ),
    Fault("unscaled gate", "expert_down", "7_persistent", "gate_of_row[tile.first + first + lane_id()]", "1.0f"),
    Fault("unscaled gate", "expert_down", "1_naive", "d_y = gate * d;", "d_y = d;"),
    Fault("slope left out", "expert_down", "1_naive", "d_y * b * slope", "d_y * b"),
    Fault(
        "gate gradient of one column",
        "expert_down",
        "2_tiled",
        "column < TILE; ++column) term",
        "column < 1; ++column) term",
    ),
    Fault("last columns dropped", "expert_down", "3_mma", "d, h, d - first_column}", "d, h, d - first_column - 8}"),
    Fault(
        "unscaled gate",
        "expert_down",
        "as_printed",
        "so_far.add(targets.gates[row], values)",
        "so_far.add(1.0f, values)",
    ),
    Fault("last expert alone", "expert_down", "as_printed", "so_far.load(sums_at(row, column));", "so_far = {};"),
    Fault(
        "last row dropped", "expert_down", "as_printed", "return row < tile.rows &&", "return row < tile.rows - 1 &&"
    ),
    *(
        Fault("second tile of columns on the first", stage, version, right, wrong)
        for stage, version, right, wrong in (
            ("expert_down", "as_printed", "* d + first_column + column;", "* d + column;"),
            ("expert_down", "2_tiled", "* h + p) * d + i])", "* h + p) * d + column])"),
            ("expert_down", "3_mma", "* h * d + first_column,", "* h * d,"),
            ("expert_down", "7_persistent", "&w3, full, tile.column + panel * PANEL,", "&w3, full, panel * PANEL,"),
            ("expert_up", "2_tiled", "tile.expert * d + i) * h + p]", "tile.expert * d + column) * h + p]"),
            ("expert_up", "3_mma", "tile.expert * d + first_column) * h;", "tile.expert * d) * h;"),
            ("expert_up", "7_persistent", "&w1, full, p, tile.column, tile.expert);", "&w1, full, p, 0, tile.expert);"),
            ("combine", "2_vector", "store_pack(out + column, pack);", "store_pack(out + lane_id() * PACK, pack);"),
        )
    ),
    Fault(
        "gates in token order",
        "expert_down",
        "2_tiled",
        "[row] = gates[slot]",
        "[slot] = gates[slot]",
        "expert_down/0_gates.cu",
    ),
    Fault("all zeros", "combine", "1_gather", "from_float<Scalar>(sum);", "from_float<Scalar>(0.0f);"),
    Fault("unscaled gate", "combine", "1_gather", "sum += gates[slot] *", "sum +="),
    Fault("one slot alone", "combine", "1_gather", "for (int j = 0; j < k; ++j)", "for (int j = 0; j < 1; ++j)"),
    Fault("unscaled gate", "combine", "2_vector", "return gates[slot];", "return 1.0f;"),
    Fault("some rows alone", "combine", "2_vector", "lane_id() < k;", "lane_id() < k - 1;"),
    Fault("first column ignored", "combine", "2_vector", "out + token * pitch + first;", "out + token * pitch;"),
    Fault(
        "first column of d_x ignored",
        "combine",
        "2_vector",
        "d_x + token * pitch + first;",
        "d_x + token * pitch;",
        "expert_up/0_sum_rows.cu",
    ),
    Fault("rows in token order", "combine", "1_gather", "to_float(y[token_index_map[slot] *", "to_float(y[slot *"),
    Fault(
        "transposed order ignored",
        "block_sparse",
        "1_naive",
        "column * high + row - first] =",
        "(row - first) * wide + column] =",
        "block_sparse/0_structures.cu",
    ),
    Fault(
        "empty bin's expert",
        "block_sparse",
        "1_naive",
        "padded_offsets[middle] <= row)",
        "padded_offsets[middle] < row)",
        "block_sparse/0_structures.cu",
    ),
    Fault(
        "padding not cleared", "block_sparse", "2_tiled", "if (slot < 0) {", "if (P < 0) {", "block_sparse/0_rows.cu"
    ),
    Fault("unscaled gate", "block_sparse", "2_tiled", "(gate * to_float(", "(to_float(", "block_sparse/0_rows.cu"),
    Fault(
        "column part beyond its block",
        "block_sparse",
        "3_mma",
        "lines, columns, BLOCK);",
        "lines, TILE_COLUMNS, BLOCK);",
    ),
    Fault("half a tile twice", "block_sparse", "7_persistent", "= tile.column + half * HALF;", "= tile.column;"),
    Fault(
        "last block left out",
        "block_sparse",
        "7_persistent",
        "blocks.count * STEPS_OF_BLOCK}",
        "(blocks.count - 1) * STEPS_OF_BLOCK}",
    ),
    Fault(
        "y_swi never written",
        "layer",
        "2_tiled",
        "if (STORE_Y_SWI) y_swi[at] =",
        "if (false) y_swi[at] =",
        "expert_up/2_tiled.cu",
    ),
    Fault(
        "saved activation of zeros",
        "layer",
        "1_naive",
        "act_a[element] = from_float<Scalar>(ACTIVATION::act(",
        "act_a[element] = from_float<Scalar>(0.0f * (",
        "activation/1_elementwise.cu",
    ),
    *(
        Fault("second tile along h on the first", stage, version, right, wrong)
        for stage, version, right, wrong in (
            ("expert_up", "2_tiled", "[(long long)p * h + j]) : 0.0f;", "[(long long)p * h + column]) : 0.0f;"),
            ("expert_up", "3_mma", "tile.expert * d * h + first_column;", "tile.expert * d * h;"),
            ("expert_up", "3_mma_tf32", "d_hidden + (long long)begin * h + first_column,", "d_hidden + begin * h,"),
            ("expert_up", "7_persistent", "tile.column + panel / PROJECTIONS", "panel / PROJECTIONS"),
            ("expert_down", "2_tiled", "tile.expert * h + j) * d + p]", "tile.expert * h + column) * d + p]"),
            ("expert_down", "3_mma", "tile.expert * h + first_column) * d, d,", "tile.expert * h) * d, d,"),
            ("expert_down", "3_mma_tf32", "gated_y + (long long)begin * h + first_row,", "gated_y + begin * h,"),
            (
                "expert_down",
                "7_persistent",
                "&w3, full, p, tile.column, tile.expert);",
                "&w3, full, p, 0, tile.expert);",
            ),
        )
    ),
    Fault(
        "gate terms of one tile", "expert_down", "3_mma", "gridDim.y + place.column_tile] = term", "gridDim.y] = term"
    ),
    Fault("gate terms of one tile", "expert_down", "7_persistent", "[place + tile.column / TILE_COLUMNS]", "[place]"),
    Fault("second tile of rows on the first", "expert_up", "2_tiled", "begin + index * SIZE, min(", "begin, min("),
    Fault(
        "second tile of rows on the first",
        "expert_down",
        "7_persistent",
        "tile = {expert, begin + row,",
        "tile = {expert, begin,",
    ),
    *(
        Fault("first scan forgotten by the second", stage, version, f"= {before} + {scan};", f"= {scan};", file)
        for stage, version, before, scan, file in (
            ("dispatch", "1_dense_map", "base", "scan.exclusive", None),
            ("dispatch", "2_bitmap", "base", "scan.exclusive", None),
            ("dispatch", "3_single_pass", "base", "scan.exclusive", None),  # of tiles, not of experts
            ("dispatch", "3_single_pass", "offset_below", "length.exclusive", None),
            ("block_sparse", "1_naive", "before", "scan.exclusive", "block_sparse/0_structures.cu"),
        )
    ),
    *(
        Fault(f"second tile of a block's {axis} on the first", "block_sparse", version, right, wrong)
        for version, axis, right, wrong in (
            ("2_tiled", "lines", "first_line = blockIdx.x % PARTS * TILE,", "first_line = 0,"),
            (
                "3_mma",
                "lines",
                "int row = row_indices[blockIdx.x] * BLOCK + first_line;",
                "int row = row_indices[blockIdx.x] * BLOCK;",
            ),
            (
                "3_mma",
                "columns",
                "column_indices[blockIdx.x] * BLOCK + first_column;",
                "column_indices[blockIdx.x] * BLOCK;",
            ),
            ("3_mma", "stored lines", "blockIdx.x * BLOCK + first_line) * BLOCK;", "blockIdx.x * BLOCK) * BLOCK;"),
            (
                "3_mma",
                "result's lines",
                "blockIdx.x / ROW_PARTS * BLOCK + first_line;",
                "blockIdx.x / ROW_PARTS * BLOCK;",
            ),
            (
                "3_mma",
                "result's columns",
                "blockIdx.y / COLUMN_PARTS * BLOCK + first_column;",
                "blockIdx.y / COLUMN_PARTS * BLOCK;",
            ),
            (
                "3_mma",
                "transposed lines",
                "LinesOfBlocks<true, false>{values + first,",
                "LinesOfBlocks<true, false>{values,",
            ),
            ("7_persistent", "lines", "row % TILES_DOWN * TILE_ROWS,", "0,"),
        )
    ),
    Fault("peak not taken off", "gating", "1_naive", "if (j == 0) peak = logit;", ";"),
    Fault("peak not taken off", "gating", "2_warp", "return from_ordered(peak);", "return 0.0f;"),
    Fault("losses without the peak", "gating", "1_naive", "row.peak = fmaxf(row.peak, logits[e]);", "row.peak = 0.0f;"),
    Fault("losses without the peak", "gating", "2_warp", "return warp_max(peak);", "return 0.0f;"),
    Fault(
        "ties to the higher expert",
        "gating",
        "1_naive",
        "e > last.expert);\n        if (after && ordered > best",
        "e < last.expert);\n        if (after && ordered >= best",
    ),
    Fault("ties to the higher lane", "gating", "2_warp", "(1u << lane_id()) - 1;", "~((2u << lane_id()) - 1);"),
    Fault(
        "ties to the higher column of a lane",
        "gating",
        "2_warp",
        "if (list[i].ordered < list[i + 1].ordered) {",
        "if (list[i].ordered <= list[i + 1].ordered) {",
    ),
    *(
        Fault("slope 1 at the kink", stage, version, "a > 0.0f ? 1.0f", "a >= 0.0f ? 1.0f", file)
        for stage, versions, file in (
            ("expert_down", ("1_naive", "2_tiled", "3_mma", "3_mma_tf32", "7_persistent"), None),
            ("block_sparse", ("1_naive", "2_tiled", "3_mma", "7_persistent"), "block_sparse/0_hidden.cu"),
        )
        for version in versions
    ),
    *(
        Fault("geglu as swiglu", stage, version, "struct geglu : gelu {", "struct geglu : silu {", file)
        for stage, version, file in (
            ("expert_up", "2_tiled", None),
            ("expert_down", "7_persistent", None),
            ("block_sparse", "3_mma", "block_sparse/0_hidden.cu"),
        )
    ),
    Fault(
        "ungated panels as gated ones",
        "expert_up",
        "7_persistent",
        "tile.column + panel / PROJECTIONS",
        "tile.column + panel / 2",
    ),
    Fault(
        "ungated gradient doubled",
        "expert_up",
        "3_mma",
        "mma_matmul<Along::DEPTH, Along::DEPTH>(sums, RESULTS * depth,",
        "mma_matmul<Along::DEPTH, Along::DEPTH>(sums, 2 * depth,",
    ),
    Fault("earlier passes forgotten", "dispatch", "2_bitmap", "base += rank.total;", ";"),
    Fault(
        "one pass counted",
        "dispatch",
        "2_bitmap",
        "word < words; word += THREADS) tokens",
        "word < min(words, THREADS); word += THREADS) tokens",
    ),
]


UNCHANGED = SimtExecutor.load


@functools.cache
def text_of(path):
    """A kernel file with every fault that was planned for it: numbers from 1, as in ``FAULTS``; 0 is none of them."""
    text = inlined(path)
    for number, fault in enumerate(FAULTS, 1):
        if fault.path == path:
            assert fault.right in text, f"{path} no longer holds {fault.right!r}: update the fault"
            switch = f"\n#if FAULT == {number}\n{fault.wrong}\n#else\n{fault.right}\n#endif\n"
            text = text.replace(fault.right, switch)
    return text


def jobs_of(fault):
    """The checks of `moeblaze check --stage S --backend simt` that run the fault's version."""
    jobs = check.plan(stages=[fault.stage], backends=["simt"])
    return [job for job in jobs if job.args[3] == fault.version]


def plant(path, number, monkeypatch):
    """Compile the file with this fault from now on."""

    def switched(self, file, text=None, **constants):
        if file == path:
            with quick_builds():
                return UNCHANGED(self, file, text=text_of(path), FAULT=number, **constants)
        return UNCHANGED(self, file, text=text, **constants)

    monkeypatch.setattr(SimtExecutor, "load", switched)


# In place of "in under 60 s, where nothing was compiled before", which no clock of a busy machine can tell.
# The small case of block_sparse loads 22 files, its blocks wider than a tile four more, and ReLU three.
MOST = Effort(rows=32, threads=2**19, files=29)


def first_failure(fault):
    """The first row that the check fails, or None, and the effort until then."""
    with counted_effort() as effort:
        for row in (row for job in jobs_of(fault) for row in job()):
            effort.rows += 1
            if not row.ok:
                return row, effort
    return None, effort


def test_the_effort_counts_each_file_and_thread_of_the_check():
    jobs = [job for job in check.plan(["combine"], ["simt"]) if job.args[3] == "1_gather"]
    with counted_effort() as effort:
        list(jobs[0]())
    launches = 3 * 2 * len(gemm.WIDE)  # kernels, steps and dtypes, each of one block
    assert (effort.threads, effort.files) == (launches * gemm.THREADS, len(gemm.WIDE))
    for name in ("threads", "files"):
        assert effort.within(effort) and not effort.within(replace(effort, **{name: getattr(effort, name) - 1}))


@pytest.mark.parametrize(
    ("number", "fault"),
    [*enumerate(FAULTS, 1)],
    ids=[f"{fault.stage}-{fault.version}-{fault.name}" for fault in FAULTS],
)
def test_the_check_catches_a_planted_fault(number, fault, record_property, monkeypatch):
    plant(fault.path, 0, monkeypatch)
    several_rows = next(job for job in jobs_of(fault) if job.args[4].L > 9)
    assert all(row.ok for row in several_rows()), "the switches themselves break the kernel"
    plant(fault.path, number, monkeypatch)
    row, effort = first_failure(fault)
    assert row is not None, "the check passes"
    assert effort.within(MOST), effort
    caught = f"{row.direction} {row.dtype}: error {row.error:.1e}, {row.shape[:80]}"
    record_property("caught", f"{fault.stage:12} {fault.version:14} {fault.name:32} {caught}")


def test_the_check_of_the_layer_catches_a_fault_of_its_gating(monkeypatch):
    """Its cases with renormalised gates, on the gating that it runs by default."""
    ((number, fault),) = [one for one in enumerate(FAULTS, 1) if one[1].name == "renormalised weights not divided"]
    plant(fault.path, number, monkeypatch)
    jobs = [job for job in check.plan(["layer"], ["simt"]) if job.args[3] == "2_tiled" and job.args[4].renormalize]
    assert any(not row.ok for job in jobs for row in job())


def test_the_check_of_the_gating_catches_a_sum_of_some_terms(monkeypatch):
    """It needs more tokens than a fault of `FAULTS` may: a term is a block's, and a pass takes as many as threads."""
    right, path = "i < num_terms; i += THREADS)", "gating/0_sums.cu"
    text = inlined(path)
    assert right in text, f"{path} no longer holds {right!r}: update the fault"
    faulty = text.replace(right, right.replace("num_terms", "min(num_terms, THREADS)"))

    def load(self, file, text=None, **constants):
        with quick_builds():
            return UNCHANGED(self, file, text=faulty if file == path else text, **constants)

    monkeypatch.setattr(SimtExecutor, "load", load)
    jobs = [job for job in check.plan(["gating"], ["simt"]) if job.args[3] == "2_warp"]
    (job,) = [job for job in jobs if job.args[4].name == cases.many_terms_case().name]
    forward, backward = job()
    assert not forward.ok and backward.ok


def test_every_stage_and_version_has_a_fault():
    assert len(FAULTS) >= 25
    versions = {(stage, version) for stage in BACKENDS["simt"].stages for version in BACKENDS["simt"].versions(stage)}
    planted = {(fault.stage, fault.version) for fault in FAULTS}
    assert versions - planted <= {
        ("layer", "1_naive"),
        ("layer", "3_mma"),
        ("layer", "3_mma_tf32"),
        ("layer", "7_persistent"),
        ("layer", "as_printed"),
    }  # the kernels of the expert stages
