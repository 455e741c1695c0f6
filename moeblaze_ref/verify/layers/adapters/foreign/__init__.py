"""Layers of other projects. Each needs its package, which is imported when the layer is made, and most need a GPU.

Layouts and names of arguments are facts of the releases that ``INSTALL`` names; other releases may differ.
"""

from functools import partial
from typing import NamedTuple

import torch

from moeblaze_ref.verify.layers.adapter import Adapter, Factory
from moeblaze_ref.verify.layers.adapters.foreign import liger, megablocks, sonicmoe, torchtitan

#: what to type where a package is missing
INSTALL = {
    "liger": "pip install liger-kernel==0.8.5",
    "megablocks": "pip install megablocks==0.10.0 grouped_gemm==0.3.0 stanford-stk==0.7.1",
    "sonicmoe": "pip install sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2",
    "torchtitan": "pip install torchtitan==0.3.0 spmd_types==0.2.3",
}


class Foreign(NamedTuple):
    """A factory that says what is missing."""

    project: str  #: a key of ``INSTALL``
    of_project: Factory

    def __call__(self, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> Adapter:
        """Return a new layer of these sizes.

        Raises
        ------
        ImportError
            If the package, or a package that it needs, is missing.
        """
        try:
            return self.of_project(d=d, h=h, E=E, k=k, dtype=dtype, device=device)
        except ImportError as error:
            raise ImportError(f"{self.project} cannot be imported ({error}): {INSTALL[self.project]}") from error


def factories() -> dict[str, Factory]:
    """Return every factory by name."""
    found: dict[str, Factory] = {
        "liger/experts": Foreign("liger", liger.experts),
        "megablocks/dmoe": Foreign("megablocks", megablocks.dmoe),
        "megablocks/dmoe memory-optimized": Foreign("megablocks", partial(megablocks.dmoe, memory_optimized=True)),
        "sonicmoe/moe": Foreign("sonicmoe", sonicmoe.moe),
        "torchtitan/moe": Foreign("torchtitan", torchtitan.moe),
    }
    return found
