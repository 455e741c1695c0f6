"""MoEBlaze's figures 4 and 6 without a GPU: the other projects' layers by stand-ins, the time by a pretended device."""

import multiprocessing
import os
import sys
import time
from functools import partial
from types import SimpleNamespace

import foreign_stubs
import pytest
import torch
from pretended import PretendedDevice

from moeblaze_ref.bench import accuracy, foreign, layer, report
from moeblaze_ref.core.config import PAPER_PRESETS, MoEConfig, preset
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.nn.routed_experts import RoutedExperts
from moeblaze_ref.papers import speed, trials
from moeblaze_ref.papers.items import ITEMS

LITTLE = MoEConfig(L=37, d=16, h=128, E=5, k=2)  # h: whole blocks of our MegaBlocks
TIMED = MoEConfig(L=5, d=8, h=128, E=2, k=1)
RUNNING = tuple(foreign.SYSTEMS)


@pytest.fixture
def stubs(monkeypatch):
    return foreign_stubs.install(monkeypatch)


def error_of(system, config, alter=lambda baseline: baseline):
    """Of a foreign layer in bfloat16."""
    c = config
    torch.manual_seed(0)
    parameters = RoutedExperts(c.d, c.h, c.E, c.k, c.activation, dtype=torch.bfloat16)
    x, d_out = torch.randn(2, c.L, c.d, dtype=torch.bfloat16)
    baseline = alter(foreign.baseline(system, parameters))
    return accuracy.worst_error(baseline.layer, parameters, x, d_out, weights=baseline.weights)


def accepted(error):
    return report.wrong([error.columns]) == []


@pytest.mark.parametrize("config", [LITTLE, LITTLE.replace(L=1, k=1), LITTLE.replace(k=5)], ids=str)
@pytest.mark.parametrize("system", RUNNING)
def test_a_foreign_layer_computes_with_our_weights(stubs, system, config):
    assert accepted(error_of(system, config))


@pytest.mark.parametrize(("system", "activation"), [
    *((system, "silu") for system in RUNNING[:3]), ("megablocks_published", "relu"),
    ("megablocks_published_block_sparse", "relu"),
])  # fmt: skip
def test_an_ungated_foreign_layer_computes_with_our_weights(stubs, system, activation):
    assert accepted(error_of(system, LITTLE.replace(activation=activation)))


def zeros(baseline):
    return baseline._replace(layer=lambda x: (0 * baseline.layer(x)[0], baseline.layer(x)[1]))


def without_the_last_row(baseline):
    def spoiled(x):
        out, chosen = baseline.layer(x)
        return torch.cat([out[:-1], 0 * out[-1:]]), chosen

    return baseline._replace(layer=spoiled)


