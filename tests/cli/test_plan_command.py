"""``moeblaze plan``: what it prints and writes, and what it refuses."""

import json
import re
import sys

import numpy as np
import processes
import pytest
from test_cli import moeblaze

from moeblaze_ref.core.traces import RoutingTrace, save
from moeblaze_ref.plan import configs

QWEN = ("plan", "qwen3-30b-a3b")
SPREAD = (*QWEN, "--data", 4, "--expert", 4)


def planned(*arguments):
    result = moeblaze(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_a_carried_model_is_planned():
    found = planned(*QWEN)
    (stage,) = found["stages"]
    assert found["parameters"] == 30_532_122_624 and found["gpus"] == 1
    assert stage["resident"]["weights"] == 2 * found["parameters"]
    assert stage["resident"]["optimizer states"] == 8 * found["parameters"]
    assert stage["peak"]["bytes"] == sum(stage["peak"]["by_kind"].values())
    assert found["with_overhead_bytes"] == int(1.05 * stage["peak"]["bytes"])


def test_tables_say_what_is_needed_and_what_would_help():
    result = moeblaze(*QWEN, "--checkpoint", "layer", "--data", 8, "--zero", 3)
    assert result.exit_code == 0
    for said in ("30,532,122,624 parameters", "together", "GB with 5% for the allocator", "What would help most"):
        assert said in result.stdout


def test_a_file_is_read_and_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(configs.fields_of("olmoe-1b-7b") | {"quantization_config": {"bits": 4}}))
    found = planned("plan", path)
    assert found["parameters"] == 6_919_161_856
    assert any("quantization_config" in note for note in found["notes"])
    path.write_text("{")
    result = moeblaze("plan", path)
    assert result.exit_code == 2 and f"{path} is not JSON" in result.stderr


def test_what_stands_beside_the_model_is_named():
    (note,) = planned("plan", "deepseek-v3", "--pipeline", 16)["notes"]
    assert (
        note
        == "Not planned: modules that predict further tokens (num_nextn_predict_layers), 11,610,068,224 parameters."
    )


def test_a_sequence_beyond_the_models_positions_is_warned_of():
    (note,) = planned(*QWEN, "--sequence", 40_961, "--checkpoint", "layer")["notes"]
    assert note.startswith("Warning: sequence is 40961, but the model's positions end at 40960")
    assert planned(*QWEN, "--sequence", 40_960, "--checkpoint", "layer")["notes"] == []


def test_each_option_changes_the_peak():
    peaks = {
        options: planned(*QWEN, "--data", 2, *options)["stages"][0]["peak"]["bytes"]
        for options in (
            (),
            ("--batch", 40),
            ("--sequence", 163_840),
            ("--recipe", "bf16"),
            ("--recipe", "fp32"),
            ("--recipe", "adamw8bit"),
            ("--recipe", "muon"),
            ("--zero", 1),
            ("--zero", 2),
            ("--zero", 3),
            ("--expert", 2),
            ("--tensor", 2),
            ("--pipeline", 2),
            ("--offload", "optimizer"),
        )
    }
    assert len(set(peaks.values())) == len(peaks)


def test_options_of_activations_change_what_is_kept():
    kept = {
        options: sum(planned(*QWEN, *options)["stages"][0]["kept"].values())
        for options in (
            (),
            ("--checkpoint", "layer"),
            ("--checkpoint", "selective"),
            ("--attention", "math"),
            ("--experts", "moeblaze/minimal"),
            ("--experts", "moeblaze/inputs"),
            ("--experts", "megablocks"),
        )
    }
    assert len(set(kept.values())) == len(kept)
    assert kept["--checkpoint", "layer"] < kept["--checkpoint", "selective"] < kept[()] < kept["--attention", "math"]


def test_offloaded_bytes_are_on_the_host():
    before, after = planned(*QWEN), planned(*QWEN, "--offload", "optimizer")
    moved = sum(before["stages"][0]["resident"][kind] for kind in ("optimizer states", "float32 weights"))
    assert after["stages"][0]["host_bytes"] == moved and before["stages"][0]["host_bytes"] == 0
    both = planned(*QWEN, "--offload", "optimizer", "--offload", "activations")["stages"][0]
    assert both["host_bytes"] == moved + sum(both["kept"].values())
    assert both["peak"]["bytes"] < after["stages"][0]["peak"]["bytes"]


