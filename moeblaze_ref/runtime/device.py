"""The GPU that is timed: its events, its two ceilings, its allocator, graphs of its work."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Protocol

import torch

from moeblaze_ref.core import provenance
from moeblaze_ref.runtime.ceilings import Ceilings
from moeblaze_ref.runtime.clock import Clock, Contender, Samples, interleave
from moeblaze_ref.runtime.torch_capture import capture

PRODUCT = 8192  # rows, columns and depth of the dense product that stands for all matrix products
COPY_BYTES = 2**29  # of each side of the device copy
LOAD_SECONDS = 1.0  # of dense products, while the clocks are read
REST_SECONDS = 1.0  # before the ceilings are measured alone
REST_REPETITIONS = 7  # few enough to be over before the clocks fall


class NoGraph(RuntimeError):
    """The work cannot be a CUDA graph."""


class Device(Clock, Protocol):
    """A device that is timed: a `Gpu`, or a simulated one in a test."""

    torch_device: torch.device
    cache_bytes: int

    @property
    def rested(self) -> Ceilings:
        """The rates without other load, before the clocks fall."""
        raise NotImplementedError

    def ceilings(self) -> dict[str, Contender]:
        """Contenders that show the device's speed. Time them interleaved with the work that is compared with it."""

    def rates(self, samples: Mapping[Any, Samples]) -> Ceilings:
        """Rates from the samples of `ceilings`, among others."""

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """The most bytes that ``work`` allocates at one time, over what was allocated before it."""

    def left_bytes(self, work: Callable[[], Any]) -> int:
        """The bytes that live on with the result of ``work``."""

    def captured(self, work: Callable[[], Any]) -> Callable[[], None]:
        """``work`` as a graph to be replayed, whose results stay allocated; raises NoGraph if it cannot be one."""


class Gpu:
    """The current CUDA device.

    Attributes
    ----------
    torch_device : torch.device
    cache_bytes : int
        Of the L2 cache, which inputs that are used alternately must not fit into.
    """

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.cache_bytes = torch.cuda.get_device_properties(self.torch_device).L2_cache_size

    def settle(self) -> None:
        """Wait until the device has finished all work in its queue."""
        torch.cuda.synchronize()

    def mark(self) -> torch.cuda.Event:
        """An event in the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record()
        return event

    def milliseconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Milliseconds between two events; waits for the second."""
        end.synchronize()
        elapsed: float = start.elapsed_time(end)
        return elapsed

    def ceilings(self) -> dict[str, Contender]:
        """The dense product and the copy, to be timed interleaved with whatever they are the ceilings of."""
        sizes, dtype = (PRODUCT, PRODUCT), torch.bfloat16
        left, right = (torch.randn(sizes, device=self.torch_device, dtype=dtype) for _ in range(2))
        product = torch.empty_like(left)
        source = torch.randint(256, (COPY_BYTES,), device=self.torch_device, dtype=torch.uint8)
        target = torch.empty_like(source)
        return {
            "product": lambda number, lap: torch.mm(left, right, out=product),
            "copy": lambda number, lap: target.copy_(source),
        }

    def rates(self, samples: Mapping[Any, Samples]) -> Ceilings:
        """Return the rates that the samples of `ceilings` show."""
        return Ceilings(2 * PRODUCT**3 / samples["product"].median, 2 * COPY_BYTES / samples["copy"].median)

    @cached_property
    def rested(self) -> Ceilings:
        """The rates of a GPU that comes from a pause, once a run: at its power limit it soon clocks lower than this."""
        torch.cuda.synchronize()
        time.sleep(REST_SECONDS)
        return self.rates(interleave(self.ceilings(), REST_REPETITIONS, self))

    def peak_bytes(self, work: Callable[[], Any]) -> int:
        """The most bytes that ``work`` allocates at one time, over what was allocated before it."""
        before = _settled_bytes()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def left_bytes(self, work: Callable[[], Any]) -> int:
        """The bytes that live on with the result of ``work``, by torch's allocator."""
        before = _settled_bytes()
        result = work()
        left = _settled_bytes() - before
        del result
        return left

    def captured(self, work: Callable[[], Any]) -> Callable[[], None]:
        """``work`` as a CUDA graph, to be replayed; its results stay allocated as long as the graph.

        Raises
        ------
        NoGraph
            If the work waits for the device, or does what else no graph can hold.
        """
        work()  # compiles, and takes workspaces, which a capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with capture(graph):
                results = work()
        except Exception as error:  # layers of other projects have exceptions of their own
            raise NoGraph(str(error)) from error

        def replay(results: Any = results) -> None:
            graph.replay()

        return replay

    def clocks(self) -> str | None:
        """SM and memory clock under load, and their maxima, as nvidia-smi says while dense products run."""
        contenders = self.ceilings()
        start = self.mark()
        contenders["product"](0, lambda: None)
        once = self.milliseconds(start, self.mark())
        for number in range(round(1000 * LOAD_SECONDS / once)):
            contenders["product"](number, lambda: None)
        clocks = provenance.clocks()
        torch.cuda.synchronize()
        return clocks


def _settled_bytes() -> int:
    """The allocated bytes, when nothing is left to be freed or done."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()
