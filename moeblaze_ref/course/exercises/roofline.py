"""The example GPU of several sheets, and which of its two limits binds."""

from moeblaze_ref.runtime.ceilings import Ceilings, Cost

GPU = {"tflops": 800, "tb_per_s": 4}  # 1e12 FLOPs, 1e12 bytes in a second
LIMITS = "'flops' or 'bytes'"


def limit(cost: Cost, tflops: float, tb_per_s: float) -> str:
    """Return the bound of a stage, "flops" or "bytes", on a GPU with 1e12 FLOPs and 1e12 bytes a second."""
    return Ceilings(flops_per_ms=tflops * 10**9, bytes_per_ms=tb_per_s * 10**9).bound(cost)
