"""Layers of other projects, on copies of our weights in their layouts: baselines for a training step on a GPU.

A package is imported when its layer is built, so the project runs without any of them. Layouts and names of arguments
are facts of these releases; other releases may differ.

- megablocks_published, also memory_optimized and block_sparse: megablocks 0.10.0, with grouped_gemm 0.3.0 and
  stanford-stk 0.7.1
- sonicmoe: sonic-moe 0.1.2.post1, with quack-kernels 0.3.11 and nvidia-cutlass-dsl 4.4.2

Sources: MegaBlocks (arXiv 2211.15841); SonicMoE (arXiv 2512.14080).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moeblaze_ref.bench.accuracy import Layer, Weights
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.nn.activations import ACTIVATION
from moeblaze_ref.nn.routed_experts import RoutedExperts


class Baseline(NamedTuple):
    """A layer of another project."""

    layer: Layer  #: x (L, d) to output (L, d) and choice of experts (L, k)
    weights: Weights  #: its own, which hold the numbers of ours


# MegaBlocks ----------------------------------------------------------------------------------------------------------


def megablocks(parameters: RoutedExperts, products: str = "grouped", memory_optimized: bool = False) -> Baseline:
    """The published dMoE.

    Parameters
    ----------
    parameters : RoutedExperts
        bfloat16, the only dtype of its grouped products.
    products : str
        "grouped", or "sparse": the block-sparse ones. They refuse Triton 3.2 and later; that check is passed over.
    memory_optimized : bool
        Its flag ``memory_optimized_mlp``: act(a) is computed again in the backward. With ReLU see ``FAULTS``.

    Returns
    -------
    Baseline
        Whose weights are the router (E, d) and, for each of w1, w2 and w3, a matrix (E * h, d).
    """
    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE

    E, d, h = parameters.w1.shape
    gated = is_gated(parameters.activation)
    arguments = partial(
        Arguments,
        hidden_size=d,
        ffn_hidden_size=h,
        moe_num_experts=E,
        moe_top_k=parameters.k,
        moe_loss_weight=0,
        activation_fn=ACTIVATION[parameters.activation],
        mlp_type="glu" if gated else "mlp",
        mlp_impl=products,
        memory_optimized_mlp=memory_optimized,
        bias=False,
        return_bias=False,
        fp16=False,
        bf16=True,
        device=parameters.w1.device,
    )
    with _triton_said_to_be("3.1.0"):
        module = dMoE(arguments())
    mlp = module.experts.mlp
    leaves = {"wg": module.router.layer.weight, "w1": mlp.w1, "w3": mlp.w2}
    if gated:
        leaves["w2"] = mlp.v1
    with torch.no_grad():
        for name, weight in parameters.named_parameters():
            leaves[name].copy_(_rows_of_megablocks(name, weight))

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        scores, gates, chosen = module.router(x)
        return module.experts(x, scores, gates, chosen), chosen

    return Baseline(layer, Weights(leaves, partial(_from_megablocks, (E, h, d))))


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


def _rows_of_megablocks(name: str, weight: Tensor) -> Tensor:
    """One of our weights in its layout: h rows of d numbers for each expert, or the router's E rows."""
    rows = weight if name == "w3" else weight.mT
    return rows if name == "wg" else rows.flatten(0, 1)


def _from_megablocks(shape: tuple[int, int, int], gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return MegaBlocks' gradients in our layouts; ``shape`` is (E, h, d)."""
    found = {name: rows if name == "wg" else rows.view(shape) for name, rows in gradients.items()}
    return {name: rows if name == "w3" else rows.mT for name, rows in found.items()}


# SonicMoE ------------------------------------------------------------------------------------------------------------


def sonicmoe(parameters: RoutedExperts) -> Baseline:
    """SonicMoE's layer with token-choice routing, gates not divided by their sum.

    Parameters
    ----------
    parameters : RoutedExperts
        bfloat16; its release computes SwiGLU and GeGLU (by tanh) alone.

    Returns
    -------
    Baseline
        Whose weights are the router (E, d), w12 (E, 2 h, d) with the rows of w1 and w2 alternating, and w3 (E, d, h).
    """
    from sonicmoe import functional
    from sonicmoe.enums import ActivationType

    leaves = {
        "wg": _leaf(parameters.wg.mT),
        "w12": _leaf(_interleaved(parameters)),
        "w3": _leaf(parameters.w3.mT),
    }
    router = _recorded(functional)

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        out, _, _ = functional.moe_TC_softmax_topk_layer(
            x,
            leaves["wg"],
            leaves["w12"].permute(1, 2, 0),
            None,
            leaves["w3"].permute(1, 2, 0),
            None,
            parameters.k,
            stream_id=0,  # this release ignores it
            activation_type=ActivationType(parameters.activation),
            is_softmax_over_topk=False,
        )
        return out, router.chosen

    return Baseline(layer, Weights(leaves, _from_sonicmoe))


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().contiguous().clone().requires_grad_()


def _interleaved(parameters: RoutedExperts) -> Tensor:
    """(E, 2 h, d): row 2 i is column i of w1, row 2 i + 1 is column i of w2; (E, h, d) without a w2."""
    if parameters.w2 is None:
        return parameters.w1.mT
    return torch.stack([parameters.w1.mT, parameters.w2.mT], dim=2).flatten(1, 2)


def _from_sonicmoe(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return SonicMoE's gradients in our layouts."""
    w12 = gradients["w12"]
    found = {"wg": gradients["wg"], "w1": w12[:, 0::2], "w2": w12[:, 1::2], "w3": gradients["w3"]}
    return {name: gradient.mT for name, gradient in found.items()}


class _Recorded:
    """SonicMoE's router function, with the experts that it chose last: the layer itself does not return them."""

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


SYSTEMS: dict[str, Callable[[RoutedExperts], Baseline]] = {
    "megablocks_published": megablocks,
    "megablocks_published_memory_optimized": partial(megablocks, memory_optimized=True),
    "megablocks_published_block_sparse": partial(megablocks, products="sparse"),
    "sonicmoe": sonicmoe,
}
# Why a system that runs computes something else than the layer, by system and activation.
FAULTS = {
    ("megablocks_published_memory_optimized", "relu"): (
        "its backward writes d_y over y, from which torch's ReLU takes its slope"
    ),
}


def baseline(system: str, parameters: RoutedExperts) -> Baseline:
    """The layer of one of ``SYSTEMS`` on the weights of ``parameters``.

    Raises
    ------
    ValueError
        If its package cannot be imported; the message says which and why.
    """
    try:
        return SYSTEMS[system](parameters)
    except ImportError as error:
        raise ValueError(f"system {system}: {error}") from error
