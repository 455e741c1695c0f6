"""The league without a GPU: on a device with made-up time, and with processes that end too early."""

import json
import os
import sys
import threading
from types import SimpleNamespace

import foreign_stubs
import pytest
import torch
from pretended import LEFT, PEAK, PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import league
from moeblaze_ref.cli import check_layer
from moeblaze_ref.cli.app import app
from moeblaze_ref.cli.check_layer import Row
from moeblaze_ref.cli.league import UNTUNED, _environment
from moeblaze_ref.core import source_hashes
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.routers import Router
from moeblaze_ref.verify.layers import adapters, layouts, reference
from moeblaze_ref.verify.layers.adapter import Sizes
from moeblaze_ref.verify.layers.adapters.foreign import sonicmoe
from moeblaze_ref.verify.layers.reference import Case, Spec

TINY = MoEConfig(L=37, d=16, h=24, E=5, k=2, dtype="float32")
SIZES = Sizes(TINY.L, TINY.d, TINY.h, TINY.E, TINY.k)
BYTES = 4 * TINY.L * TINY.d  # of x
HERE = ("torch/experts", "torch/grouped_mm", "moeblaze_ref/minimal", "moeblaze_ref/experts/linear")


def events(*layers):
    return list(league._measured("tiny", TINY, layers, 3, PretendedDevice()))


def test_each_layer_has_two_medians_and_its_bytes():
    found = events(*HERE)
    assert found[: len(HERE)] == list(HERE)
    rows = found[len(HERE) :]
    assert [row.layer for row in rows] == list(HERE)
    for row in rows:
        assert (row.preset, row.problem) == ("tiny", "")
        assert len(row.step_ms) == 2 and min(row.step_ms) > 0
        assert (row.kept_bytes, row.peak_bytes) == (LEFT - BYTES, PEAK + 2 * BYTES)


def test_a_layer_that_cannot_run_is_named_and_the_others_are_timed():
    found = events("liger/experts", "torch/experts")
    (failed, right) = [event for event in found if isinstance(event, league.Timed)]
    assert failed.layer == "liger/experts" and not failed.step_ms
    assert failed.problem.startswith("ImportError: liger cannot be imported") and "pip install" in failed.problem
    assert right.layer == "torch/experts" and right.step_ms


def results_by_role(scene, name, number):
    """What a step of a layer computes: the output, and the gradient of x and of each weight."""
    made = adapters.named(name)(d=TINY.d, h=TINY.h, E=TINY.E, k=TINY.k, dtype=torch.float32, device="cpu")
    step = scene.step_of(lambda **sizes: made)
    d_x, *gradients = step(number)
    places = [place for place, _ in made.places(SIZES)]
    found = {"out": step.forward(number), "x": d_x} | layouts.gather(list(zip(places, gradients, strict=False)))
    return found if made.router_inside else found | {"router": gradients[len(places)]}


@pytest.mark.parametrize("name", HERE)
def test_every_layer_has_the_results_of_the_same_numbers(name):
    scene = league.Scene.make(TINY, PretendedDevice())
    spec = Spec(TINY.k, Router(renormalize=name == "moeblaze_ref/minimal"), "swiglu", "output")
    weights = {role: weight.double() for role, weight in scene.weights.items()}
    for number, x in enumerate(scene.tokens):
        x = x.detach().double()
        index = reference.route(spec, weights | {"x": x}).topk_experts
        wanted = reference.exact(spec, Case("", SIZES, x, weights, index, None, scene.d_out.double()))
        found = results_by_role(scene, name, number)
        assert found.keys() == wanted.keys()
        for role, tensor in wanted.items():
            assert (found[role] - tensor).norm() < 1e-5 * tensor.norm(), role


@pytest.mark.parametrize(("h", "block"), [(24, 8), (256, 128)])
def test_a_block_sparse_layer_has_whole_blocks_where_its_experts_do(h, block):
    made = adapters.named("moeblaze_ref/megablocks")(d=16, h=h, E=2, k=1, dtype=torch.float32, device="cpu")
    assert made.module.layer.block == block


def ends_at_b(preset, layers, repetitions, tokens, gpu):
    for name in layers:
        yield name
        if name == "b":
            os.abort()
    for name in layers:
        yield league.Timed(name, preset, (1.0, 2.0), 3, 4)


