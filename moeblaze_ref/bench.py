"""Times of the torch layer on a GPU: device events, warm-up, medians, the contenders interleaved in one run."""

import statistics
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from moeblaze_ref import doors
from moeblaze_ref.backends import BACKENDS
from moeblaze_ref.config import POLICIES, MoEConfig
from moeblaze_ref.memory import measure
from moeblaze_ref.torch_layer import MoELayer

WARM_UP = 2
INPUTS = 3  # used in turn, so that none is in the L2 cache when its turn comes


def plan(configs: list[MoEConfig], repetitions: int) -> list[Callable[[], list[dict[str, Any]]]]:
    """One job a configuration.

    Raises
    ------
    ValueError
        If there is no GPU to time on, or ``repetitions`` is below 1.
    """
    doors.check_int("repetitions", repetitions, at_least=1)
    status = BACKENDS["cuda"].status()
    if not status.available:
        raise ValueError(f"only a GPU is timed: {status.detail}")
    return [lambda config=config: time_policies(config, repetitions) for config in configs]


def time_policies(config: MoEConfig, repetitions: int) -> list[dict[str, Any]]:
    """Forward and backward of one layer under every save policy, the same weights and inputs for all.

    Parameters
    ----------
    config : MoEConfig
        dtype float32, bfloat16 or float16.
    repetitions : int
        Of each policy, in turns; the first ``WARM_UP`` rounds more are not counted.

    Returns
    -------
    list of dict
        policy, shape, dtype, kept_bytes (what autograd keeps, weights excluded), forward_ms and backward_ms (medians).
    """
    dtype = getattr(torch, config.dtype)
    layer = MoELayer(config.d, config.h, config.E, config.k, config.activation, device="cuda", dtype=dtype)
    inputs = [torch.randn(config.L, config.d, device="cuda", dtype=dtype, requires_grad=True) for _ in range(INPUTS)]
    d_out = torch.randn(config.L, config.d, device="cuda", dtype=dtype)
    times: dict[str, list[tuple[float, float]]] = {policy: [] for policy in POLICIES}
    for round_ in range(WARM_UP + repetitions):
        for number, policy in enumerate(POLICIES):
            layer.policy = policy
            elapsed = _time(layer, inputs[(round_ + number) % INPUTS], d_out)
            if round_ >= WARM_UP:
                times[policy].append(elapsed)
    return [_row(layer, policy, inputs[0], config, times[policy]) for policy in POLICIES]


def _time(layer, x, d_out) -> tuple[float, float]:
    """Milliseconds of one forward and of its backward."""
    start, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    out = layer(x).out
    between.record()
    torch.autograd.grad(out, [x, *layer.parameters()], d_out)
    end.record()
    end.synchronize()
    return start.elapsed_time(between), between.elapsed_time(end)


def _row(layer, policy, x, config, times) -> dict[str, Any]:
    layer.policy = policy
    sizes = asdict(config)
    forward, backward = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "policy": policy,
        "shape": {symbol: sizes[symbol] for symbol in "LdhEk"},
        "dtype": config.dtype,
        "kept_bytes": measure.kept_bytes(layer, x),
        "forward_ms": forward,
        "backward_ms": backward,
    }
