"""Training that outlives a kill: settings, exact resume, checkpoints, the log, its data, and the command."""

import json
import math
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from typer.testing import CliRunner

from moeblaze_ref import lm
from moeblaze_ref.cli import app
from moeblaze_ref.lm import checkpoint, command, data, finite, log, presets
from moeblaze_ref.lm.checkpoint import CheckpointError
from moeblaze_ref.lm.model import LMConfig, MoETransformer
from moeblaze_ref.lm.run import CHECKPOINT, LOCK, LOG, run
from moeblaze_ref.lm.train import NonFinite, Trainer, TrainSettings
from moeblaze_ref.systems import SYSTEMS

CONFIG = LMConfig(d=16, h=16, E=4, k=2, layers=2, heads=2, sequence=16)
SETTINGS = TrainSettings(CONFIG, 7, batch=2, warmup=2, final_fraction=0.1)
EVERY = 3  # steps from one checkpoint to the next: 3, 6, 7


@pytest.fixture(autouse=True)
def one_thread():
    """The same number as in the processes that are killed: sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainer(settings=SETTINGS, corpus=None):
    return Trainer(settings, corpus or data.python_help())


def train_in(folder, settings=SETTINGS, **options):
    return run(trainer(settings), folder, every=EVERY, validation_batches=1, **options)


def without_clock(lines):
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The lines of a run that nothing disturbed."""
    torch.set_num_threads(1)
    return without_clock(train_in(tmp_path_factory.mktemp("run") / "whole"))


# Settings


def test_the_learning_rate_rises_linearly_and_falls_by_half_a_cosine():
    settings = TrainSettings(CONFIG, 30, learning_rate=2.0, warmup=10, final_fraction=0.1)
    assert settings.learning_rate_at(1) == pytest.approx(0.2) and settings.learning_rate_at(10) == 2.0
    assert settings.learning_rate_at(15) == pytest.approx(0.2 + 1.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert settings.learning_rate_at(20) == pytest.approx(1.1) and settings.learning_rate_at(30) == pytest.approx(0.2)
    assert {TrainSettings(CONFIG, 30).learning_rate_at(step) for step in range(1, 31)} == {3e-3}


def test_a_step_moves_the_weights_by_its_own_learning_rate():
    """AdamW's first step moves every weight whose gradient is not tiny by its learning rate."""
    settings = replace(SETTINGS, learning_rate=1.0, warmup=4, weight_decay=0.0)
    training = trainer(settings)
    before = training.model.head.weight.detach().clone()
    assert training.advance().learning_rate == 0.25
    assert float((training.model.head.weight - before).detach().abs().median()) == pytest.approx(0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"final_fraction": 1.5}, ValueError, "final_fraction is 1.5, but it must be 0 to 1"),
        ({"learning_rate": -1.0}, ValueError, "learning_rate is -1.0, but it must be >= 0"),
        ({"balance_weight": math.nan}, ValueError, "balance_weight is nan, but it must be finite"),
        ({"gradient_norm": 0}, ValueError, "gradient_norm is 0.0, but it must be above 0"),
        ({"precision": "float16"}, ValueError, "unknown precision 'float16'. Did you mean 'bfloat16'"),
        ({"layer": "oracel"}, ValueError, "Did you mean 'oracle'"),
        ({"warmup": 1.5}, TypeError, "warmup is 1.5"),
    ],
)
def test_a_bad_setting_says_what_is_allowed(changes, error, message):
    with pytest.raises(error, match=message):
        replace(SETTINGS, **changes)


def test_bfloat16_is_close_to_float32_but_not_it():
    wide, narrow = (trainer(replace(SETTINGS, precision=precision)) for precision in ("float32", "bfloat16"))
    first, second = wide.advance(), narrow.advance()
    assert first.loss != second.loss and second.loss == pytest.approx(first.loss, rel=1e-2)
    assert {parameter.dtype for parameter in narrow.model.parameters()} == {torch.float32}


def test_the_router_losses_have_the_weights_of_the_settings():
    """Without them the router of the last layer is moved by the language loss alone: another gradient norm."""
    norms = {
        trainer(replace(SETTINGS, **{name: 5.0})).advance().gradient_norm for name in ("balance_weight", "z_weight")
    }
    assert len(norms | {trainer().advance().gradient_norm}) == 3


