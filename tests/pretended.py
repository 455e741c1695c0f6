"""A pretended device for the tests of the benchmark: its work runs on the CPU, its time is what the test says."""

import torch

from moeblaze_ref.runtime.ceilings import Ceilings

FLOPS_PER_MS, BYTES_PER_MS, PEAK, LEFT = 2e6, 3e3, 1000, 70_000
HOT_FLOPS_PER_MS = 1.5e6


class PretendedDevice:
    """Between two marks passes what the work adds to ``now``, or a thousandth more than between the two before."""

    torch_device = torch.device("cpu")
    rested = Ceilings(FLOPS_PER_MS, BYTES_PER_MS)

    def __init__(self, cache_bytes=1):
        self.now, self.seen, self.tick, self.cache_bytes = 0.0, 0.0, 1.0, cache_bytes
        self.replays = 0  # of the forwards of modules that are graphed

    def settle(self):
        pass

    def mark(self):
        if self.now == self.seen:
            self.now += self.tick
            self.tick += 0.001
        self.seen = self.now
        return self.now

    def milliseconds(self, start, end):
        return end - start

    def ceilings(self):
        return {"product": lambda number, lap: None, "copy": lambda number, lap: None}

    def rates(self, samples):
        assert {"product", "copy"} <= samples.keys()
        return Ceilings(HOT_FLOPS_PER_MS, BYTES_PER_MS / 2)

    def peak_bytes(self, work):
        work()
        return PEAK

    def left_bytes(self, work):
        work()
        return LEFT

    def captured(self, work):
        work()
        return work

    def graphed(self, module, x):
        """In the place of `torch_graphs.graphed`."""
        forward, shape = module.forward, x.shape

        def replay(tokens):
            assert tokens.shape == shape
            self.replays += 1
            return forward(tokens)

        module.forward = replay
        return module

    def clocks(self):
        return "1 MHz, 2 MHz, 3 MHz, 4 MHz"
