"""Every file is formatted, and passes the linters: the checks of .pre-commit-config.yaml, on all files."""

import json
import re
import shutil
import sys
from pathlib import Path

import processes
import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "kernels_cuda", "moeblaze_ref", "notebooks", "tests")
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and not {"__pycache__", ".ipynb_checkpoints"} & {*path.parts}
)
CPP = r"\.(cu|cuh|h|hpp|cpp)$"
(REPOSITORY,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
HOOKS = {hook["id"]: hook for hook in REPOSITORY["hooks"]}


def command(hook):
    """The words of a hook's command, with the tools of this environment, which is .venv in a checkout."""
    tool, *arguments = HOOKS[hook]["entry"].split()
    assert tool.startswith(".venv/bin/")
    return [Path(sys.executable).with_name(tool.removeprefix(".venv/bin/")), *arguments]


def run(hook, files, cwd=ROOT):
    """Run a hook on files, relative to a folder, as pre-commit does."""
    return processes.run([*command(hook), *(files if HOOKS[hook].get("pass_filenames", True) else ())], cwd=cwd)


def matching(pattern):
    return [file for file in FILES if re.search(pattern, file)]


# The hooks


def test_the_hooks_are_local_and_call_tools_that_are_installed():
    assert REPOSITORY["repo"] == "local"
    for name, hook in HOOKS.items():
        assert hook["language"] == "system" and shutil.which(command(name)[0]), name


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_finds_nothing_in_any_file(hook):
    files = matching(HOOKS[hook]["files"])
    assert files
    result = run(hook, files)
    assert result.returncode == 0, result.stdout + result.stderr


WRONG_NOTEBOOK = {"cells": [], "metadata": {"title": "x"}, "nbformat": 4, "nbformat_minor": 5}
WRONG = {  # for each hook a file that it refuses
    "ruff-check": ("a.py", "import os\n"),
    "ruff-format": ("a.py", "x = 'quoted'\n"),
    "clang-format": ("a.cu", "int  x;\n"),
    "notebooks": ("notebooks/a.ipynb", json.dumps(WRONG_NOTEBOOK)),
    "mypy": ("moeblaze_ref/core/a.py", "def untyped(x): ...\n"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_refuses_what_is_wrong(hook, tmp_path):
    for settings in ("pyproject.toml", ".clang-format"):
        shutil.copy(ROOT / settings, tmp_path)
    name, text = WRONG[hook]
    assert re.search(HOOKS[hook]["files"], name)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
    result = run(hook, [name], tmp_path)
    assert result.returncode == 1 and Path(name).name in result.stdout + result.stderr


# What no formatter does


@pytest.mark.parametrize("kind", [CPP, r"\.py$"])
def test_no_line_of_code_has_more_than_120_columns(kind):
    """Comments too, which clang-format leaves as they are; but for the names of errors that mypy ignores."""
    lines = {f"{file}:{n}": line for file in matching(kind) for n, line in enumerate((ROOT / file).open(), 1)}
    code = {place: re.sub(r"  # type: ignore\[[\w, -]+\]$", "", line.rstrip("\n")) for place, line in lines.items()}
    assert [place for place, line in code.items() if len(line) > 120] == []