def test_a_shared_expert_is_added_to_the_routed_ones():
    model = MoETransformer(replace(CONFIG, shared=24))
    nn.init.zeros_(model.blocks[0].moe.w3)
    nn.init.zeros_(model.blocks[0].attention.project.weight)
    stream = torch.randn(2, 5, CONFIG.d, generator=torch.Generator().manual_seed(0))
    out, trace = model.blocks[0](stream)
    up, down = model.blocks[0].shared.up.weight, model.blocks[0].shared.down.weight
    a, b = trace.x @ up[:24].T, trace.x @ up[24:].T
    expected = ((a * torch.sigmoid(a) * b) @ down.T).view_as(stream)
    assert float((out - stream - expected).detach().norm() / expected.detach().norm()) < 1e-5
    assert MoETransformer(CONFIG).blocks[0].shared is None


# Exact resume


@pytest.mark.parametrize("layer", ["oracle", "capacity", "moeblaze"])
def test_a_restored_run_goes_on_bit_for_bit(layer, tmp_path):
    settings = replace(SETTINGS, layer=layer, config=replace(CONFIG, shared=8))
    whole = trainer(settings)
    for _ in range(2):
        whole.advance()
    checkpoint.save(tmp_path / CHECKPOINT, whole)
    resumed = trainer(settings)
    checkpoint.load(tmp_path / CHECKPOINT, resumed)
    assert resumed.step == checkpoint.step_of(tmp_path / CHECKPOINT) == 2
    assert [resumed.advance() for _ in range(2)] == [whole.advance() for _ in range(2)]
    assert resumed.losses == whole.losses and resumed.validate() == whole.validate()
    for name, tensor in whole.tensors().items():
        assert torch.equal(resumed.tensors()[name], tensor), name


@pytest.mark.parametrize("lost", ["optimizer", "windows"])
def test_a_run_that_forgot_a_part_of_its_state_is_another_run(lost):
    """What exact resume is tested with can tell: each part matters."""
    whole, forgetful = trainer(), trainer()
    whole.advance()
    state = {name: tensor.clone() for name, tensor in whole.tensors().items() if not name.startswith("optimizer")}
    if lost == "windows":
        state = {**whole.tensors(), "windows": torch.Generator().manual_seed(9).get_state()}
    forgetful.restore({name: tensor.clone() for name, tensor in state.items()})
    for training in (whole, forgetful):
        training.advance(), training.advance()
    assert whole.losses[2] != forgetful.losses[2]


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
torch.set_num_threads(1)
from moeblaze_ref.lm import log
import test_lm_train as tests

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

moment = sys.argv[1]
real_replace, real_add, real_write_bytes, replaced = os.replace, log.Log.add, Path.write_bytes, []

def replace(part, path):
    if path.name == tests.CHECKPOINT:
        replaced.append(path)
        if moment == "before the rename" and len(replaced) == 2:
            die()
    real_replace(part, path)
    if moment == "after the rename" and len(replaced) == 2:
        die()

def add(self, *lines):
    step = lines[0]["step"]
    if moment == "before the first checkpoint" and step == 2:
        die()
    if moment == "within a line" and step == 5:
        with self.path.open("a") as file:
            file.write('{{"step": 5, "lo')
        die()
    real_add(self, *lines)

