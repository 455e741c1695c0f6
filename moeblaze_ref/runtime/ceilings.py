"""The two rates that bound a kernel on a device, and the least time of a cost at them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """The least FLOPs and bytes that a stage needs.

    Parameters
    ----------
    flops : int
        Of its matrix products.
    bytes : int
        Inputs and outputs, each once.
    """

    flops: int
    bytes: int


@dataclass(frozen=True)
class Ceilings:
    """Rates of the device, measured in this run.

    Parameters
    ----------
    flops_per_ms : float
        By cuBLAS, bf16, on random numbers.
    bytes_per_ms : float
        By a device copy, read plus written.
    """

    flops_per_ms: float
    bytes_per_ms: float

    def roofline_ms(self, cost: Cost) -> float:
        """Milliseconds below which no version can come by much."""
        return max(cost.flops / self.flops_per_ms, cost.bytes / self.bytes_per_ms)

    def bound(self, cost: Cost) -> str:
        """Which of the two bounds the time: "flops" or "bytes"."""
        return "flops" if cost.flops / self.flops_per_ms > cost.bytes / self.bytes_per_ms else "bytes"
