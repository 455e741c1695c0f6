"""Find where numbers stopped being finite."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


class _Found(Exception):
    """Ends a forward at the first output that is not finite: kernels need not run on it."""


@torch.no_grad()
def first_module(model: nn.Module, forward: Callable[[], Any]) -> str | None:
    """The first module, in the order of the forward, whose output holds NaN or infinity.

    ``forward`` runs the model once more. Returns the module's name, such as ``blocks.1.moe``; None if every output is
    finite.
    """
    hooks = [module.register_forward_hook(_raise_if_bad(name)) for name, module in model.named_modules() if name]
    try:
        forward()
    except _Found as found:
        return str(found)
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _raise_if_bad(name: str):
    def look(module, inputs, output):
        if not all(torch.isfinite(tensor).all() for tensor in _tensors(output)):
            raise _Found(name)

    return look


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple):
        for part in output:
            yield from _tensors(part)


def first_weight(model: nn.Module) -> str | None:
    """The first parameter, in the order of the model, that holds NaN or infinity; None if all are finite."""
    return next((name for name, p in model.named_parameters() if not torch.isfinite(p).all()), None)


def last_gradient(model: nn.Module) -> str | None:
    """The last parameter, in the order of the model, whose gradient holds NaN or infinity.

    The backward reaches it first. None if every gradient is finite.
    """
    bad = [name for name, p in model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
    return bad[-1] if bad else None
