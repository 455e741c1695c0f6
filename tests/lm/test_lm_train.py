"""Training that outlives a kill: settings, exact resume, checkpoints, the log, its data, and the command."""

import json
import math
import re
import signal
import sys
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import processes
import pytest
import small_lm
import torch
from helpers import files_of_at_most
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_lm import CONFIG, moeblaze
from torch import nn

from moeblaze_ref import lm
from moeblaze_ref.core import records
from moeblaze_ref.lm import checkpoint, command, data, finite, log, presets
from moeblaze_ref.lm.checkpoint import CheckpointError
from moeblaze_ref.lm.model import MoETransformer
from moeblaze_ref.lm.run import CHECKPOINT, LOCK, LOG, run
from moeblaze_ref.lm.train import NonFinite, Trainer, TrainSettings
from moeblaze_ref.nn.systems import SYSTEMS

SETTINGS = replace(small_lm.SETTINGS, warmup=2, final_fraction=0.1)
EVERY = 3  # steps from one checkpoint to the next: 3, 6, 7

pytestmark = pytest.mark.usefixtures("one_thread")  # as in the processes that are killed: sums depend on it


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
        ({"learning_rate": "1"}, TypeError, "learning_rate is '1' .str., but it must be a number"),
        ({"order_seed": 2**63}, ValueError, "order_seed is 9223372036854775808, but it must be 0.."),
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
sys.path[:0] = {tests!r}
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
    folder, script = tmp_path / "run", KILLED.format(tests=[str(folder) for folder in Path(__file__).parents[:2]])
    killed = processes.run([sys.executable, "-c", script, moment, folder])
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


def test_lines_are_appended_and_never_written_again(tmp_path):
    lines = log.Log(tmp_path / LOG, [{"step": 0}])
    before = (tmp_path / LOG).stat().st_ino
    lines.add({"step": 1, "loss": 2.0}, {"step": 1, "validation_loss": 3.0})
    with (tmp_path / LOG).open("a") as file:
        file.write('{"step": 2, "loss": 1.0}\n')
    lines.add({"step": 3})
    assert (tmp_path / LOG).stat().st_ino == before
    assert [line["step"] for line in log.read(tmp_path / LOG)] == [0, 1, 1, 2, 3]


def test_a_log_that_a_full_disk_cuts_is_named(tmp_path):
    lines = log.Log(tmp_path / LOG, [{"step": 0}])
    with files_of_at_most(40), pytest.raises(OSError, match="log.jsonl cannot be written: .*too large"):
        lines.add({"step": 1, "loss": 2.0, "learning_rate": 0.001})
    assert log.read(tmp_path / LOG) == [{"step": 0}]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("", ValueError, "holds no whole line"),
        ('{"loss": 1}\n', ValueError, "line 1 has no step"),
        ('{"step": 0}\n[]\n', ValueError, "line 2 is not a JSON object"),
        ('{"step": 1}\nnothing\n{"step": 3}\n', ValueError, "line 2 is not JSON"),
        pytest.param('{"step": 0}\n' + "[" * 100_000 + "\n", ValueError, "line 2 is not JSON", id="nested too deep"),
        ('{"step": "x"}\n', TypeError, "line 1: step is 'x'"),
        ('{"step": 1, "loss": 2}\n{"step": 3, "loss": 2}\n', ValueError, "loss of step 3 where that of step 2 must be"),
    ],
)
def test_a_log_that_is_none_says_why(text, error, message, tmp_path):
    (tmp_path / LOG).write_text(text)
    with pytest.raises(error, match=f"log.jsonl.* {message}|log.jsonl, {message}"):
        log.read(tmp_path / LOG)


def test_the_log_is_on_the_disk_before_the_checkpoint_that_relies_on_it(tmp_path, monkeypatch):
    done = []
    to_disk, save = records.to_disk, checkpoint.save
    monkeypatch.setattr(records, "to_disk", lambda path: done.append(path.name) or to_disk(path))
    monkeypatch.setattr(checkpoint, "save", lambda *run: done.append("save") or save(*run))
    train_in(tmp_path)
    assert done.count("save") == 3
    assert all(done[number - 1] == LOG for number, what in enumerate(done) if what == "save")


