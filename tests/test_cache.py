"""The cache of compiled kernels: damaged files are built again in one run, and a build is whole or not there."""

import os
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import processes
import pytest
from test_records import files_of_at_most
from typer.testing import CliRunner

from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.cli import app
from moeblaze_ref.simt import build, cache

KERNEL = 'extern "C" __global__ void f(int* out) { out[threadIdx.x] = 7; }\n'
RUN = f"""
import numpy as np
from moeblaze_ref.raw_cuda.runtime.simt import SimtExecutor
out = np.zeros(32, np.int32)
SimtExecutor().load("one.cu", text={KERNEL!r}).launch("f", 1, 32, out=out)
print("filled", set(out.tolist()))
"""


def run(folder: Path, **environment: str):
    """Build what is not there, and run a kernel, in a process of its own."""
    return processes.run([sys.executable, "-c", RUN], env=os.environ | {"MOEBLAZE_CACHE": str(folder)} | environment)


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


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("what", ["kernel", "runtime"])
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


def test_a_library_that_cannot_be_loaded_is_one_line(monkeypatch):
    def refuse(*arguments, **options):
        raise OSError("libx.so: failed to map segment from shared object")

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    monkeypatch.setattr(build, "runtime_library", build.runtime_library.__wrapped__)
    status = BACKENDS["simt"].status()
    assert not status.available and "failed to map" in status.detail and "MOEBLAZE_CACHE" in status.remedy


def test_doctor_loads_the_runtime_and_looks_at_every_file(copy, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_CACHE", str(copy))
    loaded = []
    monkeypatch.setattr(build, "runtime_library", lambda: loaded.append(1))
    files(copy)["kernel"].write_bytes(b"")
    said = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["doctor"]).stdout
    assert "4, 1 of them damaged or of an earlier version: they are built again when needed" in said and loaded
