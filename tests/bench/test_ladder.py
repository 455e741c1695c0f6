"""The series and its counters without a GPU: every step is right, and what ncu says is read or refused."""

import functools
import json
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from itertools import pairwise

import numpy as np
import pytest
from pretended import FLOPS_PER_MS, HOT_FLOPS_PER_MS, PretendedDevice
from stages import alter
from typer.testing import CliRunner

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.raw_cuda import expert_up, gemm
from moeblaze_ref.bench import (
    accuracy,
    counters,
    document,
    findings,
    ladder,
    plan,
    report,
    results,
)
from moeblaze_ref.cli.app import app
from moeblaze_ref.core import provenance
from moeblaze_ref.core.config import MoEConfig, preset
from moeblaze_ref.core.paths import kernels_dir
from moeblaze_ref.runtime.simt.executor import SimtExecutor, SimtModule
from moeblaze_ref.verify.cases import make_case

TINY = MoEConfig(L=300, d=136, h=144, E=3, k=2)
ONE_TILE = MoEConfig(L=60, d=200, h=72, E=1, k=1)


# The steps ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    steps = [replace(step, most_tokens=step.most_tokens and 70) for step in ladder.LADDER]
    return ladder.time_ladder("tiny", TINY, steps, 2, PretendedDevice())


def test_every_step_of_the_ladder_is_right(rows):
    assert [(row["version"], row["idea"]) for row in rows] == [(step.version, step.idea) for step in ladder.LADDER]
    assert all(row["error"] <= 2**-7 for row in rows) and report.wrong(rows) == []
    assert len({row["idea"] for row in rows}) == len(rows)
    able = {version for version, dtypes in expert_up.FORWARD_VERSIONS.items() if TINY.dtype in dtypes}
    assert able == {row["version"] for row in rows}


def test_a_row_has_the_columns_that_it_should(rows):
    assert all(row.keys() == {field.name for field in fields(ladder.Row)} for row in rows)
    assert [row["shape"]["L"] for row in rows] == [70] + [TINY.L] * (len(rows) - 1)
    for row in rows:
        flops = 4 * row["shape"]["L"] * TINY.k * TINY.d * TINY.h
        assert row["tflops"] == pytest.approx(flops / row["step_ms"] / 1e9)
        assert row["pct_of_cublas"] == pytest.approx(100 * flops / row["step_ms"] / FLOPS_PER_MS)
        assert row["hot_cublas_tflops"] == HOT_FLOPS_PER_MS / 1e9


def test_each_step_is_compared_with_the_one_above_or_with_the_whole(rows):
    of_step = dict(zip(ladder.LADDER, rows, strict=True))
    first, *above = [row for step, row in of_step.items() if step.against == ladder.ABOVE]
    whole = above[-1]
    assert first["ratio_to"] == {} and whole["idea"] == ladder.TOP.idea
    for row, before in zip(above, [first, *above], strict=False):
        assert row["ratio_to"]["the row above"] == pytest.approx(row["tflops"] / before["tflops"])
    series = [of_step[step] for step in ladder.VERSIONS]
    assert [row["version"] for row in series] == ["3_mma", *gemm.TEACHING, gemm.HOPPER] and series[-1] is whole
    for row, below in zip(series[1:], series, strict=False):
        assert row["ratio_to"]["the version below"] == pytest.approx(row["tflops"] / below["tflops"])
    assert {row["idea"] for row in rows if "the version below" in row["ratio_to"]} == {
        row["idea"] for row in series[1:]
    }
    without = rows[rows.index(whole) + 1 :]
    assert len(without) == 5
    for row in without:
        assert row["ratio_to"] == {"the whole": pytest.approx(row["tflops"] / whole["tflops"])}
    (alone,) = ladder.time_ladder("tiny", TINY, [ladder.LADDER[-1]], 1, PretendedDevice())
    assert alone["ratio_to"] == {}


@pytest.mark.parametrize("name", ["a", "b", "y_swi"])
def test_a_wrong_result_is_found(name, monkeypatch):
    def spoiled(forward, *arguments, **options):
        made = dict(zip(("a", "b", "y_swi"), forward(*arguments, **options), strict=True))
        made[name][-1] = 0
        return tuple(made.values())

    alter(monkeypatch, "simt", "expert_up.forward", lambda forward: functools.partial(spoiled, forward))
    row, *_ = ladder.time_ladder("tiny", ONE_TILE, [ladder.TOP], 1, PretendedDevice())
    assert row["error"] > accuracy.BOUND and report.wrong([row]) == [row]


