"""A reader's CUDA kernel is recorded in a process of its own, on the case that is asked for."""

import threading
from multiprocessing import Pipe

import pytest
from test_checker import COMBINE, LENGTHS, changed

from moeblaze_ref.runtime.races import races
from moeblaze_ref.verify import check, guard, in_subprocess
from moeblaze_ref.verify.cases import standard_cases
from moeblaze_ref.verify.recording import record

LIMITS = guard.Limits(120)
DECLARED = "    if (index >= L * d) return;\n"


def recorded(text, task="combine", shape="", limits=LIMITS, stop=(), **options):
    return record("mine.cu", text, "mine", task, limits, shape, stop, **options)


def test_the_record_is_of_the_case_that_the_verdict_names():
    """Else of the first; the line numbers are the text's."""
    first, *others = check.cut_to_size(standard_cases())
    (other,) = (case for case in others if case.name == "k = E")
    for shape, case in (("", first), (f"{other.shape}: out[0, 0] is wrong", other)):
        launched = recorded(COMBINE, shape=shape)
        assert launched.fault == "" and launched.kernel == "mine"
        assert {region.name: region.shape for region in launched.regions.values()}["gates"] == (case.L, case.k)
        lines = {frame.line for chain in launched.frames.values() for frame in chain if frame.file == "mine.cu"}
        texts = {COMBINE.splitlines()[line - 1].strip() for line in lines}
        assert "out[index] = sum;" in texts


def test_a_fault_ends_the_record_and_a_race_is_seen_in_it():
    launched = recorded(changed(COMBINE, "if (index >= L * d)", "if (index > L * d)"))
    assert "out-of-bounds" in launched.fault and launched.outside("mine.cu").line
    serial = changed(LENGTHS, "    __syncthreads();\n", "")
    (race,) = races(recorded(serial, "dispatch.expert_lengths", grid="E", block="64"))
    assert race.element.startswith("counts[")


@pytest.mark.parametrize(
    ("does", "error", "message"),
    [
        ("int x = none;", ValueError, r"mine\.cu does not compile:\n(?s:.*)mine\.cu:4:\d+: error: .none. was not"),
        ("__builtin_trap();", ChildProcessError, "the kernel ended the process that ran it, by SIGILL"),
    ],
)
def test_what_ends_before_there_is_a_record_says_why(does, error, message):
    with pytest.raises(error, match=message):
        recorded(changed(COMBINE, DECLARED, f"    {does}\n{DECLARED}"))


def test_a_launch_that_never_ends_is_ended_by_the_limit_or_by_a_stop():
    endless = changed(COMBINE, DECLARED, "    while (true) {}\n")
    with pytest.raises(TimeoutError, match="no verdict after 3 seconds"):
        recorded(endless, limits=guard.Limits(3))
    stop, stopping = Pipe(duplex=False)
    timer = threading.Timer(0.5, stopping.close)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        recorded(endless, stop=[stop])
    timer.join()
    assert in_subprocess.confined(_nothing, LIMITS).status == 0, "the next one runs"


def _nothing(send):
    pass
