"""A test that did not run has failed, unless it needs a GPU, or another project's code, and there is none.

Every skip and every xfail, at collection too, is reported as a failure. Two folders are excused. In tests/gpu/ they are
allowed where CUDA's driver finds no device, and in tests/foreign/ where no wheel was fetched into build/sglang.
"""

import gc
import os
import signal
import uuid
from pathlib import Path

import pytest

from moeblaze_ref.core.devices import cuda_device_count

TESTS = Path(__file__).parent
WHEELS = TESTS.parent / "build" / "sglang"
EXCUSED = {  # folders, and when their tests need not run
    TESTS / "gpu": lambda: cuda_device_count() == 0,
    TESTS / "foreign": lambda: not any(WHEELS.glob("*.whl")),
}

# The cores are taken by as many processes: threads of each would wait for one another. Read when torch is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def is_excused(path):
    """Whether a test or a module at ``path`` need not run."""
    return any(path.is_relative_to(folder) and excuse() for folder, excuse in EXCUSED.items())


def fail_if_skipped(report, path):
    """The report of a test or a module at ``path``, turned into a failure if it did not run without excuse."""
    xfail = hasattr(report, "wasxfail")
    if not (report.skipped or xfail) or is_excused(path):
        return report
    reason = f"xfail {report.wasxfail}".strip() if xfail else report.longrepr[2]
    if xfail:
        del report.wasxfail  # pytest counts no report that has it as a failure
    report.outcome = "failed"
    report.longrepr = (
        f"{report.nodeid} did not run ({reason}); only tests in tests/gpu may be skipped, without a GPU, and those in "
        "tests/foreign without the wheel"
    )
    return report


def pytest_addoption(parser):
    parser.addoption(
        "--every-notebook",
        action="store_true",
        help="drive the controls of every notebook in JupyterLab (test_browser.py), not of the one with all kinds",
    )


def pytest_configure():
    """Let SIGINT end what the tests start, even if a shell that started them in the background made them ignore it.

    A process inherits that a signal is ignored, but no handler of Python's.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """A process more than there are cores: some tests wait, for pip, a browser or a rank that does not answer."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    return len(cores) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect tests without the collector of garbage: what modules make when they are imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish():
    """What is there before the first test stays, so the collector of garbage need not look through it every time.

    And it looks less often than by default, which took a twentieth of the tests' time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.fixture(autouse=True, scope="session")
def no_progress_of_the_user(tmp_path_factory):
    """What the tests solve is not noted in the user's own folder, nor by processes that they start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEBLAZE_PROGRESS", str(tmp_path_factory.mktemp("progress") / "progress.json"))
        yield


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """A host of notebooks with the wheel of this tree."""
    import host

    return host.made(tmp_path_factory)


@pytest.fixture
def one_thread():
    """Torch on one thread: small products lose more by waiting for other cores than they gain."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_autograd_thread():
    """Backward passes in the test's own thread: autograd's may hold the last gradients for a while after them."""
    import torch

    with torch.autograd.set_multithreading_enabled(False):
        yield


@pytest.fixture
def mark():
    """A text that no other process has in its command line or environment."""
    import hostile

    mark = f"8{uuid.uuid4().int % 10**12}.5"  # a number of seconds
    yield mark
    ended = hostile.until(lambda: not hostile.processes_of(mark), limit=30)
    for process in hostile.processes_of(mark):
        os.kill(process, signal.SIGKILL)
    assert ended, "processes are left"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item):
    return fail_if_skipped((yield), item.path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    return fail_if_skipped((yield), collector.path)


def pytest_terminal_summary(terminalreporter):
    """A table of the planted faults, whichever processes tried them."""
    passed = [dict(report.user_properties) for report in terminalreporter.getreports("passed")]
    if caught := [properties["caught"] for properties in passed if "caught" in properties]:
        terminalreporter.section(f"{len(caught)} planted faults, and what `moeblaze check` says of them")
        terminalreporter.write_line("\n".join(sorted(caught)))