def test_an_ungated_layer_has_a_ladder_too():
    config = TINY.replace(activation="relu2")
    steps = [ladder.TOP, ladder.LADDER[-1]]
    whole, behind = ladder.time_ladder("tiny", config, steps, 1, PretendedDevice())
    assert max(whole["error"], behind["error"]) <= 2**-7
    assert ladder.steps_of(config.replace(dtype="float32")) == list(ladder.LADDER[:2])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_step_of_the_last_version_gives_the_same_bits(seed):
    """Whatever the order of threads; stages, blocks and bands change when a sum is made, never how."""
    executor = SimtExecutor(seed=seed)
    steps = (step for step in ladder.LADDER if step.version == ladder.HOPPER)
    found = [forward_of(step, TINY, executor, "zipf") for step in steps]
    for made in found:
        for one, other in zip(made, found[0], strict=True):
            np.testing.assert_array_equal(one.view(np.uint16), other.view(np.uint16))


def forward_of(step, config, executor, routing="uniform"):
    """a, b and y_swi of a step on random operands."""
    case = make_case(*config.sizes.values(), routing).astype(config.dtype)
    operands = (case.x, *case.weights[1:3], build_by_sort(case.topk_experts, config.E), "swiglu")
    return expert_up.forward(*operands, executor=step.executor(executor, config), version=step.version)


def launch_of(step, config):
    """The launch of expert_up on one block's worth of tiles."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        forward_of(step, config, executor)
    return launches[0]


def test_constants_reach_the_kernel():
    """A stage is two barriers more to initialise, 8 bytes each, in every block."""
    one, two = (launch_of(replace(ladder.TOP, constants=c), ONE_TILE) for c in (ladder.ONE_STAGE, ladder.TWO_STAGES))
    assert two.shared.written_bytes - one.shared.written_bytes == 2 * 8 * SimtExecutor.multiprocessors
    assert one.grid == two.grid == (SimtExecutor.multiprocessors, 1, 1)


def test_a_block_a_tile_is_enough_for_every_tile():
    step = replace(ladder.TOP, persistent=False)
    assert launch_of(step, TINY).grid == (ladder.most_tiles(TINY), 1, 1)
    assert ladder.most_tiles(TINY) == (600 // 128 + 3) * 2  # 128 columns of a and of b
    assert ladder.most_tiles(TINY.replace(activation="gelu")) == 600 // 128 + 3  # 256 of a alone
    assert ladder.most_tiles(MoEConfig(L=1, d=8, h=8, E=100, k=1)) == 1


# What ncu says --------------------------------------------------------------------------------------------------------

CONF3 = preset("conf3").config
LAUNCHES = counters.launches(CONF3)


def page(cell=lambda number, name: "1", drop=None, kernels=None):
    """ncu's page "raw" as CSV."""
    metrics = [name for name in counters.metrics() if name != drop]
    kernels = kernels or [launch.kernel.replace(counters.DENSE, "nvjet_sm90_tst") for launch in LAUNCHES]
    lines = [["ID", "Kernel Name", *metrics], ["", "", *["unit"] * len(metrics)]]
    lines += [[str(i), kernel, *(cell(i, name) for name in metrics)] for i, kernel in enumerate(kernels)]
    text = "\n".join(",".join(f'"{part}"' for part in line) for line in lines)
    return f"==PROF== Connected to process 1\n{text}\n==PROF== Disconnected\n"


def test_metrics_become_columns_in_their_units():
    values = {"gpu__time_duration.sum": "7,085,000", "sm__cycles_elapsed.avg.per_second": "1,629,000,000.5"}
    stalls = {"barrier": "3", "wait": "2", "selected": "4", "long_scoreboard": "1"}
    values |= {counters.STALL_METRIC.format(reason): stalls.get(reason, "0") for reason in counters.STALLS}
    rows = list(counters.rows_of(page(lambda number, name: values.get(name, f"1,{number:03}")), LAUNCHES))
    assert len(rows) == len(ladder.LADDER) + len(counters.PRODUCTS) + 1
    for number, row in enumerate(rows):
        assert row["duration_ms"] == 7.085 and row["sm_clock_ghz"] == pytest.approx(1.629)
        assert row["registers"] == row["dram_read_bytes"] == 1000 + number and isinstance(row["registers"], int)
        assert row["stalls"] == [("barrier", 30.0), ("wait", 20.0), ("long_scoreboard", 10.0)]  # 40% issue
        assert counters.Row("counters", "conf3", dtype="bfloat16", tool="ncu", **row)
    assert rows[0]["shape"]["L"] == 2048 and rows[1]["shape"] == CONF3.sizes
    assert (rows[-1]["kernel"], rows[-1]["shape"]) == ("nvjet_sm90_tst", {"M": 8192, "N": 8192, "K": 8192})


