"""The parameters of an MoE layer as a torch module, whichever way it computes."""

import torch
from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, is_gated

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor]  # wg, w1, w2, w3


def either(dtypes: tuple[torch.dtype, ...]) -> str:
    """The dtypes, for a message."""
    return " or ".join(map(str, dtypes))


class RoutedExperts(nn.Module):
    """A router and E experts: what every torch layer of the project has, so that their states are interchangeable.

    Parameters
    ----------
    d, h, E, k : int
        Model width, expert width, experts, experts per token.
    activation : str
        One of ``config.ACTIVATIONS``.
    renormalize : bool
        Divide the chosen gates by their sum.
    device, dtype : optional
        Of the parameters wg (d, E), w1 and w2 (E, d, h), w3 (E, h, d); w2 is None for the ungated activations. The
        dtype is one of the class's ``dtypes``, if that names any.
    hosted : int, optional
        Experts whose w1, w2 and w3 are here, where others are on other devices. Default: all E.

    Raises
    ------
    ValueError
        If a size is below 1, k > E, or the activation is unknown.
    TypeError
        If a size is not an integer, or the dtype is not allowed.
    """

    dtypes: tuple[torch.dtype, ...] = ()  #: what the layer computes in; empty: in any

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        hosted: int | None = None,
    ):
        super().__init__()
        if dtype is not None and self.dtypes and dtype not in self.dtypes:
            raise TypeError(f"dtype is {dtype}, but it must be {either(self.dtypes)}")
        self._check_sizes(d=d, h=h, E=E, k=k)
        checks.check_name("activation", activation, ACTIVATIONS)
        self.k, self.activation, self.renormalize = k, activation, renormalize

        def parameter(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * fan_in**-0.5)

        self.wg = parameter(d, E, fan_in=d)
        here = E if hosted is None else hosted
        self.w1 = parameter(here, d, h, fan_in=d)
        self.w2 = parameter(here, d, h, fan_in=d) if is_gated(activation) else None
        self.w3 = parameter(here, h, d, fan_in=h)

    def _check_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            checks.check_int(name, size, at_least=1)
        checks.check_k(sizes["k"], sizes["E"])

    @property
    def weights(self) -> Weights:
        """wg, w1, w2, w3."""
        return self.wg, self.w1, self.w2, self.w3

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        (d, E), h = self.wg.shape, self.w1.shape[2]
        return f"d={d}, h={h}, E={E}, k={self.k}, activation={self.activation}, renormalize={self.renormalize}"
