"""Messages of the checker, of compilers and of a recorded launch, on the lines of the text that they speak of."""

import re
from typing import NamedTuple

import numpy as np

from moeblaze_ref.course.notebook.stepper import line_in
from moeblaze_ref.runtime.races import LOAD, Race, races
from moeblaze_ref.runtime.record import LaunchRecord

_COMPILER = r"^{file}:(\d+):\d+: (?:fatal )?(error|warning): (.*)$"
_LINE = r"{file}(?:, line |:)(\d+)"
_ELEMENT = re.compile(r"(?P<name>\w+)\[(?P<index>[\d, ]+)\] is ")  # of `report.Difference`
_DECLARATION = r"^(?:def|.*__global__.*?)\s+{kernel}\s*\("


class Message(NamedTuple):
    """A message on a line, counted from 1."""

    line: int
    severity: str  #: "error" or "warning"
    message: str


def of_verdict(said: str, file: str) -> list[Message]:
    """Return what a verdict says of lines of a file: each error of a compiler, else the verdict on the first line.

    A verdict that names no line of the file, such as a wrong element, gives no message.
    """
    compilers = re.findall(_COMPILER.format(file=re.escape(file)), said, re.MULTILINE)
    if compilers:
        return [Message(int(line), severity, message) for line, severity, message in compilers]
    named = re.search(_LINE.format(file=re.escape(file)), said)
    return [Message(int(named[1]), "error", said)] if named else []


def declaration(text: str, kernel: str) -> int:
    """Return the line that declares a kernel; 1 if none does."""
    found = re.search(_DECLARATION.format(kernel=re.escape(kernel)), text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def of_record(record: LaunchRecord, file: str) -> list[Message]:
    """Return the fault and the races of a recorded launch, on the lines of the file at which they happen."""
    found = [Message(_line_of_fault(record, file), "error", record.fault)] if record.fault else []
    return found + [message for race in races(record) for message in _of_race(race, file)]


def of_element(record: LaunchRecord, said: str, file: str) -> list[Message]:
    """Return a verdict on a wrong element, on the line of the file that was the last to write the element."""
    found = _ELEMENT.search(said)
    arrays = {name: place for place, region in record.regions.items() for name in region.name.split(" = ")}
    if not found or found["name"] not in arrays:
        return []
    place = arrays[found["name"]]
    shape, dtype = record.regions[place].shape, record.regions[place].dtype
    index = tuple(map(int, found["index"].split(", ")))
    if dtype is None or len(index) != len(shape) or any(i >= size for i, size in zip(index, shape, strict=True)):
        return []
    begin = int(np.ravel_multi_index(index, shape)) * dtype.itemsize
    records = record.records[(record.records["where"] == place) & (record.records["access"] != LOAD)]
    offsets = records["offset"].astype(np.int64)
    wrote = records["instruction"][(offsets <= begin) & (begin < offsets + records["bytes"])]
    line = line_in(file, record.frames[int(wrote[-1])]) if len(wrote) else None
    return [Message(line, "error", said)] if line else []


def _line_of_fault(record: LaunchRecord, file: str) -> int:
    """The line that the fault names, else that of the last record: a launch is recorded up to its fault."""
    if named := re.search(_LINE.format(file=re.escape(file)), record.fault):
        return int(named[1])
    last = record.frames[int(record.records["instruction"][-1])] if len(record.records) else ()
    return line_in(file, last) or 1


def _of_race(race: Race, file: str) -> list[Message]:
    lines = [line_in(file, frames) for frames in race.frames]
    return [Message(line, "error", race.sentence()) for line in dict.fromkeys(lines) if line]
