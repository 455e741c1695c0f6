"""The published dMoE: megablocks 0.10.0, with grouped_gemm 0.3.0 and stanford-stk 0.7.1. Source: arXiv 2211.15841."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.routers import Router
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.verify.layers.adapter import Adapter

WIDTHS = 32  # their least multiple in a check: its initializer fails where E * h is less than a block, 128


def dmoe(
    *,
    d: int,
    h: int,
    E: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    activation: str = "swiglu",
    products: str = "grouped",
    memory_optimized: bool = False,
) -> Adapter:
    """Return the layer; bfloat16 is the only dtype of its grouped products. It returns the choice of experts, too.

    Parameters
    ----------
    d, h, E, k, dtype, device
        As of every factory.
    activation : str
        One of ``config.ACTIVATIONS``.
    products : str
        "grouped", or "sparse": the block-sparse ones. They refuse Triton 3.2 and later; that check is passed over.
    memory_optimized : bool
        Its flag ``memory_optimized_mlp``: act(a) is computed again in the backward.
    """
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    gated = is_gated(activation)
    with _triton_said_to_be("3.1.0"):
        arguments = Arguments(
            hidden_size=d,
            ffn_hidden_size=h,
            moe_num_experts=E,
            moe_top_k=k,
            moe_loss_weight=0,
            activation_fn=ACTIVATION[activation],
            mlp_type="glu" if gated else "mlp",
            mlp_impl=products,
            memory_optimized_mlp=memory_optimized,
            bias=False,
            return_bias=False,
            fp16=False,
            bf16=True,
            device=torch.device(device),
        )
        module = dMoE(arguments)
    mlp = module.experts.mlp
    leaves = {"router": module.router.layer.weight, "w1": mlp.w1, "down": mlp.w2}
    leaves |= {"v1": mlp.v1} if gated else {}

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        scores, gates, chosen = module.router(x)
        return module.experts(x, scores, gates, chosen), chosen

    first = "gate" if gated else "up"
    layouts = {"router": "router: E d", "w1": f"{first}: E*h d", "down": "down: E*h d"}
    layouts |= {"v1": "up: E*h d"} if gated else {}
    return Adapter(run, layouts, Router(), activation, leaves, multiple=WIDTHS, dtypes=(torch.bfloat16,))


@contextmanager
def _triton_said_to_be(version: str) -> Iterator[None]:
    """Set ``triton.__version__`` for the block, if Triton is installed."""
    try:
        import triton
    except ImportError:
        yield
        return
    installed, triton.__version__ = triton.__version__, version
    try:
        yield
    finally:
        triton.__version__ = installed
