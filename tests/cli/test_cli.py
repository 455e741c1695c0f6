"""The moeblaze command: what it prints, what it writes, and its exit status."""

import functools
import json
import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from checked import dispatch_as_json
from pretended import PretendedDevice
from rich.console import Console
from typer.testing import CliRunner

from moeblaze_ref.backends.registry import BACKENDS, Status
from moeblaze_ref.bench import plan, stages
from moeblaze_ref.cli import demo
from moeblaze_ref.cli.app import app
from moeblaze_ref.cli.terminal import check_table
from moeblaze_ref.core import records
from moeblaze_ref.core.config import POLICIES, preset
from moeblaze_ref.core.structures import Gating
from moeblaze_ref.runtime.simt import build
from moeblaze_ref.verify import check, comparisons
from moeblaze_ref.verify.cases import option_cases, standard_cases
from moeblaze_ref.verify.check import Row

CASES = len(check.chosen(BACKENDS["numpy"], "dispatch", None, standard_cases() + option_cases()))
ROW_KEYS = {"stage", "direction", "backend", "version", "dtype", "shape", "error", "bound", "ok", "available"}


def moeblaze(*arguments, columns=200):
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, [str(argument) for argument in arguments])


def test_doctor_names_every_backend_and_what_to_do():
    result = moeblaze("doctor")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in (*BACKENDS, "torch"))


def test_doctor_says_what_to_install(monkeypatch):
    monkeypatch.setattr(build, "compiler", Mock(side_effect=build.SimtUnavailable("there is no g++; install g++")))
    assert "to mend: install g++" in moeblaze("doctor").stdout


def test_doctor_names_the_compiler(monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: ("python", "-m", "ziglang", "c++"))
    monkeypatch.setattr(build, "runtime_library", lambda: None)
    assert "compiled by python -m ziglang c++" in moeblaze("doctor").stdout


def test_check_prints_json_with_the_agreed_keys(tmp_path_factory):
    status, rows = dispatch_as_json(tmp_path_factory)
    assert status == 0 and all(row.keys() == ROW_KEYS for row in rows)
    passing = {row["backend"] for row in rows if row["ok"] and row["available"]}
    assert passing >= {"numpy", "numba", "simt"}
    cuda = [row for row in rows if row["backend"] == "cuda"]
    assert cuda and all(row["ok"] == row["available"] for row in cuda)


def test_check_prints_a_table_that_fits_80_columns(tmp_path_factory, monkeypatch):
    of, plan = ("--backend", "numpy", "--backend", "simt"), check.plan
    dispatched = [Row(**row) for row in dispatch_as_json(tmp_path_factory)[1] if row["backend"] in of]
    monkeypatch.setattr(check, "plan", lambda stages, backends: [lambda: dispatched, *plan(stages[1:], backends)])
    result = moeblaze("check", "--stage", "dispatch", "--stage", "combine", *of, columns=80)
    assert result.exit_code == 0 and "0 failed" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    line = next(line for line in result.stdout.splitlines() if "simt" in line)
    assert line.split()[:8] == ["dispatch", "forward", "simt", "as_printed", "int32", str(CASES), "0", "0"]


@pytest.mark.parametrize("letters", [1, 66, 90, 300])
def test_only_the_shape_of_a_row_is_cut(letters):
    """However long the name of a case is, the other columns keep their widths."""
    row = Row("dispatch", "forward", "simt", "3_single_pass", "bfloat16", "x" * letters, 1.2e-5, 1e-3, True, True)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(check_table([row]))
    assert "dispatch  forward  simt 3_single_pass  bfloat16  1  1.2e-05  0.001  pass    " in capture.get()
    assert max(map(len, capture.get().splitlines())) <= 80


def test_check_lists_every_shape_on_request():
    result = moeblaze("check", "--stage", "dispatch", "--backend", "numpy", "--all")
    assert result.stdout.count(" pass ") == CASES


def test_check_fails_with_status_1(monkeypatch):
    monkeypatch.setattr(comparisons, "BOUNDS", dict.fromkeys(comparisons.BOUNDS, -1.0))
    result = moeblaze("check", "--stage", "dispatch", "--backend", "numpy")
    assert result.exit_code == 1 and "FAIL" in result.stdout and f"{CASES} failed" in result.stdout


