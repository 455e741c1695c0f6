"""What runs by itself: the workflow of GitHub and the development container call commands that are there."""

import json
import re
import shlex
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


def test_the_development_container_calls_the_set_up_script():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container.keys() == {"name", "image", "onCreateCommand"}
    (script,) = shlex.split(container["onCreateCommand"])
    assert script == "scripts/system_packages.sh" and (ROOT / script).stat().st_mode & 0o111


def test_the_portable_tests_are_there():
    make = ["make", "--no-print-directory", "--dry-run", "test-portable"]
    commands = processes.run(make, cwd=ROOT).stdout.splitlines()
    for command in commands[-2:]:
        paths = [path for path in shlex.split(command) if path.startswith("tests/")]
        assert paths and all((ROOT / path).exists() for path in paths), command
