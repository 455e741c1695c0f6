"""Ranks that are processes of this machine: for tests and lessons. On several GPUs, torchrun starts them."""

import multiprocessing
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=400)  # of a collective: no rank waits for ever


def free_port() -> int:
    """Return a port of 127.0.0.1 on which no process listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(work: Callable[..., Any], size: int, *arguments: Any, backend: str = "gloo") -> list[Any]:
    """Run ``work(*arguments)`` on each of ``size`` ranks, new processes with one thread, and return the results.

    ``work`` is a function of a module, which the processes import; pickle must take the arguments and the results.
    ``backend`` is "gloo", or "nccl", where rank r gets GPU r.

    Raises
    ------
    torch.multiprocessing.ProcessRaisedException
        If one raised; the message has its traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        start(begin, (size, free_port(), Path(folder), backend, work, arguments), size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def start(work: Callable[..., Any], arguments: tuple, size: int, join: bool = True) -> mp.ProcessContext | None:
    """Call ``work(rank, *arguments)`` in ``size`` processes of a server that has imported torch for all of them.

    They have the environment variables that this process had when it first did so.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    return mp.start_processes(work, arguments, size, join, start_method="forkserver")


def begin(rank: int, size: int, port: int, folder: Path, backend: str, work: Callable[..., Any], arguments: tuple):
    """Be a rank: do the work in the group, and leave what it returned as a file of the folder."""
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
