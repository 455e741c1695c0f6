"""The cache of compiled kernels: damaged files are built again in one run, and a build is whole or not there."""

import os
import pwd
import re
import shutil
import sys
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import processes
import pytest
from helpers import files_of_at_most
from typer.testing import CliRunner

from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.cli.app import app
from moeblaze_ref.runtime.simt import build, cache

KERNEL = 'extern "C" __global__ void f(int* out) { out[threadIdx.x] = 7; }\n'
RUN = f"""
import numpy as np
from moeblaze_ref.runtime.simt.executor import SimtExecutor
out = np.zeros(32, np.int32)
SimtExecutor().load("one.cu", text={KERNEL!r}).launch("f", 1, 32, out=out)
print("filled", set(out.tolist()))
"""


# Runs Python without the capabilities by which root reads and writes what its mode forbids.
BOUND = """
import ctypes, os, sys
CAPBSET_DROP, DAC_OVERRIDE, DAC_READ_SEARCH = 24, 1, 2
for capability in (DAC_OVERRIDE, DAC_READ_SEARCH):
    ctypes.CDLL(None).prctl(CAPBSET_DROP, capability, 0, 0, 0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run(folder: Path, **environment: str):
    """Build what is not there, and run a kernel, in a process of its own."""
    return python(folder, "-c", RUN, **environment)


def python(folder: Path, *words: str, **environment: str):
    """Run Python with a cache, in a process that is bound by the modes of files."""
    command = [sys.executable, "-c", BOUND, *words]
    return processes.run(command, env=os.environ | {"MOEBLAZE_CACHE": str(folder)} | environment)


def assert_runs(folder: Path):
    done = run(folder)
    assert (done.returncode, done.stdout) == (0, "filled {7}\n"), done.stderr
    assert damaged(folder) == []


def damaged(folder: Path) -> list[str]:
    return [path.name for path in (folder / "simt").iterdir() if not cache.is_whole(path)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    assert_runs(folder)
    return folder


@pytest.fixture
def copy(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    return tmp_path / "cache"


def files(folder: Path) -> dict[str, Path]:
    """Those of the cache by what they are: the runtime is the larger library."""
    kernel, runtime = sorted((folder / "simt").glob("*.so"), key=lambda path: path.stat().st_size)
    (prelude,) = (folder / "simt").glob("*.gch")
    return {"kernel": kernel, "runtime": runtime, "prelude": prelude}


# What a file may hold instead of what was built.
DAMAGES = {
    "empty": lambda path, others: b"",
    "cut": lambda path, others: path.read_bytes()[: path.stat().st_size // 2],
    "cut by a byte": lambda path, others: path.read_bytes()[:-1],
    "foreign": lambda path, others: Path(np._core._multiarray_umath.__file__).read_bytes(),
    "another build": lambda path, others: next(other for other in others if other != path).read_bytes(),
    "a changed byte": lambda path, others: path.read_bytes().replace(b"simt_", b"simT_", 1),
}


# The runtime takes seconds to build. It is kept as a kernel's library is, so that one case of each kind shows it.
@pytest.mark.parametrize(("what", "damage"), [*(("kernel", damage) for damage in DAMAGES), ("runtime", "cut")])
def test_a_damaged_library_is_built_again_in_one_run(copy, what, damage):
    libraries = files(copy)
    path = libraries[what]
    before = path.read_bytes()
    path.write_bytes(DAMAGES[damage](path, libraries.values()))
    assert path.read_bytes() != before and damaged(copy) == [path.name]
    assert_runs(copy)


@pytest.mark.parametrize("damage", ["empty", "cut", "foreign"])
def test_a_damaged_precompiled_header_is_built_again(copy, damage):
    found = files(copy)
    found["prelude"].write_bytes(DAMAGES[damage](found["prelude"], found.values()))
    found["kernel"].unlink()  # nothing reads a precompiled header while there is nothing to compile
    assert_runs(copy)


def seal(path: Path, content: bytes):
    """Write a file as if it had been built so."""
    path.write_bytes(content + cache._seal(path.name, content))
    assert cache.is_whole(path)


@pytest.mark.parametrize("what", ["kernel", "runtime"])
def test_a_whole_library_that_does_not_load_is_built_again(copy, what):
    path = files(copy)[what]
    seal(path, b"no library")
    assert_runs(copy)
    assert b"no library" not in path.read_bytes()


def unreadable(path: Path):
    path.chmod(0)


def in_its_place(make: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(path: Path):
        path.unlink()
        make(path)

    return change


# What may be in the place of a file, and does not keep it from being built again.
IN_ITS_PLACE = {
    "unreadable": unreadable,
    "an empty folder": in_its_place(Path.mkdir),
    "a link to nothing": in_its_place(lambda path: path.symlink_to("nothing")),
    "a link in a circle": in_its_place(lambda path: path.symlink_to(path.name)),
    "a link to a folder": in_its_place(lambda path: path.symlink_to(path.parent.parent)),
    "a pipe": in_its_place(os.mkfifo),
}


@pytest.mark.parametrize(
    ("what", "change"), [*(("kernel", kind) for kind in IN_ITS_PLACE), ("runtime", "a link to nothing")]
)
def test_what_is_no_readable_file_is_replaced_by_one(copy, what, change):
    path = files(copy)[what]
    IN_ITS_PLACE[change](path)
    assert_runs(copy)
    assert path.is_file() and not path.is_symlink()


DOCTOR = ("-m", "moeblaze_ref", "doctor")


@pytest.mark.parametrize("what", ["kernel", "runtime"])
def test_a_folder_that_holds_something_is_named_and_stays(copy, what):
    path = files(copy)[what]
    path.unlink()
    path.mkdir()
    (path / "notes").touch()
    done = run(copy)
    said = done.stderr.splitlines()[-1]
    assert f"SimtUnavailable: {path} is a folder, but a compiled file must be there" in said and "; remove it" in said
    assert (path / "notes").exists()


def test_a_check_whose_cache_cannot_be_used_is_one_line(monkeypatch):
    def refuse(*of):
        raise cache.SimtUnavailable("x.so is a folder; remove it")

    monkeypatch.setattr("moeblaze_ref.core.progress.run_with_bar", refuse)
    result = CliRunner().invoke(app, ["check", "--stage", "combine", "--backend", "numpy"])
    assert (result.exit_code, result.stderr) == (2, "error: x.so is a folder; remove it\n")


# The folder's mode; what `moeblaze doctor` says of an unreadable file in it.
MODES = {
    0o755: "4, 1 of them damaged or of an earlier version",
    0o555: "4, 1 of them damaged or of an earlier version",
    0o311: "cannot be listed",
    0o000: "set MOEBLAZE_CACHE to another folder",
}


@pytest.mark.parametrize("mode", MODES)
def test_doctor_says_what_it_cannot_read(copy, mode):
    files(copy)["kernel"].chmod(0)
    (copy / "simt").chmod(mode)
    done = python(copy, *DOCTOR, COLUMNS="200")
    (copy / "simt").chmod(0o755)
    assert done.returncode == 0 and MODES[mode] in done.stdout, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("what", ["kernel", "runtime"])
def test_an_unreadable_file_that_cannot_be_replaced_is_one_line(copy, what):
    files(copy)[what].chmod(0)
    (copy / "simt").chmod(0o555)
    done = run(copy)
    (copy / "simt").chmod(0o755)
    assert "SimtUnavailable: the folder of compiled kernels" in done.stderr.splitlines()[-1], done.stderr


def test_two_processes_heal_one_file_at_once(copy):
    for path in files(copy).values():
        path.write_bytes(b"")
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(run, [copy, copy]))
    assert [one.stdout for one in done] == ["filled {7}\n"] * 2, [one.stderr for one in done]
    assert damaged(copy) == []


def test_a_build_that_is_killed_leaves_nothing_that_is_loaded(copy, tmp_path):
    files(copy)["kernel"].unlink()
    compiler = tmp_path / "g++"
    compiler.write_text(
        f'#!/bin/sh\ncase " $* " in *" -shared "*) kill -9 $PPID;; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    compiler.chmod(0o755)
    assert run(copy, CXX=str(compiler)).returncode == -9
    assert len(list((copy / "simt").glob("*.so"))) == 1
    assert run(copy).stdout == "filled {7}\n"


# One file -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_CACHE", str(tmp_path))
    return tmp_path / "simt"


def test_a_file_is_made_once(folder):
    made = []
    for _ in range(2):
        path = cache.kept("a.so", lambda path: made.append(path.write_bytes(b"content")))
    assert len(made) == 1 and path == folder / "a.so" and path.read_bytes().startswith(b"content")


def test_a_file_is_on_the_disk_before_it_has_its_name(folder, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.replace
    monkeypatch.setattr(
        os, "fsync", lambda number: done.append(os.readlink(f"/proc/self/fd/{number}")) or fsync(number)
    )
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("rename") or rename(*paths))
    cache.kept("a.so", lambda path: path.write_bytes(b"content"))
    first, *rest = done
    assert Path(first).name == "a.so" and Path(first).parent.parent == folder and rest == ["rename", str(folder)]


def test_a_full_disk_is_one_line_and_leaves_nothing(folder):
    with files_of_at_most(1000), pytest.raises(cache.SimtUnavailable) as refused:
        cache.kept("a.so", lambda path: path.write_bytes(bytes(5000)))
    assert re.fullmatch(
        r"the folder of compiled kernels .* cannot be written \(.*\); set MOEBLAZE_CACHE to .*", str(refused.value)
    )
    assert list(folder.iterdir()) == []


@pytest.fixture
def no_folder(tmp_path, monkeypatch):
    """Where the folder must be, there is a file: nobody can write there, root neither."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOEBLAZE_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(build, "runtime_library", build.runtime_library.__wrapped__)


