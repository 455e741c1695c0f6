"""Kernels for tests that ask whether a result is right, and not what it cost; and kernels with a fault planted in them."""

from contextlib import contextmanager
from unittest import mock

from moeblaze_ref.runtime.simt import build
from moeblaze_ref.runtime.simt.executor import SimtExecutor
from moeblaze_ref.runtime.source import inlined, kernel_text


@contextmanager
def quick_builds():
    """Kernels are compiled in half the time, with fewer passes: they ask for more accesses than those that count."""
    level, *others = build.INSTRUMENTED_FLAGS
    assert level == "-O2"
    with mock.patch.object(build, "INSTRUMENTED_FLAGS", ("-Og", *others)):
        yield


class Quick(SimtExecutor):
    """An executor of such kernels. Their text differs by a comment: nobody who counts is given one of them."""

    def load(self, file, text=None, **constants):
        with quick_builds():
            return super().load(file, text=f"{text or kernel_text(file)}\n// compiled quickly\n", **constants)


class Planted(Quick):
    """An executor with one fault in one kernel file."""

    def __init__(self, file: str, right: str, wrong: str, seed: int, **constants):
        super().__init__(seed=seed)
        text = inlined(file)
        assert right in text, f"{file} no longer holds {right!r}: update the fault"
        self.file, self.faulty_text, self.constants = file, text.replace(right, wrong), constants

    def load(self, file, text=None, **constants):
        if file != self.file:
            return super().load(file, text=text, **constants)
        return super().load(file, text=self.faulty_text, **constants, **self.constants)
