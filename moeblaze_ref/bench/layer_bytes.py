"""Bytes that any layer keeps for its backward, beside the accounts of known systems: for ``moeblaze check --layer``."""

from typing import NamedTuple

import torch

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.memory import accounting
from moeblaze_ref.memory.measure import SavedStorages
from moeblaze_ref.runtime.device import Gpu
from moeblaze_ref.verify.layers import cases
from moeblaze_ref.verify.layers.adapter import Activation, Factory, Sizes
from moeblaze_ref.verify.layers.cases import Pattern
from moeblaze_ref.verify.layers.faults import LayerFault
from moeblaze_ref.verify.layers.layer import CheckedLayer

SIZES = Sizes(L=256, d=64, h=128, E=8, k=2)  # the accounts of some systems need blocks of 128


class LayerBytes(NamedTuple):
    """Bytes of a step of `SIZES`; weights are excluded, x is included."""

    kept: int  #: of the storages that autograd saves in the forward
    peak: int | None  #: the most that a step allocates, by torch's allocator: on a GPU alone
    closest: str  #: the systems whose account is nearest to what is kept
    account: int  #: what they keep by their account


def bytes_of(factory: Factory, dtype: torch.dtype, device: str) -> LayerBytes | None:
    """Run a step, and count; None if the layer raises an error or needs other widths."""
    try:
        layer = CheckedLayer.make(factory, SIZES, dtype, device)
        return _counted(layer) if SIZES == cases.widened(SIZES, layer.adapter.multiple) else None
    except LayerFault:
        return None


def _counted(layer: CheckedLayer) -> LayerBytes:
    case = cases.make(layer.adapter, Pattern("bytes", SIZES, cases.distinct), layer.dtype)
    inputs, d_out = layer.load(case), layer.d_out(case)
    with SavedStorages(exclude=[weight for _, weight in layer.places]) as saved:
        layer.forward(inputs)

    def step() -> None:
        layer.raw_gradients(layer.forward(inputs), d_out, inputs)

    step()  # compiles, and takes workspaces
    peak = None if layer.device == "cpu" else Gpu().peak_bytes(step) + inputs.x.nbytes
    return LayerBytes(saved.bytes, peak, *closest_account(saved.bytes, layer.dtype, layer.adapter.activation))


def closest_account(kept: int, dtype: torch.dtype, activation: Activation) -> tuple[str, int]:
    """Return the systems whose accounts for `SIZES` are nearest to the kept bytes, and what they keep.

    Parameters
    ----------
    kept : int
    dtype : torch.dtype
    activation : str or callable
        A function counts as swiglu: it has two projections, too.
    """
    name = activation if isinstance(activation, str) else "swiglu"
    config = MoEConfig(**SIZES._asdict(), activation=name, dtype=str(dtype).removeprefix("torch."))
    accounts = {
        " ".join(filter(None, variant)): accounting.account(config, *variant).kept_bytes
        for variant in accounting.VARIANTS
    }
    nearest = min(accounts.values(), key=lambda account: abs(account - kept))
    return ", ".join(name for name, account in accounts.items() if account == nearest), nearest
