"""What several test processes need, and one of them makes."""

import fcntl
import os


def made_once(tmp_path_factory, name, make):
    """The text that ``make()`` returns, from the first process of this run that asks for the name; others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all processes
    made = folder / name
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            made.write_text(make())
    return made.read_text()
