"""Ranks some of which fail or die, and how each of them ended."""

import faulthandler
import os
import sys
import tempfile
import traceback
from pathlib import Path

from moeblaze_ref.parallel.local import TIMEOUT, begin, free_port, start


def run_to_the_end(work, size: int, *arguments, backend: str = "gloo") -> list[tuple[int, str]]:
    """The status and the stderr of each of ``size`` ranks that do ``work(*arguments)``, whatever the others do."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, free_port(), Path(folder), backend, work, arguments)
        started = start(_begin_alone, arguments, size, join=False).processes
        written = [Path(folder) / f"{rank}.err" for rank in range(size)]
        for process, path in zip(started, written, strict=True):
            process.join(TIMEOUT.total_seconds())
            assert process.exitcode is not None, f"a rank still runs:\n{path.read_text()}"
        return [(process.exitcode, path.read_text()) for process, path in zip(started, written, strict=True)]


def _begin_alone(rank, size, port, folder, *rest):
    """`begin`, with stderr in a file and no farewell."""
    with (folder / f"{rank}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT.total_seconds())  # where it hangs, if it does
    try:
        begin(rank, size, port, folder, *rest)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
