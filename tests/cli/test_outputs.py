"""Where commands write: on a device, a pipe, a file of their own kind, and somebody else's file.

Each command of the table is run with the work that it would do taken out: what counts here is what becomes of the path.
"""

import io
import itertools
import json
import os
import select
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import nbformat
import numpy as np
import processes
import pytest
import small_lm
import typer
from pretended import PretendedDevice
from typer.testing import CliRunner

from moeblaze_ref.bench import league, plan, tune
from moeblaze_ref.cli import app, check_layer, parallel_bench, terminal
from moeblaze_ref.core import figures, progress, provenance, records, traces
from moeblaze_ref.core.paths import DOCS
from moeblaze_ref.course.notebook import outputs
from moeblaze_ref.course.site import build as site
from moeblaze_ref.course.site import cupy_by_hand
from moeblaze_ref.course.site import path as course_path
from moeblaze_ref.lm import checkpoint, data, evidence
from moeblaze_ref.lm import command as lm_command
from moeblaze_ref.lm import run as lm_run
from moeblaze_ref.lm.train import Trainer
from moeblaze_ref.papers import command as papers_command
from moeblaze_ref.papers.item import Item
from moeblaze_ref.parallel import findings
from moeblaze_ref.placement import maps, synthetic
from moeblaze_ref.placement.synthetic import synthetic_trace
from moeblaze_ref.plan import measure as plan_measure
from moeblaze_ref.plan import measure_experts, recorded
from moeblaze_ref.verify import sanitize

NULL, FULL = 3, 7  # minor numbers of Linux' /dev/null and /dev/full
FOREIGN = "somebody's notes\n"
TRACE = synthetic_trace(64, 2, 4, 1)


def make_device(path: Path, minor: int):
    """A character device of the test's own; who may not make one gets a link to the system's."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        path.symlink_to({NULL: "/dev/null", FULL: "/dev/full"}[minor])


def is_device(path: Path) -> bool:
    return stat.S_ISCHR(path.stat().st_mode)


# The commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A command that writes one file."""

    words: tuple[str, ...]  # its words, and last the option that names the file
    load: Callable  # reads what it writes
    # Patches the work that it would do; takes a list to which the work adds when it is done.
    without: Callable[[list], list] = lambda done: []
    file: str = ""  # where the file lies in the folder that the option names; empty if it names the file
    run: Callable = lambda words: CliRunner().invoke(app.app, list(words))
    streams: bool = True  # whether it writes to what is not a regular file; otherwise it refuses
    folder: Path = Path()  # where it writes
    done: list = field(default_factory=list, init=False)  # is filled when the work is done

    def __call__(self, *more: str):
        """Write to `target`, without the work."""
        with patched(self.without(self.done)):
            return self.run([*self.words, str(self.folder if self.file else self.target), *more])

    @property
    def target(self) -> Path:
        return self.folder / (self.file or "out")

    def refuses(self, *words: str):
        """Run, and check that it ends before any work and says why in one line, with these words."""
        said = one_line(result := self())
        assert all(word in said for word in words) and not self.done, said
        return result

    def writes(self, *more: str):
        """Run, and check that it succeeds."""
        result = self(*more)
        assert result.exit_code == 0, result.output


@contextmanager
def patched(patches):
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        yield


def does(done: list, result) -> Callable:
    """A function in place of the work."""

    def work(*arguments, **options):
        done.append(1)
        return result() if callable(result) else result

    return work


def run_main(main: Callable) -> Callable:
    """Runs a module's own command by its words, as `CliRunner` runs one of the app."""

    def run(words):
        said = io.StringIO()
        with patch.object(sys, "argv", list(words)), redirect_stderr(said):
            try:
                main()
            except SystemExit as ended:
                return SimpleNamespace(exit_code=ended.code, stderr=said.getvalue(), output=said.getvalue())
        return SimpleNamespace(exit_code=0, stderr="", output="")

    return run


def of_check(done):
    return [
        patch.object(progress, "run_with_bar", does(done, [])),
        patch("moeblaze_ref.verify.check.passed", lambda rows: True),
    ]