def test_uneven_routing_costs():
    even = planned(*SPREAD)
    zipf = planned(*SPREAD, "--zipf", 1)
    assert even["imbalance"] == 1 < zipf["imbalance"] <= 4
    assert zipf["stages"][0]["kept"]["experts"] > even["stages"][0]["kept"]["experts"]


def test_a_trace_says_how_often_a_capacity_is_exceeded(tmp_path):
    rng = np.random.default_rng(0)
    topk = np.argsort(rng.random((40_000, 2, 128)), axis=-1)[..., :8].astype(np.int16)
    topk[20_000:] = np.arange(8)  # the second half sends all rows to the first GPU
    save(tmp_path / "trace.npz", RoutingTrace(topk, 128))
    traced = (*SPREAD, "--recipe", "bf16", "--sequence", 2500, "--trace", tmp_path / "trace.npz")
    found = planned(*traced)
    assert found["imbalance"] == 4 and len(found["imbalances"]["batch_peaks"]) == 4
    assert "80 GB 100%, 96 GB 50%, 141 GB 0%, 192 GB 0%." in moeblaze(*traced).stdout


def test_a_gpu_that_is_full_in_one_layer_is_not_full_in_all(tmp_path):
    """Each layer sends all rows to a GPU of its own: over all layers each GPU has as many."""
    topk = np.empty((20_000, 8, 8), np.int16)
    for layer in range(8):
        topk[:, layer] = 32 * (layer % 4) + np.arange(8)
    save(tmp_path / "trace.npz", RoutingTrace(topk, 128))
    found, even = planned(*SPREAD, "--trace", tmp_path / "trace.npz"), planned(*SPREAD)
    assert found["imbalance"] == 1 and sorted(found["imbalances"]["layers"]) == [0] * 36 + [4] * 12
    kept = found["stages"][0]["kept"]["experts"], even["stages"][0]["kept"]["experts"]
    assert kept[0] == pytest.approx(kept[1], rel=1e-6)
    buffers = (one["stages"][0]["resident"]["communication buffers"] for one in (found, even))
    assert next(buffers) == 4 * next(buffers)  # for the fullest layer
    said = moeblaze(*SPREAD, "--trace", tmp_path / "trace.npz").stdout
    assert "whose 8 layers stand for the model's 48; the fullest GPU gets 1.00" in " ".join(said.split())
    assert "from 0.00 to 4.00 in a layer" in " ".join(said.split())


def test_a_trace_with_other_choices_is_refused(tmp_path):
    save(tmp_path / "trace.npz", RoutingTrace(np.zeros((4, 2, 4), np.int16) + np.arange(4, dtype=np.int16), 128))
    result = moeblaze(*SPREAD, "--trace", tmp_path / "trace.npz")
    assert result.exit_code and "has 4 choices of a token, but qwen3-30b-a3b has 8" in " ".join(result.stderr.split())


def test_each_phase_has_its_peak():
    stage = planned(*QWEN)["stages"][0]
    phases = {one["phase"]: one for one in stage["peaks"]}
    assert list(phases) == ["forward", "backward", "optimizer"]
    assert max(phases.values(), key=lambda one: one["bytes"]) == stage["peak"] == phases["optimizer"]
    assert all(sum(one["by_kind"].values()) == one["bytes"] for one in phases.values())
    assert phases["forward"]["by_kind"]["experts"] == stage["kept"]["experts"] > 0


def test_our_layer_gets_uneven_rows_too():
    ours = ("plan", "mixtral-8x7b", "--data", 8, "--expert", 8, "--experts", "moeblaze/paper")
    even, zipf = planned(*ours), planned(*ours, "--zipf", 1)
    assert zipf["imbalance"] > 1 and zipf["stages"][0]["kept"]["experts"] > even["stages"][0]["kept"]["experts"]


def test_advice_counts_with_the_unevenness_of_more_gpus():
    base = ("plan", "mixtral-8x7b", "--zero", 1, "--recipe", "bf16", "--checkpoint", "layer", "--zipf", 1)
    four = planned(*base, "--data", 4, "--expert", 4)
    eight = planned(*base, "--data", 8, "--expert", 8)
    saved = {one["change"]: one["saved_bytes"] for one in four["changes"]}
    difference = four["stages"][0]["peak"]["bytes"] - eight["stages"][0]["peak"]["bytes"]
    assert saved.get("--data 8 --expert 8", 0) == max(0, difference)


def test_the_note_names_the_kernel_that_runs():
    said = moeblaze(*QWEN, "--recipe", "fp32").stdout, moeblaze("plan", "gpt-oss-20b").stdout
    assert "Attention runs in: math." in said[0] and "Attention runs in: plain torch." in said[1]
    assert "Attention runs in: flash." in moeblaze(*QWEN).stdout


