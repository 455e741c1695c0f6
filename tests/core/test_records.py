"""Files that are there whole or not at all."""

import errno
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from helpers import files_of_at_most
from typer.testing import CliRunner

from moeblaze_ref.cli.app import app
from moeblaze_ref.core import records


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_thereafter(tmp_path, monkeypatch):
    done = []
    fsync, rename = os.fsync, os.replace

    def seen(descriptor):
        (part,) = tmp_path.glob(".moeblaze-*.part") if not done else [tmp_path]
        for path, name in ((tmp_path, tmp_path.name), (part, "part")):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                done.append(name)
                break
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("rename") or rename(*paths))
    records.write(tmp_path / "new.json", {"a": 1})
    assert done == ["part", "rename", tmp_path.name]
    assert records.read(tmp_path / "new.json", {"a"}) == {"a": 1}


def test_a_file_has_the_rights_that_the_umask_leaves(tmp_path):
    before = os.umask(0o027)
    try:
        records.write(tmp_path / "new.json", {})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640


def test_a_full_disk_leaves_what_was_there_and_nothing_else(tmp_path):
    path = tmp_path / "kept.json"
    records.write(path, {"kept": True})
    with files_of_at_most(1000), pytest.raises(OSError, match="kept.json cannot be written: .*too large"):
        records.write(path, {"more": "x" * 5000})
    assert records.read(path, set()) == {"kept": True} and list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to("file.json")
    records.write(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").readlink() == Path("file.json")
    assert records.read(tmp_path / "file.json", set()) == {"a": 1}


@pytest.mark.parametrize("text", ["folder/", "./folder/", "/folder/.", "/", "a.json//"])
def test_a_name_that_ends_as_a_folders_is_no_file(text):
    with pytest.raises(
        ValueError, match=f"^{re.escape(text)} ends as a folder's name does, but a file is to be written"
    ):
        records.file_named(text)
    assert records.file_named("folder/a.json") == Path("folder/a.json") and records.file_named(".") == Path()


OPTIONS = [
    ("check", "--record"),
    ("sanitize", "--record"),
    ("bench layer", "--record"),
    ("bench layer", "--out"),
    ("paper", "--record"),
    ("tune", "--record"),
    ("evidence curves", "--record"),
    ("trace --checkpoint a", "--out"),
    ("place --synthetic 4x2x1 --gpus 2", "--out"),
    ("place --synthetic 4x2x1 --gpus 2", "--record"),
]


@pytest.mark.parametrize(("command", "option"), OPTIONS)
def test_an_option_that_names_a_file_refuses_the_name_of_a_folder(command, option, tmp_path, monkeypatch):
    """A path forgets the slash at its end: a file of that name was written."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*command.split(), option, "./folder/"])
    assert result.exit_code == 2 and f"'{option}'" in result.output, result.output
    assert "./folder/ ends as a folder's name does" in result.output
    assert list(tmp_path.iterdir()) == []


def refuse(number):
    """What fails as an operation that the system refuses, and names the file that it was given."""

    def fail(*arguments, **options):
        raise OSError(number, os.strerror(number), "/folder/tmp1234")

    return fail


def test_a_message_names_the_path_of_the_user_and_no_temporary_one(tmp_path, monkeypatch):
    path = tmp_path / "new.json"
    with pytest.raises(OSError, match=f"^{path} cannot be written: No such file or directory$"):
        records.replace(path, lambda part: shutil.rmtree(tmp_path), lambda found: None)  # the folder goes meanwhile
    monkeypatch.setattr(tempfile, "TemporaryFile", refuse(errno.EROFS))
    with pytest.raises(OSError, match=f"^{path} cannot be written: Read-only file system$"):
        records.check_writable(path, lambda found: None)


def test_a_file_with_hard_links_is_refused_and_by_force_replaced_alone(tmp_path):
    path, other = tmp_path / "a.json", tmp_path / "b.json"
    records.write(path, {"a": 1})
    other.hardlink_to(path)
    for attempt in (records.check_writable, lambda path, load: records.write(path, {"a": 2}, load)):
        with pytest.raises(ValueError, match=f"^{path} has 2 names .hard links., and .* replace this one by --force$"):
            attempt(path, lambda found: records.read(found, {"a"}))
    assert records.read(path, ()) == {"a": 1} and path.samefile(other)
    records.write(path, {"a": 2}, force=True)
    assert records.read(path, ()) == {"a": 2} and records.read(other, ()) == {"a": 1}
    records.write(path, {"a": 3})  # it has one name now