def of_a_kernel(done):
    verdict = SimpleNamespace(document={"rows": []}, report="", first_problem=None)
    return [patch("moeblaze_ref.verify.in_subprocess.examine", does(done, verdict))]


def of_sanitize(done):
    return [
        patch.object(sanitize, "rounds", lambda parts: {"sanitizing": []}),
        patch.object(progress, "run_with_bar", does(done, [])),
    ]


def of_a_gpu(done):
    time = patch.object(progress, "run_with_bar", does(done, []))
    table = patch("moeblaze_ref.bench.report.tables", lambda *of: "")
    return [patch.object(plan, "gpu", PretendedDevice), patch.object(plan, "jobs", lambda *of: []), time, table]


TILES = {"device": "a", "clocks": "b", "versions": {}, "commit": "c", "capability": "9.0", "entries": []}


def of_tune(done):
    return [
        *of_a_gpu(done),
        patch.object(tune, "jobs", lambda *of: []),
        patch("moeblaze_ref.bench.stages.executor_here", lambda: SimpleNamespace(capability=(9, 0))),
        patch.object(tune, "run_of", lambda *of: TILES),
    ]


def of_paper(done):
    job = does(
        done, [{"preset": "conf1", "activation": "silu", "system": "moeblaze", "policy": "minimal", "step_ms": 1.0}]
    )
    return [
        patch.object(plan, "gpu", PretendedDevice),
        patch.object(Item, "jobs", lambda *of: [job]),
        patch.object(Item, "rows", lambda *of: []),
    ]


def of_evidence(done):
    return [patch.object(evidence, "gather", does(done, {"passed": None}))]


def of_trace(done):
    trained = SimpleNamespace(model=None, settings=SimpleNamespace(layer="oracle"))
    return [
        patch.object(lm_command, "load_model", lambda *of: trained),
        patch.object(lm_command, "_texts", lambda folders: ({}, {})),
        patch.object(lm_command, "_what_it_holds", lambda trace: ""),
        patch("moeblaze_ref.lm.tracing.origin", lambda *of: {}),
        patch("moeblaze_ref.lm.tracing.trace", does(done, TRACE)),
    ]


def of_place(done):
    run = progress.run_with_bar
    return [
        patch.object(synthetic, "TOKENS", 64),
        patch.object(progress, "run_with_bar", lambda *of: done.append(1) or run(*of)),
    ]


def of_a_stream(done):
    run, routed = progress.run_with_bar, synthetic_trace(64, 2, 4, 1)
    return [
        patch.object(traces, "load", lambda path: routed),
        patch.object(progress, "run_with_bar", lambda *of: done.append(1) or run(*of)),
    ]


def of_several_gpus(done):
    ranks = SimpleNamespace(rank=0, size=2, clock=SimpleNamespace(torch_device=SimpleNamespace(type="cpu")))
    on = SimpleNamespace(token_s=1.0, bandwidth=np.ones((2, 2)))
    found = parallel_bench.Found("m", 1.0, 1.0, 1.0, 1.0, [], [], [], [])
    costs = SimpleNamespace(on=on, exchange_s=[1.0], rest_s=1.0)

    return [
        patch.object(parallel_bench.measure, "even_costs", does(done, costs)),
        patch.object(parallel_bench, "placements_of", lambda *of: [None]),
        patch.object(parallel_bench, "replay", lambda *of: [None]),
        patch.object(parallel_bench, "beside_model", lambda *of: found),
        patch.object(parallel_bench, "table", lambda *of: ""),
        patch.object(findings, "what", lambda run: ""),
        patch.object(findings, "doubts", lambda run: []),
        patch.object(parallel_bench.traces, "load", lambda path: TRACE),
        patch.object(parallel_bench, "MarkedRanks", lambda clock: ranks),
        patch.object(parallel_bench, "Watch", nullcontext),
        *(patch.object(parallel_bench.dist, name, lambda *of, **options: None) for name in
          ("init_process_group", "destroy_process_group")),
    ]  # fmt: skip


def on_several_gpus(words):
    app = typer.Typer()
    app.command()(parallel_bench.main)
    return CliRunner().invoke(app, list(words))


