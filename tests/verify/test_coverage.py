"""Every option occurs in the checks of every kernel file of every backend and stage that reads it."""

import inspect
import itertools
import json

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from moeblaze_ref.backends.registry import BACKENDS, CHECKED, ORACLE, STAGES, OpenStage
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import ACTIVATIONS
from moeblaze_ref.nn.systems import SYSTEMS
from moeblaze_ref.verify import cases, check, comparisons, coverage
from moeblaze_ref.verify.comparisons import TORCH_LAYERS

TABLE = list(coverage.lines())
OPTIONS = {option.name: option for option in coverage.OPTIONS}


def test_no_cell_is_empty():
    assert coverage.gaps(TABLE) == []
    for line in TABLE:
        assert list(line.cells) == list(CHECKED)
        assert all(cell and all(cell.values()) for cell in line.cells.values()), line


def test_every_stage_option_and_value_has_its_line():
    assert {line.stage for line in TABLE} == {*STAGES, *TORCH_LAYERS} == {*coverage.READS}
    values = {option.name: set(option.values) for option in coverage.OPTIONS}
    for stage, read in coverage.READS.items():
        for name, all_of_it in values.items():
            found = {line.value for line in TABLE if (line.stage, line.option) == (stage, name)}
            assert found == (all_of_it if name in read else {"-"}), (stage, name)


def test_every_kernel_file_has_its_line_and_its_cells():
    for backend in ("simt", "cuda"):
        for stage in BACKENDS[backend].stages:
            files = set(BACKENDS[backend].versions(stage))
            of_stage = [line for line in TABLE if line.stage == stage]
            assert {line.value for line in of_stage if line.option == "version"} == files
            for line in of_stage:
                if line.option in coverage.READS[stage] and line.option != "version":
                    assert line.cells[backend].keys() == files, (line, backend)


def test_a_cell_without_checks_says_why():
    for line in TABLE:
        for backend, cell in line.cells.items():
            reasons = {reason for reason in cell.values() if isinstance(reason, str)}
            assert reasons <= coverage.REASONS.keys(), line
            has = backend in BACKENDS and line.stage in BACKENDS[backend].stages
            if has and line.option in coverage.READS[line.stage]:
                assert not reasons & {coverage.NO_STAGE, coverage.NOT_READ}
            elif has:
                assert reasons == {coverage.NOT_READ}


def test_a_reason_stands_for_no_more_than_it_says():
    """Where all activations of one kernel file are enough, they are all there; a dtype is missing where none is."""
    for line in TABLE:
        for backend, cell in line.cells.items():
            if coverage.COMPILED in cell.values():
                assert (line.stage, line.option, backend) == ("layer", "activation", "simt") and line.value != "swiglu"
                assert cell[comparisons.FIRST_VERSION] > 0
            for kernel, reason in cell.items():
                if reason == coverage.NO_DTYPE and line.stage in STAGES:
                    version = None if kernel == coverage.ONE else kernel
                    assert line.value not in BACKENDS[backend].versions(line.stage)[version]


def without(monkeypatch, unwanted):
    """The gaps if `check.reachable` gives no case of which ``unwanted(version, case)`` is true."""
    keep = check.reachable

    def fewer(backend, stage, version, all_cases):
        return [case for case in keep(backend, stage, version, all_cases) if not unwanted(version, case)]

    monkeypatch.setattr(check, "reachable", fewer)
    return set(coverage.gaps(list(coverage.lines())))


@pytest.mark.parametrize(
    ("option", "value", "stage"),
    [
        ("renormalize", "True", "gating"),
        ("policy", "inputs", "layer"),
        ("load_balancing_loss", "False", "gating"),
        ("topk_experts", "True", "layer"),
        ("wanted", "d_w3", "layer"),
        ("overwrite", "True", "expert_down"),
    ],
)
def test_an_option_that_is_never_on_is_a_gap(option, value, stage, monkeypatch):
    of = OPTIONS[option].of
    gaps = without(monkeypatch, lambda version, case: str(of(coverage.Check("float32", case))) == value)
    assert {f"{stage} on {name}: {option} is never {value}" for name in ("numpy", "numba")} <= gaps
    files = [file for file in BACKENDS["simt"].versions(stage) if (stage, file) != ("expert_down", "as_printed")]
    places = [f"{backend} {file}" for backend in ("simt", "cuda") for file in files]
    assert {f"{stage} on {place}: {option} is never {value}" for place in places} <= gaps


