"""Prepare a torch layer's operands before a kernel runs: checks, autocast, rows, alignment."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from moeblaze_ref.backends.raw_cuda.gemm import ALIGNMENT
from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import address_of, has_values
from moeblaze_ref.nn.routed_experts import either
from moeblaze_ref.nn.torch_transforms import refuse_transform, tracing, transforms_active

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that the kernels compute in

DEVICES = ("cpu", "cuda")

Named = Mapping[str, Tensor | None]  # operands by the names that messages have


def check_call(x: Tensor, owner: str) -> None:
    """x is a tensor, and no transform runs under which the ``owner`` (a layer's name) cannot."""
    checks.check_type("x", x, Tensor)
    if transforms_active() or tracing():
        refuse_transform(owner)


def check_kinds(x: Tensor, weights: Named, owner: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Everything lies on one device that the owner runs on, and has a dtype that it computes in."""
    if x.device.type not in DEVICES:
        raise ValueError(f"x is on {x.device}, but {owner} runs on cuda or cpu")
    for name, tensor in ("x", x), *weights.items():
        if tensor is None:
            continue
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} has dtype {tensor.dtype}, but it must be {either(dtypes)}")
        check_strided(name, tensor)
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, but x is on {x.device}: move one of them")


def check_strided(name: str, tensor: Tensor) -> None:
    """A tensor is neither sparse nor nested."""
    if tensor.layout != torch.strided:
        raise TypeError(f"{name} has layout {tensor.layout}, but it must be {torch.strided}")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor, but it must be a plain one")


def check_width(x: Tensor, width: int) -> None:
    """x is (..., d)."""
    if x.ndim == 0 or x.shape[-1] != width:
        raise ValueError(f"x has shape {tuple(x.shape)}, but it must be (..., d={width})")


def cast(x: Tensor, weights: Named) -> tuple[Tensor, list[Any]]:
    """x and the weights, tensors or None, in autocast's dtype where that is on; autograd casts their gradients back."""
    device = x.device.type
    casts = torch.is_autocast_enabled(device) and x.dtype != torch.float64  # which autocast leaves alone
    dtype = torch.get_autocast_dtype(device) if casts else x.dtype
    for name, weight in weights.items():
        if weight is not None and weight.dtype != dtype and not casts:
            raise TypeError(f"{name} is {weight.dtype}, but x is {x.dtype}: cast one of them, or use torch.autocast")
    return x.to(dtype), [None if w is None else w.to(dtype) for w in weights.values()]


def are_plain(x: Tensor, weights: Iterable[Tensor | None]) -> bool:
    """Return True if these are strided tensors of torch's own classes, outside of any transform."""
    if transforms_active() or tracing():
        return False
    return _is_plain(x) and all([weight is None or _is_plain(weight) for weight in weights])


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def casts_or_refuses(x: Tensor) -> bool:
    """Return True if autocast is on for the device of x, or no layer runs on that device."""
    device = x.device.type
    return device not in DEVICES or torch.is_autocast_enabled(device)


def in_place(*tensors: Tensor | None) -> bool:
    """Return True if kernels can read the tensors without a copy."""
    return all(tensor is None or (tensor.is_contiguous() and is_aligned(tensor)) for tensor in tensors)


def layouts_of(tensors: Iterable[Tensor | None]) -> tuple[Any, ...]:
    """Return the layouts of plain tensors: everything that a check or a launch reads besides addresses and values."""
    return tuple([None if tensor is None else _layout_of(tensor) for tensor in tensors])


def _layout_of(tensor: Tensor) -> tuple[Any, ...]:
    lies = tensor.is_contiguous() or tensor.stride()
    return tensor.shape, tensor.dtype, tensor.get_device(), tensor.data_ptr() % ALIGNMENT, lies, tensor.is_neg()


def rows_of(x: Tensor) -> Tensor:
    """x (..., d) as contiguous rows (L, d)."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def is_aligned(tensor: Tensor) -> bool:
    """Return True if the tensor's address is a multiple of 16 bytes."""
    return address_of(tensor) % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, copied if its address is not a multiple of 16 bytes."""
    return tensor if is_aligned(tensor) else tensor.clone()


def checked_routing(
    name: str, experts: Tensor, x: Tensor, k: int, num_experts: int, dtypes: tuple[torch.dtype, ...]
) -> Tensor:
    """A routing (L, k) given by the caller, contiguous: the one place that looks at its values, if there are any."""
    check_routing_tensor(name, experts, x, k, dtypes)
    if has_values(x):
        checks.check_choice(name, experts.cpu().numpy(), num_experts)
    return experts.contiguous()


def check_routing_tensor(name: str, experts: Tensor, x: Tensor, k: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """A routing is a tensor (L, k) of one of these dtypes, beside x."""
    checks.check_type(name, experts, Tensor)
    if experts.dtype not in dtypes:
        raise TypeError(f"{name} has dtype {experts.dtype}, but it must be {either(dtypes)}")
    if experts.device != x.device:
        raise ValueError(f"{name} is on {experts.device}, but x is on {x.device}")
    check_strided(name, experts)
    checks.check_shape(name, experts, {"L": x.numel() // x.shape[-1], "k": k})
