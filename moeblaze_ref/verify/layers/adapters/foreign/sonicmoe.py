"""SonicMoE's layer with token-choice routing: sonic-moe 0.1.2.post1. Source: arXiv 2512.14080."""

import os

import torch
from torch import Tensor

from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.routers import Router
from moeblaze_ref.verify.layers.adapter import ALIGNED, Adapter, leaves

TUNE = "MOEBLAZE_TUNE_SONICMOE"  #: "0": every product has the default tile, in place of a search for each new shape


def moe(*, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str, activation: str = "swiglu") -> Adapter:
    """Return the layer, which also returns its choice of experts; its release has SwiGLU and GeGLU (by tanh) alone."""
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType

    if os.environ.get(TUNE) == "0":
        _leave_untuned()
    gated = is_gated(activation)
    weights = leaves(dtype, device, router=(E, d), gate_up=(E, h * (1 + gated), d), down=(E, d, h))
    router = _recorded(functional)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, _, _ = functional.moe_TC_softmax_topk_layer(
            x,
            weights["router"],
            weights["gate_up"].permute(1, 2, 0),
            None,
            weights["down"].permute(1, 2, 0),
            None,
            k,
            stream_id=0,  # this release ignores it
            activation_type=ActivationType(activation),
            is_softmax_over_topk=False,
        )
        return out, router.chosen

    up = "gate_up: E h2 d" if gated else "up: E h d"
    layouts = {"router": "router: E d", "gate_up": up, "down": "down: E d h"}
    return Adapter(
        run,
        layouts,
        Router(),
        activation,
        weights,
        multiple=ALIGNED,
        dtypes=(torch.bfloat16, torch.float16),
        compiles=False,
        strides=False,
    )


def _leave_untuned() -> None:
    """Give the products of this process, by quack, one tile each."""
    from quack import autotuner, gemm_interface

    tile = gemm_interface.default_config(torch.device("cuda"))
    for product in (gemm_interface.gemm_tuned, gemm_interface.gemm_gated_tuned, gemm_interface.gemm_dgated_tuned):
        product.configs = [autotuner.AutotuneConfig(config=tile)]


class _Recorded:
    """The router's function, with the experts that it chose last: the layer itself does not return them."""

    chosen: Tensor  # from the first call on

    def __init__(self, router):
        self._router = router

    def apply(self, *arguments):
        gates, self.chosen = self._router.apply(*arguments)
        return gates, self.chosen


def _recorded(functional) -> _Recorded:
    """The recorder in the place of the router of SonicMoE's module, once."""
    router = functional.TC_Softmax_Topk_Router_Function
    if not isinstance(router, _Recorded):
        functional.TC_Softmax_Topk_Router_Function = router = _Recorded(router)
    return router