def test_a_sweep_takes_sequences_that_gpus_divide(tmp_path):
    result = moeblaze(*QWEN, "--tensor", 2, "--sequence", 6, "--sweep", "sequence", "--plots", tmp_path)
    assert result.exit_code == 0, result.stderr


def test_plots_are_written(tmp_path):
    result = moeblaze(*QWEN, "--plots", tmp_path, "--sweep", "sequence")
    assert result.exit_code == 0, result.stderr
    names = ["plan_by_kind.png", "plan_by_sequence.png", "plan_timeline.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nope",), "unknown model 'nope'. Valid: deepseek-v2-lite"),
        (("",), "'' does not exist; give a config.json, or one of"),
        (("/dev/null",), "'/dev/null' is not a regular file; give a config.json, or one of"),
        (("/dev",), "/dev is a folder without a config.json"),
        (("no/config.json",), "'no/config.json' does not exist; give a config.json, or one of"),
        ((*QWEN[1:], "--tensor", 3), "tensor is 3, but it must divide the vocabulary, 151936"),
        ((*QWEN[1:], "--tensor", 2, "--sequence", 4097), "tensor is 2, but it must divide sequence, 4097"),
        ((*QWEN[1:], "--data", 3, "--expert", 3), "expert is 3, but it must divide the experts, 128"),
        ((*QWEN[1:], "--data", 256, "--expert", 256), "expert is 256, but it must divide the experts, 128"),
        ((*QWEN[1:], "--expert", 4), r"expert is 4, but it must divide data \* tensor, 1 \* 1"),
        ((*QWEN[1:], "--pipeline", 100), "pipeline is 100, but qwen3-30b-a3b has 48 layers"),
        ((*QWEN[1:], "--sequence", 0), "sequence is 0, but it must be 1..1000000000"),
        ((*QWEN[1:], "--recipe", "bf17"), "unknown recipe 'bf17'. Did you mean 'bf16'"),
        ((*QWEN[1:], "--zero", 4), "zero is 4, but it must be 0..3"),
        ((*QWEN[1:], "--checkpoint", "all"), "unknown checkpoint 'all'"),
        ((*QWEN[1:], "--attention", "efficient"), "attention is 'efficient', but it does not serve 4 heads of keys"),
        ((*QWEN[1:], "--offload", "weights"), "unknown offload 'weights'"),
        ((*QWEN[1:], "--overhead", -1), "overhead is -1.0, but it must be 0 to 1"),
        ((*QWEN[1:], "--sweep", "depth", "--plots", "x"), "unknown sweep 'depth'"),
        ((*QWEN[1:], "--sweep", "batch"), "--sweep draws a plot: it needs a folder, --plots"),
        ((*QWEN[1:], "--experts", "moeblaze"), "unknown policy None"),
        (("deepseek-v3", "--experts", "moeblaze/minimal"), "experts is .moeblaze., but no layer here has such"),
        (("llama-4-scout", "--data", 2, "--expert", 2), "expert is 2, but Llama 4's experts in transformers see all"),
        ((*SPREAD[1:], "--zipf", -1), "zipf is -1.0, but it must be 0 to 10"),
        ((*SPREAD[1:], "--trace", "no.npz"), "no.npz"),
        ((*QWEN[1:], "--trace", "no.npz"), "--trace and --zipf need several GPUs that share the experts"),
        ((*QWEN[1:], "--zipf", -1), "--trace and --zipf need several GPUs that share the experts"),
        ((*QWEN[1:], "--zero", 1), "zero is 1, but data is 1: ZeRO divides among 2 or more data-parallel GPUs"),
        ((*QWEN[1:], "--batch", 10**400), "batch is 1000"),
        ((*SPREAD[1:], "--trace", "no.npz", "--zipf", 1), "only one of them can say how tokens spread"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(arguments, said):
    result = moeblaze("plan", *arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert re.search(said, result.stderr), result.stderr


def test_a_plan_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from typer.testing import CliRunner; from moeblaze_ref.cli.app import app; "
        "CliRunner().invoke(app, ['plan', 'qwen3-30b-a3b', '--batch', '1', '--sequence', '4096']); "
        "print('moeblaze_ref.plan.run' in sys.modules, {*sys.modules} & {'torch', 'transformers', 'matplotlib'})"
    )
    assert processes.run([sys.executable, "-c", code]).stdout == "True set()\n"
