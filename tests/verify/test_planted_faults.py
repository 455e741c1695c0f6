"""Planted faults that `moeblaze check` must catch, in every operation; the constant FAULT switches one on."""

import functools
from dataclasses import replace
from typing import NamedTuple

import pytest
from planted import Effort, counted_effort, plant, with_fault

from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.runtime.source import inlined
from moeblaze_ref.verify import cases, check


class Fault(NamedTuple):
    """A place in a kernel file, or in a header of it, and what stands there if FAULT is this fault's number."""

    stage: str
    version: str
    name: str
    right: str
    wrong: str
    file: str | None = None  # the version's own

    @property
    def path(self):
        return self.file or gemm.file_of(self.stage, self.version)


# By stage and version: name, what stands in the file, what the fault puts there, and the file if it is another.
PLANTED = {
    "gating/1_naive": [
        ("gates never written", "gates[token * k + j] = weight;", ";"),
        ("last token dropped", "if (token >= L) return;", "if (token >= L - 1) return;"),
        ("gradient without its mean", " - shift - mean)", ")"),
        ("renormalised gates over all experts", "RENORMALIZE ? exponentials_of_chosen(row, chosen, k) : all;", "all;"),
        ("renormalised mean for all", "= RENORMALIZE ? z : z - mean;", "= z - mean;"),
        ("balance left out of the chosen", "(BALANCE ? z + balance", "(false ? z + balance"),
        ("peak not taken off", "if (j == 0) peak = logit;", ";"),
        ("losses without the peak", "row.peak = fmaxf(row.peak, logits[e]);", "row.peak = 0.0f;"),
        (
            "ties to the higher expert",
            "e > last.expert);\n        if (after && ordered > best",
            "e < last.expert);\n        if (after && ordered >= best",
        ),
    ],
    "gating/2_warp": [
        ("renormalised weights not divided", "= weight / warp_sum(weight);", "= weight;"),
        ("peak of one lane", "return warp_max(peak);", "return peak;"),
        ("column beyond the row written", "(column(i) < E) store_pack", "(column(i) <= E) store_pack"),
        ("missing barrier", "__syncwarp();  // the chosen are written over what another lane may have written", ""),
        ("wrong expert counted", "tile * E + expert]", "tile * E + (expert + 1) % E]", "gating/sums.cu"),
        ("peak not taken off", "return from_ordered(peak);", "return 0.0f;"),
        ("losses without the peak", "return warp_max(peak);", "return 0.0f;"),
        ("ties to the higher lane", "(1u << lane_id()) - 1;", "~((2u << lane_id()) - 1);"),
        ("ties to the higher column of a lane", "ordered < list[i + 1].ordered", "ordered <= list[i + 1].ordered"),
    ],
    "dispatch/1_dense_map": [
        ("writes past its buffer", "rank.exclusive;", "rank.exclusive + 1;"),
        ("map not cleared", "rows[entry] = EMPTY;", ";"),
    ],
    "dispatch/2_bitmap": [
        ("wrong expert's words", "[word / WARPS * stride +", "[(word / WARPS + 1) % E * stride +"),
        ("words not cleared", "words[word] = 0;", ";"),
        ("earlier passes forgotten", "base += rank.total;", ";"),
        ("one pass counted", "< words; word += THREADS) tokens", "< min(words, THREADS); word += THREADS) tokens"),
    ],
    "dispatch/3_single_pass": [
        ("last slot dropped", "< tile.slots;", "< tile.slots - 1;"),
        ("off-by-one offset", "= offset_below;", "= offset_below + 1;"),
        ("earlier tiles forgotten", "offset + bases[blockIdx.x] - first", "offset - first"),
        ("missing barrier", "__syncthreads();  // the rows lie in order", ""),
    ],
    "dispatch/as_printed": [
        ("earlier tiles forgotten", "base += rank.total;", ";"),
        ("locations of the wrong expert", "= location_map[entry];", "= location_map[token * E];"),
    ],
    "expert_up/1_naive": [
        ("wrong expert's weights", "(long long)blockIdx.y * d * h + at.column", "at.column"),
        ("rows not gathered", "x + (long long)expert_token_indices[at.row] * d", "x + at.row % 7 * d"),
        ("a slot dropped", "for (int j = 0; j < k; ++j)", "for (int j = 1; j < k; ++j)"),
    ],
    "expert_up/2_tiled": [
        ("rows of the next expert", "if (row < tile.rows && j < h) store_hidden", "if (j < h) store_hidden"),
        ("missing barrier", "__syncthreads();  // all have read before the tiles are written again", ""),
        ("activation without its gate", "GATED ? act_a * ACTIVATION::factor(b) : act_a", "act_a"),
        ("second tile of columns on the first", "tile.expert * d + i) * h + p]", "tile.expert * d + column) * h + p]"),
        ("second tile along h on the first", "[(long long)p * h + j]) : 0.0f;", "[(long long)p * h + column]) : 0.0f;"),
        ("second tile of rows on the first", "begin + index * SIZE, min(", "begin, min("),
    ],
    "expert_up/3_mma": [
        ("copies not awaited", "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();"),
        ("stale buffer", "cp_async_or_zero(stage +", "if (begin) cp_async_or_zero(stage +"),
        ("fragments not transposed", "ldmatrix_x4_transposed(registers,", "ldmatrix_x4(registers,"),
        ("second tile of columns on the first", "tile.expert * d + first_column) * h;", "tile.expert * d) * h;"),
        ("second tile along h on the first", "tile.expert * d * h + first_column;", "tile.expert * d * h;"),
        ("ungated gradient doubled", "Along::DEPTH>(sums, RESULTS * depth,", "Along::DEPTH>(sums, 2 * depth,"),
    ],
    "expert_up/3_mma_tf32": [
        ("depths swapped", "m / 2 : m % 2) * CHUNK;", "m % 2 : m / 2) * CHUNK;"),
        ("second tile along h on the first", "+ (long long)begin * h + first_column,", "+ begin * h,"),
    ],
    "expert_up/4_wgmma": [
        ("stage filled too early", "load(step + STAGES - 1);", "load(step + STAGES);"),
        ("missing fence", "        fence_async_proxy();", ";"),
    ],
    "expert_up/5_tma": [
        ("full without its rows", "cp_async_arrive(full);", "barrier_arrive(full);"),
        ("wrong expert's weights", "TILE_DEPTH, tile.expert);", "TILE_DEPTH, 0);"),
    ],
    "expert_up/6_specialized": [
        ("last product not awaited", "    wgmma_wait<0>();\n", ""),
        ("no stage is freed", "barrier_arrive(read);", ";"),
    ],
    "expert_up/7_persistent": [
        ("last step dropped", "(depth + TILE_DEPTH - 1) / TILE_DEPTH", "depth / TILE_DEPTH"),
        ("wrong expert's weights", "PANEL, p, tile.expert);", "PANEL, p, 0);"),
        ("copies not awaited", "cp_async_arrive(full);", "barrier_arrive(full);"),
        ("second tile of columns on the first", "&w1, full, p, tile.column,", "&w1, full, p, 0,"),
        ("second tile along h on the first", "tile.column + panel / PROJECTIONS", "panel / PROJECTIONS"),
        ("ungated panels as gated ones", "tile.column + panel / PROJECTIONS", "tile.column + panel / 2"),
    ],
    "expert_down/1_naive": [
        ("unscaled gate", "d_y = gate * d;", "d_y = d;"),
        ("slope left out", "d_y * ACTIVATION::factor(b) * slope", "d_y * ACTIVATION::factor(b)"),
    ],
    "expert_down/2_tiled": [
        ("gate gradient of one column", "column < TILE; ++column) term", "column < 1; ++column) term"),
        ("second tile of columns on the first", "* h + p) * d + i])", "* h + p) * d + column])"),
        ("gates in token order", "[row] = gates[slot]", "[slot] = gates[slot]", "expert_down/gates.cu"),
        ("second tile along h on the first", "tile.expert * h + j) * d + p]", "tile.expert * h + column) * d + p]"),
    ],
    "expert_down/3_mma": [
        ("last columns dropped", "d, h, d - first_column}", "d, h, d - first_column - 8}"),
        ("second tile of columns on the first", "* h * d + first_column,", "* h * d,"),
        ("second tile along h on the first", "tile.expert * h + first_column) * d, d,", "tile.expert * h) * d, d,"),
        ("gate terms of one tile", "gridDim.y + place.column_tile] = term", "gridDim.y] = term"),
    ],
    "expert_down/3_mma_tf32": [
        ("fewer bits", "+ 0x1000u) & ~0x1fffu", "+ 0x4000u) & ~0x7fffu"),
        ("second tile along h on the first", "gated_y + (long long)begin * h + first_row,", "gated_y + begin * h,"),
    ],
    "expert_down/7_persistent": [
        ("missing wait", "barrier_wait(&shared.full[now], state.parity);", ";"),
        ("row tail stored", "width, tile.rows, width - column);", "width, TILE_ROWS, width - column);"),
        ("unscaled gate", "gate_of_row[tile.first + first + lane_id()]", "1.0f"),
        ("second tile of columns on the first", "&w3, full, tile.column + panel * PANEL,", "&w3, full, panel * PANEL,"),
        ("second tile along h on the first", "&w3, full, p, tile.column,", "&w3, full, p, 0,"),
        ("gate terms of one tile", "[place + tile.column / TILE_COLUMNS]", "[place]"),
        ("second tile of rows on the first", "tile = {expert, begin + row,", "tile = {expert, begin,"),
    ],
    "expert_down/as_printed": [
        ("unscaled gate", "so_far.add(targets.gates[row], values)", "so_far.add(1.0f, values)"),
        ("last expert alone", "so_far.load(sums_at(row, column));", "so_far = {};"),
        ("last row dropped", "return row < tile.rows &&", "return row < tile.rows - 1 &&"),
        ("second tile of columns on the first", "* d + first_column + column;", "* d + column;"),
    ],
    "combine/1_gather": [
        ("all zeros", "from_float<Scalar>(sum);", "from_float<Scalar>(0.0f);"),
        ("unscaled gate", "sum += gates[slot] *", "sum +="),
        ("one slot alone", "for (int j = 0; j < k; ++j)", "for (int j = 0; j < 1; ++j)"),
        ("rows in token order", "to_float(y[token_index_map[slot] *", "to_float(y[slot *"),
    ],
    "combine/2_vector": [
        ("second tile of columns on the first", "(out + column, pack);", "(out + lane_id() * PACK, pack);"),
        ("unscaled gate", "return gates[slot];", "return 1.0f;"),
        ("some rows alone", "lane_id() < k;", "lane_id() < k - 1;"),
        ("first column ignored", "out + token * pitch + first;", "out + token * pitch;"),
        (
            "first column of d_x ignored",
            "d_x + token * pitch + first;",
            "d_x + token * pitch;",
            "expert_up/sum_rows.cu",
        ),
    ],
    "block_sparse/1_naive": [
        (
            "transposed order ignored",
            "column * high + row - first]",
            "(row - first) * wide + column]",
            "block_sparse/structures.cu",
        ),
        ("empty bin's expert", "[middle] <= row)", "[middle] < row)", "block_sparse/structures.cu"),
    ],
    "block_sparse/2_tiled": [
        ("padding not cleared", "if (slot < 0) {", "if (P < 0) {", "block_sparse/rows.cu"),
        ("unscaled gate", "(gate * to_float(", "(to_float(", "block_sparse/rows.cu"),
        ("second tile of a block's lines on the first", "first_line = blockIdx.x % PARTS * TILE,", "first_line = 0,"),
    ],
    "block_sparse/3_mma": [
        ("column part beyond its block", "lines, columns, BLOCK);", "lines, TILE_COLUMNS, BLOCK);"),
    ],
    "block_sparse/7_persistent": [
        ("half a tile twice", "= tile.column + half * HALF;", "= tile.column;"),
        ("last block left out", "blocks.count * STEPS_OF_BLOCK}", "(blocks.count - 1) * STEPS_OF_BLOCK}"),
        ("second tile of a block's lines on the first", "row % TILES_DOWN * TILE_ROWS,", "0,"),
    ],
    "layer/1_naive": [
        (
            "saved activation of zeros",
            "from_float<Scalar>(ACTIVATION::act(",
            "from_float<Scalar>(0.0f * (",
            "activation/1_elementwise.cu",
        ),
    ],
    "layer/2_tiled": [
        ("y_swi never written", "if (STORE_Y_SWI) y_swi[at] =", "if (false) y_swi[at] =", "expert_up/2_tiled.cu"),
    ],
}
SHARED = [
    *(
        Fault("block_sparse", "3_mma", f"second tile of a block's {axis} on the first", right, wrong)
        for axis, right, wrong in (
            (
                "lines",
                "int row = row_indices[blockIdx.x] * BLOCK + first_line;",
                "int row = row_indices[blockIdx.x] * BLOCK;",
            ),
            ("columns", "column_indices[blockIdx.x] * BLOCK + first_column;", "column_indices[blockIdx.x] * BLOCK;"),
            ("stored lines", "blockIdx.x * BLOCK + first_line) * BLOCK;", "blockIdx.x * BLOCK) * BLOCK;"),
            ("result's lines", "blockIdx.x / ROW_PARTS * BLOCK + first_line;", "blockIdx.x / ROW_PARTS * BLOCK;"),
            (
                "result's columns",
                "blockIdx.y / COLUMN_PARTS * BLOCK + first_column;",
                "blockIdx.y / COLUMN_PARTS * BLOCK;",
            ),
            ("transposed lines", "LinesOfBlocks<true, false>{values + first,", "LinesOfBlocks<true, false>{values,"),
        )
    ),
    *(
        Fault("gating", version, f"{what} after the 16th", right, right.replace("k", "min(k, 16)"), file)
        for version, what, right, file in (
            ("1_naive", "choices", "choice = {-1, BEST};\n    for (int j = 0; j < k; ++j)", None),
            ("2_warp", "choices", "if (lane_id() >= k) return;", None),
            ("2_warp", "gradients", "if (lane_id() < k) {", None),
            ("2_warp", "counts", "if (lane_id() < k) histogram", "gating/sums.cu"),
        )
    ),
    *(
        Fault(stage, version, "first scan forgotten by the second", f"= {before} + {scan};", f"= {scan};", file)
        for stage, version, before, scan, file in (
            ("dispatch", "1_dense_map", "base", "scan.exclusive", None),
            ("dispatch", "2_bitmap", "base", "scan.exclusive", None),
            ("dispatch", "3_single_pass", "base", "scan.exclusive", None),  # of tiles, not of experts
            ("dispatch", "3_single_pass", "offset_below", "length.exclusive", None),
            ("block_sparse", "1_naive", "before", "scan.exclusive", "block_sparse/structures.cu"),
        )
    ),
    *(
        Fault(stage, version, "slope 1 at the kink", "a > 0.0f ? 1.0f", "a >= 0.0f ? 1.0f", file)
        for stage, versions, file in (
            ("expert_down", ("1_naive", "2_tiled", "3_mma", "3_mma_tf32", "7_persistent"), None),
            ("block_sparse", ("1_naive", "2_tiled", "3_mma", "7_persistent"), "block_sparse/hidden.cu"),
        )
        for version in versions
    ),
    *(
        Fault(stage, version, "geglu as swiglu", "struct geglu : gelu {", "struct geglu : silu {", file)
        for stage, version, file in (
            ("expert_up", "2_tiled", None),
            ("expert_down", "7_persistent", None),
            ("block_sparse", "3_mma", "block_sparse/hidden.cu"),
        )
    ),
]
FAULTS = [Fault(*place.split("/"), *fault) for place, faults in PLANTED.items() for fault in faults] + SHARED


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


