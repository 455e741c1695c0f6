"""README's numbers and commands are the project's own."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from moeblaze_ref.bench import document
from moeblaze_ref.cli.app import app
from moeblaze_ref.core.config import preset
from moeblaze_ref.core.units import GIB
from moeblaze_ref.memory.accounting import account

README = (Path(__file__).parents[1] / "README.md").read_text()
COLUMNS = [
    ("conventional", None),
    ("megablocks_published", None),
    ("moeblaze", "paper"),
    ("moeblaze", "minimal"),
    ("moeblaze", "inputs"),
]
ROWS = re.findall(r"^\| ([\w-]+) \| ([\d, ]+) \| (.+) \|$", README, re.MULTILINE)


def test_readme_opens_with_the_two_commands():
    first_block = README.split("```")[1].split()
    assert [first_block[i + 1] for i, word in enumerate(first_block) if word == "make"] == ["demo", "test"]


@pytest.mark.parametrize(("name", "sizes", "numbers"), ROWS, ids=[row[0] for row in ROWS])
def test_the_table_is_what_the_formulas_give(name, sizes, numbers):
    config = preset(name).config
    assert sizes == ", ".join(f"{getattr(config, symbol):,}" for symbol in ("L", "d", "h", "E", "k"))
    kept = [account(config, system, policy).kept_bytes / GIB for system, policy in COLUMNS]
    assert numbers.split(" | ") == [f"{number:.2f}" for number in kept]


def test_the_table_is_there():
    assert len(ROWS) == 6


def test_every_command_that_readme_names_exists():
    commands = get_command(app).commands
    named = re.findall(r"moeblaze (\w+)", README)
    assert {"doctor", "check", "memory"} <= set(named) <= commands.keys()


def test_what_was_measured_is_what_the_results_give():
    assert "<!-- begin summary -->" in README and document.fill(README, document.recorded()) == README