def test_the_speed_is_of_all_tokens_of_the_step(tmp_path, monkeypatch):
    clock = iter([10.0, 12.0])
    monkeypatch.setattr("moeblaze_ref.lm.run.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    lines = train_in(tmp_path, replace(SETTINGS, steps=1))
    assert lines[1]["tokens_per_second"] == SETTINGS.batch * CONFIG.sequence / 2


def test_the_dropped_share_is_of_the_rows_of_all_layers(tmp_path):
    training = trainer(replace(SETTINGS, steps=1, layer="capacity", layer_options={"capacity_factor": 1.0}))
    slots = lambda: [block.moe.dropped_slots for block in training.model.blocks]
    dropped = []
    training.validate = lambda batches: dropped.append([int(n) for n in slots() if n is not None]) or 0.0
    lines = run(training, tmp_path)
    first, second = dropped[-1]  # what the step left there
    assert first != second
    assert lines[1]["dropped_share"] == (first + second) / (2 * SETTINGS.batch * CONFIG.sequence * CONFIG.k)


def test_a_run_of_no_steps_has_a_checkpoint_too(tmp_path):
    lines = train_in(tmp_path, replace(SETTINGS, steps=0))
    assert [line["step"] for line in lines] == [0] and checkpoint.step_of(tmp_path / CHECKPOINT) == 0
    assert train_in(tmp_path, replace(SETTINGS, steps=0), resume=True) == lines


def test_two_processes_do_not_train_in_one_folder(tmp_path):
    refused = []

    def second(line):
        with pytest.raises(ValueError, match="another process trains in .*: wait for it") as error:
            train_in(tmp_path, resume=True)
        refused.append(error)

    train_in(tmp_path, on_line=second)
    assert len(refused) >= SETTINGS.steps


def test_a_file_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="run is a file, but a run needs a folder"):
        train_in(tmp_path / "run")


def test_a_layer_that_cannot_run_leaves_no_log(tmp_path):
    with pytest.raises(ValueError, match="lower the capacity factor"):
        train_in(tmp_path, replace(SETTINGS, layer="capacity", layer_options={"capacity_factor": 1e300}))
    train_in(tmp_path, replace(SETTINGS, steps=1))


# Checkpoints and logs that are refused


@pytest.fixture
def folder(tmp_path):
    train_in(tmp_path, replace(SETTINGS, steps=2))
    return tmp_path


