"""README's numbers and commands are the project's own."""

import re
from pathlib import Path

import pytest
from test_docs import Document, wrong_examples
from typer.main import get_command

from moeblaze_ref.backends import registry
from moeblaze_ref.bench import document
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import preset
from moeblaze_ref.core.units import GIB
from moeblaze_ref.memory.accounting import account

PATH = Path(__file__).parents[1] / "README.md"
README = PATH.read_text()
COLUMNS = [("conventional", None), ("megablocks_published", None), ("moeblaze", "minimal")]
ROWS = re.findall(r"^\| ([\w-]+) ((?:\| \d+\.\d\d ){5})\|$", README, re.MULTILINE)
assert len(ROWS) == 5


def test_readme_opens_with_a_layer_that_runs_and_the_two_commands():
    code, printed, commands = README.split("```")[1:6:2]
    assert code.startswith("python") and "MoELayer" in code and "same output: True" in printed
    words = commands.split()
    assert [words[i + 1] for i, word in enumerate(words) if word == "make"] == ["demo", "test"]


def test_the_layer_prints_what_readme_says(monkeypatch):
    """On the CPU, as README says."""
    monkeypatch.setattr(registry, "cuda_device_count", lambda: 0)
    assert list(wrong_examples(Document(PATH))) == []


@pytest.mark.parametrize(("name", "numbers"), ROWS, ids=[row[0] for row in ROWS])
def test_the_kept_bytes_are_what_the_formulas_give(name, numbers):
    kept = [account(preset(name).config, system, policy).kept_bytes / GIB for system, policy in COLUMNS]
    assert numbers.strip("| ").split(" | ")[:3] == [f"{number:.2f}" for number in kept]


def test_every_command_that_readme_names_exists():
    commands = get_command(app).commands
    named = re.findall(r"moeblaze (\w+)", README)
    assert {"doctor", "check", "memory"} <= set(named) <= commands.keys()


def test_what_was_measured_is_what_the_results_give():
    assert "<!-- begin headline -->" in README and document.fill(README, document.recorded()) == README


def test_readme_names_a_page_for_each_reader():
    readers = re.findall(r"^- \*\*([\w ]+)\*\*: ", README, re.MULTILINE)
    assert readers == ["Student", "Lecturer", "Kernel engineer", "Model trainer", "Researcher"]
    home = (PATH.parent / "docs" / "index.md").read_text()
    assert re.findall(r"^\*\*([\w ]+)\*\*$", home, re.MULTILINE) == readers, "each has a card"