FILES = {(fault.stage, fault.version, fault.path): fault for fault in FAULTS}


@pytest.mark.parametrize("fault", FILES.values(), ids=map("-".join, FILES))
def test_the_switches_themselves_break_no_kernel(fault, monkeypatch):
    plant(monkeypatch, fault.path, text_of(fault.path), FAULT=0)
    several_rows = next(job for job in jobs_of(fault) if job.args[4].L > 9)
    assert all(row.ok for row in several_rows())


@pytest.mark.parametrize(
    ("number", "fault"),
    [*enumerate(FAULTS, 1)],
    ids=[f"{fault.stage}-{fault.version}-{fault.name}" for fault in FAULTS],
)
def test_the_check_catches_a_planted_fault(number, fault, record_property, monkeypatch):
    plant(monkeypatch, fault.path, text_of(fault.path), FAULT=number)
    row, effort = first_failure(fault)
    assert row is not None, "the check passes"
    assert effort.within(MOST), effort
    caught = f"{row.direction} {row.dtype}: error {row.error:.1e}, {row.shape[:80]}"
    record_property("caught", f"{fault.stage:12} {fault.version:14} {fault.name:32} {caught}")


def test_the_check_of_the_layer_catches_a_fault_of_its_gating(monkeypatch):
    """Its cases with renormalised gates, on the gating that it runs by default."""
    ((number, fault),) = [one for one in enumerate(FAULTS, 1) if one[1].name == "renormalised weights not divided"]
    plant(monkeypatch, fault.path, text_of(fault.path), FAULT=number)
    jobs = [job for job in check.plan(["layer"], ["simt"]) if job.args[3] == "2_tiled" and job.args[4].renormalize]
    assert any(not row.ok for job in jobs for row in job())


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("float(all_rows) / R", "float(all_rows) / L"),
        ("z_sum / L", "z_sum / R"),
        ("sums[i] += row[i];", ";"),
        ("gates[slot] = routed.gate;", "gates[slot] = 0.0f;"),
    ],
)
def test_the_check_of_the_layer_catches_a_fault_of_its_fused_gating(right, wrong, monkeypatch):
    plant(monkeypatch, "gating/fused.cu", with_fault("gating/fused.cu", right, wrong))
    jobs = [job for job in check.plan(["layer"], ["simt"]) if job.args[3] == "2_tiled"]
    assert any(not row.ok for job in jobs for row in job())