def test_one_kernel_file_does_not_hide_another(monkeypatch):
    gaps = without(monkeypatch, lambda version, case: version == "2_tiled" and case.policy == "paper")
    assert {gap for gap in gaps if gap.startswith("layer on simt")} == {"layer on simt 2_tiled: policy is never paper"}


@pytest.mark.parametrize("stage", ["expert_up", "expert_down", "block_sparse"])
def test_every_kernel_file_of_the_experts_meets_every_activation(stage):
    for backend in BACKENDS.values():
        for kernel, found in coverage.checks(backend, stage).items():
            assert {one.case.activation for one in found} == set(ACTIVATIONS), (backend.name, kernel)


@pytest.mark.parametrize("stage", ["expert_up", "expert_down", "block_sparse"])
def test_every_kernel_file_of_the_experts_meets_pre_activations_of_zero(stage):
    """The slope of ReLU jumps there."""
    for backend in BACKENDS.values():
        for kernel, found in coverage.checks(backend, stage).items():
            kinks = {one.case.activation for one in found if (comparisons.hidden(one.case)[0] == 0).any()}
            assert {"relu", "relu2", "reglu"} <= kinks, (backend.name, kernel)


# What a check reads ---------------------------------------------------------------------------------------------------


class Watched:
    """A case, or a stage, that remembers which of its attributes were read."""

    def __init__(self, watched, seen):
        self._watched, self._seen = watched, seen

    def __getattr__(self, name):
        self._seen.add(name)
        return getattr(self._watched, name)


FIELDS = {"d_losses": ("load_balancing_loss", "router_z_loss"), "replayed": ("topk_experts",), "topk_experts": ()}
OF_THE_CALL = {"dtype", "version"}  # not read of a case, but chosen for all cases


def options_read(seen):
    return {option for name in seen for option in FIELDS.get(name, (name,)) if option in OPTIONS}


def watched_check(stage):
    """What the check of a stage reads of a case, and which functions of the stage it calls."""
    read, called = set(), set()
    case = Watched(cases.make_case(5, 8, 16, 4, 2).astype("float64"), read)
    opened = Watched(BACKENDS["numpy"].open(stage), called)
    runs = {"dispatch": lambda opened, case: opened.build(case.topk_experts, case.E)} | comparisons.RUN
    runs[stage](opened, case)
    return read, called - vars(OpenStage).keys()


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_reads_the_options_that_are_stated(stage):
    """What the check of a stage reads of a case, and what the table says that it reads, are the same."""
    read, _ = watched_check(stage)
    assert options_read(read) == {*coverage.READS[stage]} - OF_THE_CALL


@pytest.mark.parametrize("layer", TORCH_LAYERS)
def test_a_torch_layer_reads_the_options_that_are_stated(layer):
    seen = set()
    case = Watched(cases.make_case(5, 8, 16, 4, 2).astype("float32"), seen)
    comparisons.run_torch_layer("cpu", case, layer)
    assert options_read(seen) == {*coverage.READS[layer]} - OF_THE_CALL


# Arguments that are tensors, structures or sizes, unless they have a default.
DATA = set(
    "x wg w1 w2 w3 weights a b y y_swi logits probs topk_experts gates dispatch bins saved d_out d_gates d_a d_b "
    "d_hidden gated_y d h E k L num_experts capacity".split()
)


def choices(functions):
    """The arguments of functions that choose something."""
    of_all = [one for function in functions for one in inspect.signature(function).parameters.values()]
    return {one.name for one in of_all if one.name not in {*DATA, "self"} or one.default is not one.empty}


def parameters(stage):
    return {OPTIONS[name].parameter if name in OPTIONS else name for name in coverage.READS[stage]} - {""}


@pytest.mark.parametrize("stage", STAGES)
def test_every_argument_of_a_stage_is_an_option_of_its_checks(stage):
    """A new argument of a function that is checked is a new line of the table, or says why it is none."""
    module = BACKENDS["numpy"].stage(stage)
    functions = [getattr(module, name) for name in watched_check(stage)[1]]
    assert choices(functions) - coverage.ELSEWHERE.keys() == parameters(stage) - {"dtype", "version"}


