"""Time the host: how long a training step of the layer keeps Python busy, in units of one ``torch.add``.

The layer is so small that the GPU waits for the host, so the host never waits for the GPU's queue. The unit is that of
the same machine and the same minutes: processors differ, and a launch costs more on some than on others.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.launch_plans import use_launch_plans, without_launch_plans
from moeblaze_ref.nn.torch_layer import MoELayer
from moeblaze_ref.runtime.device import Device

TOKENS = 64  # few: the GPU waits
PRESETS = ("conf3",)
CALLS = 10  # of one contender in a row, whose times are one sample
WARM_UP = 3  # rounds: the kernels are compiled, and the plans recorded
WORKS = ("forward", "step")
UNIT = "torch.add"
EMPTY = "step of an empty node"  # what autograd alone costs
Contender = tuple[str, bool]  # of WORKS, and whether launch plans are allowed
Make = Callable[..., torch.nn.Module]  # a layer of a config, with a ``device`` and ``dtype``


@dataclass(frozen=True, kw_only=True)
class Row:
    """The host's time of one kind of work, with or without launch plans."""

    kind: str  #: "host"
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k}
    dtype: str
    work: str  #: "forward", of a training step; "step", forward and backward; or that of a node without kernels
    plans: bool  #: whether launch plans were replayed
    host_us: float  #: median of one call, microseconds
    quartiles_us: tuple[float, float]  #: first and third
    unit_us: float  #: median of one ``torch.add`` of the same run
    units: float  #: host_us over unit_us


def layer_of(config: MoEConfig, **place: Any) -> torch.nn.Module:
    """Return the project's layer on one device."""
    return MoELayer(config.d, config.h, config.E, config.k, config.activation, **place)


def time_host(
    preset: str, config: MoEConfig, repetitions: int, device: Device, make: Make = layer_of
) -> list[dict[str, Any]]:
    """Time forward and step, with and without launch plans, interleaved with ``torch.add``: a `Row` as dict for each.

    ``preset`` is the layer's name in the rows.
    """
    works = works_of(config, device, make)
    contenders: dict[Any, Callable[[], object]] = {UNIT: unit_of(device), (EMPTY, False): empty_step_of(config, device)}
    contenders |= {(name, plans): _called(work, plans) for name, work in works.items() for plans in (False, True)}
    before = use_launch_plans()
    try:
        samples = _samples(contenders, repetitions, device)
    finally:
        use_launch_plans(before)
    unit = statistics.median(samples[UNIT])
    return [
        asdict(
            Row(
                kind="host",
                preset=preset,
                shape=config.sizes,
                dtype=config.dtype,
                work=name,
                plans=plans,
                host_us=(host := statistics.median(samples[name, plans])),
                quartiles_us=_quartiles(samples[name, plans]),
                unit_us=unit,
                units=host / unit,
            )
        )
        for name, plans in [key for key in samples if key != UNIT]
    ]


def works_of(config: MoEConfig, device: Device, make: Make = layer_of) -> dict[str, Callable[[], object]]:
    """Return the calls to time, by name. They are calls of one layer and prepare no inputs."""
    place: dict[str, Any] = {"device": device.torch_device, "dtype": getattr(torch, config.dtype)}
    layer = make(config, **place)
    x, d_out = (torch.randn(config.L, config.d, **place) for _ in range(2))  # (L, d)
    leaves = [x.requires_grad_(), *layer.parameters()]
    return {
        "forward": lambda: layer(x).out,
        "step": lambda: torch.autograd.grad(layer(x).out, leaves, d_out),
    }


def unit_of(device: Device) -> Callable[[], object]:
    """One ``torch.add`` of two small tensors."""
    left, right = (torch.ones(TOKENS, device=device.torch_device) for _ in range(2))
    return lambda: torch.add(left, right)


class _Empty(torch.autograd.Function):
    """A node that saves what it is given, as the layer's does, and runs no kernel."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *weights)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return d_out, *ctx.saved_tensors[1:]


def empty_step_of(config: MoEConfig, device: Device) -> Callable[[], object]:
    """A step of a node with the layer's tensors that does nothing: forward and backward."""
    place: dict[str, Any] = {"device": device.torch_device, "dtype": getattr(torch, config.dtype)}
    x, d_out = (torch.randn(config.L, config.d, **place) for _ in range(2))  # (L, d)
    leaves = [x, *layer_of(config, **place).parameters()]
    x.requires_grad_()
    return lambda: torch.autograd.grad(_Empty.apply(*leaves), leaves, d_out)


def _called(work: Callable[[], object], plans: bool) -> Callable[[], object]:
    def call() -> object:
        with nullcontext() if plans else without_launch_plans():
            return work()

    return call


def _samples(contenders: dict[Any, Callable[[], object]], repetitions: int, device: Device) -> dict[Any, list[float]]:
    """Microseconds of one call of each contender, a sample a round; the device is idle before each."""
    samples: dict[Any, list[float]] = {name: [] for name in contenders}
    for number in range(WARM_UP + repetitions):
        for name, call in contenders.items():
            device.settle()
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            if number >= WARM_UP:
                samples[name].append((time.perf_counter() - start) * 1e6 / CALLS)
    return samples


def _quartiles(samples: Sequence[float]) -> tuple[float, float]:
    if len(samples) == 1:
        return samples[0], samples[0]
    first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
    return first, third