def of_a_page(module, measured: dict) -> Callable:
    """Of a module that measures, records and fills in a page of the documentation."""
    page = SimpleNamespace(read_text=str, write_text=lambda text: None)
    return lambda done: [
        patch.object(module, "measure", does(done, measured)),
        patch.object(module, "DOCUMENT", page),
    ]


def of_a_plan(done):
    return [patch("moeblaze_ref.plan.advice.changes", does(done, []))]


def of_measured_plans(done):
    return [patch.object(recorded, "_rows", does(done, [[]]))]


def of_a_league(done):
    right = [check_layer.Row("torch/experts", "bfloat16", True, "", 0.5, True, False, (), "")]
    return [
        patch.object(check_layer, "check_device"),
        patch.object(check_layer, "rows_of", does(done, right)),
        patch.object(league, "timed", does(done, [])),
    ]


def of_memory(done):
    return [patch("moeblaze_ref.memory.measured.measure_here", does(done, []))]


def of_demo(done):
    """Everything before the plots."""
    names = ("_train", "_cases", "_layer_config", "_show_memory", "_count_dispatch", "_figures")
    result = SimpleNamespace(model=SimpleNamespace(blocks=[SimpleNamespace(moe=None)]))
    results = (result, [SimpleNamespace(L=1)], None, None, [], figure_of_loss)
    return [
        *(patch(f"moeblaze_ref.cli.demo.{name}", does(done, made)) for name, made in zip(names, results, strict=True)),
        patch("moeblaze_ref.cli.demo.check.plan", lambda *of, **options: []),
        patch("moeblaze_ref.cli.demo._compare_kept_bytes"),
        *(patch.object(terminal, name, lambda rows: "") for name in ("check_table", "verdict")),
        patch("moeblaze_ref.verify.check.passed", lambda rows: True),
    ]


def of_grading(done):
    return [
        patch("moeblaze_ref.course.exercises.grading.submissions", lambda folder: []),
        patch("moeblaze_ref.course.exercises.grading.open_network", lambda: False),
        patch("moeblaze_ref.course.exercises.grading.grade", does(done, [])),
    ]


def of_slides(done):
    return [patch("moeblaze_ref.course.teaching.slides.lecture", does(done, []))]


def of_quiz(done):
    return [patch("moeblaze_ref.course.teaching.quiz._asked", does(done, []))]


def begins_with(first: str) -> Callable:
    """What reads a file that begins with this."""

    def load(path):
        assert path.read_text().startswith(first)

    return load


def figure_of_loss():
    from moeblaze_ref.lm.plots import loss_curve

    return {"loss": loss_curve([2.0, 1.0])}