@pytest.mark.parametrize("name", counters.metrics())
@pytest.mark.parametrize("cell", ["", "n/a", "nan", None])
def test_a_metric_without_a_number_is_named(name, cell):
    text = page(drop=name) if cell is None else page(lambda number, other: cell if other == name else "1")
    with pytest.raises(
        ValueError, match=f"ncu has no number for the metric {name} of kernel expert_up, but {cell or ''!r}"
    ):
        list(counters.rows_of(text, LAUNCHES))


@pytest.mark.parametrize(
    "spoil",
    [lambda k: k[:-1], lambda k: [*k, "act"], lambda k: [*k[:-2], k[-1], k[-2]], lambda k: ["sum_rows", *k[1:]]],
)
def test_other_launches_than_those_expected_are_refused(spoil):
    kernels = spoil([launch.kernel.replace(counters.DENSE, "nvjet_x") for launch in LAUNCHES])
    with pytest.raises(ValueError, match="ncu counted .*, but launched were expert_up, "):
        list(counters.rows_of(page(kernels=kernels), LAUNCHES))
    with pytest.raises(ValueError, match="ncu counted nothing, but launched were"):
        list(counters.rows_of("==PROF== nothing\n", LAUNCHES))


def test_what_is_launched_is_what_is_expected(monkeypatch):
    seen, counting = [], []
    run = SimtModule._run

    def watched(module, kernel, *arguments):
        if counting:
            seen.append(kernel)
        run(module, kernel, *arguments)

    @contextmanager
    def counted():
        counting.append(True)
        yield
        counting.clear()

    monkeypatch.setattr(SimtModule, "_run", watched)
    config = TINY.replace(L=70)
    counters.launch_all(config, PretendedDevice(), counted)
    names = {launch.kernel for launch in counters.launches(config)}
    expected = [launch.kernel for launch in counters.launches(config) if launch.kernel != counters.DENSE]
    assert [kernel for kernel in seen if kernel in names] == expected


