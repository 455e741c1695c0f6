"""Faults of a layer or of its factory, besides wrong numbers."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from typing import NamedTuple

import torch

from moeblaze_ref.core import checks


class LayerFault(ValueError):
    """A layer or its factory raised an error, or did what no layer may.

    Parameters
    ----------
    message : str
        One line.
    kind : str
        What it is in a few words, such as "raises RuntimeError".
    """

    def __init__(self, message: str, kind: str = "") -> None:
        super().__init__(message)
        self.kind = kind


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one of its causes, is that a device had no memory left."""
    return error is not None and (isinstance(error, torch.OutOfMemoryError) or is_out_of_memory(error.__cause__))


def in_a_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def raised(error: BaseException) -> str:
    """An error in a line, and where in the layer's own code it was raised, or what was called there raised it."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OTHERS)]
    where = f" ({PurePath(own[-1].filename).name}, line {own[-1].lineno}, in {own[-1].name})" if own else ""
    return in_a_line(error) + where


# Code that calls a layer, code that a layer calls, and code that checks its description.
_OTHERS = (*(str(PurePath(file).parent) for file in (__file__, torch.__file__, checks.__file__)), "<")


@contextmanager
def faults_of_a_layer(device: str) -> Iterator[None]:
    """Make an error of the code inside, or of the kernels that it started, a `LayerFault`; keep torch's settings."""
    before = Settings.now()
    try:
        yield
        _wait_for(device)
    except LayerFault:
        raise
    except Exception as error:
        raise LayerFault(raised(error), f"raises {type(error).__name__}") from error
    finally:
        after = Settings.now()
        before.restore()
    for name, old, new in zip(SETTINGS, before, after, strict=True):
        if old != new:
            raise LayerFault(f"it changes torch's {name} from {old} to {new}", f"changes torch's {name}")


def _wait_for(device: str) -> None:
    if device != "cpu" and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()


SETTINGS = ("default dtype", "gradient mode", "deterministic mode", "number of threads")


class Settings(NamedTuple):
    """Settings of torch that a layer must not change, in the order of `SETTINGS`."""

    dtype: torch.dtype
    gradients: bool
    deterministic: int
    threads: int

    @classmethod
    def now(cls) -> "Settings":
        """Read the current settings."""
        return cls(
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.get_deterministic_debug_mode(),
            torch.get_num_threads(),
        )

    def restore(self) -> None:
        """Restore the settings that have changed."""
        now = Settings.now()
        if now.dtype != self.dtype:
            torch.set_default_dtype(self.dtype)
        if now.gradients != self.gradients:
            torch.set_grad_enabled(self.gradients)
        if now.deterministic != self.deterministic:
            torch.set_deterministic_debug_mode(self.deterministic)
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
