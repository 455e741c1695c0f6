"""Processes that tests start: each has a time limit, and what it started ends with it."""

import os
import signal
import subprocess
from contextlib import contextmanager
from pathlib import Path

PIPE = subprocess.PIPE
LIMIT = 600  # seconds, on a slow and busy machine; pyproject.toml gives a whole test longer


def run(command, limit=LIMIT, **options):
    """Run a command to its end and return the ``subprocess.CompletedProcess``, with its output as text.

    Parameters
    ----------
    command : sequence of str or Path
    limit : float
        Seconds.
    **options
        Of ``subprocess.Popen``.

    Raises
    ------
    subprocess.TimeoutExpired
        If it did not end within the limit. Its process group is killed.
    """
    options = {"stdout": PIPE, "stderr": PIPE} | options
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        output, errors = process.communicate(timeout=limit)
    except BaseException:
        _kill_group(process)
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@contextmanager
def beginning():
    """Yield a function that starts a command in a session of its own and returns its process; output comes as text.

    Those that still run in the end are killed, with their groups.
    """
    started = []

    def begin(command, **options):
        options |= {"stderr": PIPE, "text": True, "start_new_session": True}
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    try:
        yield begin
    finally:
        for process in started:
            if process.poll() is None:
                _kill_group(process)


def end(process, limit=30):
    """End a process that was started in a session of its own: ask it to, and kill its group after ``limit`` seconds."""
    process.terminate()
    try:
        process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        _kill_group(process)


def runs(pid):
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # it ended meanwhile
        pass
    process.wait()