def test_a_process_that_ends_costs_the_layer_that_ran_its_first_step(monkeypatch):
    monkeypatch.setattr(league, "measured", ends_at_b)
    a, b, c = league.timed("conf1", ("a", "b", "c"), 3, seconds=60)
    assert (a.step_ms, c.step_ms) == ((1.0, 2.0), (1.0, 2.0))
    assert b.problem == "its process ended, killed by SIGABRT" and not b.step_ms


def test_each_gpu_times_one_shape_at_a_time(monkeypatch):
    used, both = set(), threading.Barrier(2)

    def timed(shape, layers, repetitions, seconds, tokens, gpu):
        assert gpu not in used
        used.add(gpu)
        both.wait(60)  # until the other GPU has a shape, too
        used.remove(gpu)
        return [league.Timed(name, shape, (gpu, gpu)) for name in layers]

    monkeypatch.setattr(league, "timed", timed)
    rows = list(league.timed_on(2, ("conf1", "conf2", "conf3", "conf4"), ("a",), 3, 60.0))
    assert [row.preset for (row,) in rows] == ["conf1", "conf2", "conf3", "conf4"]
    assert {row.step_ms[0] for (row,) in rows} == {0, 1}


BAD_INPUT = {
    "--preset conf9": "unknown preset 'conf9'. Did you mean 'conf7'?",
    "--layer torch/expert": "unknown layer 'torch/expert'. Did you mean 'torch/experts'?",
    "--layer make": "unknown layer 'make'",
    "--layer layers:": "a layer is 'layers:', but it must be MODULE:FACTORY",
    "--tokens 0": "tokens is 0, but it must be >= 1",
    "--timeout 0": "Invalid value for '--timeout'",
    "--seeds 0": "Invalid value for '--seeds'",
    "--gpus 0": "Invalid value for '--gpus'",
}


def test_the_command_names_what_it_does_not_take():
    for words, said in BAD_INPUT.items():
        found = CliRunner().invoke(app, ["league", *words.split()])
        assert found.exit_code == 2 and said in " ".join(found.output.split()), found.output


def test_without_a_gpu_it_says_so_before_any_check(monkeypatch):
    monkeypatch.setattr(check_layer, "cuda_device_count", lambda: 0)
    monkeypatch.setattr(check_layer, "rows_of", lambda *_: pytest.fail("a layer was checked"))
    found = CliRunner().invoke(app, ["league"])
    assert found.exit_code == 2 and found.output == "error: device is cuda, but this machine has no CUDA device\n"


def test_it_takes_no_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(check_layer, "cuda_device_count", lambda: 2)
    found = CliRunner().invoke(app, ["league", "--gpus", "3"])
    assert found.exit_code == 2
    assert found.output == "error: gpus is 3, but it must be at most 2, the GPUs of this machine\n"


def test_a_league_of_layers_that_cannot_be_checked_fails(monkeypatch):
    monkeypatch.setattr(check_layer, "check_device", lambda *_: None)
    monkeypatch.setattr(check_layer, "rows_of", lambda name, *_: [check_layer._failed(name, "it is missing")])
    found = CliRunner().invoke(app, ["league", "--layer", "liger/experts", "--preset", "conf1"])
    assert found.exit_code == 2 and "error: liger/experts: it is missing" in found.output


@pytest.fixture
def shapes_run(monkeypatch):
    """A league without a GPU, ended by Ctrl-C at conf3 as long as that is in ``ends``; its lists fill as it runs."""
    run = SimpleNamespace(checked=[], timed=[], ends={"conf3"})

    def verdict(name, *_):
        run.checked.append(name)
        return [Row(name, "bfloat16", True, "", 0.5, True, False, (), "")]

    def timed(shape, layers, *_):
        if shape in run.ends:
            raise KeyboardInterrupt
        run.timed.append(shape)
        return [league.Timed(name, shape, (1.0, 2.0), 3, 4) for name in layers]

    monkeypatch.setattr(check_layer, "check_device", lambda *_: None)
    monkeypatch.setattr(check_layer, "rows_of", verdict)
    monkeypatch.setattr(league, "timed", timed)
    return run


def run_league(path, *words):
    shapes = ["--preset", "conf1", "--preset", "conf3"]
    return CliRunner().invoke(app, ["league", "--layer", "torch/experts", *shapes, "--record", str(path), *words])