def test_check_records_where_it_ran(tmp_path):
    path = tmp_path / "results" / "check.json"
    assert moeblaze("check", "--stage", "dispatch", "--backend", "numpy", "--record", path).exit_code == 0
    recorded = json.loads(path.read_text())
    assert recorded.keys() == {"device", "clocks", "versions", "commit", "code", "command", "rows"}
    assert recorded["versions"]["numpy"] and len(recorded["rows"]) == CASES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("check", "--stage", "dispach"), "unknown stage 'dispach'. Did you mean 'dispatch'?"),
        (("check", "--backend", "cdua"), "unknown backend 'cdua'. Did you mean 'cuda'?"),
        (("memory", "--preset", "mixtrl"), "unknown preset 'mixtrl'. Did you mean 'mixtral'?"),
        (("memory", "--system", "megablock"), "unknown system 'megablock'. Did you mean 'megablocks'?"),
        (("memory", "--activation", "swish"), "unknown activation 'swish'."),
        (("memory", "--tokens", "-1"), "L is -1, but it must be >= 0"),
        (("memory", "--tokens", 2**31), "R = L * k = 2147483648 * 4"),
        (("memory", "--capacity-factor", "0"), "capacity_factor is 0.0, but it must be above 0"),
        (("memory", "--router", "mixtrall"), "unknown router 'mixtrall'. Did you mean 'mixtral'?"),
        (("memory", "--router", "llama4", "--system", "sonicmoe"), "sonicmoe is counted from its paper"),
        (("memory", "--shared", "0"), "shared is 0, but it must be >= 1"),
        (("memory", "--shared-gate"), "--shared-gate is given, but there is no shared expert"),
    ],
)
def test_wrong_names_and_sizes_are_named_with_status_2(arguments, message):
    result = moeblaze(*arguments)
    assert result.exit_code == 2 and message in result.stderr and not result.stdout


def test_memory_of_the_papers_example():
    report = json.loads(moeblaze("memory", "--preset", "paper-deepseek", "--json").stdout)
    assert report.keys() == {"preset", "tokens", "notes", "systems"} and report["tokens"] == 2_000_000
    conventional = report["systems"][0]
    assert conventional.keys() == {
        "system", "policy", "kept_bytes", "measured_bytes", "transient_bytes", "tensors"
    }  # fmt: skip
    (routed,) = (tensor for tensor in conventional["tensors"] if tensor["name"] == "routed_x")
    assert routed == {
        "name": "routed_x", "shape": [8_000_000, 6144], "dtype": "bfloat16", "formula": "L*k*d*2",
        "bytes": 98_304_000_000, "kept": True,
    }  # fmt: skip
    assert any("about 94 GB" in note for note in report["notes"])
    assert any("about 98 GB" in note for note in report["notes"])


def test_memory_lists_every_system_and_policy():
    systems = json.loads(moeblaze("memory", "--json").stdout)["systems"]
    found = [(system["system"], system["policy"]) for system in systems]
    capacities, megablocks = ("capacity", "dynamic_capacity"), ("megablocks_published", "megablocks_memory_optimized")
    others = ("conventional", "sequential", *capacities, *megablocks, "megablocks", "sonicmoe")
    assert found == [*((name, None) for name in others), *(("moeblaze", policy) for policy in POLICIES)]


def test_memory_takes_tokens_and_systems():
    result = moeblaze("memory", "--preset", "conf1", "--tokens", 1000, "--system", "moeblaze", "--json")
    report = json.loads(result.stdout)
    assert report["tokens"] == 1000 and {system["system"] for system in report["systems"]} == {"moeblaze"}
    x = report["systems"][0]["tensors"][0]
    assert (x["name"], x["bytes"]) == ("x", 1000 * preset("conf1").config.d * 2)


