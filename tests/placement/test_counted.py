"""Counts of tokens an expert, without the choices of each token."""

import json

import numpy as np
import pytest
import torch
from test_cli import moeblaze

from moeblaze_ref.placement import baselines, counted, methods, sources
from moeblaze_ref.placement.counted import Counted
from moeblaze_ref.placement.expand import expanded
from moeblaze_ref.placement.maps import Copies, load
from moeblaze_ref.placement.simulate import balance, cluster, loads

PARTS, LAYERS, E, G = 6, 3, 8, 4


def drawn(seed=0):
    random = np.random.default_rng(seed)
    of_expert = random.zipf(1.5, (1, LAYERS, E)).clip(max=50)
    return of_expert * random.integers(1, 20, (PARTS, LAYERS, E))


@pytest.fixture
def file(tmp_path):
    np.savez(tmp_path / "counts.npz", counts=drawn())
    return tmp_path / "counts.npz"


def test_an_npz_and_sglangs_record_are_read_alike(tmp_path, file):
    torch.save({"rank": 0, "logical_count": torch.from_numpy(drawn())}, tmp_path / "stat.pt")
    for path in (file, tmp_path / "stat.pt"):
        found = sources.read(path, "counts", model="a model")
        np.testing.assert_array_equal(found.trace.counts, drawn())
        assert (found.trace.model, found.dense, found.left_out) == ("a model", (), 0)


def test_one_array_of_layers_is_one_part(tmp_path):
    np.savez(tmp_path / "counts.npz", counts=drawn()[0].astype(np.int32))
    found = sources.read(tmp_path / "counts.npz", "counts").trace
    np.testing.assert_array_equal(found.counts, drawn()[:1])
    assert found.tokens == drawn()[0].sum(axis=1).max()


def test_layers_without_counts_are_dense(tmp_path):
    counts = np.concatenate([np.zeros((PARTS, 1, E), int), drawn()], axis=1)
    np.savez(tmp_path / "counts.npz", counts=counts)
    found = sources.read(tmp_path / "counts.npz", "counts")
    assert found.dense == (0,) and found.trace.layers == LAYERS


def test_halves_are_parts():
    whole = Counted(drawn())
    sample, held_out = whole.halves(0)
    assert len(sample.counts) == len(held_out.counts) == PARTS // 2
    np.testing.assert_array_equal(sample.profile().P + held_out.profile().P, whole.profile().P)
    other, _ = whole.halves(1)
    assert not np.array_equal(other.counts, sample.counts)
    assert len(Counted(drawn()[:5]).halves(0)[0].counts) == 2


def test_loads_are_those_of_the_held_out_parts():
    whole, on = Counted(drawn()), cluster("nvlink", G, 64, 64)
    found = {trial.method: trial for job in methods.jobs(whole, on, ("greedy", "eplb-replicas")) for trial in job()}
    sample, held_out = (half.profile() for half in whole.halves(0))
    placed = baselines.greedy(sample, G)
    assert found["greedy"].balance_mean == balance(loads(held_out, placed.shares())).mean()
    spread = baselines.eplb(sample, G, E + G)
    assert found["eplb-replicas"].balance_mean == balance(loads(held_out, spread)).mean()
    assert {getattr(found["greedy"], name) for name in methods.FOLLOWED} == {None}


def test_the_map_to_write_has_the_most_even_load():
    trials = [
        t
        for job in methods.jobs(Counted(drawn()), cluster("nvlink", G, 64, 64), ("contiguous", "greedy"))
        for t in job()
    ]
    contiguous, greedy = trials
    assert greedy.balance_mean < contiguous.balance_mean
    assert methods.fastest_map(trials) is greedy.fitted.placement


def test_the_command_takes_counts(file, tmp_path):
    done = moeblaze("place", "--trace", str(file), "--from", "counts", "--gpus", str(G), "--json")
    rows = {row["method"]: row for row in json.loads(done.stdout)}
    assert rows.keys() == set(methods.METHODS) - set(methods.FOLLOWING)
    assert rows["greedy"]["distinct_gpus"] is None and rows["greedy"]["balance_mean"] >= 1
    assert (
        "dedup is not tried: the record has counts alone, but it needs the experts that each token chose" in done.stderr
    )
    shown = moeblaze("place", "--trace", str(file), "--from", "counts", "--gpus", str(G), "--method", "greedy")
    assert " - " in shown.stdout
    out = tmp_path / "map.npz"
    options = ["--method", "eplb-nearest", "--budget", "3", "--out", str(out)]
    done = moeblaze("place", "--trace", str(file), "--from", "counts", "--gpus", str(G), *options)
    assert done.exit_code == 0, done.output
    written = load(out)
    assert isinstance(written, Copies) and written.sizes().max() == 3


BAD_OPTIONS = {
    ("--method", "dedup"): "dedup is not tried: the record has counts alone",
    ("--plots", "pictures"): "--plots draws crossings, but of counts alone none are known",
    ("--expand", "6x16x4"): "a larger model is made of the tokens of a trace, but the record has counts alone",
    ("--experts", "9"): "num_experts is 9, but counts.npz has counts of 8 experts",
}


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_options_that_need_more_than_counts(file, options, monkeypatch):
    monkeypatch.chdir(file.parent)
    done = moeblaze("place", "--trace", str(file), "--from", "counts", "--gpus", str(G), *options)
    assert done.exit_code == 2 and BAD_OPTIONS[options] in " ".join(done.output.split()), done.output


def test_bad_records(tmp_path):
    def said_of(**arrays):
        np.savez(tmp_path / "counts.npz", **arrays)
        with pytest.raises((ValueError, TypeError)) as raised:
            sources.read(tmp_path / "counts.npz", "counts")
        return str(raised.value)

    assert "counts" in said_of(topk=drawn())
    assert "is -1, but it must be >= 0" in said_of(counts=drawn() * 0 - 1)
    assert "float64" in said_of(counts=drawn() / 2)
    assert "rank" in said_of(counts=drawn()[0, 0]) or "dim" in said_of(counts=drawn()[0, 0])
    assert said_of(counts=drawn() * 0) == "counts.npz holds no counts: all are 0"
    torch.save({"rank": 0}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other.pt has no logical_count, as SGLang's records of mode stat have"):
        counted.read(tmp_path / "other.pt")
    with pytest.raises(ValueError, match="the counts have one part, but a split needs at least 2"):
        Counted(drawn()[:1]).halves(0)
    silent = drawn()
    silent[:, 1] = 0
    with pytest.raises(ValueError, match="layer 1 has no counts"):
        Counted(silent)
    with pytest.raises(ValueError, match="made of the tokens"):
        expanded(Counted(drawn()), "6x16x4")
