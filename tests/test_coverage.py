"""Every option occurs in the cases of every backend and every stage that reads it; the command writes the table."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from moeblaze_ref import cases, check, comparisons, coverage
from moeblaze_ref.backends import BACKENDS, CHECKED, STAGES
from moeblaze_ref.cli import app

TABLE = list(coverage.lines())


def test_no_cell_is_empty():
    assert coverage.gaps(TABLE) == []
    for line in TABLE:
        assert list(line.cells) == list(CHECKED)
        assert all(cell for cell in line.cells.values()), line


def test_every_stage_option_and_value_has_its_line():
    assert {line.stage for line in TABLE} == {*STAGES, *check.cases_of_layers(), "torch_capacity"}
    values = {option.name: set(option.values) for option in coverage.OPTIONS}
    for stage, read in coverage.READS.items():
        for name, all_of_it in values.items():
            found = {line.value for line in TABLE if (line.stage, line.option) == (stage, name)}
            assert found == (all_of_it if name in read else {"-"}), (stage, name)


def test_a_cell_without_checks_says_why():
    for line in TABLE:
        for backend, cell in line.cells.items():
            has = backend in BACKENDS and line.stage in BACKENDS[backend].stages
            if has:
                assert isinstance(cell, int) if line.option in coverage.READS[line.stage] else cell == coverage.NOT_READ
            else:
                assert isinstance(cell, int) or cell in (coverage.NO_STAGE, coverage.NOT_READ)


@pytest.mark.parametrize(
    ("option", "value", "stage"),
    [("renormalize", "True", "gating"), ("policy", "inputs", "layer"), ("load_balancing_loss", "False", "gating")],
)
def test_an_option_that_is_never_on_is_a_gap(option, value, stage, monkeypatch):
    (of,) = (one.of for one in coverage.OPTIONS if one.name == option)
    keep = check.reachable
    monkeypatch.setattr(
        check, "reachable", lambda *arguments: [case for case in keep(*arguments) if str(of(case)) != value]
    )
    gaps = coverage.gaps(list(coverage.lines()))
    assert {f"{stage} on {backend}: {option} is never {value}" for backend in BACKENDS} <= set(gaps)


class Watched:
    """A case that remembers which options were read of it."""

    def __init__(self, case, seen):
        self._case, self._seen = case, seen

    def __getattr__(self, name):
        self._seen.add(name)
        return getattr(self._case, name)


FIELDS = {"d_losses": ("load_balancing_loss", "router_z_loss")}


def options_read(seen):
    names = {option.name for option in coverage.OPTIONS}
    return {option for name in seen for option in FIELDS.get(name, (name,)) if option in names}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "dispatch"])
def test_a_stage_reads_the_options_that_are_stated(stage):
    """What the check of a stage reads of a case, and what the table says that it reads, are the same."""
    seen = set()
    case = Watched(cases.make_case(5, 8, 16, 4, 2).astype("float64"), seen)
    comparisons.RUN[stage](BACKENDS["numpy"].open(stage), case)
    assert options_read(seen) == set(coverage.READS[stage])


@pytest.mark.parametrize("layer", [*check.cases_of_layers(), "torch_capacity"])
def test_a_torch_layer_reads_the_options_that_are_stated(layer):
    seen = set()
    case = Watched(cases.make_case(5, 8, 16, 4, 2).astype("float32"), seen)
    comparisons.run_torch_layer("cpu", case, layer)
    assert options_read(seen) == set(coverage.READS[layer])


def test_every_kernel_file_gets_every_option_but_the_activation():
    """The first file of a stage gets all activations. Each is a compilation: the other files have tests of theirs."""
    all_cases = cases.standard_cases() + cases.option_cases()
    for stage in BACKENDS["simt"].stages:
        read = [option for option in coverage.OPTIONS if option.name in coverage.READS[stage]]
        for rung in BACKENDS["simt"].rungs(stage):
            chosen = check.reachable(BACKENDS["simt"], stage, rung, all_cases)
            for option in (option for option in read if option.name != "activation" or rung == check.FIRST_RUNG):
                assert {str(option.of(case)) for case in chosen} == set(option.values), (stage, rung, option.name)


def test_every_two_router_options_meet_on_the_executor():
    """Renormalisation with and without each loss, of one loss with and without the other."""
    of_router = [option for option in coverage.OPTIONS if option.name in coverage.ROUTER]
    for stage in ("gating", "layer"):
        for rung in BACKENDS["simt"].rungs(stage):
            all_cases = cases.standard_cases() + cases.option_cases()
            chosen = check.reachable(BACKENDS["simt"], stage, rung, all_cases)
            for one, other in itertools.combinations(of_router, 2):
                assert len({(one.of(case), other.of(case)) for case in chosen}) == 4, (stage, rung, one.name)


def test_the_command_writes_the_table():
    result = CliRunner().invoke(app, ["check", "--coverage"])
    assert result.exit_code == 0, result.output
    assert "renormalize" in result.stdout and "not read: the stage has no such option" in result.stdout
    machine = CliRunner().invoke(app, ["check", "--coverage", "--json"])
    rows = json.loads(machine.stdout)
    assert [(row["stage"], row["option"], row["value"]) for row in rows] == [
        (line.stage, line.option, line.value) for line in TABLE
    ]
    assert all(set(row["cells"]) == set(CHECKED) for row in rows)


def test_the_command_fails_where_an_option_never_occurs(monkeypatch):
    monkeypatch.setattr(check, "reachable", lambda *arguments: cases.standard_cases())
    result = CliRunner().invoke(app, ["check", "--coverage"])
    assert result.exit_code == 1 and "gating on simt: renormalize is never True" in result.stdout


def test_the_command_takes_no_other_choice_with_it():
    result = CliRunner().invoke(app, ["check", "--coverage", "--stage", "gating"])
    assert result.exit_code == 2 and "--coverage counts every stage of every backend" in result.stderr
