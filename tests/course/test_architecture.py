"""docs/architecture.md shows the contract of imports and the folders as they are."""

import re

import pytest

from moeblaze_ref.core.paths import PACKAGE
from moeblaze_ref.course.site import architecture

TEXT = architecture.DOCUMENT.read_text()
ROW = re.compile(r"^\| `(\w+)/` \| (.*) \| (.*) \| ([\d,]+) \|$", re.MULTILINE)


def rows(text):
    """(name, what it holds, what it may import) of each folder, and its lines."""
    found = ROW.findall(text)
    return [row[:3] for row in found], [int(row[3].replace(",", "")) for row in found]


def test_the_picture_is_the_contract():
    assert architecture.PICTURE.read_text() == architecture.picture()


def test_every_folder_of_the_package_is_in_the_picture_and_the_page():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert folders == set(architecture.HOLDS) == {folder for layer in architecture.layers() for folder in layer}
    assert all(f"**`{folder}/`**" in TEXT for folder in folders)


def test_the_table_is_the_packages():
    """Lines may drift by a tenth before the page is stale."""
    written, lines = rows(TEXT)
    folders, now = rows(architecture.page(TEXT))
    assert written == folders and len(folders) == len(architecture.HOLDS) + 2
    assert lines == [pytest.approx(number, rel=0.1, abs=100) for number in now]


def test_a_folder_may_import_those_below_it():
    may = {name: below for name, _, below in rows(TEXT)[0]}
    assert (may["core"], may["systems"], may["backends"]) == ("", "core", "runtime, systems, core")
    assert may["cli"] == "course and below" and may["bench"] == may["lm"] == "verify and below"


def test_lines_are_those_of_every_source_file(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "one.py").write_text("1\n2\n")
    (tmp_path / "below" / "kernel.cu").write_text("1\n")
    (tmp_path / "table.json").write_text("1\n" * 9)
    assert architecture.lines_in(tmp_path) == 3