PLACE = ("place", "--synthetic", "2x4x1", "--gpus", "2", "--method", "contiguous", "--splits", "0")
REPLAY = ("replay", "--trace", "t", "--gpus", "2", "--method", "greedy", "--batch", "8", "--window", "8")
SHIFT = ("shift", "--trace", "t", "--gpus", "2", "--by", "third", "--method", "greedy", "--seeds", "1")
COMMANDS = {
    "check": Command(("check", "--backend", "numpy", "--record"), provenance.load, of_check),
    "check --kernel": Command(
        ("check", "--kernel", "a.cu", "--stage", "combine", "--record"), provenance.load, of_a_kernel
    ),
    "sanitize": Command(("sanitize", "--record"), provenance.load, of_sanitize),
    "bench": Command(("bench", "layer", "--record"), provenance.load, of_a_gpu),
    "bench --out": Command(("bench", "layer", "--out"), provenance.load, of_a_gpu),
    "tune": Command(("tune", "--record"), tune.tiles.load, of_tune),
    "paper": Command(
        ("paper", "moeblaze-fig4", "--gpu", "--record"), papers_command.results.load, of_paper, streams=False
    ),
    "evidence": Command(("evidence", "replayed", "--json", "--record"), provenance.load, of_evidence),
    "trace": Command(("trace", "--checkpoint", __file__, "--device", "cpu", "--out"), traces.load, of_trace),
    "replay --record": Command((*REPLAY, "--record"), provenance.load, of_a_stream),
    "replay --plots": Command((*REPLAY, "--plots"), figures._check_picture, of_a_stream, "load_by_batch.png"),
    "shift --record": Command((*SHIFT, "--record"), provenance.load, of_a_stream),
    "place --out": Command((*PLACE, "--out"), maps.load, of_place),
    "place --record": Command((*PLACE, "--record"), provenance.load, of_place),
    "place --plots": Command((*PLACE, "--plots"), figures._check_picture, of_place, "load_by_gpu.png"),
    "memory": Command(
        ("memory", "--preset", "conf1", "--measure", "--plots"), figures._check_picture, of_memory,
        "memory_against_tokens.png",
    ),
    "plan --plots": Command(
        ("plan", "olmoe-1b-7b", "--plots"), figures._check_picture, of_a_plan, "plan_timeline.png"
    ),
    "plan.measure": Command(
        ("measure", "--record"), provenance.load, of_measured_plans, run=run_main(plan_measure.main)
    ),
    "plan.measure_experts": Command(
        ("measure_experts", "--record"), provenance.load, of_measured_plans, run=run_main(measure_experts.main)
    ),
    "league": Command(("league", "--record"), provenance.load, of_a_league, streams=False),
    "paper --plots": Command(("paper", "moeblaze-fig3", "--plots"), figures._check_picture, file="moeblaze-fig3.png"),
    "demo": Command(("demo", "--out"), figures._check_picture, of_demo, "loss.png"),
    "parallel.bench": Command(
        ("--trace", "t", "--map", "m", "--preset", "toy", "--tokens", "4", "--steps", "1", "--record"), provenance.load,
        of_several_gpus, run=on_several_gpus,
    ),
    "course grade": Command(("course", "grade", "folder", "--out"), begins_with("submission,exercise,"), of_grading),
    "course slides": Command(("course", "slides"), begins_with("<!DOCTYPE html><!-- slides"), of_slides),
    "course quiz": Command(("course", "quiz", "--out"), begins_with("# Quiz: the Mixture"), of_quiz),
    "site.path": Command(
        ("path", "--record"), provenance.load, of_a_page(course_path, {"rows": [], "cores": 1}),
        run=run_main(course_path.main),
    ),
    "site.cupy_by_hand": Command(
        ("cupy", "--record"), provenance.load, of_a_page(cupy_by_hand, {"printed": ""}),
        run=run_main(cupy_by_hand.main),
    ),
}  # fmt: skip


@pytest.fixture(params=COMMANDS)
def command(request, tmp_path, one_thread):
    return replace(COMMANDS[request.param], folder=tmp_path)


def one_line(result) -> str:
    """The last line of an error, after argparse's usage."""
    assert result.exit_code == 2, result.output
    return result.stderr.splitlines()[-1]


def test_a_device_stays_one(command):
    make_device(command.target, NULL)
    if command.streams:
        command.writes()
    else:
        command.refuses("not a regular file")
    assert is_device(command.target)


def test_a_device_that_takes_nothing_stays_one(command):
    make_device(command.target, FULL)
    said = one_line(command())
    assert "cannot be written" in said or not command.streams, said
    assert is_device(command.target)


def test_a_pipe_gets_all_that_a_file_would(command, tmp_path):
    os.mkfifo(command.target)
    if not command.streams:
        command.refuses("not a regular file")
        return
    pipe, read = os.open(command.target, os.O_RDONLY | os.O_NONBLOCK), []
    reader = threading.Thread(target=lambda: read.append(all_of(pipe)), daemon=True)
    reader.start()
    command.writes()
    reader.join(60)
    assert command.target.is_fifo()
    whole = tmp_path / "whole"
    whole.write_bytes(read[0])
    command.load(whole)


def all_of(pipe: int) -> bytes:
    """What a reader that waits gets, until the first writer closes the pipe."""
    select.select([pipe], [], [])
    os.set_blocking(pipe, True)
    with open(pipe, "rb") as file:
        return file.read()


