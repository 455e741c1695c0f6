"""Processes that talk by gloo, and what they did."""

import socket
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=120)  # of the tests' own: nobody is to wait for ever


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(work, size: int, *arguments, timeout=TIMEOUT) -> list:
    """What ``work(*arguments)`` returned on each of ``size`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_begin, (size, free_port(), Path(folder), timeout, work, arguments), nprocs=size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _begin(rank, size, port, folder, timeout, work, arguments):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size, timeout=timeout
    )
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
