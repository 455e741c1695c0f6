"""Figures 4 and 6 of MoEBlaze: the speed of a training step on its seven configurations, measured on a GPU.

A step is a forward and a backward of one layer in bfloat16, without an optimizer, as in sections 6.4 and 6.6. Every
system computes with the same weights and tokens. `bench.layer.time_layer` times them interleaved in one run, compares
the output and every gradient with the oracle, and counts what each saves for backward.

Section 6 names two ungated activations, ReLU (6.1) and SiLU (6.3, 6.4); figure 4 is measured with both.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from moeblaze_ref.bench import accuracy, foreign, layer, report
from moeblaze_ref.bench.timed_systems import OURS
from moeblaze_ref.core.config import PAPER_PRESETS, MoEConfig, preset
from moeblaze_ref.papers.trials import Trials
from moeblaze_ref.runtime.device import Device

Row = dict[str, Any]
Job = Callable[[], list[Row]]
Trial = Callable[[str, MoEConfig], str | None]

POLICIES = ("paper", "minimal", "inputs")
BASELINES = ("megablocks", "grouped_mm", *foreign.SYSTEMS, "gather_sum_compiled")
REPETITIONS = 9
NOT_SHOWN = ("kind", "routing", "time_over_uniform", "capacity_factor", "dropped_rows", "lost_tokens")


def figure_4(device: Device) -> list[Job]:
    """Return a job for each configuration, with SiLU and with ReLU, see `time_systems`."""
    return jobs(("silu", "relu"), device)


def figure_6(device: Device) -> list[Job]:
    """Return a job for each configuration, with SwiGLU, see `time_systems`."""
    return jobs(("swiglu",), device)


def jobs(activations: Sequence[str], device: Device) -> list[Job]:
    """Return a job for each activation and configuration of MoEBlaze's table 1, see `time_systems`."""
    fails = Trials().failure
    return [
        partial(time_systems, name, preset(name).config.replace(activation=activation), device, fails)
        for activation in activations
        for name in PAPER_PRESETS
    ]


def time_systems(name: str, config: MoEConfig, device: Device, fails: Trial) -> list[Row]:
    """Time our layer under ``POLICIES`` and every baseline, interleaved.

    The layer's name in the rows is ``name``. ``fails`` tries a system of another project on it, as
    `trials.Trials.failure` does.

    Returns
    -------
    list of dict
        A `bench.layer.Row` for each system that runs and is right, without the columns ``NOT_SHOWN``. For each other
        one preset, shape, dtype, activation, system, policy (None) and message: what fails, in a line.
    """
    failures = {system: fails(system, config) for system in BASELINES if system in foreign.SYSTEMS}
    able = tuple(system for system in BASELINES if failures.get(system) is None)
    timed = layer.time_layer(name, config, layer.Choice((OURS, *able), POLICIES, repetitions=REPETITIONS), device)
    failures |= {row["system"]: _wrong(row) for row in report.wrong(timed) if row["system"] in foreign.SYSTEMS}
    messages = {system: message for system, message in failures.items() if message is not None}
    head = {"preset": name, "shape": config.sizes, "dtype": config.dtype, "activation": config.activation}
    return [
        *(_shown(row, messages) for row in timed if row["system"] not in messages),
        *(head | {"system": system, "policy": None, "message": message} for system, message in messages.items()),
    ]


def _shown(row: Row, messages: Mapping[str, str]) -> Row:
    """A row without the columns that are not shown, nor ratios to systems that have a message."""
    ratios = {system: ratio for system, ratio in row["ratio_to"].items() if system not in messages}
    return {key: value for key, value in row.items() if key not in NOT_SHOWN} | {"ratio_to": ratios}


def _wrong(row: Row) -> str:
    """Return a system's error against the oracle, with the reason if it is known."""
    message = (
        f"wrong: error {row['error']:.2g}, of the worst row {row['row_error']:.2g}, compared with the oracle; "
        f"at most {accuracy.BOUND:.2g} and {accuracy.ROW_BOUND:.2g} are allowed"
    )
    reason = foreign.FAULTS.get((row["system"], row["activation"]))
    return message if reason is None else f"{message}: {reason}"
