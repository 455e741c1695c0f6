"""Files that are there whole or not at all."""

import os
import resource
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest

from moeblaze_ref.core import records


@contextmanager
def files_of_at_most(size):
    """The system refuses to let a file grow further, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