@contextmanager
def refused(folder, error, message):
    """This error is raised, and every file of the folder stays as it is."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error, match=message):
        yield
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_with_a_run_is_not_overwritten(folder):
    with refused(folder, ValueError, "holds a run already .checkpoint.safetensors, log.jsonl.: resume it"):
        train_in(folder, replace(SETTINGS, steps=2))


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
    with refused(folder, CheckpointError, message):
        train_in(folder, replace(SETTINGS, **{"steps": 2, **changes}), resume=True)


def test_a_checkpoint_of_another_text_is_refused(folder):
    its = data.python_help()
    other = data.Corpus(its.training[1:], its.validation)
    message = f"its text is '{its.fingerprint}', but here it is '{other.fingerprint}'"
    with refused(folder, CheckpointError, message):
        run(trainer(replace(SETTINGS, steps=2), other), folder, resume=True)


LOSSES = "does not have the losses of the 2 steps"
LOGS = {  # what becomes of the lines, None of a lost file, and what is said of it
    "lost": (None, "No such file or directory: .*log.jsonl"),
    "cut": (lambda first, *rest: [first, *rest[:1]], f"{LOSSES} that the checkpoint has done"),
    "changed": (lambda first, step, *rest: [first, step.replace('"loss": ', '"loss": 1'), *rest], LOSSES),
    "with a hole": (lambda first, step, *rest: [first, *rest], "has the loss of step 2 where that of step 1 must be"),
    "of another run": (lambda *lines: ['{"step": 0, "run": "0123"}\n'], "is of the run 0123, but here it is"),
}


@pytest.mark.parametrize("how", LOGS)
def test_a_log_that_is_not_the_checkpoints_is_refused_and_kept(how, folder):
    change, message = LOGS[how]
    lines = (folder / LOG).read_text().splitlines(keepends=True)
    (folder / LOG).unlink()
    if change is not None:
        (folder / LOG).write_text("".join(change(*lines)))
    with refused(folder, (ValueError, OSError), message):
        train_in(folder, replace(SETTINGS, steps=2), resume=True)


def test_a_foreign_log_without_a_checkpoint_is_refused_and_kept(folder):
    (folder / CHECKPOINT).unlink()
    with refused(folder, ValueError, "log.jsonl is of the run .*: name another folder"):
        train_in(folder, replace(SETTINGS, steps=3), resume=True)
    train_in(folder, replace(SETTINGS, steps=2), resume=True)


def spoil_by(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def spoil_header(**metadata):
    return lambda path: save_file(load_file(path), path, metadata)


def spoil_fields(**fields):
    """Fields of the header that no training run writes; the digest is then wrong too, but they come first."""

    def spoil(path):
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[checkpoint.HEADER]) | fields
        text = json.dumps({name: value for name, value in header.items() if value is not None})
        spoil_header(**{checkpoint.HEADER: text})(path)

    return spoil


def spoil_tensors(change):
    """Tensors that another program may have saved, with a digest that fits them."""

    def spoil(path):
        training = trainer(replace(SETTINGS, steps=2))
        training.advance(), training.advance()
        tensors = {name: tensor.clone() for name, tensor in training.tensors().items()}
        change(tensors)
        training.tensors = lambda: tensors
        checkpoint.save(path, training)

    return spoil


MOMENT = "optimizer.blocks.1.moe.w1.exp_avg"
HEAD = "model.head.weight"


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


DAMAGED = {
    f"{HEAD} is float32 (2, 3), but it must be float32 (256, 16)": put(HEAD, torch.zeros(2, 3)),
    f"{HEAD} is float16 (256, 16), but it must be float32": put(HEAD, torch.zeros(256, 16).half()),
    f"{HEAD} holds NaN or infinity": lambda tensors: tensors[HEAD][3].fill_(math.nan),
    f"{MOMENT} is absent, but it must be float32 (4, 16, 16)": lambda tensors: tensors.pop(MOMENT),
    f"{MOMENT} is float32 (16,)": put(MOMENT, torch.zeros(16)),
    "losses is absent": lambda tensors: tensors.pop("losses"),
    "losses is float64 (1,), but it must be float64 (2,)": put("losses", torch.zeros(1, dtype=torch.float64)),
    "windows is absent": lambda tensors: tensors.pop("windows"),
    "more is float32 (2,), but it must be absent": put("more", torch.zeros(2)),
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (spoil_by(lambda content: content[:-1]), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: content[:50]), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: b""), "is truncated, or no checkpoint"),
        (spoil_by(lambda content: b"hello, world" * 50), "is truncated, or no checkpoint"),
        (spoil_header(), "no training run of this project wrote it"),
        (spoil_header(moeblaze_ref="{"), "is damaged: its header is not JSON: Expecting"),
        (spoil_header(moeblaze_ref="[]"), "is damaged: its header is not a JSON object"),
        (spoil_fields(format=None), "is damaged: its header has no format"),
        (spoil_fields(format=1), "is of format 1, but this version reads format 2"),
        (spoil_fields(settings=None, digest=None), "is damaged: its header has no digest, settings"),
        (spoil_fields(steps=1), "is damaged: what it holds does not have the digest"),
        *((spoil_tensors(change), re.escape(message)) for message, change in DAMAGED.items()),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_kept(spoil, message, folder):
    spoil(folder / CHECKPOINT)
    training = trainer(replace(SETTINGS, steps=2))
    untouched = {name: tensor.clone() for name, tensor in training.tensors().items()}
    with refused(folder, CheckpointError, message):
        run(training, folder, resume=True)
    assert training.tensors().keys() == untouched.keys()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in training.tensors().items())


def test_a_checkpoint_with_a_flipped_bit_is_refused(folder):
    whole, fresh = (folder / CHECKPOINT).read_bytes(), trainer(replace(SETTINGS, steps=2))
    length = 8 + int.from_bytes(whole[:8], "little")  # of all that comes before the tensors
    random = Random(0)
    places = [random.randrange(length) for _ in range(60)] + [random.randrange(length, len(whole)) for _ in range(20)]
    for place in places:
        flipped = bytearray(whole)
        flipped[place] ^= 1 << random.randrange(8)
        (folder / CHECKPOINT).write_bytes(flipped)
        with pytest.raises(CheckpointError, match="checkpoint.safetensors"):
            checkpoint.load(folder / CHECKPOINT, fresh)
        with pytest.raises(CheckpointError, match="checkpoint.safetensors"):
            checkpoint.load_model(folder / CHECKPOINT)


def test_a_field_that_only_the_checkpoint_has_is_compared(tmp_path):
    settings = replace(SETTINGS, steps=1, layer="capacity", layer_options={"capacity_factor": 2.0})
    train_in(tmp_path, settings)
    message = "its settings.layer_options.capacity_factor is 2.0, but here it is 'absent'"
    with pytest.raises(CheckpointError, match=message):
        train_in(tmp_path, replace(settings, layer_options={}), resume=True)


def test_a_model_of_settings_that_are_unknown_here_is_refused(tmp_path, monkeypatch):
    fields = asdict(SETTINGS) | {"momentum": 0.9}
    monkeypatch.setattr(checkpoint, "asdict", lambda settings: fields)
    checkpoint.save(tmp_path / CHECKPOINT, trainer())
    with pytest.raises(CheckpointError, match="has settings that this version does not know: .*momentum"):
        checkpoint.load_model(tmp_path / CHECKPOINT)


@pytest.mark.parametrize("message, change", [item for item in DAMAGED.items() if item[0].startswith("model.")])
def test_a_model_of_damaged_weights_is_refused(message, change, tmp_path):
    spoil_tensors(change)(tmp_path / CHECKPOINT)
    with pytest.raises(CheckpointError, match=re.escape(message)):
        checkpoint.load_model(tmp_path / CHECKPOINT)


def test_a_folder_is_no_checkpoint(tmp_path):
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        checkpoint.step_of(tmp_path)


def test_a_checkpoint_that_may_not_be_read_says_so(folder, monkeypatch):
    def guarded(path, *_):
        raise PermissionError(f"[Errno 13] Permission denied: '{path}'")

    monkeypatch.setattr(Path, "open", guarded)
    with pytest.raises(PermissionError, match=CHECKPOINT):
        checkpoint.step_of(folder / CHECKPOINT)


def test_a_full_disk_leaves_the_checkpoint_of_before(folder):
    with files_of_at_most(10_000), refused(folder, OSError, "checkpoint.safetensors cannot be written: .*too large"):
        checkpoint.save(folder / CHECKPOINT, trainer())


def test_the_steps_of_a_checkpoint_are_read_without_its_tensors(folder):
    whole = (folder / CHECKPOINT).read_bytes()
    (folder / CHECKPOINT).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert checkpoint.step_of(folder / CHECKPOINT) == 2


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
    options = {"block": 8} if layer.startswith("megablocks") else {}
    spoiled = Spoiled(replace(SETTINGS, layer=layer, layer_options=options), data.python_help())
    message = "step 5: loss nan, .* the activations of blocks.1.moe are the first .*checkpoint.safetensors keeps step 3"
    with pytest.raises(NonFinite, match=message):
        run(spoiled, tmp_path, every=EVERY, validation_batches=1)
    assert all(torch.isfinite(tensor).all() for tensor in load_file(tmp_path / CHECKPOINT).values())
    assert [line["step"] for line in log.read(tmp_path / LOG) if "loss" in line] == [1, 2, 3, 4]


def test_a_run_that_fails_at_once_has_kept_nothing(tmp_path):
    training = trainer()
    nn.init.constant_(training.model.embedding.weight, math.inf)
    message = "loss after it is nan; the activations of embedding are .*No checkpoint was written"
    with pytest.raises(NonFinite, match=message):
        run(training, tmp_path)


def test_a_weight_that_is_not_finite_replaces_no_checkpoint(tmp_path):
    """Validation is rarer here than checkpoints, and no step comes between the weight and the checkpoint."""
    training = trainer()
    advance = training.advance

    def spoiled():
        done = advance()
        if training.step == 4:
            with torch.no_grad():
                training.model.blocks[1].moe.w1[0, 0, 0] = math.inf
        return done

    training.advance = spoiled
    with pytest.raises(NonFinite, match="step 4: blocks.1.moe.w1 holds NaN or infinity after it. .* keeps step 2"):
        run(training, tmp_path, every=20, validation_batches=1, checkpoint_every=2)
    checkpoint.load(tmp_path / CHECKPOINT, trainer())


def test_validation_that_is_not_finite_names_the_module():
    training = trainer()
    nn.init.constant_(training.model.blocks[1].moe.w3, 3e38)
    message = "step 0: the validation loss after it is .*; the activations of blocks.1.moe are"
    with pytest.raises(NonFinite, match=message):
        training.validate(2)


def test_the_search_for_what_is_not_finite_goes_by_the_replayed_choice():
    """Of logits v, -v, v / 2, -v / 2 two are above 0, whatever v: the router itself never chooses expert 0."""
    training = trainer(replace(SETTINGS, config=replace(CONFIG, E=5)))
    with torch.no_grad():
        layer = training.model.blocks[1].moe
        layer.wg.copy_(layer.wg[:, :1] * torch.tensor([0.0, 1.0, -1.0, 0.5, -0.5]))
        layer.w3[0].fill_(math.nan)
    assert math.isfinite(training.validate())
    shape = (SETTINGS.batch * CONFIG.sequence, CONFIG.k)
    replayed = [torch.tensor([[0, 1]], dtype=torch.int32).expand(shape).contiguous()] * CONFIG.layers
    with pytest.raises(NonFinite, match="the activations of blocks.1.moe are the first"):
        training.advance(replayed)


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
        ({"a.txt": b"one", "b.bin": b"12\x00"}, r"data/b.bin is not text: byte 2 is 0x00"),
        ({"a.txt": b"one", "in/b.bin": b"1\xff2"}, r"data/in/b.bin is not text: byte 1 is 0xff"),
    ],
)
def test_a_folder_without_text_names_what_is_wrong(files, message, tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", files)
    with pytest.raises(ValueError, match=message):
        data.folder(tmp_path / "data")


def test_a_folder_that_may_not_be_read_is_not_left_out(tmp_path, monkeypatch):
    write(tmp_path, FILES)
    listed = Path.iterdir

    def guarded(path):
        if path.name == "part2":
            raise PermissionError(f"[Errno 13] Permission denied: '{path}'")
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    with pytest.raises(PermissionError, match="part2"):
        data.folder(tmp_path)


def test_the_fingerprint_is_of_both_texts():
    first, second = (torch.full((5,), value, dtype=torch.uint8) for value in (1, 2))
    texts = [data.Corpus(a, b).fingerprint for a in (first, second) for b in (first, second)]
    assert len(set(texts)) == 4


def test_what_the_making_of_python_wrote_and_copies_of_the_topics_are_no_sources(tmp_path):
    kept = {"os.py", "json/decoder.py", "configparser.py"}
    left_out = {
        *("_sysconfigdata__linux_x86_64-linux-gnu.py", "config-3.11-x86_64-linux-gnu/python-config.py"),
        *("pydoc_data/topics.py", "encodings/cp037.py", "site-packages/numpy/core.py", "os.txt"),
    }
    write(tmp_path, dict.fromkeys(kept | left_out, b"text"))
    assert {path.relative_to(tmp_path).as_posix() for path in data._sources(tmp_path)} == kept


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere is not a folder"):
        data.folder(tmp_path / "nowhere")


def test_a_text_shorter_than_a_window_is_refused():
    short = data.Corpus(torch.zeros(17, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8))
    message = "the validation text has 16 bytes, but a window of 16 and its next byte need 17"
    with pytest.raises(ValueError, match=message):
        trainer(corpus=short)


def test_the_standard_library_is_documentation_and_sources():
    corpus, help_ = data.standard_library(), data.python_help()
    for part, topics in ((corpus.training, help_.training), (corpus.validation, help_.validation)):
        assert torch.equal(part[: len(topics)], topics)
        assert part[len(topics) :].numpy().tobytes().count(b"\ndef ") > 100
        assert b"Autogenerated by Sphinx" not in part.numpy().tobytes()  # the topics once more, in pydoc_data
    assert len(corpus.training) > 2_000_000 and len(corpus.validation) > 100_000


# The command


def test_the_command_trains_and_goes_on(tmp_path, texts):
    train = ("--layer", "oracle", "--steps", 2, "--device", "cpu", "--data", texts, "--out", tmp_path / "run")
    done = moeblaze("train", *train)
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in (tmp_path / "run" / LOG).read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2, 2] and lines[1]["tokens_per_second"] > 0
    assert (
        f"2 steps: validation loss {lines[0]['validation_loss']:.3f} -> {lines[-1]['validation_loss']:.3f}"
        in done.stdout
    )
    again = moeblaze("train", *train)
    assert again.exit_code == 2 and "holds a run already" in again.output
    assert moeblaze("train", *train, "--resume").exit_code == 0
    assert len((tmp_path / "run" / LOG).read_text().splitlines()) == 4


def test_the_command_stops_at_a_loss_that_is_not_finite(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(command, "Trainer", lambda *arguments: spoiled(Trainer(*arguments)))

    def spoiled(training):
        nn.init.constant_(training.model.embedding.weight, math.nan)
        return training

    done = moeblaze("train", "--layer", "oracle", "--device", "cpu", "--data", texts, "--out", tmp_path / "run")
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
        (("--seed", str(10**22)), f"seed is {10**22}, but it must be 0..{2**63 - 1}"),
        (("--device", "gpu"), "unknown device 'gpu'"),
        (("--data", "/nowhere"), "/nowhere is not a folder"),
    ],
)
def test_the_command_says_what_is_allowed_and_writes_nothing(arguments, message, tmp_path, texts):
    known = ("--data", texts) if "--data" not in arguments else ()
    device = () if "--device" in arguments else ("--device", "cpu")
    done = moeblaze("train", "--out", tmp_path / "run", *known, *device, *arguments)
    assert done.exit_code == 2 and message in done.output, done.output
    assert not (tmp_path / "run").exists()


def test_the_names_that_the_command_lists_are_all_there_are():
    assert lm.PRESETS.keys() == presets.SETTINGS.keys() and set(lm.LAYERS) == SYSTEMS.keys()


def test_a_policy_reaches_the_layer():
    settings = command.settings("tiny", "moeblaze", {"policy": "inputs", "capacity_factor": None}, {"seed": 3})
    assert settings.layer_options == {"policy": "inputs"} and settings.seed == 3
    model = trainer(replace(settings, config=CONFIG)).model
    assert [block.moe.policy for block in model.blocks] == ["inputs", "inputs"]


def test_an_option_that_is_the_layers_default_is_the_same_run():
    chosen = {"policy": "minimal", "capacity_factor": None}, {"policy": None, "capacity_factor": None}
    asked, default = (command.settings("tiny", "moeblaze", options, {}) for options in chosen)
    assert asked == default


def test_ctrl_c_says_how_to_go_on(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(command, "run", Mock(side_effect=KeyboardInterrupt))
    done = moeblaze("train", "--layer", "oracle", "--device", "cpu", "--data", texts, "--out", tmp_path / "run")
    assert done.exit_code == 130 and "--resume goes on from the last checkpoint" in done.output
