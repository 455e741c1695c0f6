"""Functions that torch.compile does not compile, and that torch.export refuses.

They have a module of their own: marking a function imports the compiler, which takes more than a second.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Returned = TypeVar("Returned")


REASON = "torch cannot compile an MoE layer of moeblaze_ref: leave out fullgraph=True"


@torch.compiler.disable(reason=REASON)  # type: ignore[no-untyped-call, untyped-decorator]
def run(function: Callable[..., Returned], *arguments: Any) -> Returned:
    """``function(*arguments)``, outside of any compiled graph."""
    return function(*arguments)


# Called in place of being traced: the compiler of torch 2.11 takes is_exporting() for true wherever it traces it.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch's decorators have no types
def refuse_export(layer: str) -> None:
    """Raise RuntimeError under ``torch.export``: an exported program cannot hold the layer."""
    if torch.compiler.is_exporting():
        raise RuntimeError(
            f"torch.export cannot export {layer}: to run it elsewhere, save the state_dict of the module that has its "
            "weights"
        )