def the_next_experts_weights(baseline):
    """Rows of all experts in another order, in the layer and not in what its gradients are compared with."""
    with torch.no_grad():
        leaf = baseline.weights.leaves["down"]
        leaf.copy_(leaf.roll(len(leaf) // LITTLE.E, dims=0))
    return baseline


def gradients_exchanged(baseline):
    def as_ours(gradients):
        found = baseline.weights.as_ours(gradients)
        return found | {"w1": found["w2"], "w2": found["w1"]}

    return baseline._replace(weights=baseline.weights._replace(as_ours=as_ours))


FAULTS = (zeros, without_the_last_row, the_next_experts_weights, gradients_exchanged)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("system", ("megablocks_published", "sonicmoe"))
def test_a_fault_of_a_foreign_layer_is_found(stubs, system, fault):
    assert not accepted(error_of(system, LITTLE, fault))


def test_the_choice_of_sonicmoe_is_recorded_once(stubs):
    parameters = RoutedExperts(16, 8, 8, 3, "swiglu", dtype=torch.bfloat16)
    first, second = (foreign.baseline("sonicmoe", parameters) for _ in range(2))
    assert isinstance(stubs.TC_Softmax_Topk_Router_Function._router, type)
    x, y = torch.randn(2, 9, 16, dtype=torch.bfloat16)
    (_, of_x), (_, of_y) = first.layer(x), second.layer(y)
    assert of_x.shape == of_y.shape == (9, 3) and not torch.equal(of_x, of_y)


def test_a_missing_package_is_named():
    with pytest.raises(ValueError, match="system sonicmoe: No module named 'sonicmoe'"):
        foreign.baseline("sonicmoe", RoutedExperts(16, 8, 8, 3))


# The figures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch):
    """One repetition, and without the compiled baseline, which has a test of its own."""
    monkeypatch.setattr(speed, "BASELINES", [name for name in speed.BASELINES if "compiled" not in name])
    monkeypatch.setattr(speed, "REPETITIONS", 1)


def timed(activation):
    device = PretendedDevice()
    fails = partial(trials.failure, device=device)
    return speed.time_systems("conf0", TIMED.replace(activation=activation), device, fails)


def by_label(rows):
    return {report.label(row): row for row in rows}


def test_every_system_of_figure_6_has_a_row(stubs, quick):
    rows = timed("swiglu")
    ours = [f"moeblaze, {policy}" for policy in speed.POLICIES]
    running = [*ours, "megablocks", "grouped_mm", *RUNNING]
    found = by_label(rows)
    assert list(found) == running and len(rows) == len(found)
    for name in running:
        row = found[name]
        assert (row["preset"], row["activation"], row["shape"]) == ("conf0", "swiglu", TIMED.sizes)
        assert accepted(accuracy.Error(row["error"], row["row_error"])) and 0 < row["error"]
        assert row["step_ms"] > 0 and row["fwd_ms"] > 0 and row["bwd_ms"] > 0 and row["graph_ms"] > 0
        assert row.keys().isdisjoint(speed.NOT_SHOWN)
    for name in ours:
        assert found[name]["ratio_to"].keys() == {*running} - {*ours}
        assert found[name]["kept_bytes"] == account(TIMED, "moeblaze", found[name]["policy"]).kept_bytes


def test_a_copy_of_the_weights_is_not_counted_as_saved(monkeypatch):
    def product(parameters):
        leaf = torch.eye(LITTLE.d, dtype=torch.bfloat16).requires_grad_()
        chosen = torch.zeros(LITTLE.L, LITTLE.k, dtype=torch.int64)
        return foreign.Baseline(lambda x: (x @ leaf, chosen), accuracy.Weights({"w": leaf}))

    monkeypatch.setitem(foreign.SYSTEMS, "product", product)
    scene = layer.Scene(LITTLE, layer.Choice(("product",)), PretendedDevice())
    (subject,) = scene.subjects()
    assert layer._memory(scene, subject, PretendedDevice())["kept_bytes"] == scene.tokens(subject).nbytes
    assert [gradient.shape for gradient in scene.step(subject)] == [(LITTLE.L, LITTLE.d), (LITTLE.d, LITTLE.d)]


@pytest.mark.parametrize("system", foreign.SYSTEMS)
def test_what_cannot_run_is_a_message(system):
    package = "sonicmoe" if system == "sonicmoe" else "megablocks"
    message = f"ValueError: system {system}: No module named '{package}'"
    assert trials.failure(system, LITTLE, PretendedDevice()) == message


def crash(*_):
    os.abort()


def hang(*_):
    time.sleep(600)


def answer(_, state):
    return str(os.getpid()), state == "usable"


@pytest.fixture
def bystander():
    """A child of this process that no trial started."""
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    process.start()
    yield process
    process.kill()
    process.join()


def test_a_system_that_ends_its_process_ends_that_alone_and_is_not_tried_again(monkeypatch, bystander):
    tried = trials.Trials()
    for system, trial, limit, message in (
        ("a", crash, 240, "its process crashed"),
        ("b", hang, 5, "its first step did not end within 5 seconds"),
    ):
        monkeypatch.setattr(trials, "_on_the_gpu", trial)
        monkeypatch.setattr(trials, "LIMIT_SECONDS", limit)
        assert tried.failure(system, LITTLE) == message
        assert tried.failure(system, LITTLE) == f"not tried: on another layer of this run {message}"
        assert bystander.is_alive()
    monkeypatch.setattr(trials, "LIMIT_SECONDS", 240)
    monkeypatch.setattr(trials, "_on_the_gpu", answer)
    spoiled, first, second = (tried.failure(*trial) for trial in (("c", "spoiled"), ("d", "usable"), ("d", "usable")))
    assert first == second != spoiled, "a process without a usable context serves no other trial"
    assert tried.failure("c", "usable") == f"not tried: on another layer of this run {spoiled}"
    assert bystander.is_alive() and int(spoiled) not in {process.pid for process in multiprocessing.active_children()}


def test_a_system_that_is_wrong_or_lacks_an_activation_has_a_message_in_place_of_its_times(stubs, quick):
    found = by_label(timed("relu"))
    wrong, lacking = found["megablocks_published_memory_optimized"], found["sonicmoe"]
    assert wrong["message"].startswith("wrong: error ") and "torch's ReLU" in wrong["message"]
    assert lacking["message"] == "AssertionError: no non GLU activation yet"
    assert wrong.keys() == lacking.keys() == {"preset", "shape", "dtype", "activation", "system", "policy", "message"}
    rivals = found["moeblaze, minimal"]["ratio_to"]
    assert rivals.keys() == {"megablocks", "grouped_mm", "megablocks_published", "megablocks_published_block_sparse"}


def test_the_version_of_triton_is_what_it_was(stubs, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__="3.6.0"))
    foreign.baseline("megablocks_published_block_sparse", RoutedExperts(16, 8, 8, 3, dtype=torch.bfloat16))
    assert sys.modules["triton"].__version__ == "3.6.0"
    with pytest.raises(ValueError, match="not supported with triton"):
        foreign_stubs.Arguments(mlp_impl="sparse")


def test_the_figures_have_all_seven_configurations():
    device = PretendedDevice()
    asked = [job.args for item in ("moeblaze-fig4", "moeblaze-fig6") for job in ITEMS[item].jobs(device)]
    activations = ["silu"] * 7 + ["relu"] * 7 + ["swiglu"] * 7
    assert [(name, config.activation) for name, config, *_ in asked] == [
        *zip(PAPER_PRESETS * 3, activations, strict=False)
    ]
    assert all(config.sizes == preset(name).config.sizes and of is device for name, config, of, *_ in asked)
    assert {"gather_sum_compiled", "sonicmoe", "megablocks", "grouped_mm"} <= {*speed.BASELINES}
