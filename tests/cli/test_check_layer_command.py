"""`moeblaze check --layer`: verdicts, and layers that crash, hang or cannot be made."""

import json
import sys
from importlib.machinery import ModuleSpec
from json import JSONDecodeError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_cli import moeblaze
from typer.testing import CliRunner

from moeblaze_ref.bench.layer_bytes import bytes_of
from moeblaze_ref.bench.layer_times import LayerTimes
from moeblaze_ref.cli import check_layer
from moeblaze_ref.cli.app import app
from moeblaze_ref.cli.shared import print_error
from moeblaze_ref.verify.layers import isolated
from moeblaze_ref.verify.layers.adapter import check_is_there
from moeblaze_ref.verify.layers.adapters import plain
from moeblaze_ref.verify.layers.faults import LayerFault

LAYERS = """
import os, sys, time
from dataclasses import replace
from moeblaze_ref.verify.layers.adapters import plain

class Printing(plain.PlainExperts):
    def forward(self, *inputs):
        print("here")
        return super().forward(*inputs)

def right(**sizes):
    return plain.experts(**sizes, kind=Printing)

def forking(**sizes):
    if os.fork() == 0:
        time.sleep(1000)
    os.abort()

def swapped(**sizes):
    return replace(plain.experts(**sizes), weights={"gate_up": "up_gate: E 2h d", "down": "down: E d h"})

def crashing(**sizes):
    os.abort()

def hanging(**sizes):
    time.sleep(1000)

class InNarrow(plain.PlainExperts):
    def forward(self, x, *routing):
        if str(x.dtype) == "torch.bfloat16" and len(x) == 1:
            self.end()
        return super().forward(x, *routing)

class Killed(InNarrow):
    def end(self):
        os.kill(os.getpid(), 11)

class Endless(InNarrow):
    def end(self):
        time.sleep(1000)

class Raising(InNarrow):
    def end(self):
        raise OSError("no file")

def killed(**sizes):
    return plain.experts(**sizes, kind=Killed)

def endless(**sizes):
    return plain.experts(**sizes, kind=Endless)

def raising(**sizes):
    return plain.experts(**sizes, kind=Raising)

def inside(**sizes):
    return replace(plain.experts(**sizes), module=lambda x: x)

def exiting(**sizes):
    sys.exit(3)

def uncompiled(**sizes):
    return replace(plain.experts(**sizes), compiles=False)

class Halved(plain.PlainExperts):
    def forward(self, *inputs):
        return super().forward(*inputs) / 2

def halved(**sizes):
    return replace(plain.experts(**sizes, kind=Halved), compiles=False)

def nothing(**sizes):
    return 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_layers.py").write_text(LAYERS)
    return tmp_path


def test_each_layer_has_a_process_of_its_own(here):
    """What ends one leaves the verdicts on the others."""
    names = ["crashing", "forking", "exiting", "swapped", "nothing", "right", "missing"]
    options = [word for name in names for word in ("--layer", f"my_layers:{name}")]
    done = moeblaze("check", *options, "--dtype", "float32", "--json")
    rows = {row["layer"].partition(":")[2]: row for row in json.loads(done.stdout)}
    assert done.exit_code == 1 and [*rows] == names
    assert rows["right"]["right"] and rows["right"]["bug_class"] == "" and 0 < rows["right"]["largest_error"] < 1
    assert not rows["swapped"]["right"] and rows["swapped"]["bug_class"] == "gate and up exchanged"
    said = "a step, random (one forward and one backward of 61 tokens, 7 experts, 2 for each token, d = 24, h = 40): "
    assert f"{said}the output, token 0: error" in rows["swapped"]["first_problem"]
    line = LAYERS.splitlines().index("    sys.exit(3)") + 1
    problems = {
        "crashing": "its process ended, killed by SIGABRT, in: the start",
        "forking": "its process ended, killed by SIGABRT, in: the start",
        "exiting": f"the factory raised SystemExit: 3 (my_layers.py, line {line}, in exiting)",
        "nothing": "the factory returns an int, but it must return a verify.layers.Adapter",
        "missing": "my_layers has no missing",
    }
    for name, problem in problems.items():
        assert rows[name]["dtype"] is None and rows[name]["first_problem"] == problem


def test_a_layer_that_hangs(here):
    done = moeblaze("check", "--layer", "my_layers:hanging", "--timeout", "1")
    assert done.exit_code == 1 and "no verdict" in done.output
    said = "there is no verdict after 1 seconds, the start of Python included; it ended in: the start. --timeout allows"
    assert said in " ".join(done.output.split())


def test_the_step_in_which_a_layer_ends_is_named(here):
    """The dtype before it has its verdict."""
    names = {"killed": "killed by SIGSEGV, in: ", "endless": "the start of Python included; it ended in: "}
    for name, said in names.items():
        right, ended = check_layer.rows_of(f"my_layers:{name}", ["float32", "bfloat16"], "cpu", 1, 40)
        assert right.right and f"{said}bfloat16, a step, one token" in ended.first_problem


def test_a_module_that_is_nowhere_or_exits_is_refused(here):
    Path("exits.py").write_text("import sys\nsys.exit(3)\n")
    done = moeblaze("check", "--layer", "my_layers:right", "--layer", "nowhere.layers:make")  # before any is checked
    said = " ".join(done.output.split())
    assert done.exit_code == 2 and "nowhere.layers cannot be imported: no nowhere is in " in said
    done = moeblaze("check", "--layer", "exits:make")
    assert done.exit_code == 2 and "exits cannot be imported: SystemExit: 3" in " ".join(done.output.split())


def test_a_module_that_only_a_finder_knows_is_there(monkeypatch):
    """As of a package that is installed for editing: no folder of sys.path has it."""
    knows = SimpleNamespace(find_spec=lambda name, *_: ModuleSpec(name, None) if name == "elsewhere" else None)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, knows])
    check_is_there("elsewhere.layers")
    with pytest.raises(ValueError, match="nowhere.layers cannot be imported"):
        check_is_there("nowhere.layers")


def test_an_error_that_is_made_of_more_than_words_keeps_its_words():
    found = isolated._plain(JSONDecodeError("Expecting value", "{", 1))
    assert type(found) is ValueError and "Expecting value: line 1 column 2" in str(found)
    fault = isolated._plain(LayerFault("the layer raised"))
    assert type(fault) is LayerFault and str(fault) == "the layer raised"


def test_options_of_a_kernel_or_a_layer_want_one():
    done = moeblaze("check", "--timeout", "5", "--dtype", "float32")
    said = "only a check of one kernel or a layer takes --dtype, --timeout: add --kernel or --layer"
    assert done.exit_code == 2 and said in " ".join(done.output.split())


def test_the_verdict_says_what_a_layer_does_in_place_of_computing(here):
    done = moeblaze("check", "--layer", "my_layers:raising", "--dtype", "bfloat16")
    assert done.exit_code == 1 and "wrong: raises OSError" in done.output
    said = "one forward and one backward of 1 token, 4 experts, 2 for each token, d = 16, h = 24"
    reason = f"my_layers:raising, bfloat16: the first wrong case: a step, one token ({said}): OSError: no file"
    assert reason in done.output


def test_a_router_that_the_description_forgets_is_no_bug_of_the_layer(here):
    done = moeblaze("check", "--layer", "my_layers:inside")
    assert done.exit_code == 2 and "not checked" in done.output and "does it have a router inside?" in done.output


def test_the_reason_follows_the_verdict(here):
    """The bytes of a step come after both; a way that the layer refuses is said with its verdict."""
    done = moeblaze("check", "--layer", "my_layers:halved", "--dtype", "float32")
    lines = done.output.splitlines()
    (verdict,) = (i for i, line in enumerate(lines) if " wrong: class unknown " in line)
    assert lines[verdict + 1].startswith("my_layers:halved, float32: the first wrong case: a step, random (")
    assert lines[verdict + 2] == "my_layers:halved, float32: not supported: torch.compile"
    assert lines[verdict + 3].startswith("bytes of a step, ")


def test_a_right_layer_and_its_record(here):
    done = moeblaze("check", "--layer", "my_layers:right", "--dtype", "float32", "--record", "record.json")
    assert done.exit_code == 0, done.output
    assert "my_layers:right" in done.output and "right" in done.output
    record = json.loads((here / "record.json").read_text())
    (row,) = record["rows"]
    assert record["command"] == "check --layer" and row["dtype"] == "float32"
    used = bytes_of(plain.experts, torch.float32, "cpu")
    assert (row["kept_bytes"], row["peak_bytes"], row["account_bytes"]) == (used.kept, None, used.account)
    assert row["closest"] == used.closest and f"{used.kept / 1024:,.1f}" in done.output


@pytest.fixture
def two_layers(monkeypatch, tmp_path):
    """Checks of two layers, which are noted; those in ``ends`` end the run, as Ctrl-C does."""
    run = SimpleNamespace(checked=[], ends={"torch/grouped_mm"}, path=tmp_path / "record.json")

    def rows_of(name, dtypes, device, seeds, *_):
        if name in run.ends:
            raise KeyboardInterrupt
        run.checked.append(name)
        return [check_layer.Row(name, run.dtype, True, "", 0.5, True, False, (), "")]

    def command(*words):
        layers = ["--layer", "torch/experts", "--layer", "torch/grouped_mm"]
        return CliRunner().invoke(app, ["check", *layers, "--record", str(run.path), *words])

    run.command, run.dtype = command, "float32"
    monkeypatch.setattr(check_layer, "rows_of", rows_of)
    return run


def test_a_run_that_is_ended_leaves_its_verdicts_and_another_goes_on(two_layers):
    two_layers.command("--seeds", "2")
    assert [row["layer"] for row in json.loads(two_layers.path.read_text())["rows"]] == ["torch/experts"]
    two_layers.ends.clear()
    done = two_layers.command("--seeds", "2", "--resume")
    assert done.exit_code == 0 and two_layers.checked == ["torch/experts", "torch/grouped_mm"]
    assert [row["layer"] for row in json.loads(two_layers.path.read_text())["rows"]] == two_layers.checked
    assert done.output.index("torch/experts") < done.output.index("torch/grouped_mm")
    two_layers.command("--seeds", "2")
    assert two_layers.checked == ["torch/experts", "torch/grouped_mm"] * 2  # without --resume all anew


def test_a_layer_without_a_verdict_is_checked_again(two_layers):
    two_layers.ends.clear()
    two_layers.dtype = None
    two_layers.command()
    two_layers.dtype = "float32"
    assert two_layers.command("--resume").exit_code == 0
    assert two_layers.checked == ["torch/experts", "torch/grouped_mm"] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "3"], "its seeds is 1, but it must be 3"),
        (["--dtype", "float16"], "its dtypes is [], but it must be ['float16']"),
        (["--large"], "its large is False, but it must be True"),
    ],
)
def test_a_record_that_was_asked_otherwise_is_not_resumed(two_layers, words, said):
    two_layers.command()
    done = two_layers.command("--resume", *words)
    assert done.exit_code == 2 and said in " ".join(done.output.split())
    assert two_layers.checked == ["torch/experts"]


@pytest.mark.parametrize("words", [["--layer", "torch/experts", "--resume"], ["--resume"]])
def test_what_cannot_be_resumed(words):
    done = CliRunner().invoke(app, ["check", *words])
    assert done.exit_code == 2
    said = "but there is none" if "--layer" in words else "only a check of a layer takes --resume: add --layer"
    assert said in " ".join(done.output.split())


def test_times_of_a_gpu_are_shown_beside_plain_torch(monkeypatch, capsys):
    def there(work, *arguments, seconds):
        *_, timed = arguments
        yield from (
            event if isinstance(event, str) else (*event[:2], LayerTimes(1.25, 2.5) if timed else None)
            for event in work(*arguments[:-1], False)
        )

    monkeypatch.setattr(isolated, "isolated", there)
    timed, untimed = (
        [*check_layer.rows_of("torch/experts", ["float32"], "cpu", 1, 60, timed=timed)] for timed in (True, False)
    )
    assert [(row.step_ms, row.plain_ms) for row in timed + untimed] == [(1.25, 2.5), (None, None)]
    check_layer.show(timed)
    last = capsys.readouterr().out.splitlines()[-1].split()
    assert last == ["torch/experts", "float32", "1.250", "2.500"]


def test_what_a_layer_refuses_is_said(here):
    done = moeblaze("check", "--layer", "my_layers:uncompiled", "--dtype", "bfloat16")
    assert done.exit_code == 0 and "my_layers:uncompiled, bfloat16: not supported: torch.compile\n" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layer", "torch/expert"], "Did you mean 'torch/experts'?"),
        (["--layer", "no_such_module:make"], "no_such_module cannot be imported: no no_such_module is in"),
        (["--layer", "mine"], "unknown layer 'mine': write mine:FACTORY for yours. Names of the package's begin with"),
        (["--layer", "a/b"], "unknown layer 'a/b': write MODULE:FACTORY for yours"),
        (["--layer", "torch"], "Valid: torch/experts, torch/experts with biases"),
        (["--layer", "a/b.py:make"], "MODULE is a name as in import, not a path: write b:make in the folder of b.py"),
        (["--layer", "my_layers:nothing"], "the factory returns an int, but it must return a verify.layers.Adapter"),
        (["--layer", "torch/grouped_mm", "--dtype", "float16"], "the layer computes in torch.bfloat16, not in torch"),
        (["--layer", "my_layers:"], "a layer is 'my_layers:', but it must be MODULE:FACTORY"),
        (["--layer", "torch/experts", "--dtype", "float8"], "unknown dtype 'float8'"),
        (["--layer", "torch/experts", "--device", "gpu"], "unknown device 'gpu'"),
        (["--layer", "torch/experts", "--gradients"], "--layer checks whole layers: leave --gradients out"),
        (
            ["--layer", "torch/experts", "--large"],
            "layers of more than 2^31 elements run on a GPU alone: the device is cpu",
        ),
        (["--seeds", "2"], "only a check of a layer takes --seeds: add --layer"),
        (["--device", "cpu", "--jobs", "2"], "only a check of a layer takes --device, --jobs: add --layer"),
    ],
)
def test_bad_input(here, arguments, message):
    done = moeblaze("check", *arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_options_of_kernels_and_layers_have_a_heading_of_their_own():
    shared = moeblaze("check", "--help").output.partition("A kernel or a layer of your own")[2]
    shared, _, of_layers = shared.partition("A layer of your own")
    assert "--dtype" in shared and "--timeout" in shared and "--layer" in of_layers


def test_a_machine_without_a_gpu(here, monkeypatch):
    monkeypatch.setattr(check_layer, "cuda_device_count", lambda: 0)
    done = moeblaze("check", "--layer", "torch/experts", "--device", "cuda")
    assert done.exit_code == 2 and done.output == "error: device is cuda, but this machine has no CUDA device\n"


def test_layers_that_are_timed_are_checked_one_at_a_time(here, monkeypatch):
    monkeypatch.setattr(check_layer, "cuda_device_count", lambda: 1)
    done = moeblaze("check", "--layer", "torch/experts", "--device", "cuda", "--jobs", "2")
    said = "error: jobs is 2, but it must be 1 with device cuda: layers are timed there"
    assert done.exit_code == 2 and " ".join(done.output.split()) == said


def test_layers_checked_two_at_a_time_have_the_verdicts_of_one_at_a_time(here):
    words = ["check", "--layer", "torch/experts", "--layer", "my_layers:uncompiled", "--dtype", "bfloat16", "--json"]
    one, two = (moeblaze(*words, *jobs) for jobs in ([], ["--jobs", str(2**40)]))
    assert one.exit_code == two.exit_code == 0 and json.loads(one.stdout) == json.loads(two.stdout)
    assert [row["layer"] for row in json.loads(two.stdout)] == ["torch/experts", "my_layers:uncompiled"]


def test_a_message_stays_as_it_is(capsys):
    """A console may take :star: for a picture, and [red] for a colour."""
    print_error("my_layers:star: x[3] is [red]")
    assert capsys.readouterr().err == "error: my_layers:star: x[3] is [red]\n"
