"""A record that another process sends is the one that it made, or is refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moeblaze_ref.runtime.record import RECORD, LaunchRecord, Region
from moeblaze_ref.runtime.record_bytes import pack, unpack
from moeblaze_ref.runtime.simt.symbols import Frame, SharedArray

RECORDS = np.array([(0, 4, 16, 3, 4, 1, 0, 0), (1, 0, 24, 3, 0, 0, -3, 1)], RECORD)
MADE = LaunchRecord(
    kernel="walk",
    grid=(2, 1, 1),
    block=(32, 1, 1),
    records=RECORDS,
    seen=9,
    regions={
        0: Region("x", "global", np.dtype(np.float32), (4, 2)),
        -1: Region("shared memory", "shared", parts=(SharedArray("tile", 0, 128),)),
        -3: Region("no array", "nowhere"),
    },
    frames={16: (Frame("helper", "include/common.cuh", 3), Frame("walk", "a.cu", 7)), 24: (Frame("walk", "a.cu", 8),)},
    sources={"a.cu": "first\nsecond \N{GREEK SMALL LETTER MU}\n"},
    fault="kernel walk, block (1, 0, 0), thread (3, 0, 0): stops",
)


def test_a_record_arrives_as_it_was_sent():
    found = unpack(pack(MADE))
    np.testing.assert_array_equal(found.records, RECORDS)
    assert replace(found, records=None).__dict__ == replace(MADE, records=None).__dict__


def changed(**parts):
    head, _, numbers = pack(MADE).partition(b"\n")
    return json.dumps(json.loads(head) | parts).encode() + b"\n" + numbers


def with_record(**fields):
    records = RECORDS.copy()
    for name, value in fields.items():
        records[name][0] = value
    return pack(replace(MADE, records=records))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"\x80\x04N.",  # a pickle
        b"[]\n",
        pack(MADE)[:-1],
        changed(launch=["walk"]),
        changed(frames=[[16, []], [24, []]]),
        changed(frames=[]),
        changed(regions=[[0, "x", "global", "no dtype", [4], []]]),
        changed(sources=7),
        with_record(where=5),
        with_record(instruction=1),
        with_record(bytes=2**31),
    ],
)
def test_other_bytes_are_refused(sent):
    with pytest.raises(ValueError, match="these bytes are not a record of a launch"):
        unpack(sent)