def test_a_pipe_without_a_reader_is_refused_before_any_work(command):
    os.mkfifo(command.target)
    command.refuses("a pipe that no process reads" if command.streams else "not a regular file")


def test_a_link_into_a_folder_that_is_not_there_makes_the_folder(command, tmp_path):
    command.target.symlink_to(tmp_path / "missing" / "file")
    command.writes()
    assert command.target.is_symlink()
    command.load(tmp_path / "missing" / "file")


def test_a_link_into_a_folder_that_cannot_be_made_is_refused_before_any_work(command, tmp_path):
    (tmp_path / "notes").write_text(FOREIGN)
    command.target.symlink_to(tmp_path / "notes" / "file")
    command.refuses()


def test_links_in_a_circle_are_one_line_before_any_work(command, tmp_path):
    command.target.symlink_to("circle")
    (tmp_path / "circle").symlink_to(command.target.name)
    assert command.refuses("cannot be written", "symbolic links").stderr.count("error:") == 1


OTHER = {"device": "a", "versions": {}, "commit": "c"}  # a record of no command


@pytest.mark.parametrize(
    "content", [FOREIGN, json.dumps(OTHER), json.dumps(OTHER | {"command": "another command"})],
    ids=["notes", "record of no command", "record of another command"],
)  # fmt: skip
def test_somebody_elses_file_is_refused_before_any_work_and_replaced_by_force(command, content):
    command.target.write_text(content)
    command.refuses(command.target.name, "--force")
    assert command.target.read_text() == content
    command.writes("--force")
    command.load(command.target)


def test_a_file_of_its_own_is_replaced_and_an_empty_one_filled(command):
    command.target.touch()
    for _ in range(2):
        command.writes()
        command.load(command.target)
        assert command.target.stat().st_size > 0


OUTPUTS = {"record", "out", "plots"}


def options_of_commands():
    """Each command with the names of its options."""
    commands = typer.main.get_command(app.app).commands
    return [(name, {option.name for option in one.params}) for name, one in commands.items()]


def test_every_option_that_names_an_output_is_in_the_table():
    """A command that writes has --force, but training, which never replaces anything."""
    found = set()
    for name, options in options_of_commands():
        assert bool(options & OUTPUTS) == ("force" in options) or name == "train", name
        found |= {(name, option) for option in options & OUTPUTS}
    written = {(one.words[0], one.words[-1].lstrip("-")) for one in COMMANDS.values()}
    assert found - written == {("train", "out"), ("evidence", "out")}  # folders of runs, as below


# Commands with several outputs ----------------------------------------------------------------------------------------

EVIDENCE_OF_CURVES = ("evidence", "curves", "--json")
PAPER = ("paper", "moeblaze-fig4", "--gpu")
# (words, the work that is taken out, an option and its path, another and its path) in a folder.
COLLISIONS = {
    "place: the same": (PLACE, of_place, ("--out", "x"), ("--record", "x")),
    "place: another spelling": (PLACE, of_place, ("--out", "x"), ("--record", "folder/../x")),
    "place: a link": (PLACE, of_place, ("--out", "x"), ("--record", "link to x")),
    "place: a folder's link": (PLACE, of_place, ("--out", "folder/x"), ("--record", "link to folder/x")),
    "place: one file of two names": (PLACE, of_place, ("--out", "one"), ("--record", "other")),
    "place: a picture": (PLACE, of_place, ("--out", "plots/load_by_gpu.png"), ("--plots", "plots")),
    "place: the pictures' folder": (PLACE, of_place, ("--record", "plots"), ("--plots", "plots")),
    "place: a pipe": (PLACE, of_place, ("--out", "pipe"), ("--record", "pipe")),
    "replay: a picture": (REPLAY, of_a_stream, ("--record", "plots/load_by_batch.png"), ("--plots", "plots")),
    "evidence: a log": (EVIDENCE_OF_CURVES, of_evidence, ("--record", "runs/moeblaze/log.jsonl"), ("--out", "runs")),
    "evidence: the runs' folder": (EVIDENCE_OF_CURVES, of_evidence, ("--record", "runs"), ("--out", "runs")),
    "paper: a picture": (PAPER, of_paper, ("--record", "plots/moeblaze-fig4_H100.png"), ("--plots", "plots")),
}


