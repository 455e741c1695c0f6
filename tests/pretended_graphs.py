"""Pretended CUDA graphs for tests without a GPU: captured work runs at once, and a replay is counted and does nothing.

So a layer's results are those of its capture, which are right for the input and the gradients that it had there.
"""

import contextlib
import gc

import pytest
import torch


class Graph:
    """A pretended ``torch.cuda.CUDAGraph``."""

    def __init__(self):
        self.captured, self.replays = False, 0

    def replay(self):
        assert self.captured
        self.replays += 1


class Cuda:
    """What a test reads of the pretended GPU.

    Attributes
    ----------
    events : list of str
        "collection", "begin" and "end" of a capture, and "failed", in their order.
    collector : list of bool
        Whether Python's garbage collector was on, at the beginning and at the end of each capture.
    capturing : bool
    """

    def __init__(self):
        self.events, self.collector, self.capturing = [], [], False

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None):
        """A pretended ``torch.cuda.graph``."""
        self._say("begin")
        self.capturing = True
        try:
            yield
            graph.captured = True
        except BaseException:
            self.events.append("failed")
            raise
        finally:
            self.capturing = False
            self._say("end")

    def _say(self, event):
        self.events.append(event)
        self.collector.append(gc.isenabled())

    def collected(self, phase, info):
        """For ``gc.callbacks``."""
        if phase == "start":
            self.events.append("collection")


@contextlib.contextmanager
def pretended_graphs():
    """torch.cuda with pretended graphs, and no other CUDA."""
    cuda = Cuda()
    names = ("stream", "device", "Stream", "current_stream", "graph_pool_handle", "synchronize")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(torch.cuda, name, lambda *arguments: contextlib.nullcontext())
        patch.setattr(torch.cuda, "CUDAGraph", Graph)
        patch.setattr(torch.cuda, "graph", cuda.graph)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: cuda.capturing)
        gc.callbacks.append(cuda.collected)
        try:
            yield cuda
        finally:
            gc.callbacks.remove(cuda.collected)