def write_bytes(path, content):
    if moment == "within a checkpoint" and replaced:
        real_write_bytes(path, content[:len(content) // 2])
        die()
    real_write_bytes(path, content)

os.replace, log.Log.add, Path.write_bytes = replace, add, write_bytes
tests.train_in(Path(sys.argv[2]))
"""
MOMENTS = {  # and the step that the folder's checkpoint then holds
    "before the first checkpoint": None,
    "within a line": 3,
    "within a checkpoint": 3,
    "before the rename": 3,
    "after the rename": 6,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_at_any_moment_changes_no_loss(moment, tmp_path, uninterrupted):
    folder, script = tmp_path / "run", KILLED.format(tests=str(Path(__file__).parent))
    killed = subprocess.run([sys.executable, "-c", script, moment, folder], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    saved = checkpoint.step_of(folder / CHECKPOINT) if (folder / CHECKPOINT).exists() else None
    assert saved == MOMENTS[moment]
    assert len(log.read(folder / LOG)) < len(uninterrupted)
    train_in(folder, resume=True)
    assert without_clock(log.read(folder / LOG)) == uninterrupted
    assert {path.name for path in folder.iterdir()} == {CHECKPOINT, LOG, LOCK}


def test_checkpoints_may_be_rarer_than_validations(tmp_path, monkeypatch, uninterrupted):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda path, trainer: saved.append(trainer.step))
    lines = train_in(tmp_path / "run", checkpoint_every=5)
    assert saved == [5, 7] and without_clock(lines) == uninterrupted


def test_the_log_has_every_step_once_and_validation_lines(uninterrupted):
    steps = [line["step"] for line in uninterrupted if "loss" in line]
    held_out = [line["step"] for line in uninterrupted if "validation_loss" in line]
    assert steps == list(range(1, 8)) and held_out == [0, 3, 6, 7]
    assert uninterrupted[0].keys() == {"step", "validation_loss", "run"}
    for line in uninterrupted[1:]:
        assert line.keys() in ({"step", "validation_loss"}, {"step", "loss", "learning_rate", "gradient_norm"})
    assert uninterrupted[-1]["validation_loss"] < uninterrupted[0]["validation_loss"]


def test_a_finished_run_that_is_resumed_stays_as_it_is(tmp_path, uninterrupted):
    train_in(tmp_path)
    before = (tmp_path / LOG).read_bytes()
    train_in(tmp_path, resume=True)
    assert (tmp_path / LOG).read_bytes() == before


def test_a_broken_line_of_the_log_is_named(tmp_path):
    (tmp_path / LOG).write_text('{"step": 1}\nnothing\n{"step": 3}\n')
    with pytest.raises(ValueError, match="log.jsonl, line 2 is no JSON"):
        log.read(tmp_path / LOG)


# Checkpoints that are refused


@pytest.fixture
def folder(tmp_path):
    train_in(tmp_path, replace(SETTINGS, steps=2))
    return tmp_path


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_with_a_run_is_not_overwritten(folder):
    before = contents(folder)
    with pytest.raises(ValueError, match="holds a run already .checkpoint.safetensors, log.jsonl.: resume it"):
        train_in(folder, replace(SETTINGS, steps=2))
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 9}, "its settings.steps is 2, but here it is 9"),
        ({"seed": 4}, "its settings.seed is 0, but here it is 4"),
        ({"config": replace(CONFIG, h=24)}, "its settings.config.h is 16, but here it is 24"),
        ({"layer": "capacity"}, "its settings.layer is 'oracle', but here it is 'capacity'"),
        (
            {"layer_options": {"renormalize": True}},
            "its settings.layer_options.renormalize is 'absent', but here it is True",
        ),
    ],
)
def test_a_checkpoint_of_another_configuration_names_the_field(changes, message, folder):
    before = contents(folder)
    with pytest.raises(CheckpointError, match=message):
        train_in(folder, replace(SETTINGS, **{"steps": 2, **changes}), resume=True)
    assert contents(folder) == before


def test_a_checkpoint_of_another_text_is_refused(folder):
    help_ = data.python_help()
    other = data.Corpus(help_.training[1:], help_.validation)
    with pytest.raises(
        CheckpointError, match=f"its text is '{help_.fingerprint}', but here it is '{other.fingerprint}'"
    ):
        run(trainer(replace(SETTINGS, steps=2), other), folder, resume=True)


def spoil_by(change):
    def spoil(path):
        path.write_bytes(change(path.read_bytes()))

    return spoil


def spoil_header(path):
    save_file(load_file(path), path)


def spoil_shape(path):
    training = trainer(replace(SETTINGS, steps=2))
    tensors = training.tensors() | {"model.head.weight": torch.zeros(2, 3)}
    training.tensors = lambda: tensors
    checkpoint.save(path, training)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_by(lambda content: content[:-1]), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: content[:50]), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: b""), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: b"hello, world" * 50), "is truncated, or no checkpoint"),
        (spoil_header, "no training run of this project wrote it"),
        (spoil_shape, r"model.head.weight is float32 \(2, 3\), but it must be float32 \(256, 16\)"),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_kept(spoil, message, folder):
    spoil(folder / CHECKPOINT)
    before = contents(folder)
    with pytest.raises(CheckpointError, match=message):
        train_in(folder, replace(SETTINGS, steps=2), resume=True)
    assert contents(folder) == before


def test_the_model_of_a_checkpoint_predicts_as_the_trained_one(tmp_path):
    training = trainer(replace(SETTINGS, layer="capacity", layer_options={"capacity_factor": 0.5}))
    training.advance()
    checkpoint.save(tmp_path / CHECKPOINT, training)
    model, settings, text, steps, _ = checkpoint.load_model(tmp_path / CHECKPOINT)
    tokens = torch.arange(30).view(2, 15)
    assert (settings, text, steps) == (training.settings, training.corpus.fingerprint, 1)
    assert torch.equal(model(tokens).logits, training.model(tokens).logits)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint .*nothing"):
        checkpoint.load_model(tmp_path / "nothing")


# Numbers that are not finite


class Spoiled(Trainer):
    """A run in which one weight of the second layer's experts becomes NaN after four steps."""

    def advance(self):
        if self.step == 4:
            with torch.no_grad():
                self.model.blocks[1].moe.w1[:, 0, 0] = math.nan
        return super().advance()


@pytest.mark.parametrize("layer", SYSTEMS)
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(layer, tmp_path):
    options = {"block": 8} if layer == "megablocks" else {}
    spoiled = Spoiled(replace(SETTINGS, layer=layer, layer_options=options), data.python_help())
    message = "step 5: loss nan, .* the activations of blocks.1.moe are the first .*checkpoint.safetensors keeps step 3"
    with pytest.raises(NonFinite, match=message):
        run(spoiled, tmp_path, every=EVERY, validation_batches=1)
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / CHECKPOINT).values())
    assert [line["step"] for line in log.read(tmp_path / LOG) if "loss" in line] == [1, 2, 3, 4]