@pytest.mark.parametrize("case", COLLISIONS)
def test_two_options_that_name_one_file_are_refused_before_any_work(case, tmp_path, one_thread):
    words, without, (one, path), (other, second) = COLLISIONS[case]
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to x").symlink_to("x")
    (tmp_path / "link to folder").symlink_to("folder")
    (tmp_path / "one").touch()
    (tmp_path / "other").hardlink_to(tmp_path / "one")
    os.mkfifo(tmp_path / "pipe")
    reader, done = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK), []
    before = sorted(tmp_path.rglob("*"))
    with patched(without(done)):
        result = CliRunner().invoke(app.app, [*words, one, str(tmp_path / path), other, f"{tmp_path}/{second}"])
    os.close(reader)
    said = one_line(result)
    assert one in said and other in said and "name two files" in said, said
    assert not done and sorted(tmp_path.rglob("*")) == before


def test_a_device_may_be_named_twice_and_two_files_may_share_a_folder(tmp_path, one_thread):
    make_device(tmp_path / "null", NULL)
    for out, record in (("null", "null"), ("new/map.npz", "new/record.json")):
        with patched(of_place([])):
            words = [*PLACE, "--out", str(tmp_path / out), "--record", str(tmp_path / record)]
            result = CliRunner().invoke(app.app, words)
        assert result.exit_code == 0, result.output
    maps.load(tmp_path / "new" / "map.npz"), provenance.load_of("place", tmp_path / "new" / "record.json")


def test_every_command_with_several_outputs_is_in_the_table_of_collisions():
    outputs = {name: [f"--{option}" for option in options & OUTPUTS] for name, options in options_of_commands()}
    pairs = {name: set(map(frozenset, itertools.combinations(named, 2))) for name, named in outputs.items()}
    several = {name: found for name, found in pairs.items() if found}
    tried = {
        name: {frozenset((a[0], b[0])) for words, _, a, b in COLLISIONS.values() if words[0] == name}
        for name in several
    }
    assert tried == several


# The one mechanism ----------------------------------------------------------------------------------------------------


def test_what_is_printed_to_goes_on_where_the_last_line_ended(tmp_path):
    """A redirected /dev/stdout is a regular file, which must be neither replaced nor begun again."""
    code = (
        "from pathlib import Path; from moeblaze_ref.core import records; print('before');"
        "records.write(Path('/dev/stdout'), {'a': 1}); print('after')"
    )
    told = tmp_path / "told"
    with told.open("w") as file:
        assert processes.run([sys.executable, "-c", code], stdout=file).returncode == 0
    assert told.read_text() == 'before\n{\n "a": 1\n}\nafter\n'
    piped = processes.run([sys.executable, "-c", code])
    assert piped.stdout == told.read_text()


def test_a_socket_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(tmp_path / "socket"))
        with pytest.raises(ValueError, match="socket is a socket, but only a file, a character device or a pipe"):
            records.write(tmp_path / "socket", {})


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("precious"), Path.mkdir,
                                  lambda path: path.write_text(FOREIGN)])  # fmt: skip
def test_what_lies_beside_a_file_stays(tmp_path, make):
    (tmp_path / "precious").write_text(FOREIGN)
    names = [tmp_path / "x.json.part", tmp_path / ".moeblaze-notes.part"]
    for path in names:
        make(path)
    before = [(path.lstat().st_ino, path.lstat().st_mode) for path in names]
    records.write(tmp_path / "x.json", {})
    assert [(path.lstat().st_ino, path.lstat().st_mode) for path in names] == before
    assert (tmp_path / "precious").read_text() == FOREIGN
    assert all(path.read_text() == FOREIGN for path in names if path.is_file())


WRITES = """
import os, signal, sys
from pathlib import Path
from moeblaze_ref.core import records
def write(part):
    part.write_text("half")
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
records.replace(Path(sys.argv[1]), write, Path.read_text, True)
"""


