"""What runs by itself: the workflow of GitHub, and the containers, call commands that are there."""

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import processes
import pytest
import yaml

ROOT = Path(__file__).parents[1]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())["jobs"]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_checks_out_and_makes_targets(job):
    first, *steps = JOBS[job]["steps"]
    assert first == {"uses": "actions/checkout@v4"} and steps
    targets = re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for step in steps:
        (command,) = step.values()
        make, target = command.split()
        assert (*step, make) == ("run", "make") and target in targets


def test_linux_runs_every_test_and_macos_those_that_need_no_linux():
    assert {job: [step["run"] for step in steps["steps"][1:]] for job, steps in JOBS.items()} == {
        "linux": ["make test"],
        "macos": ["make test-portable"],
    }


SET_UP = "scripts/set_up.sh"


def test_the_containers_do_nothing_but_run_the_set_up_script():
    development = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert development.keys() == {"name", "image", "onCreateCommand"}
    command = development["onCreateCommand"]
    assert command == f"{SET_UP} TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu"
    image = ["FROM debian:bookworm", "WORKDIR /moeblaze_ref", "COPY . .", f"RUN {command}"]
    assert (ROOT / "Dockerfile").read_text().splitlines() == image


def test_an_image_has_neither_the_history_nor_what_git_ignores():
    """Docker's patterns start at the root of the tree; git's do so only with a / in front."""
    ignored_by_git = (line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines())
    patterns = [line.removeprefix("/") if line.startswith("/") else f"**/{line}" for line in ignored_by_git]
    assert (ROOT / ".dockerignore").read_text().splitlines() == [".git", *patterns]


@pytest.fixture
def call_set_up(tmp_path):
    """A function that calls the set-up script from another folder, over a tree that prints what is called."""
    clean = {"PATH": os.environ["PATH"]}  # nothing of the make that may have started these tests
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / SET_UP, tmp_path / SET_UP)
    (tmp_path / "Makefile").write_text("setup:\n\t@echo setup from $(TORCH_INDEX_URL)\n")

    def call(system_packages):
        script = tmp_path / "scripts" / "system_packages.sh"
        script.write_text(f"#!/bin/sh\n{system_packages}\n")
        script.chmod(0o755)
        return processes.run([tmp_path / SET_UP, "TORCH_INDEX_URL=the-index"], cwd="/", env=clean)

    return call


def test_the_set_up_script_installs_system_packages_then_the_pinned_ones(call_set_up):
    result = call_set_up("echo $# needs")
    assert (result.returncode, result.stdout) == (0, "0 needs\nsetup from the-index\n")


def test_the_set_up_script_stops_where_system_packages_are_missing(call_set_up):
    result = call_set_up("exit 3")
    assert (result.returncode, result.stdout) == (3, "")


def test_the_portable_tests_are_there():
    make = ["make", "--no-print-directory", "--dry-run", "test-portable"]
    commands = processes.run(make, cwd=ROOT).stdout.splitlines()
    for command in commands[-2:]:
        paths = [path for path in shlex.split(command) if path.startswith("tests/")]
        assert paths and all((ROOT / path).exists() for path in paths), command
