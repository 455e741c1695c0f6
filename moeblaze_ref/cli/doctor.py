"""``moeblaze doctor``: which backends run here."""

from rich import box
from rich.table import Table
from rich.text import Text

from moeblaze_ref.backends.registry import BACKENDS, ORACLE
from moeblaze_ref.cli.shared import print_text, stdout
from moeblaze_ref.runtime.simt import cache


def doctor():
    """Say which backends run here, and what to install for those that do not run."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("backend", no_wrap=True)
    table.add_column("runs here", no_wrap=True)
    table.add_column("how, or why not")
    backends = (*BACKENDS.values(), ORACLE)
    statuses = {backend.name: backend.status() for backend in backends}
    for backend in backends:
        status = statuses[backend.name]
        verdict = Text("yes", style="green") if status.available else Text("no", style="yellow")
        remedy = f"\nto mend: {status.remedy}" if status.remedy else ""
        table.add_row(backend.name, verdict, f"{backend.description}: {status.detail}{remedy}")
    stdout().print(table)
    if statuses["simt"].available:
        print_text(_what_the_cache_holds())


def _what_the_cache_holds() -> str:
    """Return one line on the compiled kernels, or why there is nothing to say of them."""
    try:
        return cache.summary()
    except cache.SimtUnavailable as error:
        return str(error)