def test_memory_takes_a_router_and_a_shared_expert():
    plain, other = (
        json.loads(moeblaze("memory", "--preset", "conf3", "--json", *more).stdout)
        for more in ((), ("--router", "deepseek_v2", "--shared", 256, "--shared-gate"))
    )
    assert {one["system"] for one in plain["systems"]} - {one["system"] for one in other["systems"]} == {
        "megablocks_published", "sonicmoe"
    }  # fmt: skip
    names = {tensor["name"] for tensor in other["systems"][-1]["tensors"]}
    assert {"x_wide", "unscaled_gates", "shared_a", "shared_gate", "routed_out"} <= names
    assert other["systems"][-1]["kept_bytes"] > plain["systems"][-1]["kept_bytes"]
    assert any("shared expert: Shared(width=256, gated=True)" in note for note in other["notes"])


def test_memory_measures_what_runs_here():
    which = ("--system", "moeblaze", "--system", "megablocks_published", "--system", "capacity")
    result = moeblaze("memory", "--preset", "conf1", "--tokens", 8, *which, "--measure", "--json")
    for system in json.loads(result.stdout)["systems"]:
        published = system["system"] == "megablocks_published"
        assert system["measured_bytes"] == (None if published else system["kept_bytes"])


def test_memory_takes_a_block_size():
    sizes = [
        json.loads(moeblaze("memory", "--system", "megablocks", *more, "--json").stdout)
        for more in ((), ("--block", 64))
    ]
    (wide,), (narrow,) = (report["systems"] for report in sizes)
    assert wide["kept_bytes"] != narrow["kept_bytes"] and wide["measured_bytes"] is None
    assert moeblaze("memory", "--block", 3).exit_code == 2


