"""Torch's function transforms and its tracer, of a layer whose kernels torch cannot look into: each raises one line."""

from collections.abc import Iterable
from typing import NoReturn

import torch
from torch import Tensor

# By the name of the transform in torch: what users call it, and what to use instead.
_INSTEAD = {
    "Grad": ("torch.func.grad, vjp or jacrev", "call torch.autograd.grad, or backward, on the layer's output"),
    "Vmap": ("torch.func.vmap", "pass all tokens in one call, as x of shape (..., d), and loop over several layers"),
    "Functionalize": ("torch.func.functionalize", "call the layer as it is, since it changes none of its inputs"),
    "Jvp": ("torch.func.jvp, jacfwd or hessian", "call torch.autograd.grad on the layer's output, in reverse mode"),
}


# Both are functions of C, since every forward calls them.
transforms_active = torch._C._are_functorch_transforms_active  # whether one of torch.func's transforms is running
tracing = torch._C._get_tracing_state  # what torch.jit.trace has recorded; None if it is not running


def refuse_transform(layer: str) -> None:
    """Raise RuntimeError if torch.jit.trace is running, or a transform under which the ``layer`` (its name) cannot."""
    if tracing():
        raise RuntimeError(
            f"torch.jit.trace cannot record {layer}: to run it elsewhere, save the state_dict of the module that "
            "has its weights"
        )
    transform = torch._C._functorch.peek_interpreter_stack().key().name
    if transform in _INSTEAD:
        called, instead = _INSTEAD[transform]
        raise RuntimeError(f"{layer} does not run under {called}: {instead}")


def refuse_forward_mode(layer: str) -> NoReturn:
    """Raise RuntimeError: the layer has no forward-mode derivative."""
    raise RuntimeError(
        f"{layer} has no forward-mode derivative (torch.func.linearize, torch.autograd.forward_ad): call "
        f"torch.autograd.grad on the layer's output"
    )


def check_backward(layer: str, gradients: Iterable[Tensor | None]) -> None:
    """Raise RuntimeError for a backward that a node of the ``layer`` (its name) cannot do.

    If gradients of its gradients were wanted, they would be wrong; it takes no batches of gradients either.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{layer} has no second derivative: call backward or grad without create_graph=True")
    for gradient in gradients:
        if gradient is not None and torch._C._functorch.is_legacy_batchedtensor(gradient):
            raise RuntimeError(f"{layer} takes no batch of gradients (is_grads_batched, vectorize): loop over them")
