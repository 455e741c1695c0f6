"""Routing traces: what a trained model's routers chose, the file of it, and what its reader refuses."""

import hashlib
import json
import re
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from helpers import files_of_at_most
from typer.testing import CliRunner

from moeblaze_ref.cli.app import app
from moeblaze_ref.core import traces
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.lm import checkpoint, command, data, tracing
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


def test_the_model_computes_in_the_precision_that_it_was_trained_in(trainer):
    dtypes = []
    hook = trainer.model.head.register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    traced(trainer), traced(trainer, precision="bfloat16")
    hook.remove()
    assert set(dtypes[: len(dtypes) // 2]) == {torch.float32} and set(dtypes[len(dtypes) // 2 :]) == {torch.bfloat16}


def test_the_tokens_that_a_mask_chooses_keep_all_that_is_theirs(trainer):
    found = traced(trainer)
    kept = found.of(found.seq >= 5)
    assert kept.tokens == 24 and set(kept.seq.tolist()) == {5, 6, 7}
    for name in ("topk", "pos", "token"):
        assert np.array_equal(getattr(kept, name), getattr(found, name)[40:])
    assert kept.seq_kind is found.seq_kind and kept.model == "small"


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


def test_the_number_of_experts_is_the_traces_whatever_its_info_says(trainer, tmp_path):
    found = replace(traced(trainer), info={"experts": 99, "model": "another", "note": 1})
    traces.save(tmp_path / "trace.npz", found)
    again = traces.load(tmp_path / "trace.npz")
    assert again.info == {"experts": 5, "model": "small", "note": 1} and again.num_experts == 5


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


DEEP = "[" * 100_000  # JSON that Python cannot nest


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
        (replaced("topk", lambda a: a.astype(np.int32) + 2**16), ValueError, "but there are only 5 experts"),
        (
            replaced("topk", lambda a: np.broadcast_to(np.int16([2, 0, 2]), (64, 3, 3))),
            ValueError,
            "names expert 2 twice",
        ),
        (replaced("token", lambda a: a.astype(object)), ValueError, "not an npz of plain arrays"),
        (replaced("topk", lambda a: a.astype(float)), TypeError, "topk has dtype float64, but it must be int8"),
        (replaced("topk", lambda a: a[:, 0]), ValueError, "topk has shape (64, 2), but it must have 3 dimensions"),
        (replaced("seq", lambda a: a[:-1]), ValueError, "seq has shape (63,), but it must be (tokens=64)"),
        (replaced("token", lambda a: a[1:]), ValueError, "token has shape (63,), but it must be (tokens=64)"),
        (replaced("seq_kind", lambda a: a[1:]), ValueError, "seq[56] is 7, but there are only 7 sequences in seq_kind"),
        (replaced("seq_kind", lambda a: np.arange(8)), TypeError, "seq_kind has dtype int64, but it must be text"),
        (replaced("info", lambda a: "[]"), ValueError, "info is not a JSON object, but it must be one"),
        (replaced("info", lambda a: '{"experts": 5.5}'), TypeError, "num_experts is 5.5"),
        (replaced("info", lambda a: "{"), ValueError, "trace.npz: info is not JSON: "),
        (replaced("info", lambda a: DEEP), ValueError, "trace.npz: info is not JSON: "),
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
    with pytest.raises(ValueError, match=f"^{path.name} is truncated, or not an npz of plain arrays"):
        traces.load(path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_file_with_a_flipped_bit_is_named_or_says_the_same(trainer, tmp_path, save):
    """What a bit of a date or of a comment says changes nothing."""
    path, found = tmp_path / "trace.npz", traced(trainer)
    save(path, info='{"experts": 5}', **{name: getattr(found, name) for name in traces.ARRAYS})
    whole, random, refused = path.read_bytes(), Random(0), 0
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[random.randrange(len(whole))] ^= 1 << random.randrange(8)
        path.write_bytes(flipped)
        try:
            again = traces.load(path)
        except (ValueError, TypeError) as error:
            assert str(error).startswith("trace.npz")
            refused += 1
        else:
            assert all(np.array_equal(getattr(again, name), getattr(found, name)) for name in traces.ARRAYS)
    assert refused > 150


def test_an_array_too_large_for_any_memory_is_refused(tmp_path):
    header = np.lib.format.header_data_from_array_1_0(np.zeros((1, 1, 1), np.int16)) | {"shape": (2**40, 2**10, 2)}
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive, archive.open("topk.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(ValueError, match="huge.npz is truncated, or not an npz"):
        traces.load(tmp_path / "huge.npz")


def test_a_failed_write_leaves_the_trace_of_before(trainer, tmp_path):
    found = traced(trainer)
    traces.save(tmp_path / "trace.npz", found)
    before = (tmp_path / "trace.npz").read_bytes()
    with files_of_at_most(500), pytest.raises(OSError, match="trace.npz cannot be written"):
        traces.save(tmp_path / "trace.npz", found)
    assert (tmp_path / "trace.npz").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_a_single_array_is_no_trace(tmp_path):
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(
        ValueError, match=r"one.npy is a single array, but an npz is needed: numpy.savez\(path, topk=array\)"
    ):
        traces.load(tmp_path / "one.npy")


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"])
def test_the_largest_id_of_every_dtype_is_counted(tmp_path, dtype):
    largest = min(np.iinfo(dtype).max, traces.MAX_IDS - 1)
    np.savez(tmp_path / "largest.npz", topk=np.array([[[largest, 0]]], dtype))
    assert traces.load(tmp_path / "largest.npz").num_experts == largest + 1


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
    held_out = data.folder(folder).validation
    assert found.info["text"] == {"notes": hashlib.sha256(bytes(held_out.tolist())).hexdigest()[:16]}
    assert found.info["trained_on"] == trainer.corpus.fingerprint and found.info["held_out"] == []
    assert "the model was trained on another text, and may have read notes" in " ".join(ran.output.split())
    assert re.fullmatch("byte-lm-[0-9a-f]{16}", found.model)
    expected = tracing.trace(trainer.model, SETTINGS, {"notes": held_out}, found.info)
    assert np.array_equal(found.topk, expected.topk)


def test_what_the_training_held_out_is_told_from_other_text(tmp_path):
    for name, words in (("own", "some words"), ("other", "more words")):
        (tmp_path / name).mkdir()
        for number in range(2):
            (tmp_path / name / f"{number}.txt").write_text(f"{words} of file {number}, and more")
    saved = tmp_path / "checkpoint.safetensors"
    checkpoint.save(saved, Trainer(SETTINGS, data.folder(tmp_path / "own")))
    told = command.trace(saved, tmp_path / "trace.npz", [tmp_path / "own", tmp_path / "other"], 8, "cpu")
    assert told.endswith("the model was trained on another text, and may have read other")
    assert traces.load(tmp_path / "trace.npz").info["held_out"] == ["own"]
    assert "may have read" not in command.trace(saved, tmp_path / "trace.npz", [tmp_path / "own"], 8, "cpu")


def test_two_folders_of_one_name_are_refused(trainer, tmp_path):
    checkpoint.save(tmp_path / "checkpoint.safetensors", trainer)
    folders = [tmp_path / "x" / "text", tmp_path / "y" / "text"]
    with pytest.raises(ValueError, match="2 folders are called text, but each kind of text needs a name of its own"):
        command.trace(tmp_path / "checkpoint.safetensors", tmp_path / "trace.npz", folders, None, "cpu")


def test_a_trace_does_not_replace_its_checkpoint(trainer, tmp_path):
    saved, link = tmp_path / "checkpoint.safetensors", tmp_path / "link"
    checkpoint.save(saved, trainer)
    link.symlink_to(saved)
    before = saved.read_bytes()
    for out in (saved, link):
        with pytest.raises(ValueError, match="is the checkpoint itself"):
            command.trace(saved, out, [], 8, "cpu")
    assert saved.read_bytes() == before


def test_a_bad_checkpoint_makes_no_folder(tmp_path):
    (tmp_path / "bad").write_bytes(b"no checkpoint")
    with pytest.raises(checkpoint.CheckpointError):
        command.trace(tmp_path / "bad", tmp_path / "deep" / "trace.npz", [], None, "cpu")
    assert not (tmp_path / "deep").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"--checkpoint": "missing"}, "there is no checkpoint missing"),
        ({"--tokens": "3"}, "tokens is 3, but it must be >= 8"),
        ({"--device": "tpu"}, "device"),
        ({"--out": "."}, "is a folder, but a file is to be written"),
        ({"--data": "missing"}, "missing is not a folder"),
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

RESULTS = DOCS / "results"
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
