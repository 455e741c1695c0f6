"""`moeblaze lab`: a reader's copies of the notebooks, and JupyterLab over them."""

from unittest.mock import Mock, patch

import pytest
from test_cli import moeblaze

from moeblaze_ref.core.paths import ROOT, notebooks_dir
from moeblaze_ref.course.notebook import copies

NAMES = {path.relative_to(ROOT / "notebooks") for path in (ROOT / "notebooks").rglob("*.ipynb")}


@pytest.fixture
def started():
    """What was run in place of JupyterLab."""
    with patch("subprocess.run", Mock(return_value=Mock(returncode=3))) as run:
        yield run


def test_it_opens_copies_of_every_notebook_and_passes_options_on(tmp_path, monkeypatch, started):
    monkeypatch.chdir(tmp_path)
    done = moeblaze("lab", "--no-browser", "--port=9999")
    assert done.exit_code == 3, "JupyterLab's own exit status"
    assert f"{len(NAMES)} new notebooks in moeblaze_course/notebooks" in done.stdout
    own = tmp_path / "moeblaze_course"
    assert {path.relative_to(own / "notebooks") for path in (own / "notebooks").rglob("*.ipynb")} == NAMES
    (command,) = (call.args[0] for call in started.call_args_list)
    assert f"--ServerApp.root_dir={own}" in command and command[-2:] == ["--no-browser", "--port=9999"]
    for name, target in {"docs": ROOT / "docs", "moeblaze_ref": ROOT / "moeblaze_ref"}.items():
        assert (own / name).resolve() == target


def test_copies_that_are_there_are_kept_and_missing_ones_come_again(tmp_path):
    assert copies.copy(tmp_path) == len(NAMES)
    mine, lost = tmp_path / "notebooks" / "00_memory_wall.ipynb", tmp_path / "notebooks" / "01_routing.ipynb"
    mine.write_text("mine")
    lost.unlink()
    assert copies.copy(tmp_path) == 1
    assert mine.read_text() == "mine" and lost.read_bytes() == (ROOT / "notebooks" / lost.name).read_bytes()


def test_a_link_of_a_checkout_that_has_moved_is_renewed(tmp_path):
    (tmp_path / "docs").symlink_to(tmp_path / "gone")
    copies.copy(tmp_path)
    assert (tmp_path / "docs").resolve() == ROOT / "docs"


def test_the_notebooks_themselves_are_not_opened(started):
    done = moeblaze("lab", "--folder", ROOT)
    assert done.exit_code == 2 and "name another folder for your copies" in " ".join(done.output.split())
    assert not started.called


def test_the_makefile_opens_copies_that_git_ignores():
    assert "\tmoeblaze lab\n" in (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    assert "/moeblaze_course/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_wheel_has_its_notebooks_inside(tmp_path, monkeypatch):
    assert notebooks_dir() == ROOT / "notebooks"
    monkeypatch.setattr("moeblaze_ref.core.paths.PACKAGE", tmp_path)
    (tmp_path / "notebooks").mkdir()
    assert notebooks_dir() == tmp_path / "notebooks"
