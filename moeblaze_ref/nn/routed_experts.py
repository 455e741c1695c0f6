"""The parameters of an MoE layer as a torch module, whichever way it computes."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.types import Device

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.core.routers import Router, Shared, named
from moeblaze_ref.nn import routers
from moeblaze_ref.nn.routers import Routing
from moeblaze_ref.nn.shared_expert import SharedExpert

Weights = tuple[Tensor, Tensor, Tensor | None, Tensor]  # wg, w1, w2, w3


def either(dtypes: Iterable[torch.dtype]) -> str:
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
    router : Router or str, optional
        How logits become experts and gates, or a name in ``routers.ROUTERS``. It may add the parameter logit_bias (E,)
        and the buffer selection_bias (E,), which is float32 and starts at 0. Default: a softmax, with ``renormalize``.
    shared : Shared, optional
        An expert that sees every token, in plain torch: ``shared_expert``.

    Raises
    ------
    ValueError
        If a size is below 1, k > E, the activation or router is unknown, or the router does not fit the sizes.
    TypeError
        If a size is not an integer, or the dtype is not allowed.
    """

    dtypes: tuple[torch.dtype, ...] = ()  #: what the layer computes in; empty: in any
    selection_bias: Tensor | None

    def __init__(
        self,
        d: int,
        h: int,
        E: int,
        k: int,
        activation: str = "swiglu",
        renormalize: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
        hosted: int | None = None,
        router: Router | str | None = None,
        shared: Shared | None = None,
    ):
        super().__init__()
        if dtype is not None and self.dtypes and dtype not in self.dtypes:
            raise TypeError(f"dtype is {dtype}, but it must be {either(self.dtypes)}")
        self._check_sizes(d=d, h=h, E=E, k=k)
        checks.check_name("activation", activation, ACTIVATIONS)
        self.k, self.activation = k, activation
        self.router = self._checked_router(router, renormalize, E)
        self.renormalize = self.router.renormalize

        def parameter(*shape: int, fan_in: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, device=device, dtype=dtype) * fan_in**-0.5)

        self.wg = parameter(d, E, fan_in=d)
        here = E if hosted is None else hosted
        self.w1 = parameter(here, d, h, fan_in=d)
        self.w2 = parameter(here, d, h, fan_in=d) if is_gated(activation) else None
        self.w3 = parameter(here, h, d, fan_in=h)
        self.logit_bias = parameter(E, fan_in=d) if self.router.logit_bias else None
        bias = torch.zeros(E, dtype=torch.float32, device=device) if self.router.selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.shared_expert = None if shared is None else SharedExpert(d, shared, activation, device, dtype)

    def _checked_router(self, router: Router | str | None, renormalize: bool, num_experts: int) -> Router:
        """Return the router, if it fits the sizes."""
        if router is None:
            return Router(renormalize=renormalize)
        if renormalize:
            raise ValueError("renormalize is True, but a router is given: its own field renormalize decides")
        router = named(router)
        router.check_sizes(num_experts, self.k)
        return router

    def route(self, x: Tensor, wg: Tensor, topk_experts: Tensor | None = None) -> Routing:
        """Return the routing of x (L, d) by wg (d, E), or by a choice (L, k) to replay, in plain torch."""
        return routers.route(x, wg, self.k, self.router, self.logit_bias, self.selection_bias, topk_experts)

    def with_shared(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the experts' sum (L, d), and that of the shared expert for x (L, d) if there is one."""
        return out if self.shared_expert is None else out + self.shared_expert(x)

    def _check_sizes(self, **sizes: int) -> None:
        for name, size in sizes.items():
            checks.check_int(name, size, at_least=1)
        checks.check_k(sizes["k"], sizes["E"])

    @property
    def weights(self) -> Weights:
        """wg, w1, w2, w3."""
        return self.wg, self.w1, self.w2, self.w3

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a forward reads, by name in the state: `weights`, biases, the shared expert's weights."""
        names = ("wg", "w1", "w2", "w3", "logit_bias", "selection_bias")
        found = {name: getattr(self, name) for name in names}
        if (shared := self.shared_expert) is not None:
            found |= {f"shared_expert.{name}": getattr(shared, name) for name in ("w1", "w2", "w3", "gate")}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def extra_repr(self) -> str:
        """The sizes and choices, for ``print``."""
        (d, E), h = self.wg.shape, self.w1.shape[2]
        choice = f"renormalize={self.renormalize}" if self.router.plain else f"router={self.router}"
        return f"d={d}, h={h}, E={E}, k={self.k}, activation={self.activation}, {choice}"
