"""What a kernel file's header states, so that tests can compare it with what is counted."""

import math
from typing import NamedTuple

from moeblaze_ref.core.kernel_headers import evaluate, table
from moeblaze_ref.core.paths import kernels_dir

__all__ = ["Stated", "assert_as_stated", "evaluate", "stated"]


class Stated(NamedTuple):
    """What a header says of one kernel."""

    shared: str
    read: str
    written: str


def stated(file):
    """{kernel: Stated} of a file below kernels_cuda/."""
    rows = table((kernels_dir() / file).read_text())
    return {name: Stated(row["shared bytes"], row["bytes read"], row["bytes written"]) for name, row in rows.items()}


def assert_as_stated(launch, headers, symbols):
    """The bytes that the threads of a launch ask for are those that its kernel's header states."""
    header, symbols = headers[launch.kernel], {"blocks": math.prod(launch.grid)} | symbols
    assert launch.read_bytes == evaluate(header.read, symbols), f"{launch.kernel} reads {header.read}"
    assert launch.written_bytes == evaluate(header.written, symbols), f"{launch.kernel} writes {header.written}"
