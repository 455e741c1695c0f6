"""A router whose bias a reader's function updates, step after step."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moeblaze_ref.nn.oracle import top_k
from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells import messages
from moeblaze_ref.verify.torch_cells.cell import Cell


class Skewed(NamedTuple):
    """A router that prefers some experts, and how it is trained."""

    popularity: np.ndarray  #: (E,) float32, added to the logits of every token
    k: int
    tokens: int  #: of a step
    steps: int
    seed: int

    def logits(self, seed: int, tokens: int) -> Tensor:
        """Logits (tokens, E) of new tokens."""
        noise = np.random.default_rng(seed).standard_normal((tokens, self.popularity.size), np.float32)
        return torch.from_numpy(noise + self.popularity)


def chosen(logits: Tensor, bias: Tensor, k: int) -> Tensor:
    """The top k experts (L, k) of each token by its logits and the bias, which is the same for all tokens."""
    return top_k(logits + bias, k)


def train(cell: Cell, routers: list[Skewed], pipe: Send) -> None:
    """Start each bias at zeros, let the function update it after every step's choice, and send the last."""

    def steps(update: Any) -> Iterator[dict[str, Any]]:
        for router in routers:
            bias = torch.zeros(router.popularity.size)
            for step in range(router.steps):
                choice = chosen(router.logits(router.seed + step, router.tokens), bias, router.k)
                bias = update(bias.clone(), choice)
                _check(bias, router.popularity.size)
            yield {"bias": messages.encoded("the bias", bias)}

    cell.answer(steps, pipe)


def _check(bias: Any, num_experts: int) -> None:
    if not isinstance(bias, Tensor) or bias.shape != (num_experts,) or not bias.is_floating_point():
        raise TypeError(f"the update must return the bias, a tensor of floats of shape (E,) = ({num_experts},)")
