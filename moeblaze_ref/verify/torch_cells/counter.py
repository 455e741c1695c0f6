"""Layers whose saved bytes a reader's function counts."""

from collections.abc import Iterator
from typing import Any

import torch

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.nn.systems import system
from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells.cell import Cell

Layers = list[tuple[str, MoEConfig]]  # a system of `nn.SYSTEMS`, and the sizes


def count(cell: Cell, layers: Layers, pipe: Send) -> None:
    """Ask the function for the bytes that one forward of each layer saves, and send them."""

    def steps(saved_bytes: Any) -> Iterator[dict[str, Any]]:
        torch.manual_seed(0)
        for name, sizes in layers:
            dtype = getattr(torch, sizes.dtype)
            layer = system(name, dtype=dtype)(sizes.d, sizes.h, sizes.E, sizes.k, sizes.activation)
            found = saved_bytes(layer, torch.randn(sizes.L, sizes.d, dtype=dtype, requires_grad=True))
            if type(found) is not int:
                raise TypeError(f"{cell.name} returns a {type(found).__name__}, but it must return an int")
            yield {"bytes": found}

    cell.answer(steps, pipe)
