"""Tensors and answers as lines of JSON: what comes from a reader's process is data, and is read as nothing else."""

import base64
import json
from typing import Any

import numpy as np
import torch

from moeblaze_ref.verify.guard import Send

DTYPES = ("float32", "float64", "int32", "int64", "bool")


def send(pipe: Send, message: dict[str, Any]) -> None:
    """Send one answer."""
    pipe(json.dumps(message).encode() + b"\n")


def encoded(name: str, value: Any) -> dict[str, Any]:
    """A tensor as JSON has it.

    Raises
    ------
    TypeError
        If it is no tensor, or has a dtype that is none of `DTYPES`.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}, but it must be a tensor")
    if (dtype := str(value.dtype).removeprefix("torch.")) not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}, but it must be one of {', '.join(DTYPES)}")
    data = value.detach().cpu().contiguous().numpy().tobytes()
    return {"dtype": dtype, "shape": list(value.shape), "data": base64.b64encode(data).decode()}


def decoded(value: Any) -> np.ndarray:
    """The array of such a tensor; ValueError, TypeError or KeyError if it is none."""
    if value["dtype"] not in DTYPES:
        raise ValueError("no dtype")
    data = base64.b64decode(value["data"], validate=True)
    return np.frombuffer(data, value["dtype"]).reshape(value["shape"]).copy()
