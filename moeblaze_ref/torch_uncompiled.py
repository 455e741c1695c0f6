"""What torch.compile leaves as it is, and compiles what is around it.

A module of its own: to mark a function so imports the compiler, more than a second that only who compiles should spend.
"""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, outside of any compiled graph."""
    return function(*arguments)