@pytest.mark.parametrize(("name", "left"), [("SIGTERM", 0), ("SIGINT", 0), ("SIGKILL", 1)])
def test_what_a_killed_write_leaves_is_gone_after_the_next(tmp_path, name, left):
    path = tmp_path / "kept.json"
    path.write_text(FOREIGN)
    killed = processes.run([sys.executable, "-c", WRITES, path, name])
    assert killed.returncode == -getattr(signal, name), killed.stderr
    assert path.read_text() == FOREIGN and len(list(tmp_path.iterdir())) == 1 + left
    records.write(tmp_path / "next.json", {})
    assert {found.name for found in tmp_path.iterdir()} == {"kept.json", "next.json"}


def test_a_write_leaves_alone_what_another_one_fills(tmp_path):
    def write(part):
        part.write_text("half")
        records.write(tmp_path / "other.json", {})
        assert part.read_text() == "half"

    records.replace(tmp_path / "one.json", write, Path.read_text)
    assert {path.name for path in tmp_path.iterdir()} == {"one.json", "other.json"}


def test_a_program_that_handles_sigterm_keeps_its_handler(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from moeblaze_ref.core import records;"
        "signal.signal(signal.SIGTERM, lambda *of: print('mine'));"
        "fill = lambda part: (os.kill(os.getpid(), 15), part.write_text('a'));"
        "records.replace(Path(sys.argv[1]), fill, Path.read_text);"
        "os.kill(os.getpid(), 15)"
    )
    done = processes.run([sys.executable, "-c", code, tmp_path / "x"])
    assert (done.returncode, done.stdout) == (0, "mine\nmine\n"), done.stderr
    assert (tmp_path / "x").read_text() == "a"


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o640, 0o755])
def test_a_file_that_is_replaced_keeps_its_mode_and_its_owner(tmp_path, mode):
    path, seen = tmp_path / "shared.json", []
    records.write(path, {})
    with suppress(PermissionError):  # who may not give a file away is its owner already
        os.chown(path, 65534, 65534)
    path.chmod(mode)
    before = path.stat()
    records.replace(path, lambda part: seen.append(part.stat().st_mode) or part.write_text("{}"), Path.read_text)
    after = path.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino and stat.S_IMODE(seen[0]) == 0o600


def test_a_name_of_the_greatest_length_is_written(tmp_path):
    records.write(tmp_path / ("x" * 255), {"a": 1})
    assert records.read(tmp_path / ("x" * 255), {"a"}) == {"a": 1}


def test_a_json_file_in_the_place_of_a_map_is_refused_in_words_of_our_own(tmp_path):
    path = tmp_path / "map.npz"
    path.write_text("{}")
    with pytest.raises(ValueError) as refused:
        records.check_writable(path, maps.load)
    assert str(refused.value) == (
        f"{path} exists, and this command did not write it: map.npz is truncated, or not an npz of plain arrays. "
        "Name another one, or replace it by --force"
    )


def test_json_that_is_nested_too_deep_is_no_json(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="deep.json is not JSON"):
        records.write(path, {})


def test_the_records_of_the_documentation_name_their_commands():
    """Each can therefore be written anew by its command, without --force."""
    for path in (DOCS / "results").glob("*.json"):
        found = records.read(path, ())
        if "kind" in found or ("code" in found and "runs" not in found):
            named = f"evidence {found['kind']}" if "kind" in found else name_of_record(path.name)
            provenance.load_of(named, path)


def name_of_record(file: str) -> str:
    """The command of the longest beginning of a file's name that is known."""
    return NAMES_OF_RECORDS[max((name for name in NAMES_OF_RECORDS if file.startswith(f"{name}_")), key=len)]


NAMES_OF_RECORDS = {
    "check": "check",
    "course": "site.path",
    "cupy": "site.cupy_by_hand",
    "ep": "parallel.bench",
    "ep_host": "parallel.host",
    "experts": "plan.measure_experts",
    "gradients": "check --gradients",
    "place": "place",
    "place_time": "replay",
    "place_time_shift": "shift",
    "layers": "check --layer",
    "league": "league",
    "plan": "plan.measure",
    "sanitize": "sanitize",
}