NCU = """#!/bin/sh
if [ "$1" = --version ]; then printf 'NVIDIA\\nVersion 2025.3 (public-release)\\n'; exit; fi
{body}
while [ $# -gt 0 ]; do [ "$1" = --log-file ] && cat "{page}" > "$2"; shift; done
exit {status}
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program by that name on the PATH: what it logs, what else it does, how it ends."""

    def make(log, body="", status=0):
        (tmp_path / "page.csv").write_text(log)
        program = tmp_path / "ncu"
        program.write_text(NCU.format(body=body, page=tmp_path / "page.csv", status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return make


def test_rows_come_from_ncu(ncu, tmp_path):
    ncu(page(), f'echo "$@" > {tmp_path}/asked')
    rows = counters.count("conf3", CONF3, PretendedDevice())
    assert all(row.keys() == {field.name for field in fields(counters.Row)} for row in rows)
    asked = (tmp_path / "asked").read_text()
    options = (
        "--clock-control none",
        "--replay-mode kernel",
        "--profile-from-start off",
        "moeblaze_ref.bench.counters",
    )
    assert all(part in asked for part in (*options, *counters.metrics()))
    assert json.loads(asked[asked.index("{") :]) == asdict(CONF3)
    assert {row["tool"] for row in rows} == {
        "ncu 2025.3 (public-release), --replay-mode kernel --clock-control none --cache-control all"
    }
    json.dumps(rows)


def test_what_ncu_complains_about_is_said(ncu):
    ncu("==PROF== x\n==ERROR== Failed to find metric sm__no_such_thing\n", status=1)
    with pytest.raises(ValueError, match="ncu ended with status 1: ==ERROR== Failed to find metric sm__no_such_thing"):
        counters.count("conf3", CONF3, PretendedDevice())


# Requests, files and documents ----------------------------------------------------------------------------------------


def test_jobs_of_the_ladder():
    jobs = plan.jobs("ladder", plan.Request(repetitions=3))
    assert [job.args[0] for job in jobs] == ["conf3", "qwen3"]
    assert jobs[0].args[2:] == (list(ladder.LADDER), 3)
    (job,) = plan.jobs("ladder", plan.Request(presets=("conf1",), versions=("3_mma", "7_persistent")))
    assert {step.version for step in job.args[2]} == {"3_mma", "7_persistent"}
    assert [job.args[0] for job in plan.jobs("counters", plan.Request(presets=("qwen3",), tokens=64))] == [
        "qwen3, L=64"
    ]
    assert [plan.repetitions(kind, plan.Request()) for kind in ("ladder", "counters")] == [15, 1]
    with pytest.raises(ValueError, match="unknown version of the series '5_more'"):
        plan.jobs("ladder", plan.Request(versions=("5_more",)))
    with pytest.raises(ValueError, match="--kernel 3_mma: bench counters has all of them"):
        plan.jobs("counters", plan.Request(versions=("3_mma",)))


def recorded(kind, file, *options):
    """The file that the command writes, and what it shows."""
    arguments = ("bench", kind, "--preset", "conf3", "--record", file, *options)
    result = CliRunner().invoke(app, list(map(str, arguments)), env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return results.load(file), result.output


def test_the_command_times_the_ladder(monkeypatch, tmp_path):
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    monkeypatch.setattr(plan, "_layer", lambda name, tokens: (name, TINY.replace(L=tokens)))
    options = ("--tokens", 37, "--repetitions", 1, "--kernel", "2_tiled", "--kernel", "3_mma")
    file = tmp_path / "ladder.json"
    found, shown = recorded("ladder", file, *options)
    assert [row["version"] for row in results.rows_of(found, "ladder")] == ["2_tiled", "3_mma"]
    assert "tensor cores by mma.sync" in shown and "the row above" in shown
    results.check_place(file)
    monkeypatch.setattr(provenance, "_commit", lambda: "another")
    with pytest.raises(ValueError, match="holds runs with commit"):
        results.check_place(file)


def test_the_command_records_what_ncu_counts(ncu, monkeypatch, tmp_path):
    ncu(page())
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    found, shown = recorded("counters", tmp_path / "counters.json")
    assert len(results.rows_of(found, "counters")) == len(LAUNCHES) and "d_x_rows" in shown
    assert found["runs"] == [{"kind": "counters", "clocks": PretendedDevice().clocks(), "repetitions": 1}]


def test_without_ncu_it_says_so_and_so_does_the_command(monkeypatch):
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="ncu is not on the PATH"):
        counters.count("conf3", CONF3, PretendedDevice())
    result = CliRunner().invoke(app, ["bench", "counters", "--preset", "conf3"])
    assert result.exit_code == 2 and "ncu is not on the PATH" in result.output


def test_committed_results_have_every_step_of_every_preset():
    steps = [(name, step.idea) for name in ladder.PRESETS for step in ladder.LADDER]
    timed = results.load(results.LADDER)["rows"]
    assert [(row["preset"], row["idea"]) for row in timed if row["run"] == 0] == steps and report.wrong(timed) == []
    counted = {(row["preset"], row["idea"], row["version"]) for row in results.load(results.COUNTERS)["rows"]}
    expected = {
        (name, one.idea, one.version) for name in counters.PRESETS for one in counters.launches(preset(name).config)
    }
    assert counted == expected


@pytest.mark.parametrize("gpu", ["H100", "H200"])
def test_each_version_of_the_series_is_faster_than_the_one_below_but_for_the_one_that_says_so(gpu):
    series = findings.speeds_of_series(results.load(results.LADDER.with_name(f"ladder_{gpu.lower()}.json")))
    files = [path.stem for path in sorted((kernels_dir() / "expert_up").glob("[1-9]_*.cu"))]
    ratios = []
    for versions in series.values():
        assert list(versions) == files
        rates = [row["tflops"] for row in versions.values()]
        slower = {files[i + 1]: high / low for i, (low, high) in enumerate(pairwise(rates)) if high < low}
        assert list(slower) == ["6_specialized"] and max(rates) == rates[-1]
        ratios.append(slower["6_specialized"])
    said = (kernels_dir() / "expert_up" / "6_specialized.cu").read_text()
    assert f"{min(ratios):.2f} to {max(ratios):.2f} on an {gpu}" in said.partition("Times as fast as 5_tma: ")[2]
    assert tuple(series) == ladder.PRESETS


def counted_by_preset():
    """The committed counters of the last version: each preset's launches, by step or stage."""
    rows = [row for row in results.load(results.COUNTERS)["rows"] if row["version"] == ladder.HOPPER]
    return {name: {row["idea"]: row for row in rows if row["preset"] == name} for name in counters.PRESETS}


def test_the_whole_kernel_is_busier_than_one_stage_and_issues_more():
    """As notebook 6 says under what surprised us."""
    for steps in counted_by_preset().values():
        for idea in ("wgmma and TMA, one stage", "one stage, the rest as it is"):
            assert all(steps[idea][share] < steps[ladder.TOP.idea][share] for share in ("tensor_pct", "issue_pct"))


def test_where_d_hidden_is_furthest_behind_the_link_is_the_busiest():
    """As docs/cublas_gap.md supposes from it."""
    found = results.load(results.COUNTERS)
    denses = {row["preset"]: row for row in found["rows"] if not row["version"]}
    behind = {name: findings._behind_ms(steps["d_hidden"], denses[name]) for name, steps in counted_by_preset().items()}
    assert max(behind, key=behind.get) == "conf3"
    row = counted_by_preset()["conf3"]["d_hidden"]
    others = ("tensor_pct", "issue_pct", "dram_pct")
    assert row["l2_pct"] == row["l2_link_pct"] > max(row[share] for share in others)


def test_tables_stand_in_the_document_with_where_they_come_from():
    text = document.fill(
        "".join(f"<!-- begin {name} -->\n<!-- end {name} -->\n" for name in document.OF_OTHER_FILES), None
    )
    for file in (results.LADDER, results.COUNTERS):
        found = results.load(file)
        assert f"- commit: {found['commit']}" in text and found["rows"][0]["idea"] in text
    assert found["rows"][0]["tool"] in text


def counted(kernel, busy, clock, waits="wait", idea=None, version=ladder.HOPPER):
    """A row of one launch."""
    head = {
        "kind": "counters",
        "run": 0,
        "preset": "tiny",
        "version": version,
        "kernel": kernel,
        "idea": idea or kernel,
    }
    times = {"duration_ms": 2.0, "sm_clock_ghz": clock, "stalls": [[waits, 40.0], ["barrier", 9.0]]}
    return head | times | {"tensor_pct": busy, "dram_pct": 10, "l2_pct": 20, "l2_link_pct": 30}


def test_why_compares_with_cublas_and_begins_with_the_furthest_behind():
    rows = [
        counted("expert_up", 45, 2.0, idea=ladder.TOP.idea),
        counted("expert_up", 10, 1.0, idea="two stages"),
        counted("d_w3", 45, 1.0),
    ]
    found = {"rows": [*rows, counted("nvjet", 90, 2.0, version="")]}
    assert findings.why(found).splitlines()[2:] == [
        "| tiny | `d_w3` | 25 | 50 | 50 | 2.00 | 1.50 | 10 | 20 | 30 |",
        "| tiny | `expert_up` | 50 | 50 | 100 | 2.00 | 1.00 | 10 | 20 | 30 |",
        "| tiny | cuBLAS, dense | 100 | 100 | 100 | 2.00 | 0.00 | 10 | 20 | 30 |",
    ]
    assert findings.facts({"rows": rows}) == findings.why({"rows": rows}) == "", "without cuBLAS there is no measure"


def test_what_the_counters_say_is_computed():
    rows = [counted("expert_down", 80, 1.5, "gmma"), counted("d_hidden", 40, 1.5, findings.WAIT)]
    found = {"rows": [*rows, counted("nvjet", 80, 1.5, "gmma", version="")]}
    of_layer, waits = findings.facts(found).replace("\n  ", " ").splitlines()
    assert "On tiny, `d_hidden` is furthest behind. It loses 1.00 of the 1.00 ms that" in of_layer
    assert "least busy is `d_hidden` (40% at 1.50 GHz), and the busiest is `expert_down` (80% at 1.50 GHz)." in of_layer
    assert "in 1 of 2 launches. In kernels that gather rows, it takes 40 to 40%" in waits and "0 to 0%" in waits