def test_memory_writes_its_plots(tmp_path):
    assert moeblaze("memory", "--preset", "conf1", "--plots", tmp_path / "plots").exit_code == 0
    written = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert written == ["memory_against_tokens.png", "memory_by_tensor.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (tmp_path / "plots").iterdir())


def test_the_demo_learns_checks_and_plots(monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "WINDOWS", 1)
    result = moeblaze("demo", "--steps", 30, "--out", tmp_path)
    assert result.exit_code == 0, result.stdout
    assert " 0 failed" in result.stdout and "kept bytes" in result.stdout
    first, last = result.stdout.split("loss ")[1].split(" nats")[0].split(" -> ")
    assert float(last) < 0.7 * float(first)
    assert {path.stem for path in tmp_path.iterdir()} == {
        "loss", "expert_load", "dispatch_traffic", "memory_by_tensor", "memory_against_tokens"
    }  # fmt: skip


def test_the_demo_fails_when_a_check_fails(monkeypatch, tmp_path):
    monkeypatch.setattr(comparisons, "BOUNDS", dict.fromkeys(comparisons.BOUNDS, -1.0))
    monkeypatch.setattr(check, "plan", functools.partial(check.plan, backends=["numpy"]))
    result = moeblaze("demo", "--steps", 1, "--out", tmp_path)
    assert result.exit_code == 1 and "FAIL" in result.stdout


@pytest.mark.parametrize("kind", ["layer", "ladder", "counters"])
def test_only_a_gpu_is_timed(kind, monkeypatch):
    absent = SimpleNamespace(status=lambda: Status(False, "no CUDA device"))
    monkeypatch.setattr(plan, "BACKENDS", {"cuda": absent})
    result = moeblaze("bench", kind)
    assert (result.exit_code, result.stdout) == (2, "") and "only a GPU is timed: no CUDA device" in result.stderr
    assert "unknown preset 'conf9'" in moeblaze("bench", kind, "--preset", "conf9").stderr
    assert "--policy minimal: only bench layer takes it" in moeblaze("bench", "stage", "--policy", "minimal").stderr


@pytest.fixture
def pretended_gpu(monkeypatch):
    monkeypatch.setattr(plan, "gpu", PretendedDevice)


TIME_GATING = ("bench", "gating", "--preset", "conf1", "--tokens", 37, "--kernel", "2_warp", "--repetitions", 2)


def test_times_are_shown_recorded_and_added(pretended_gpu, tmp_path):
    path = tmp_path / "times.json"
    result = moeblaze(*TIME_GATING, "--record", path)
    assert result.exit_code == 0, result.output
    assert re.search(r"conf1, L=37 +gating +moeblaze +2_warp +\d.*\n.* conf1, L=37 +gating +torch ", result.stdout)
    assert moeblaze(*TIME_GATING, "--out", path).exit_code == 0
    recorded = json.loads(path.read_text())
    assert recorded.keys() == {"device", "clocks", "versions", "commit", "code", "runs", "rows"}
    assert recorded["runs"] == [{"kind": "gating", "clocks": "1 MHz, 2 MHz, 3 MHz, 4 MHz", "repetitions": 2}] * 2
    assert [(row["run"], row["system"]) for row in recorded["rows"]] == [
        (0, "moeblaze"), (0, "torch"), (1, "moeblaze"), (1, "torch")
    ]  # fmt: skip


def test_systems_are_listed_with_commas_or_one_by_one(pretended_gpu):
    of_layer = ("bench", "layer", "--preset", "conf1", "--tokens", 3, "--repetitions", 1, "--json")
    for listed in (("--system", "oracle,torch_grouped"), ("--system", "oracle", "--system", "torch_grouped")):
        result = moeblaze(*of_layer, *listed)
        assert result.exit_code == 0, result.output
        assert [row["system"] for row in json.loads(result.stdout)["rows"]] == ["oracle", "grouped_mm"]
    result = moeblaze(*of_layer, "--system", "oracle,megablock")
    assert (result.exit_code, result.stdout) == (2, "")
    assert (
        "unknown system 'megablock'. Did you mean 'megablocks'? Valid: moeblaze, megablocks_memory_optimized,"
        in result.stderr
    )


def test_where_nothing_can_be_written_nothing_is_timed(pretended_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(stages, "time_stage", lambda *arguments, **options: pytest.fail("it is timed"))
    file = tmp_path / "file.json"
    file.write_text("[]")
    refused = {
        tmp_path: "is a folder, but a file is to be written",
        file / "below.json": "file.json",
        file: "not a JSON object",
    }
    for path, message in refused.items():
        result = moeblaze(*TIME_GATING, "--record", path)
        assert (result.exit_code, result.stdout) == (2, "") and message in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert file.read_text() == "[]" and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("command", [("check", "--stage", "gating"), ("tune",), ("check", "--kernel", "a.cu:b")])
def test_every_record_is_tried_first(pretended_gpu, monkeypatch, tmp_path, command):
    monkeypatch.setattr("moeblaze_ref.core.progress.run_with_bar", None)
    stage = ("--stage", "combine") if "--kernel" in command else ()
    result = moeblaze(*command, *stage, "--record", tmp_path)
    assert result.exit_code == 2 and "is a folder, but a file is to be written" in result.stderr


def test_what_was_timed_is_shown_even_if_it_cannot_be_written(pretended_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(records, "write", Mock(side_effect=OSError("No space left on device")))
    result = moeblaze(*TIME_GATING, "--record", tmp_path / "times.json")
    assert result.exit_code == 2 and "conf1, L=37" in result.stdout and "No space left on device" in result.stderr


def test_times_are_printed_as_json(pretended_gpu):
    result = moeblaze(*TIME_GATING, "--json")
    ours, torchs = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0 and (ours["version"], torchs["version"]) == ("2_warp", None)
    assert ours["ratio_to"] == {"torch": torchs["step_ms"] / ours["step_ms"]}


def test_a_wrong_result_fails_the_benchmark(pretended_gpu, monkeypatch):
    run = stages.gating.forward

    def zeros(inputs, **options):
        return Gating(*(0 * array for array in run(inputs.logits, inputs.config.k, **options)))

    monkeypatch.setitem(stages.RUN, "gating", zeros)
    assert moeblaze(*TIME_GATING).exit_code == 1


def test_gradients_are_checked_alone():
    assert "leave --stage out" in moeblaze("check", "--gradients", "--stage", "layer").output
    assert "leave one of them out" in moeblaze("check", "--gradients", "--kernel", "mine.cu").output
    for other in (("--gradients",), ("--kernel", "mine.cu", "--stage", "combine")):
        assert "leave --gradients and --kernel out" in moeblaze("check", "--large", *other).output
    assert "unknown backend of the torch layer 'numba'" in moeblaze("check", "--gradients", "--backend", "numba").output