OF_AUTOGRAD = {"d_load_balancing_loss", "d_router_z_loss", "wanted", "overwrite"}  # no argument of a torch layer


@pytest.mark.parametrize("layer", TORCH_LAYERS)
def test_every_argument_of_a_torch_layer_is_an_option_of_its_checks(layer):
    kind = SYSTEMS[TORCH_LAYERS[layer].system]
    assert choices([kind.__init__, kind.forward]) - coverage.ELSEWHERE.keys() == parameters(layer) - OF_AUTOGRAD


def test_an_argument_that_no_check_chooses_is_found():
    def forward(x, k, activation, renormalize=False, jitter=0.0): ...

    assert choices([forward]) == {"activation", "renormalize", "jitter"}


def test_every_system_but_the_oracle_is_checked():
    assert {layer.system for layer in TORCH_LAYERS.values()} == SYSTEMS.keys() - {"oracle"}


# Pairs ----------------------------------------------------------------------------------------------------------------

PAIRED = ("policy", "renormalize", "load_balancing_loss", "router_z_loss", "activation")


@pytest.mark.parametrize("backend", [*BACKENDS.values(), ORACLE], ids=lambda backend: backend.name)
def test_any_two_values_of_two_options_meet_in_every_kernel_file(backend):
    for stage in ("gating", "layer", *TORCH_LAYERS):
        read = [OPTIONS[name] for name in PAIRED if name in coverage.READS[stage]]
        for kernel, found in coverage.checks(backend, stage).items():
            never = {
                (line.option, line.value)
                for line in TABLE
                if line.stage == stage and line.cells[backend.name].get(kernel) == coverage.COMPILED
            }
            for one, other in itertools.combinations(read, 2):
                wanted = {
                    pair
                    for pair in itertools.product(one.values, other.values)
                    if not {(one.name, pair[0]), (other.name, pair[1])} & never
                }
                met = {(str(one.of(check)), str(other.of(check))) for check in found}
                assert wanted <= met, (stage, kernel, one.name, other.name, wanted - met)


def test_no_two_switches_are_the_same_or_opposite():
    """So any two values of two switches meet, and each meets every save policy."""
    paired = [coverage.Check("float16", case.astype("float16")) for case in cases.paired_options()]
    names = ("policy", *cases._DIFFERS, "topk_experts")
    for one, other in itertools.combinations((OPTIONS[name] for name in names if name in OPTIONS), 2):
        met = {(str(one.of(check)), str(other.of(check))) for check in paired}
        assert met == set(itertools.product(one.values, other.values)), (one.name, other.name)


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_writes_the_table():
    result = CliRunner().invoke(app, ["check", "--coverage"])
    assert result.exit_code == 0, result.output
    printed = " ".join(result.stdout.split())
    assert "renormalize" in printed
    for name, reason in (coverage.REASONS | coverage.ELSEWHERE).items():
        assert f"{name}: {reason}" in printed or f"{name}, which no case chooses: {reason}" in printed
    machine = CliRunner().invoke(app, ["check", "--coverage", "--json"])
    rows = json.loads(machine.stdout)
    assert [(row["stage"], row["option"], row["value"]) for row in rows] == [
        (line.stage, line.option, line.value) for line in TABLE
    ]
    assert all(set(row["cells"]) == set(CHECKED) for row in rows)


def test_the_command_fails_where_an_option_never_occurs(monkeypatch):
    monkeypatch.setattr(check, "reachable", lambda *arguments: cases.standard_cases())
    result = CliRunner().invoke(app, ["check", "--coverage"])
    assert result.exit_code == 1 and "gating on simt 1_naive: renormalize is never True" in result.stdout


ARGUMENTS = {"--stage": "gating", "--timeout": "9"}


@pytest.mark.parametrize("option", [one for one in get_command(app).commands["check"].params], ids=lambda one: one.name)
def test_the_command_takes_no_other_choice_with_it(option):
    (name, *_) = option.opts
    if name in ("--coverage", "--json"):
        return
    given = [name] if option.is_flag else [name, ARGUMENTS.get(name, "1")]
    result = CliRunner().invoke(app, ["check", "--coverage", *given])
    message = f"--coverage counts every stage of every backend: leave {name} out"
    assert result.exit_code == 2 and message in " ".join(result.stderr.split())
