"""Processes that talk to each other, what they did, and how they ended."""

import faulthandler
import os
import socket
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = timedelta(seconds=400)  # of the tests' own: nobody is to wait for ever


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(work, size: int, *arguments, backend: str = "gloo") -> list:
    """What ``work(*arguments)`` returned on each of ``size`` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_begin, (size, free_port(), Path(folder), backend, work, arguments), nprocs=size)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _begin(rank, size, port, folder, backend, work, arguments):
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=TIMEOUT)
    torch.save(work(*arguments), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_to_the_end(work, size: int, *arguments, backend: str = "gloo") -> list[tuple[int, str]]:
    """The status and the stderr of each of ``size`` ranks that do ``work(*arguments)``, whatever the others do."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, free_port(), Path(folder), backend, work, arguments)
        started = mp.spawn(_begin_alone, arguments, nprocs=size, join=False).processes
        written = [Path(folder) / f"{rank}.err" for rank in range(size)]
        for process, path in zip(started, written, strict=True):
            process.join(TIMEOUT.total_seconds())
            assert process.exitcode is not None, f"a rank still runs:\n{path.read_text()}"
        return [(process.exitcode, path.read_text()) for process, path in zip(started, written, strict=True)]


def _begin_alone(rank, size, port, folder, *rest):
    """`_begin`, with stderr in a file and no farewell."""
    with (folder / f"{rank}.err").open("w") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.dump_traceback_later(0.9 * TIMEOUT.total_seconds())  # where it hangs, if it does
    try:
        _begin(rank, size, port, folder, *rest)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
