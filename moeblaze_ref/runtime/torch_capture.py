"""Capture of CUDA graphs without Python's garbage collector.

The collector may run at any allocation of a Python object. If it finds a cycle that owns an older CUDA graph, it
destroys the graph. CUDA forbids that while a stream captures: the capture fails with
CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
"""

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


@contextmanager
def without_collector() -> Iterator[None]:
    """Context in which Python's garbage collector runs only if called: reference counting alone frees objects."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def without_collector_if_capturing() -> AbstractContextManager[None]:
    """`without_collector` if the current CUDA stream captures; else nothing."""
    return without_collector() if torch.cuda.is_current_stream_capturing() else nullcontext()


@contextmanager
def capture(graph: torch.cuda.CUDAGraph, pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture the CUDA work inside the ``with`` block: ``torch.cuda.graph`` that no garbage collection can invalidate.

    Garbage is collected first. The collector is off until the capture has ended, and then as it was before.

    Parameters
    ----------
    graph : torch.cuda.CUDAGraph
        What the work is captured into.
    pool, stream : optional
        As in ``torch.cuda.graph``.

    Raises
    ------
    RuntimeError
        As ``torch.cuda.graph``, if the work cannot be captured: for example, if it waits for the GPU. The current
        stream is then the one from before, and torch can capture again.

    Notes
    -----
    Two things can still invalidate a capture: work inside the block that calls ``gc.collect()`` or drops the last
    reference to a CUDA graph, and another thread that does so meanwhile.
    """
    gc.collect()
    with without_collector(), torch.cuda.stream(torch.cuda.current_stream()):  # torch leaves its own after a failure
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                yield
        except BaseException:
            _capture_nothing()
            raise


def _capture_nothing() -> None:
    """After a capture that failed, torch's generator of random numbers is still in it until one succeeds."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
