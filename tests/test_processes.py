"""Processes that tests start always end."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import hostile
import processes
import pytest

OWN = {"processes.py", "browser.py", Path(__file__).name}  # the others start processes by `processes.run`
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_command_prints_comes_back():
    done = processes.run([sys.executable, "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(3)"])
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "2\n", 3)


def test_a_command_over_its_limit_is_killed_with_its_children():
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        processes.run([sys.executable, "-c", PARENT], limit=5)
    assert hostile.until(lambda: not processes.runs(int(expired.value.output)), limit=30)


def test_a_process_that_ignores_the_signal_to_end_is_killed():
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with processes.beginning() as begin:
        process = begin([sys.executable, "-c", deaf], stdout=processes.PIPE)
        with process.stdout:
            process.stdout.readline()
            processes.end(process, limit=0.2)
    assert process.returncode == -signal.SIGKILL


def test_sigint_ends_a_process_though_the_tests_were_to_ignore_it(pytestconfig):
    """As they do if a shell starts them in the background."""
    conftest = pytestconfig.pluginmanager.get_plugin(str(Path(__file__).with_name("conftest.py")))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        conftest.pytest_configure()
        with processes.beginning() as begin:
            process = begin(
                [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"], stdout=processes.PIPE
            )
            with process.stdout:
                process.stdout.readline()
                process.send_signal(signal.SIGINT)
                process.wait(timeout=30)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.returncode == -signal.SIGINT


def test_no_test_starts_a_process_without_a_limit():
    """By name: `subprocess` and `os.system` occur in the helpers alone."""
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        if path.name not in OWN:
            names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
            assert "subprocess" not in names, f"{path.name} starts a process: take processes.run"


def test_a_test_has_a_time_limit(pytestconfig):
    assert pytestconfig.pluginmanager.hasplugin("timeout") and int(pytestconfig.getini("timeout")) <= 1200
