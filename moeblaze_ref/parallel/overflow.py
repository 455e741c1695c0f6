"""Repeat a step in which a layer had too little room: no row is dropped."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from moeblaze_ref.parallel.layer import ExpertParallelMoE
from moeblaze_ref.parallel.ranks import RankGroup

Result = TypeVar("Result")
log = logging.getLogger(__name__)


def repeat_on_overflow(model: nn.Module, step: Callable[[], Result], ranks: RankGroup | None = None) -> Result:
    """Run a step, and run it once more without capacities if a layer of any rank had too little room.

    The host waits for the device once, at the end of the step, and not in each layer.

    Parameters
    ----------
    model : nn.Module
        With `ExpertParallelMoE` layers in it.
    step : callable
        Forward and backward, without the optimizer. It must begin by clearing the gradients, since it may run twice.
        The second run draws new random numbers.
    ranks : RankGroup, optional
        All ranks that make the step together, such as those of a whole mesh. Default: those of the first layer.

    Returns
    -------
    what ``step()`` returned
        The last time.
    """
    layers = [each for each in model.modules() if isinstance(each, ExpertParallelMoE) and each.capacity is not None]
    for layer in layers:
        layer.overflowed.zero_()
    result = step()
    if not layers:
        return result
    flags = torch.stack([layer.overflowed for layer in layers]).int()
    overflowed = (ranks or layers[0].ranks).total(flags).nonzero().flatten().tolist()
    if not overflowed:
        return result
    del result
    log.info("a step runs again: too little room in %d of %d layers", len(overflowed), len(layers))
    with _without_capacity(layers):
        return step()


@contextmanager
def _without_capacity(layers: Sequence[ExpertParallelMoE]) -> Iterator[None]:
    before = [layer.capacity for layer in layers]
    for layer in layers:
        layer.capacity = None
    try:
        yield
    finally:
        for layer, capacity in zip(layers, before, strict=True):
            layer.capacity = capacity
