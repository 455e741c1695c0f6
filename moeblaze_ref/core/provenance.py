"""Where a result was measured: GPU, versions and commit, recorded beside every published number."""

import importlib.metadata
import os
import platform
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

from moeblaze_ref.core import records, source_hashes
from moeblaze_ref.core.devices import cuda_device_count
from moeblaze_ref.core.paths import PACKAGE

OWN = ("moeblaze_ref", "numpy", "torch", "numba", "numba-cuda", "cupy-cuda13x", "cuda-core", "triton", "ortools")
BASELINES = (
    *("megablocks", "grouped_gemm", "stanford-stk", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl"),
    *("liger-kernel", "torchtitan", "spmd-types", "transformers"),
)
PACKAGES = (*OWN, *BASELINES)
RECORD = {"device", "versions", "commit"}  # what every record has


def environment(parts: tuple[str, ...] = source_hashes.MEASURED) -> dict[str, Any]:
    """Device, clocks, versions, commit and hashes of the code of this very run.

    Parameters
    ----------
    parts : tuple of str
        The parts of the code that are measured, of ``source_hashes.PARTS``.

    Returns
    -------
    dict
        {device, clocks, versions, commit, code}. Without a GPU device is the processor and clocks is None. The
        commit is git's, or $MOEBLAZE_COMMIT where the tree was copied without its history, else "unknown". ``code``
        has the hash of each part as it is in this tree, whatever of it is committed.
    """
    return {
        "device": _nvidia_smi("name,driver_version,memory.total") or _processor(),
        "clocks": clocks(),
        "versions": {"python": platform.python_version()} | _versions(),
        "commit": _commit(),
        "code": source_hashes.hashes(parts),
    }


def clocks() -> str | None:
    """SM and memory clock of this moment, then their maxima; None without a GPU."""
    return _nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem")


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _nvidia_smi(fields: str) -> str | None:
    if cuda_device_count() == 0:
        return None
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader", "--id=0"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _processor() -> str:
    """The processor's name: Linux alone tells it in a file, others through Python."""
    told = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", told.read_text()) if told.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _commit() -> str:
    if told := os.environ.get("MOEBLAZE_COMMIT"):
        return told
    git = ["git", "-C", str(PACKAGE), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # the machine has no git
        found = ""
    return found or "unknown"


def check_place(path: Path, command: str, force: bool = False) -> None:
    """Check that a record of a command may be written here; errors as in `records.check_writable`."""
    records.check_writable(path, partial(load_of, command), force)


def record(
    path: Path,
    command: str,
    content: dict[str, Any],
    force: bool = False,
    parts: tuple[str, ...] = source_hashes.MEASURED,
) -> dict[str, Any]:
    """Write ``content``, the environment and the name of the command to a JSON file, making its folder if need be.

    Parameters
    ----------
    path : Path
        A record of the same command is replaced; another file only with ``force``.
    command : str
        What makes the record, such as "place" or "check --large".
    content : dict
    force : bool
    parts : tuple of str
        As in `environment`.

    Returns
    -------
    dict
        What was written.

    Raises
    ------
    ValueError, OSError
        As in `records.replace`.
    """
    whole = environment(parts) | {"command": command} | content
    records.write(path, whole, partial(load_of, command), force)
    return whole


def load(path: Path) -> dict[str, Any]:
    """Return what a record of any command holds; errors as in `records.read`."""
    return records.read(path, RECORD)


def resumed(
    path: Path | None, command: str, asked: dict[str, Any], parts: tuple[str, ...] = source_hashes.MEASURED
) -> dict[str, Any]:
    """Return what a record holds that its command can go on with.

    Parameters
    ----------
    path : Path or None
        None if no record was named.
    command : str
    asked : dict
        What the record must hold besides: how the command was called then, and is called now.
    parts : tuple of str
        As in `environment`; other parts of the code may have changed.

    Raises
    ------
    ValueError
        If there is no such record, or it was made on another device, with other versions, by other code, or was asked
        otherwise; the message says what it has, and what it must have.
    """
    if path is None or not path.exists():
        raise ValueError("--resume goes on with the record that --record names, but there is none")
    found, here = load_of(command, path), environment(parts) | asked
    then = found | {"code": {part: found.get("code", {}).get(part) for part in parts}}
    for name in ("device", "versions", "code", *asked):
        if then.get(name) != here[name]:
            raise ValueError(
                f"{path.name} cannot be resumed: its {name} is {then.get(name)}, but it must be {here[name]}, as here"
            )
    return found


def load_of(command: str, path: Path) -> dict[str, Any]:
    """Return what a record of one command holds.

    Raises
    ------
    ValueError, OSError
        If the file is no record, or one of another command; or as in `records.read`.
    """
    found = load(path)
    if (its := found.get("command")) != command:
        named = f"of {its!r}" if its else "that names no command"
        raise ValueError(f"{path.name} is a record {named}, but it must be one of {command!r}")
    return found
