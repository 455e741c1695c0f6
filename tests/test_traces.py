"""Routing traces: what a trained model's routers chose, the file of it, and what its reader refuses."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from moeblaze_ref import traces
from moeblaze_ref.cli import app
from moeblaze_ref.lm import checkpoint, data, tracing
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.presets import preset
from moeblaze_ref.lm.train import Trainer, TrainSettings, capture

SETTINGS = TrainSettings(LMConfig(d=16, h=16, E=5, k=2, layers=3, heads=2, sequence=8), steps=2, batch=2)
TEXTS = {
    "digits": torch.frombuffer(bytearray(b"0123456789" * 10), dtype=torch.uint8),
    "letters": torch.frombuffer(bytearray(b"abcdefgh" * 3), dtype=torch.uint8),
}


@pytest.fixture(scope="module")
def trainer():
    found = Trainer(SETTINGS, data.python_help())
    while found.step < SETTINGS.steps:
        found.advance()
    return found


def traced(trainer, tokens=40, **changes):
    return tracing.trace(trainer.model, replace(SETTINGS, **changes), TEXTS, {"model": "small"}, tokens)


# What is traced


def test_a_trace_is_what_the_model_chose_for_the_bytes_that_it_names(trainer):
    found = traced(trainer)
    assert found.topk.shape == (64, 3, 2) and found.topk.dtype == np.int16
    for sequence in np.unique(found.seq):
        own = found.seq == sequence
        tokens = torch.from_numpy(found.token[own].astype(np.int64))[None]
        for layer, seen in enumerate(capture(trainer.model, tokens)):
            assert np.array_equal(found.topk[own, layer], seen.topk_experts)
    assert len(np.unique(found.topk[:, 0], axis=0)) > 1


def test_windows_of_each_kind_are_whole_and_spread_over_its_text(trainer):
    found = traced(trainer, tokens=40)
    windows = found.token.reshape(-1, 8)
    assert found.seq_kind.tolist() == ["digits"] * 5 + ["letters"] * 3
    starts = [bytes(window).decode() for window in windows]
    text = "0123456789" * 10
    assert starts[:5] == [text[8 * at :][:8] for at in (0, 2, 4, 7, 9)]
    assert starts[5:] == ["abcdefgh"] * 3
    assert found.pos.tolist() == list(range(8)) * 8
    assert traced(trainer, tokens=15).tokens == 16


def test_batches_do_not_show(trainer):
    few, many = (traced(trainer, batch=batch) for batch in (1, 64))
    assert np.array_equal(few.topk, many.topk)


def test_a_text_shorter_than_a_window_is_named(trainer):
    with pytest.raises(ValueError, match="the text note has 3 bytes, but a window of the model has 8"):
        tracing.trace(trainer.model, SETTINGS, {"note": TEXTS["letters"][:3]}, {})
    with pytest.raises(ValueError, match="tokens is 7, but it must be >= 8"):
        traced(trainer, tokens=7)


def test_the_three_kinds_were_no_training_text():
    training = bytes(data.standard_library().training.numpy())
    kinds = data.held_out_kinds()
    assert list(kinds) == ["prose", "code", "tables"]
    for text in kinds.values():
        content = bytes(text.numpy())
        windows = [content[at : at + 200] for at in range(0, len(content) - 200, len(content) // 50)]
        # A licence or a line of dashes may stand in files of both parts.
        assert sum(window in training for window in windows) <= len(windows) // 10
    assert b"decoding_table" in bytes(kinds["tables"].numpy())
    assert min(map(len, kinds.values())) > 31_000


# The file


def test_a_trace_comes_back_from_its_file_as_it_was(trainer, tmp_path):
    found = traced(trainer)
    traces.save(tmp_path / "trace.npz", found)
    again = traces.load(tmp_path / "trace.npz")
    for name in traces.ARRAYS:
        assert np.array_equal(getattr(again, name), getattr(found, name)) and getattr(found, name) is not None
    assert again.info == {"experts": 5, "model": "small"}
    assert (again.num_experts, again.model) == (5, "small")


def test_bytes_and_kinds_may_be_missing_and_unknown_arrays_are_left_out(trainer, tmp_path):
    found = replace(traced(trainer), token=None, seq_kind=None)
    path = tmp_path / "trace.npz"
    np.savez(path, topk=found.topk, seq=found.seq, pos=found.pos, num_experts=5, more=np.ones(3))
    again = traces.load(path)
    assert again.token is None and again.seq_kind is None
    assert np.array_equal(again.topk, found.topk)


def corrupted(name, at, value):
    def corrupt(arrays):
        arrays[name] = arrays[name].copy()
        arrays[name][at] = value

    return corrupt


def without(name):
    return lambda arrays: arrays.pop(name)


def replaced(name, change):
    return lambda arrays: arrays.update({name: change(arrays[name])})


@pytest.mark.parametrize(
    "corrupt, error, message",
    [
        (corrupted("topk", (9, 1, 0), 5), ValueError, "topk[9, 1, 0] is 5, but there are only 5 experts"),
        (corrupted("topk", (0, 2, 1), -1), ValueError, "topk[0, 2, 1] is -1"),
        (corrupted("topk", (63, 2), [3, 3]), ValueError, "topk[63, 2] names expert 3 twice"),
        (corrupted("topk", (slice(None), 1), -1), ValueError, "topk[:, 1] names no expert at all"),
        (corrupted("seq", 17, 0), ValueError, "seq[17] is 0 again, but the tokens of a sequence must stand together"),
        (corrupted("seq", slice(8, 16), 8), ValueError, "seq[8] is 8, but there are only 8 sequences in seq_kind"),
        (corrupted("pos", 12, 3), ValueError, "pos[12] is 3 after 3, but positions must rise in a sequence"),
        (replaced("topk", lambda a: a.astype(float)), TypeError, "topk has dtype float64, but it must be int8"),
        (replaced("topk", lambda a: a[:, 0]), ValueError, "topk has shape (64, 2), but it must have 3 dimensions"),
        (replaced("seq", lambda a: a[:-1]), ValueError, "seq has shape (63,), but it must be (tokens=64)"),
        (replaced("token", lambda a: a[1:]), ValueError, "token has shape (63,), but it must be (tokens=64)"),
        (replaced("seq_kind", lambda a: a[1:]), ValueError, "seq[56] is 7, but there are only 7 sequences in seq_kind"),
        (replaced("seq_kind", lambda a: np.arange(8)), TypeError, "seq_kind has dtype int64, but it must be text"),
        (replaced("info", lambda a: "[]"), ValueError, "info is [], but it must be a JSON object"),
        (replaced("info", lambda a: '{"experts": 5.5}'), TypeError, "num_experts is 5.5"),
        (replaced("info", lambda a: "{"), ValueError, "trace.npz: "),
        (without("topk"), ValueError, "has no topk"),
        (without("seq"), ValueError, "seq_kind says what each sequence is, but there is no seq"),
    ],
)
def test_a_corrupted_file_is_named_with_the_element(trainer, tmp_path, corrupt, error, message):
    found = traced(trainer)
    arrays = {name: getattr(found, name) for name in traces.ARRAYS} | {"info": '{"experts": 5}'}
    corrupt(arrays)
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)
    with pytest.raises(error, match=re.escape(message)) as seen:
        traces.load(path)
    assert str(seen.value).startswith(path.name)


@pytest.mark.parametrize("kept", [0, 100, -30])
def test_a_truncated_file_is_named(trainer, tmp_path, kept):
    path = tmp_path / "trace.npz"
    traces.save(path, traced(trainer))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"^{path.name} is truncated, or no npz of plain arrays"):
        traces.load(path)


def test_a_single_array_is_no_trace(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(ValueError, match="one.npy is truncated, or no npz of plain arrays"):
        traces.load(tmp_path / "one.npy")


# The command


def test_the_command_writes_the_trace_of_a_checkpoint(trainer, tmp_path):
    saved, out, folder = tmp_path / "checkpoint.safetensors", tmp_path / "deep" / "trace.npz", tmp_path / "notes"
    checkpoint.save(saved, trainer)
    folder.mkdir()
    for name in ("one.txt", "two.txt"):
        (folder / name).write_text(f"some words of {name}, and more of them")
    ran = CliRunner().invoke(app, ["trace", "--checkpoint", str(saved), "--out", str(out), "--data", str(folder)])
    assert ran.exit_code == 0, ran.output
    assert "32 tokens (32 of notes), 3 layers, 2 of 5 experts each" in ran.output
    found = traces.load(out)
    assert found.info["steps"] == 2 and found.info["config"]["sequence"] == 8
    assert set(found.info) >= {"experts", "model", "layer", "precision", "text", "python", "commit"}
    assert re.fullmatch("byte-lm-[0-9a-f]{16}", found.model)
    expected = tracing.trace(trainer.model, SETTINGS, {"notes": data.folder(folder).validation}, found.info)
    assert np.array_equal(found.topk, expected.topk)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"--checkpoint": "missing"}, "there is no checkpoint missing"),
        ({"--tokens": "3"}, "tokens is 3, but it must be >= 8"),
        ({"--device": "tpu"}, "device"),
        ({"--out": "."}, "is a folder, but a file is to be written"),
        ({"--data": "missing"}, "missing is no folder"),
    ],
)
def test_bad_input_to_the_command_is_named(trainer, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    checkpoint.save(Path("checkpoint.safetensors"), trainer)
    given = {"--checkpoint": "checkpoint.safetensors", "--out": "trace.npz"} | arguments
    ran = CliRunner().invoke(app, ["trace", *(word for pair in given.items() for word in pair)])
    assert ran.exit_code == 2 and message in " ".join(ran.output.split()), ran.output
    assert not Path("trace.npz").exists()


# The trace that the project publishes

RESULTS = Path(__file__).parents[1] / "docs" / "results"
CURVES = RESULTS / "train_curves_h200.json"


def test_the_published_trace_is_of_three_kinds_of_text_and_of_the_published_run():
    path = RESULTS / "trace_lm_small_h200.npz"
    assert path.stat().st_size < 3 * 2**20
    found = traces.load(path)
    config = preset("lm-small").config
    assert found.info["config"] == asdict(config) and found.info["steps"] == preset("lm-small").steps
    assert found.topk.shape == (len(found.seq_kind) * config.sequence, config.layers, config.k)
    assert found.tokens >= 100_000 and found.num_experts == config.E
    assert found.info["commit"] == json.loads(CURVES.read_text())["commit"]
    assert list(dict.fromkeys(found.seq_kind.tolist())) == ["prose", "code", "tables"]
    text = found.token.tobytes()
    assert b"def " in text and b"decoding_table" in text
    used = [len(np.unique(found.topk[:, layer])) for layer in range(config.layers)]
    assert used == [config.E] * config.layers
