"""Try other projects' layers in a process of their own: a crash or an endless compilation ends that process alone."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from moeblaze_ref.bench import layer
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.runtime.device import Device, Gpu

LIMIT_SECONDS = 240  # of one trial, its compilation included


class Trials:
    """Run trials one after the other in a process of their own.

    A trial that crashes the process, or that lasts too long, ends it. The next trial starts another process, and a
    system that ended one is not tried again.
    """

    def __init__(self):
        self._pool: ProcessPoolExecutor | None = None
        self._worker = 0  # id of the pool's process
        self._ended_by: dict[str, str | None] = {}  # a system that ended its process: its message

    def failure(self, system: str, config: MoEConfig) -> str | None:
        """Try one step of a system on a layer; return what fails, in a line, or None if nothing does.

        The system is one of ``bench.timed_systems.SYSTEMS``.
        """
        if system in self._ended_by:
            return f"not tried: on another layer of this run {self._ended_by[system]}"
        torch.cuda.empty_cache()  # the trial shares the GPU's memory with this process
        pool = self._pool or self._start()
        try:
            message, usable = pool.submit(_on_the_gpu, system, config).result(LIMIT_SECONDS)
        except BrokenProcessPool:
            message, usable = "its process crashed", False
        except TimeoutError:
            message, usable = f"its first step did not end within {LIMIT_SECONDS} seconds", False
        if not usable:
            self._end()
            self._ended_by[system] = message
        return message

    def _start(self) -> ProcessPoolExecutor:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self._worker = self._pool.submit(os.getpid).result()
        return self._pool

    def _end(self):
        for process in multiprocessing.active_children():
            if process.pid == self._worker:
                process.kill()
        self._pool = None


def _on_the_gpu(system: str, config: MoEConfig) -> tuple[str | None, bool]:
    """Return the failure, and whether the process can go on: an illegal access leaves no usable CUDA context."""
    message = failure(system, config, Gpu())
    try:
        torch.cuda.empty_cache()
    except RuntimeError:
        return message, False
    return message, True


def failure(system: str, config: MoEConfig, device: Device) -> str | None:
    """Try one step of a system on a layer in this process; return what `Trials.failure` returns."""
    try:
        scene = layer.Scene(config, layer.Choice((system,)), device)
        (subject,) = scene.subjects()
        scene.step(subject)
        device.settle()
    except Exception as error:  # another project's code may raise any error
        first, *_ = [*str(error).strip().splitlines(), ""]
        return f"{type(error).__name__}: {first}"
    return None