def rows_of_case(stage, version, case):
    of_version = [job for job in check.plan([stage], ["simt"]) if job.args[3] == version]
    (job,) = [job for job in of_version if job.args[4].name == case.name]
    return list(job())


@pytest.mark.parametrize(
    ("version", "right", "wrong", "case"),
    [
        ("2_warp", "i < num_terms; i +=", "i < min(num_terms, THREADS); i +=", cases.many_terms_case()),
        ("1_naive", "tile < tiles; tile +=", "tile < min(tiles, THREADS); tile +=", cases.many_tokens_case()),
    ],
)
def test_the_check_of_the_gating_catches_a_sum_of_the_first_pass(version, right, wrong, case, monkeypatch):
    """It needs more tokens than a fault of `FAULTS` may: a pass takes as many terms, or counts, as threads."""
    plant(monkeypatch, "gating/sums.cu", with_fault("gating/sums.cu", right, wrong))
    forward, backward = rows_of_case("gating", version, case)
    assert not forward.ok and backward.ok


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("for (; token < L; token += stride) {", "if (token < L) {"),
        ("prob_sums + blockIdx.x * E, E)", "prob_sums + (blockIdx.x & 127) * E, E)"),
        ("block < blocks; block += SUM_WARPS", "block < min(blocks, 96); block += SUM_WARPS"),
    ],
)
def test_the_check_of_the_layer_catches_a_fused_gating_of_the_first_pass(right, wrong, monkeypatch):
    plant(monkeypatch, "gating/fused.cu", with_fault("gating/fused.cu", right, wrong))
    forward, *_ = rows_of_case("layer", "1_naive", cases.many_passes_case())
    assert forward.direction == "forward" and not forward.ok


def test_every_stage_and_version_has_a_fault():
    assert len(FAULTS) >= 25
    versions = {(stage, version) for stage in BACKENDS["simt"].stages for version in BACKENDS["simt"].versions(stage)}
    planted = {(fault.stage, fault.version) for fault in FAULTS}
    of_expert_stages = ("1_naive", "3_mma", "3_mma_tf32", "7_persistent", "as_printed")
    assert versions - planted <= {("layer", version) for version in of_expert_stages}