def test_a_run_that_is_ended_leaves_the_shapes_that_it_finished(shapes_run, tmp_path):
    run_league(path := tmp_path / "league.json")
    record = json.loads(path.read_text())
    assert [row["layer"] for row in record["checks"]] == ["torch/experts"]
    assert [(row["preset"], row["step_ms"]) for row in record["times"]] == [("conf1", [1.0, 2.0])]


def test_a_run_goes_on_where_another_was_ended(shapes_run, tmp_path):
    run_league(path := tmp_path / "league.json")
    shapes_run.ends.clear()
    assert run_league(path, "--resume").exit_code == 0
    assert shapes_run.checked == ["torch/experts"] and shapes_run.timed == ["conf1", "conf3"]
    record = json.loads(path.read_text())
    assert [row["preset"] for row in record["times"]] == ["conf1", "conf3"] and len(record["checks"]) == 1


def test_a_run_that_is_ended_leaves_the_checks_that_it_finished(shapes_run, tmp_path, monkeypatch):
    layers = ["--layer", "torch/grouped_mm", "--layer", "torch/experts"]
    words = ["league", *layers, "--preset", "conf1", "--jobs", "1", "--record", str(path := tmp_path / "league.json")]
    verdict = check_layer.rows_of
    with monkeypatch.context() as ended:
        ended.setattr(check_layer, "rows_of", lambda name, *_: verdict(name) if "mm" in name else sys.exit(130))
        CliRunner().invoke(app, words)
    assert [row["layer"] for row in json.loads(path.read_text())["checks"]] == ["torch/grouped_mm"]
    assert CliRunner().invoke(app, [*words, "--resume"]).exit_code == 0
    assert shapes_run.checked == ["torch/grouped_mm", "torch/experts"]
    assert [row["layer"] for row in json.loads(path.read_text())["checks"]] == shapes_run.checked


def test_only_a_record_of_the_same_terms_is_resumed(shapes_run, tmp_path):
    path = tmp_path / "league.json"
    assert "but there is none" in run_league(path, "--resume").output
    run_league(path)
    other = run_league(path, "--resume", "--repetitions", "3")
    assert other.exit_code == 2
    said = "error: league.json cannot be resumed: its repetitions is 9, but it must be 3, as here"
    assert " ".join(other.output.split()) == said
    path.write_text(json.dumps(json.loads(path.read_text()) | {"code": {"layers": "0"}}))
    said = "its code is {'CUDA kernels': None, 'layers': '0'}, but it must be"
    assert said in run_league(path, "--resume").output
    assert shapes_run.timed == ["conf1"]


@pytest.mark.parametrize("then", [{}, {source_hashes.CHECKS: "0"}])
def test_verdicts_of_another_check_are_taken_anew_and_times_stay(shapes_run, tmp_path, then):
    run_league(path := tmp_path / "league.json")
    record = json.loads(path.read_text())
    assert record["code"].pop(source_hashes.CHECKS)
    path.write_text(json.dumps(record | {"code": record["code"] | then}))
    shapes_run.ends.clear()
    assert run_league(path, "--resume").exit_code == 0
    assert shapes_run.checked == ["torch/experts"] * 2 and shapes_run.timed == ["conf1", "conf3"]
    assert json.loads(path.read_text())["code"][source_hashes.CHECKS] != "0"


def test_sonicmoe_is_checked_with_one_tile_and_timed_with_its_own_choice(monkeypatch):
    foreign_stubs.install(monkeypatch)
    products = {f"gemm{name}_tuned": SimpleNamespace(configs=[1, 2]) for name in ("", "_gated", "_dgated")}
    quack = SimpleNamespace(
        autotuner=SimpleNamespace(AutotuneConfig=dict),
        gemm_interface=SimpleNamespace(default_config=lambda device: device.type, **products),
    )
    monkeypatch.setitem(sys.modules, "quack", quack)
    sizes = {"d": 16, "h": 16, "E": 2, "k": 1, "dtype": torch.bfloat16, "device": "cpu"}

    sonicmoe.moe(**sizes)
    assert all(product.configs == [1, 2] for product in products.values())
    with _environment(UNTUNED):
        sonicmoe.moe(**sizes)
    assert all(product.configs == [{"config": "cuda"}] for product in products.values())
    assert not UNTUNED.keys() & os.environ.keys()
