"""The host's time without a GPU: what is timed, in which unit, and what the command shows and records."""

import os
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from pretended import PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import document, first_step, host, launched, layer, plan, report, results
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn import launch_plans

TINY = MoEConfig(L=5, d=16, h=24, E=4, k=2)
COSTS = {
    host.UNIT: 4,
    (host.EMPTY, False): 80,
    ("forward", False): 400,
    ("forward", True): 100,
    ("step", False): 900,
    ("step", True): 240,
}


class Clock:
    """Time that passes only in the works: microseconds of each call, by their names."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(host.time, "perf_counter", lambda: self.now / 1e6)
        monkeypatch.setattr(host, "unit_of", lambda device: lambda: self.take(host.UNIT))
        monkeypatch.setattr(host, "empty_step_of", lambda *_: lambda: self.take((host.EMPTY, False)))
        monkeypatch.setattr(host, "works_of", lambda *_: {name: self.work(name) for name in host.WORKS})

    def work(self, name):
        return lambda: self.take((name, launch_plans._allowed.get()))

    def take(self, name):
        self.calls.append(name)
        self.now += COSTS[name]


def test_rows_are_in_units_of_the_same_run(monkeypatch):
    clock = Clock(monkeypatch)
    rows = host.time_host("tiny", TINY, 3, PretendedDevice())
    assert all(row.keys() == {field.name for field in fields(host.Row)} for row in rows)
    for row in rows:
        cost = COSTS[row["work"], row["plans"]]
        assert row["host_us"] == pytest.approx(cost) and row["units"] == pytest.approx(cost / 4)
        assert row["quartiles_us"] == pytest.approx((cost, cost)) and row["unit_us"] == pytest.approx(4)
    assert [(row["work"], row["plans"]) for row in rows] == list(COSTS)[1:]
    rounds, calls = host.WARM_UP + 3, host.CALLS + 1
    assert clock.calls == [name for name in COSTS for _ in range(calls)] * rounds  # interleaved


def test_the_step_has_every_gradient_and_the_forward_keeps_what_a_step_needs():
    works = host.works_of(TINY, PretendedDevice())
    assert works["forward"]().requires_grad
    assert [tuple(gradient.shape) for gradient in works["step"]()] == [
        (5, 16),
        (16, 4),
        *[(4, 16, 24)] * 2,
        (4, 24, 16),
    ]
    empty = host.empty_step_of(TINY, PretendedDevice())()
    assert [tuple(gradient.shape) for gradient in empty] == [tuple(gradient.shape) for gradient in works["step"]()]
    assert torch.equal(host.unit_of(PretendedDevice())(), torch.full((host.TOKENS,), 2.0))


def test_jobs_have_few_tokens_unless_the_user_says_otherwise():
    def tokens(**options):
        return [job.args[1].L for job in plan.jobs("host", plan.Request(**options)) if job.func is host.time_host]

    assert tokens() == [host.TOKENS] and tokens(presets=("qwen3", "conf1")) == [host.TOKENS] * 2
    assert tokens(tokens=8) == [8]


@pytest.mark.parametrize("kind", ["host", "launched", "first_step"])
def test_the_layer_has_its_own_version(kind):
    with pytest.raises(ValueError, match=f"--kernel 3_mma: bench {kind} has the layer's own version"):
        plan.jobs(kind, plan.Request(versions=("3_mma",)))


def test_all_of_the_hosts_part_is_measured_if_no_layer_is_named():
    def works(**options):
        return [job.func for job in plan.jobs("host", plan.Request(**options))]

    assert set(works()) == {host.time_host, launched.time_launched, first_step.time_first_step}
    assert set(works(presets=("conf1",))) == set(works(tokens=8)) == {host.time_host}
    names = [job.args[0] for job in plan.jobs("launched", plan.Request())]
    assert {"conf1", "conf5", "conf1, L=4,096"} <= set(names) and len(names) == len(set(names))
    with pytest.raises(ValueError, match="conf3 is too large for graphs: a hidden tensor may have at most 512 MiB"):
        plan.jobs("launched", plan.Request(presets=("conf3",)))


def test_the_command_shows_and_records_the_rows(monkeypatch, tmp_path):
    Clock(monkeypatch)
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    file = tmp_path / "host.json"
    arguments = ["bench", "host", "--preset", "conf3", "--repetitions", "2", "--record", str(file)]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    found = results.load(file)
    assert [row["units"] for row in found["rows"]] == pytest.approx([20, 100, 25, 225, 60])
    assert found["runs"] == [{"kind": "host", "clocks": PretendedDevice().clocks(), "repetitions": 2}]
    assert report.wrong(found["rows"]) == []
    for cell in ("launch plans", "60.0", "225.0", "conf3, L=64"):
        assert cell in shown.output


# As launched, beside graphs -------------------------------------------------------------------------------------------


@pytest.fixture
def graphs(monkeypatch):
    """A device with graphs."""
    device = PretendedDevice()
    monkeypatch.setattr(layer, "graphed", device.graphed)
    return device


@pytest.mark.parametrize("in_use", [True, False])
def test_a_small_layer_is_timed_in_each_way_beside_its_graphs(graphs, monkeypatch, in_use):
    monkeypatch.setattr(launch_plans, "_in_use", in_use)

    def step(scene, subject, number=0, lap=lambda: None):
        plans = launch_plans._in_use and launch_plans._allowed.get()
        graphs.now += {("moeblaze", False): 50, ("moeblaze", True): 20, ("moeblaze_graphed", False): 10}[
            subject.system, plans
        ]
        return run(scene, subject, number, lap)

    run = layer.Scene.step
    monkeypatch.setattr(layer.Scene, "step", step)
    rows = launched.time_launched("tiny", TINY, 3, graphs)
    assert all(row.keys() == {field.name for field in fields(launched.Row)} for row in rows)
    ways = {row["way"]: row["step_ms"] for row in rows}
    assert ways == pytest.approx({"launched": 51, "launched, plans": 21, "graphed": 11}, abs=0.1)  # a lap takes one
    assert {row["way"]: row["over_graphed"] for row in rows} == {way: ms / ways["graphed"] for way, ms in ways.items()}
    assert report.wrong(rows) == [] and all(row["error"] > 0 for row in rows) and graphs.replays > 0
    assert launch_plans._in_use is in_use


def test_calls_that_replay_a_plan_are_counted(monkeypatch):
    counts = iter([launch_plans.Counts(7, 5), launch_plans.Counts(9, 5)])
    monkeypatch.setattr(launched, "launch_plan_counts", lambda: next(counts))
    assert launched._plan_calls(lambda number, lap: None) == 2


# The first step -------------------------------------------------------------------------------------------------------


def test_the_caches_are_empty_once_and_the_same_folder_after_that(monkeypatch):
    seen = []

    def timed(config, device, environment):
        assert (config, device) == (TINY, "cpu")
        (folder,) = {environment[name] for name in first_step.CACHES}
        seen.append((folder, sorted(path.name for path in Path(folder).iterdir())))
        (Path(folder) / f"kernel{len(seen)}").touch()
        seconds = float([9, 3, 1, 2][len(seen) - 1])
        return {"forward_s": 1.0, "backward_s": seconds, "step_s": 1 + seconds, "process_s": 10 * seconds}

    monkeypatch.setattr(first_step, "_timed", timed)
    empty, warm = first_step.time_first_step("tiny", TINY, PretendedDevice())
    assert empty.keys() == {field.name for field in fields(first_step.Row)}
    assert len({folder for folder, _ in seen}) == 1 and not Path(seen[0][0]).exists()
    assert [len(files) for _, files in seen] == [0, 1, 2, 3]
    assert (empty["caches"], empty["step_s"], empty["processes"]) == ("empty", 10, 1)
    assert (warm["caches"], warm["step_s"], warm["process_s"], warm["processes"]) == ("warm", 3, 20, 3)


def test_a_first_step_runs_in_a_process_of_its_own():
    found = first_step._timed(TINY, "cpu", dict(os.environ))
    assert found["step_s"] == pytest.approx(found["forward_s"] + found["backward_s"])
    assert 0 < found["forward_s"] and 0 < found["backward_s"] and found["step_s"] < found["process_s"]


def test_a_process_that_fails_is_one_line(monkeypatch):
    with pytest.raises(ValueError, match="^a first step failed: .*nowhere") as error:
        first_step._timed(TINY, "nowhere", dict(os.environ))
    assert "\n" not in str(error.value)


# All of it ------------------------------------------------------------------------------------------------------------


def test_a_record_of_all_three_has_a_table_of_each(graphs, monkeypatch, tmp_path):
    Clock(monkeypatch)
    monkeypatch.setattr(plan, "gpu", lambda: graphs)
    monkeypatch.setattr(plan, "_layer", lambda name, tokens: (name, TINY))
    seconds = {"forward_s": 1.0, "backward_s": 0.5, "step_s": 1.5, "process_s": 5.0}
    monkeypatch.setattr(first_step, "_timed", lambda *of: seconds)
    monkeypatch.setattr(launched, "PRESETS", (("conf1", None),))
    file = tmp_path / "results" / "host_h100.json"
    shown = CliRunner().invoke(
        app, ["bench", "host", "--repetitions", "1", "--record", str(file)], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    monkeypatch.setattr(results, "DOCS", tmp_path)
    page = document.fill("<!-- begin launches -->\n<!-- end launches -->", None)
    for text in (shown.output, page):
        for cell in ("in torch.adds", "over graphed", "launched, plans", "warm", "1.50"):
            assert cell in text
    assert page.count("- device: ") == 1
