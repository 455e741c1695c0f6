"""Encode a launch's records as bytes, JSON and then an array, for a process that does not trust the sender."""

import json
from typing import Any

import numpy as np

from moeblaze_ref.runtime.record import RECORD, LaunchRecord, Region
from moeblaze_ref.runtime.simt.symbols import Frame, SharedArray

WIDEST_ACCESS = 16  # bytes


def pack(record: LaunchRecord) -> bytes:
    """Return a line of JSON with what the record has beside its array, then the array's bytes."""
    head = {
        "launch": [record.kernel, record.grid, record.block, record.seen, record.fault],
        "regions": [[place, *_described(region)] for place, region in record.regions.items()],
        "frames": [[place, chain] for place, chain in record.frames.items()],
        "sources": record.sources,
    }
    return json.dumps(head).encode() + b"\n" + record.records.tobytes()


def unpack(sent: bytes) -> LaunchRecord:
    """Return the record that `pack` has made bytes of.

    Raises
    ------
    ValueError
        If the bytes are no such record. Nothing in them is run.
    """
    first, _, numbers = sent.partition(b"\n")
    try:
        found = _unpacked(json.loads(first), np.frombuffer(numbers, RECORD))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"these bytes are not a record of a launch: {error}") from None
    known = np.isin(found.records["where"], [*found.regions]) & np.isin(found.records["instruction"], [*found.frames])
    if not known.all() or found.records["bytes"].max(initial=0) > WIDEST_ACCESS:
        raise ValueError("these bytes are not a record of a launch: a record names no known memory or line")
    return found


def _described(region: Region) -> tuple[str, str, str | None, tuple[int, ...], tuple[SharedArray, ...]]:
    return region.name, region.space, region.dtype and str(region.dtype), region.shape, region.parts


def _unpacked(head: dict[str, Any], records: np.ndarray) -> LaunchRecord:
    kernel, grid, block, seen, fault = head["launch"]
    return LaunchRecord(
        kernel=str(kernel),
        grid=_three(grid),
        block=_three(block),
        records=records,
        seen=int(seen),
        regions={int(place): _region(*described) for place, *described in head["regions"]},
        frames={int(place): _chain(chain) for place, chain in head["frames"]},
        sources={str(file): str(text) for file, text in head["sources"].items()},
        fault=str(fault),
    )


def _three(size: Any) -> tuple[int, int, int]:
    x, y, z = map(int, size)
    return x, y, z


def _region(name: Any, space: Any, dtype: Any, shape: Any, parts: Any) -> Region:
    arrays = (SharedArray(str(part), int(begin), int(size)) for part, begin, size in parts)
    return Region(str(name), str(space), np.dtype(str(dtype)) if dtype else None, tuple(map(int, shape)), tuple(arrays))


def _chain(frames: Any) -> tuple[Frame, ...]:
    chain = tuple(Frame(str(function), str(file), int(line)) for function, file, line in frames)
    if not chain:
        raise ValueError("an instruction has no line")
    return chain