def test_a_run_that_fails_at_once_has_kept_nothing(tmp_path):
    training = trainer()
    nn.init.constant_(training.model.embedding.weight, math.inf)
    with pytest.raises(NonFinite, match="loss after it is nan; the activations of embedding are .*No checkpoint was written"):
        run(training, tmp_path)


def test_a_gradient_that_is_not_finite_is_named_and_moves_no_weight():
    training = trainer()
    before = {name: parameter.detach().clone() for name, parameter in training.model.named_parameters()}
    training.model.blocks[1].moe.w3.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFinite, match="step 1: loss 5.*the gradient of blocks.1.moe.w3 is not"):
        training.advance()
    assert all(torch.equal(parameter, before[name]) for name, parameter in training.model.named_parameters())


def test_the_first_module_in_the_order_of_the_forward_is_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Identity(), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert finite.first_module(model, lambda: model(torch.ones(1, 2))) is None
    for number in (2, 1):
        layer = model[2] if number == 2 else model[1][1]
        nn.init.constant_(layer.bias, math.inf)
        assert finite.first_module(model, lambda: model(torch.ones(1, 2))) == {2: "2", 1: "1.1"}[number]
    assert not any(module._forward_hooks for module in model.modules())


# Data


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


FILES = {f"part{number // 10}/file{number}.txt": b"<text %d>" % number for number in range(40)}


def files_of(part):
    return set(part.numpy().tobytes().split(b"\n\n"))


def test_a_folder_is_split_by_file(tmp_path):
    write(tmp_path, FILES | {".git/config": b"\xff", "copy.txt": FILES["part1/file11.txt"], "empty.txt": b""})
    corpus = data.folder(tmp_path)
    training, validation = files_of(corpus.training), files_of(corpus.validation)
    assert not training & validation and training | validation == set(FILES.values())
    assert len(validation) == 4
    assert data.folder(tmp_path).fingerprint == corpus.fingerprint


