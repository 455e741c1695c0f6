"""Time the first training step of fresh processes: with empty caches of kernels on the disk, then with warm ones.

Each process makes a layer and its inputs, waits for the device, and times the forward and the backward of the output's
sum. The kernels are compiled in the first of them, or loaded from the caches.
``python -m moeblaze_ref.bench.first_step`` is such a process.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.runtime.device import Device

PRESETS = ("conf3",)
# The variables that name the folders of compiled kernels: ours, CuPy's and the driver's.
CACHES = ("MOEBLAZE_CACHE", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")
PROCESSES = {"empty": 1, "warm": 3}  # by what the caches are when they start


@dataclass(frozen=True, kw_only=True)
class Row:
    """The first step of processes whose caches are empty, or warm: medians over the processes."""

    kind: str  #: "first_step"
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k}
    dtype: str
    caches: str  #: "empty" or "warm"
    processes: int
    forward_s: float  #: seconds until the device has done it; so are the others
    backward_s: float
    step_s: float  #: forward and backward
    process_s: float  #: from the start of the process to its end: Python, torch and the device's context too


def time_first_step(preset: str, config: MoEConfig, device: Device) -> list[dict[str, Any]]:
    """Time first steps in processes of their own, one after another: a `Row` as dict for each of ``PROCESSES``.

    Parameters
    ----------
    preset : str
        The layer's name in the rows.
    config : MoEConfig
    device : Device
        Of its kind, "cuda" or "cpu", is the device of the processes.

    Raises
    ------
    ValueError
        If a process fails; the message is the last line that it wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | dict.fromkeys(CACHES, folder)
        found = {
            caches: [_timed(config, device.torch_device.type, environment) for _ in range(count)]
            for caches, count in PROCESSES.items()
        }
    return [
        asdict(
            Row(
                kind="first_step",
                preset=preset,
                shape=config.sizes,
                dtype=config.dtype,
                caches=caches,
                processes=len(times),
                **{name: statistics.median(of_one[name] for of_one in times) for name in times[0]},
            )
        )
        for caches, times in found.items()
    ]


def _timed(config: MoEConfig, device: str, environment: dict[str, str]) -> dict[str, float]:
    """The seconds of a new process."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "moeblaze_ref.bench.first_step", json.dumps(asdict(config)), device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        said = done.stderr.strip() or f"it ended with status {done.returncode}"
        raise ValueError(f"a first step failed: {said.splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found | {"process_s": time.perf_counter() - start}


def first_step(config: MoEConfig, device: str) -> dict[str, float]:
    """Make a layer and return the seconds of its first forward, its first backward, and both."""
    place: dict[str, Any] = {"device": device, "dtype": getattr(torch, config.dtype)}
    layer = MoELayer(config.d, config.h, config.E, config.k, config.activation, **place)
    x = torch.randn(config.L, config.d, **place).requires_grad_()  # (L, d)
    settle: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    settle()
    start = time.perf_counter()
    total = layer(x).out.sum()
    settle()
    middle = time.perf_counter()
    torch.autograd.grad(total, [x, *layer.parameters()])
    settle()
    end = time.perf_counter()
    return {"forward_s": middle - start, "backward_s": end - middle, "step_s": end - start}


if __name__ == "__main__":
    print(json.dumps(first_step(MoEConfig(**json.loads(sys.argv[1])), sys.argv[2])))
