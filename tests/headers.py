"""What a kernel file's header states, so that tests can compare it with what is counted."""

from typing import NamedTuple

from moeblaze_ref.core.kernel_headers import evaluate, table
from moeblaze_ref.core.paths import kernels_dir

__all__ = ["Stated", "evaluate", "stated"]


class Stated(NamedTuple):
    """What a header says of one kernel."""

    shared: str
    read: str
    written: str


def stated(file):
    """{kernel: Stated} of a file below kernels_cuda/."""
    rows = table((kernels_dir() / file).read_text())
    return {name: Stated(row["shared bytes"], row["bytes read"], row["bytes written"]) for name, row in rows.items()}
