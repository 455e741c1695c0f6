"""The host's time without a GPU: what is timed, in which unit, and what the command shows and records."""

from dataclasses import fields

import pytest
import torch
from pretended import PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import host, plan, report, results
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn import launch_plans

TINY = MoEConfig(L=5, d=16, h=24, E=4, k=2)
COSTS = {host.UNIT: 4, ("forward", False): 400, ("forward", True): 100, ("step", False): 900, ("step", True): 240}


class Clock:
    """Time that passes only in the works: microseconds of each call, by their names."""

    def __init__(self, monkeypatch):
        self.now, self.calls = 0.0, []
        monkeypatch.setattr(host.time, "perf_counter", lambda: self.now / 1e6)
        monkeypatch.setattr(host, "unit_of", lambda device: lambda: self.take(host.UNIT))
        monkeypatch.setattr(host, "works_of", lambda config, device: {name: self.work(name) for name in host.WORKS})

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
    assert torch.equal(host.unit_of(PretendedDevice())(), torch.full((host.TOKENS,), 2.0))


def test_jobs_have_few_tokens_unless_the_user_says_otherwise():
    def tokens(**options):
        return [job.args[1].L for job in plan.jobs("host", plan.Request(**options))]

    assert tokens() == [host.TOKENS] and tokens(presets=("qwen3", "conf1")) == [host.TOKENS] * 2
    assert tokens(tokens=8) == [8]
    with pytest.raises(ValueError, match="--kernel 3_mma: bench host has the layer's own version"):
        plan.jobs("host", plan.Request(versions=("3_mma",)))


def test_the_command_shows_and_records_the_rows(monkeypatch, tmp_path):
    Clock(monkeypatch)
    monkeypatch.setattr(plan, "gpu", PretendedDevice)
    file = tmp_path / "host.json"
    arguments = ["bench", "host", "--repetitions", "2", "--record", str(file)]
    shown = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    found = results.load(file)
    assert [row["units"] for row in found["rows"]] == pytest.approx([100, 25, 225, 60])
    assert found["runs"] == [{"kind": "host", "clocks": PretendedDevice().clocks(), "repetitions": 2}]
    assert report.wrong(found["rows"]) == []
    for cell in ("launch plans", "60.0", "225.0", "conf3, L=64"):
        assert cell in shown.output
