"""Run right and wrong layers on a routing that a reader constructs."""

from collections.abc import Iterable
from functools import partial

import numpy as np
import torch

from moeblaze_ref.verify.layers.adapter import Sizes
from moeblaze_ref.verify.layers.adapters import plain, wrong
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.check import evidence_of

D, H = 16, 24  # widths of the layers


class SmallTiles(wrong.WholeTiles):
    """Loses the rows of an expert that fill no tile of four."""

    tile = 4


KINDS = wrong.KINDS | {"last tile lost": SmallTiles}


def passing(names: Iterable[str], topk_experts: np.ndarray, num_experts: int) -> list[str]:
    """The layers of ``KINDS`` that compute everything right in one float32 step with a routing (L, k)."""
    L, k = topk_experts.shape
    chosen = torch.from_numpy(topk_experts).long()
    pattern = Pattern("a reader's routing", Sizes(L, D, H, num_experts, k), lambda sizes, generator: chosen)
    return [name for name in names if _is_right(name, pattern)]


def _is_right(name: str, pattern: Pattern) -> bool:
    factory = partial(plain.experts, kind=KINDS[name])
    return not evidence_of(factory, pattern, torch.float32).wrong
