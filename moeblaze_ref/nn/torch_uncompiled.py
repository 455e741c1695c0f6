"""What torch.compile leaves as it is, compiling what is around it, and what torch.export cannot have.

A module of its own: to mark a function so imports the compiler, more than a second that only who compiles should spend.
"""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="torch cannot compile an MoE layer of moeblaze_ref: leave out fullgraph=True")
def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, outside of any compiled graph."""
    return function(*arguments)


@torch.compiler.assume_constant_result  # so that a strict export calls it, too, in place of tracing it
def refuse_export(layer: str):
    """Raise RuntimeError: an exported program cannot hold the layer."""
    raise RuntimeError(
        f"torch.export cannot export {layer}: save its state_dict, and load it into a {layer} where it runs"
    )