@pytest.mark.parametrize(
    "save",
    [
        lambda path, *force: traces.save(path, TRACE, *force),
        lambda path, *force: maps.save(path, maps.from_hosts([[[0], [1]]], 2), *force),
    ],
)
def test_functions_replace_their_own_kind_alone(tmp_path, save):
    path = tmp_path / "out.npz"
    path.write_text(FOREIGN)
    with pytest.raises(ValueError, match="this command did not write it"):
        save(path)
    assert path.read_text() == FOREIGN
    save(path, True)
    save(path)


def test_a_picture_of_another_project_is_refused(tmp_path):
    figure = figure_of_loss()["loss"]
    figure.savefig(tmp_path / "loss.png")
    with pytest.raises(ValueError, match=r"loss.png exists, .*is not a picture of moeblaze_ref"):
        figures.save(figure, tmp_path, "loss")
    figures.save(figure, tmp_path, "loss", force=True)
    assert figures.save(figure, tmp_path, "loss") == tmp_path / "loss.png"


def test_a_notebook_takes_the_place_of_a_notebook_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe.ipynb")
    with pytest.raises(ValueError, match="pipe.ipynb is not a regular file"):
        outputs.remake(tmp_path / "pipe.ipynb")
    (tmp_path / "notes.ipynb").write_text(FOREIGN)
    with pytest.raises(nbformat.reader.NotJSONError):
        outputs.remake(tmp_path / "notes.ipynb")
    assert (tmp_path / "notes.ipynb").read_text() == FOREIGN


def test_a_site_removes_no_folder_of_somebody_else(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(site, "build", lambda folder: built.append(folder) or 0)
    (tmp_path / "notes.txt").write_text(FOREIGN)
    refused = run_main(site.main)(["build", str(tmp_path)])
    assert refused.exit_code == 2 and "all of it would be removed" in refused.stderr and not built
    for words in (["build", str(tmp_path / "new")], ["build", str(tmp_path), "--force"], ["build"]):
        assert run_main(site.main)(words).exit_code == 0
    assert built == [tmp_path / "new", tmp_path, site.SITE]
    (tmp_path / "index.html").write_text(site._TO_HOME)
    site.check_place(tmp_path)


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [lm_run.CHECKPOINT, lm_run.LOG, lm_run.LOCK])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: make_device(path, NULL)], ids=["pipe", "device"])
@pytest.mark.parametrize("resume", [False, True])
def test_training_refuses_what_is_no_regular_file(tmp_path, name, make, resume):
    make(tmp_path / name)
    kind = stat.S_IFMT((tmp_path / name).stat().st_mode)
    with pytest.raises(ValueError, match=f"{name} is not a regular file"):
        lm_run.run(Trainer(small_lm.SETTINGS, data.python_help()), tmp_path, resume)
    assert stat.S_IFMT((tmp_path / name).stat().st_mode) == kind


@pytest.mark.parametrize("name", [lm_run.CHECKPOINT, lm_run.LOG])
@pytest.mark.parametrize("resume", [False, True])
def test_training_keeps_somebody_elses_file(tmp_path, name, resume):
    (tmp_path / name).write_text(FOREIGN)
    with pytest.raises(ValueError, match=name):
        lm_run.run(Trainer(small_lm.SETTINGS, data.python_help()), tmp_path, resume)
    assert (tmp_path / name).read_text() == FOREIGN


def test_a_lock_is_held_on_somebody_elses_file_too(tmp_path):
    (tmp_path / lm_run.LOCK).write_text(FOREIGN)
    with lm_run._alone_in(tmp_path):
        pass
    assert (tmp_path / lm_run.LOCK).read_text() == FOREIGN


def test_a_checkpoint_takes_the_place_of_a_checkpoint_alone(tmp_path):
    trainer = Trainer(small_lm.SETTINGS, data.python_help())
    path = tmp_path / "checkpoint.safetensors"
    path.write_text(FOREIGN)
    with pytest.raises(ValueError, match="this command did not write it"):
        checkpoint.save(path, trainer)
    path.unlink()
    checkpoint.save(path, trainer)
    checkpoint.save(path, trainer)
