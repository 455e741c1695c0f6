"""Runs a notebook from top to bottom, sliders included."""

import math
import os
import queue
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client import AsyncKernelClient, AsyncKernelManager
from jupyter_client.channels import AsyncZMQSocketChannel
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient

# The only metadata that a notebook of this project has.
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


class _WatchfulChannel(AsyncZMQSocketChannel):
    """Looks for a reply ten times a second.

    While a slider's picture is sent back to the kernel, a reply may arrive without waking up the code that waits for
    it: jupyter_client sends past the asynchronous socket, which then misses the one signal of the arrival.
    """

    async def get_msg(  # type: ignore[override]  # as AsyncZMQSocketChannel's own
        self, timeout: float | None = None
    ) -> dict[str, Any]:
        """The next message; queue.Empty if there is none within ``timeout`` seconds, None for ever."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            try:
                return await super().get_msg(max(0.0, min(left, 0.1)))
            except queue.Empty:
                if left <= 0.1:
                    raise


class _WatchfulClient(AsyncKernelClient):
    """A client that misses no reply."""

    shell_channel_class = _WatchfulChannel


class _ThisPython(AsyncKernelManager):
    """Starts kernels with the Python that runs this, whatever kernels are installed."""

    client_factory = _WatchfulClient

    @property
    def kernel_spec(self) -> KernelSpec:
        """How a kernel starts."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, **METADATA["kernelspec"])


def execute(notebook: nbformat.NotebookNode, folder: Path, cell_seconds: int = 600) -> nbformat.NotebookNode:
    """A copy of a notebook after a run from top to bottom in a folder, by the Python that calls this.

    Raises
    ------
    nbclient.exceptions.CellExecutionError
        If a cell raises.
    nbclient.exceptions.CellTimeoutError
        If a cell runs longer than its limit.
    """
    copy = nbformat.from_dict(notebook)
    with tempfile.TemporaryDirectory() as home:
        where = {"metadata": {"path": str(folder)}}
        one_thread = {"OMP_NUM_THREADS": "1"}  # more would add in another order
        client = NotebookClient(
            copy, timeout=cell_seconds, kernel_manager_class=_ThisPython, record_timing=False, resources=where
        )
        client.execute(env={**os.environ, "IPYTHONDIR": home, **one_thread})
    return copy