@pytest.mark.parametrize(
    "words",
    [
        ("check", "--stage", "combine", "--kernel", "kernels_cuda/combine/1_gather.cu:combine"),
        ("train", "--device", "cpu", "--steps", "1", "--out", "run"),
    ],
)
def test_a_cache_that_cannot_be_written_is_one_line(no_folder, tmp_path, monkeypatch, words):
    words = [str(Path(word).resolve()) if word.startswith("kernels_cuda") else word for word in words]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1, result.output
    assert "the folder of compiled kernels" in result.stderr and "set MOEBLAZE_CACHE" in result.stderr


def test_doctor_says_no_to_a_cache_that_cannot_be_written(no_folder):
    status = BACKENDS["simt"].status()
    assert not status.available and "cannot be written" in status.detail and "MOEBLAZE_CACHE" in status.remedy
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0


@pytest.fixture
def homeless(monkeypatch):
    """A process without HOME, whose user the password database does not know."""

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("HOME", "XDG_CACHE_HOME", "MOEBLAZE_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(build, "runtime_library", build.runtime_library.__wrapped__)


def test_a_named_folder_needs_no_home(homeless, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.folder() == tmp_path / "xdg/moeblaze_ref/simt"
    monkeypatch.setenv("MOEBLAZE_CACHE", str(tmp_path / "named"))
    assert cache.folder() == tmp_path / "named/simt"


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_without_a_home_one_line_says_what_to_set(homeless, home, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if home is not None:
        monkeypatch.setenv("HOME", home)
    with pytest.raises(
        cache.SimtUnavailable, match=r"HOME is not set, and user \d+ has no home .*; set MOEBLAZE_CACHE to"
    ):
        cache.folder()
    status = BACKENDS["simt"].status()
    assert not status.available and "HOME" in status.detail and status.remedy == "set MOEBLAZE_CACHE to a folder"
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 0
    result = CliRunner().invoke(app, ["train", "--device", "cpu", "--steps", "1", "--out", "run"])
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1 and "MOEBLAZE_CACHE" in result.stderr


def test_without_home_the_password_database_says_where_it_is(homeless, tmp_path, monkeypatch):
    monkeypatch.setattr(pwd, "getpwuid", lambda user: types.SimpleNamespace(pw_dir=str(tmp_path)))
    assert cache.folder() == tmp_path / ".cache/moeblaze_ref/simt"
    monkeypatch.setattr(pwd, "getpwuid", lambda user: types.SimpleNamespace(pw_dir=""))
    with pytest.raises(cache.SimtUnavailable):
        cache.folder()


@pytest.mark.parametrize("named", ["", "relative", "./relative"])
def test_a_cache_folder_that_is_not_absolute_does_not_count(homeless, named, tmp_path, monkeypatch):
    """As the XDG base directory specification demands; an empty name of ours is none either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    monkeypatch.setenv("MOEBLAZE_CACHE", "")
    assert cache.folder() == tmp_path / "home/.cache/moeblaze_ref/simt"
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.fixture
def refused(copy, monkeypatch):
    """The files that could not be loaded, by their inodes: none can, once the runtime is loaded."""
    monkeypatch.setenv("MOEBLAZE_CACHE", str(copy))
    build.runtime_library()
    tried = []

    def refuse(path, **options):
        tried.append(Path(path).stat().st_ino)
        raise OSError("libx.so: failed to map segment from shared object")

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    return tried


def test_a_library_that_cannot_be_loaded_is_built_once_more_and_then_one_line(refused, monkeypatch):
    monkeypatch.setattr(build, "runtime_library", build.runtime_library.__wrapped__)
    status = BACKENDS["simt"].status()
    assert not status.available and "failed to map" in status.detail and "MOEBLAZE_CACHE" in status.remedy
    assert len(set(refused)) == 2


def test_a_kernel_file_that_cannot_be_loaded_is_one_line(refused):
    with pytest.raises(cache.SimtUnavailable, match="failed to map .*; set MOEBLAZE_CACHE to"):
        build.build_kernels("one.cu", KERNEL, ["f"], [], {})


def test_doctor_loads_the_runtime_and_looks_at_every_file(copy, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_CACHE", str(copy))
    loaded = []
    monkeypatch.setattr(build, "runtime_library", lambda: loaded.append(1))
    files(copy)["kernel"].write_bytes(b"")
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"]).stdout
    assert "4, 1 of them damaged or of an earlier version: they are built again when needed" in said and loaded