def test_the_names_decide_who_is_held_out(tmp_path):
    write(tmp_path / "a", FILES)
    write(tmp_path / "b", {name: content + b"!" for name, content in FILES.items()})
    first, second = (files_of(data.folder(tmp_path / name).validation) for name in "ab")
    assert {content + b"!" for content in first} == second


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "data holds no text, but at least two different ones are needed"),
        ({"a.txt": b"", ".hidden": b"text"}, "data holds no text"),
        ({"a.txt": b"one"}, "data holds one text file only"),
        ({"a.txt": b"one", "b.bin": b"12\x00"}, r"data/b.bin is no text: byte 2 is 0x00"),
        ({"a.txt": b"one", "in/b.bin": b"1\xff2"}, r"data/in/b.bin is no text: byte 1 is 0xff"),
    ],
)
def test_a_folder_without_text_names_what_is_wrong(files, message, tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", files)
    with pytest.raises(ValueError, match=message):
        data.folder(tmp_path / "data")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is no folder"):
        data.folder(tmp_path / "nowhere")


def test_a_text_shorter_than_a_window_is_refused():
    short = data.Corpus(torch.zeros(17, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8))
    with pytest.raises(
        ValueError, match="the validation text has 16 bytes, but a window of 16 and its next byte need 17"
    ):
        trainer(corpus=short)


def test_the_standard_library_is_documentation_and_sources():
    corpus, help_ = data.standard_library(), data.python_help()
    for part, topics in ((corpus.training, help_.training), (corpus.validation, help_.validation)):
        assert torch.equal(part[: len(topics)], topics)
        assert part[len(topics) :].numpy().tobytes().count(b"\ndef ") > 100
    assert len(corpus.training) > 2_000_000 and len(corpus.validation) > 100_000


# The command


def moeblaze(*arguments):
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", *map(str, arguments)])


@pytest.fixture
def texts(tmp_path):
    write(tmp_path / "texts", {name: content * 400 for name, content in FILES.items()})
    return tmp_path / "texts"


def test_the_command_trains_and_goes_on(tmp_path, texts):
    train = ("--layer", "oracle", "--steps", 2, "--device", "cpu", "--data", texts, "--out", tmp_path / "run")
    done = moeblaze(*train)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2] and lines[1]["tokens_per_second"] > 0
    assert (
        f"2 steps: validation loss {lines[0]['validation_loss']:.3f} -> {lines[-1]['validation_loss']:.3f}"
        in done.stdout
    )
    again = moeblaze(*train)
    assert again.exit_code == 2 and "holds a run already" in again.output
    assert moeblaze(*train, "--resume").exit_code == 0
    assert len((tmp_path / "run" / LOG).read_text().splitlines()) == 4


def test_the_command_stops_at_a_loss_that_is_not_finite(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(command, "Trainer", lambda *arguments: spoiled(Trainer(*arguments)))

    def spoiled(training):
        nn.init.constant_(training.model.embedding.weight, math.nan)
        return training

    done = moeblaze("--layer", "oracle", "--device", "cpu", "--data", texts, "--out", tmp_path / "run")
    assert done.exit_code == 1 and "error: step 0" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--preset", "tny"), "Did you mean 'tiny'"),
        (("--layer", "megablock"), "Did you mean 'megablocks'"),
        (
            ("--layer", "oracle", "--policy", "paper"),
            "policy is an option of the layer moeblaze, but the layer is oracle",
        ),
        (("--policy", "papper"), "Did you mean 'paper'"),
        (("--layer", "capacity", "--capacity-factor", "0"), "capacity_factor"),
        (("--steps", "-1"), "steps is -1, but it must be >= 0"),
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--data", "/nowhere"), "/nowhere is no folder"),
    ],
)
def test_the_command_says_what_is_allowed_and_writes_nothing(arguments, message, tmp_path, texts):
    known = ("--data", texts) if "--data" not in arguments else ()
    done = moeblaze(
        "--out", tmp_path / "run", *known, *(() if "--device" in arguments else ("--device", "cpu")), *arguments
    )
    assert done.exit_code == 2 and message in done.output, done.output
    assert not (tmp_path / "run").exists()


def test_the_names_that_the_command_lists_are_all_there_are():
    assert lm.PRESETS.keys() == presets.SETTINGS.keys() and set(lm.LAYERS) == SYSTEMS.keys()
    small = presets.preset("lm-small").config
    assert (small.layers, small.E, small.k, small.d) == (8, 16, 2, 512)


def test_a_policy_reaches_the_layer():
    settings = command.settings("tiny", "moeblaze", {"policy": "inputs", "capacity_factor": None}, {"seed": 3})
    assert settings.layer_options == {"policy": "inputs"} and settings.seed == 3
    model = trainer(replace(settings, config=CONFIG)).model
    assert [block.moe.policy for block in model.blocks] == ["inputs", "inputs"]
