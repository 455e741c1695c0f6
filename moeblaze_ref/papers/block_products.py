"""MegaBlocks' figures 9 and 10: its block-sparse products beside cuBLAS batched, and beside one expert after another.

Source: MegaBlocks (arXiv 2211.15841), sections 5.1 and 6.3, figure 9; appendix A, figure 10. Routing is uniform and
top-1: every expert has as many rows as the next.

What the paper's text does not say and we assume: each of the 8 GPUs has 8 of the 64 experts and receives as many tokens
as it sends; operands are bfloat16. Of figure 10 only E, the baseline and the range of the ratio are in the text: we
take the widths and tokens of figure 9, the same tokens at every E, and the time of all six products together.

Each of figure 9's products, and figure 10's six together, move more than twice the bytes of the L2 cache of an H100 or
H200: no operand is in the cache when it is used again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import fmean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moeblaze_ref.backends.raw_cuda import block_sparse, dispatch
from moeblaze_ref.core.config import MODELS, MoEConfig
from moeblaze_ref.core.structures import Array, Topology
from moeblaze_ref.papers.agreement import checked_errors
from moeblaze_ref.papers.results import Rows
from moeblaze_ref.runtime.bridge_choice import bridge_to
from moeblaze_ref.runtime.clock import interleave, replayed
from moeblaze_ref.runtime.device import Device

MICRO_BATCHES = {"moe-XS": 64, "moe-Small": 32, "moe-Medium": 8}  # sequences; table 3, dMoE
LOCAL_EXPERTS = 8  # 64 experts over 8 GPUs
EXPERTS = tuple(2**power for power in range(1, 8))  # figure 10: 2 to 128
REPETITIONS = 15

Pair = tuple[Tensor, Tensor]


def local_layer(model: str, E: int = LOCAL_EXPERTS) -> MoEConfig:
    """Return the MoE layer that one GPU, with E experts, computes in a step of the model's micro batch of table 3."""
    size = MODELS[model]
    return MoEConfig(MICRO_BATCHES[model] * size.sequence, size.d, 4 * size.d, E, k=1, activation="gelu")


# The problem, dense and block-sparse ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Experts:
    """The operands of all six products, expert by expert; m = L / E rows each."""

    rows: Tensor  #: (E, m, d), in the place of x and of the gradient of y
    hidden: Tensor  #: (E, m, h), in the place of y_swi and of the gradient of a
    w1: Tensor  #: (E, d, h)
    w3: Tensor  #: (E, h, d)

    @classmethod
    def random(cls, config: MoEConfig, device: torch.device) -> "Experts":
        """Draw operands whose products have elements of order 1.

        Raises
        ------
        ValueError
            If E does not divide L.
        """
        E, d, h, m = config.E, config.d, config.h, config.L // config.E
        if m * E != config.L:
            raise ValueError(f"L is {config.L}, but uniform routing needs a multiple of E = {E}")
        options = {"device": device, "dtype": getattr(torch, config.dtype)}
        shapes = {"rows": (E, m, d), "hidden": (E, m, h), "w1": (E, d, h), "w3": (E, h, d)}
        fan_in = {"rows": 1, "hidden": 1, "w1": d, "w3": h}
        return cls(**{name: torch.randn(shapes[name], **options).mul_(fan_in[name] ** -0.5) for name in shapes})


class BlockSparse:
    """The same operands as the block-sparse stage takes them, and its options.

    ``block`` is the number of rows and columns of a block. Each expert's rows are padded with zeros to whole blocks.
    ``options`` are executor and version of every product.
    """

    def __init__(self, experts: Experts, block: int, device: torch.device):
        self._experts, self._block, self.bridge = experts, block, bridge_to(device)
        executor = self.bridge.executor
        dtype = str(experts.rows.dtype).removeprefix("torch.")
        version = block_sparse.default_version(dtype, experts.rows.shape[2], block, executor)
        self.options: dict[str, Any] = {"executor": executor, "version": version}
        padding = (0, 0, 0, -experts.rows.shape[1] % block)
        rows, hidden = (F.pad(matrix, padding) for matrix in (experts.rows, experts.hidden))  # (E, M, d), (E, M, h)
        self.rows = self.bridge.array(rows.flatten(0, 1))  # (E M, d)
        self.values = self.bridge.array(blocks_of(hidden, block))  # (nnz, block, block)
        self.w1, self.w3 = self.bridge.array(experts.w1), self.bridge.array(experts.w3)
        self.w3_rows = self.bridge.array(experts.w3.flatten(0, 1))  # (E h, d)

    @cached_property
    def topology(self) -> Topology:
        """Return the topology of uniform routing: token i goes to expert i mod E."""
        E, m, _ = self._experts.rows.shape
        chosen = (torch.arange(E * m, device=self._experts.rows.device) % E).int().view(-1, 1)  # (L, 1)
        with self.bridge.running():
            order = dispatch.build.unchecked(self.bridge.array(chosen), E, executor=self.options["executor"])
            bins = block_sparse.pad.unchecked(order, self._block, **self.options)
            return block_sparse.build_topology.unchecked(bins, self._experts.hidden.shape[2], **self.options)

    def run(self, names: Sequence[str]) -> list[Array]:
        """Return the results of these products, without waiting for the device."""
        with self.bridge.running():
            return [PRODUCTS[name].ours(self, **self.options) for name in names]

    def dense(self, name: str, result: Array) -> Tensor:
        """Return the result of a product as the batched product has it, (E, ., .), without padding."""
        (E, m, _), tensor = self._experts.rows.shape, self.bridge.by_name({name: result})[name]
        if PRODUCTS[name].sparse:
            return matrices_of(tensor, E, self._experts.hidden.shape[2])[:, :m]
        return tensor.reshape(E, -1, tensor.shape[-1])[:, : PRODUCTS[name].dense(self._experts)[0].shape[1]]


def blocks_of(matrices: Tensor, block: int) -> Tensor:
    """Cut matrices (E, M, h) into blocks (nnz, block, block), block row by block row."""
    E, M, h = matrices.shape
    return matrices.view(E, M // block, block, h // block, block).transpose(2, 3).reshape(-1, block, block)


def matrices_of(blocks: Tensor, E: int, h: int) -> Tensor:
    """Put the blocks of `blocks_of` together again."""
    block = blocks.shape[1]
    return blocks.view(E, -1, h // block, block, block).transpose(2, 3).reshape(E, -1, h)


@dataclass(frozen=True)
class Product:
    """One of the six products."""

    ours: Callable[..., Array]  #: runs the block-sparse stage
    dense: Callable[[Experts], Pair]  #: returns the two operands of the batched product, (E, ., .) each
    sparse: bool = False  #: whether the result is block-sparse


# Section 5.1: forward of both layers, gradients of the second layer, gradients of the first.
PRODUCTS = {
    "SDD": Product(
        lambda b, **o: block_sparse.sdd.unchecked(b.rows, b.w1, b.topology, **o), lambda e: (e.rows, e.w1), sparse=True
    ),
    "DSD": Product(
        lambda b, **o: block_sparse.dsd.unchecked(b.values, b.topology, b.w3_rows, **o), lambda e: (e.hidden, e.w3)
    ),
    "SDD^T": Product(
        lambda b, **o: block_sparse.sdd.unchecked(b.rows, b.w3_rows, b.topology, transpose_rhs=True, **o),
        lambda e: (e.rows, e.w3.mT),
        sparse=True,
    ),
    "DS^TD": Product(
        lambda b, **o: block_sparse.dsd.unchecked(b.values, b.topology, b.rows, transpose_lhs=True, **o),
        lambda e: (e.hidden.mT, e.rows),
    ),
    "DSD^T": Product(
        lambda b, **o: block_sparse.dsd.unchecked(b.values, b.topology, b.w1, transpose_rhs=True, **o),
        lambda e: (e.hidden, e.w1.mT),
    ),
    "DD^TS": Product(
        lambda b, **o: block_sparse.dds.unchecked(
            b.rows, b.values, b.topology, transpose_lhs=True, parts=len(b.w1), **o
        ),
        lambda e: (e.rows.mT, e.hidden),
    ),
}


def _errors(names: Sequence[str], experts: Experts, blocks: BlockSparse) -> dict[str, float]:
    """The worst errors of our products, beside torch's batched ones."""
    found = []
    for name in names:
        (result,) = blocks.run([name])
        expected = torch.bmm(*PRODUCTS[name].dense(experts))
        found.append(checked_errors(f"product {name}", blocks.dense(name, result), expected))
    return {column: max(error[column] for error in found) for column in found[0]}


# Figure 9 -------------------------------------------------------------------------------------------------------------


def time_product(model: str, name: str, config: MoEConfig, device: Device, block: int = block_sparse.BLOCK) -> Rows:
    """Time one product beside torch.bmm, interleaved, by replays of CUDA graphs.

    ``model`` is the name in the row, ``name`` one of ``PRODUCTS``, and ``config`` the layer, see `local_layer`.

    Returns
    -------
    list of dict
        One: {model, product, shape, dtype, kernel, ms, quartiles_ms, bmm_ms, bmm_quartiles_ms, tflops, pct_of_bmm,
        error, row_error}. The errors are those against torch.bmm.

    Raises
    ------
    ArithmeticError
        If our result is not torch's.
    """
    experts = Experts.random(config, device.torch_device)
    blocks = BlockSparse(experts, block, device.torch_device)
    errors = _errors([name], experts, blocks)
    works: dict[str, Callable[[], Any]] = {
        "ours": partial(blocks.run, [name]),
        "bmm": partial(torch.bmm, *PRODUCTS[name].dense(experts)),
    }
    contenders = {system: replayed(device.captured(work)) for system, work in works.items()}
    times = interleave(contenders, REPETITIONS, device)
    ours, bmm = times["ours"], times["bmm"]
    row = {
        "model": model,
        "product": name,
        "shape": config.sizes,
        "dtype": config.dtype,
        "kernel": blocks.options["version"],
        "ms": ours.median,
        "quartiles_ms": list(ours.quartiles),
        "bmm_ms": bmm.median,
        "bmm_quartiles_ms": list(bmm.quartiles),
        "tflops": product_flops(config) / ours.median / 1e9,
        "pct_of_bmm": 100 * bmm.median / ours.median,
    }
    return [row | errors]


def product_flops(config: MoEConfig) -> int:
    """Return the FLOPs of any one of the six products, padding not counted."""
    return 2 * config.R * config.d * config.h


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how near the products of figure 9 come to cuBLAS batched, in percent of its rate.

    The rows are as `time_product` returns them, of one device.

    Returns
    -------
    dict
        {products, mean, deviation, least, least_at, most, most_at}: their number, mean and sample deviation (None of a
        single one), and both extremes with model and product.

    Raises
    ------
    ValueError
        If there is no row.
    """
    if not rows:
        raise ValueError("rows is empty, but it must hold at least one product")
    shares = {f"{row['model']} {row['product']}": row["pct_of_bmm"] for row in rows}
    least, most = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return {
        "products": len(shares),
        "mean": fmean(shares.values()),
        "deviation": stdev(shares.values()) if len(shares) > 1 else None,
        "least": shares[least],
        "least_at": least,
        "most": shares[most],
        "most_at": most,
    }


# Figure 10 ------------------------------------------------------------------------------------------------------------


def time_experts(model: str, config: MoEConfig, device: Device, block: int = block_sparse.BLOCK) -> Rows:
    """Time all six products beside dense products of one expert after another, interleaved.

    Both are timed as the host launches them, which is what many small products cost, and as CUDA graphs, without the
    host.

    ``model`` is the name in the row, and ``config`` the layer, see `local_layer`.

    Returns
    -------
    list of dict
        One: {model, E, shape, dtype, kernel, rows_of_expert, ms, quartiles_ms, sequential_ms, sequential_quartiles_ms,
        graph_ms, sequential_graph_ms, error, row_error}. Rows of padding, which ours computes where m is no multiple of
        the block, are in its time.

    Raises
    ------
    ArithmeticError
        If a result of ours is not torch's.
    """
    experts = Experts.random(config, device.torch_device)
    blocks = BlockSparse(experts, block, device.torch_device)
    errors = _errors(list(PRODUCTS), experts, blocks)
    works: dict[str, Callable[[], Any]] = {
        "ours": partial(blocks.run, list(PRODUCTS)),
        "sequential": partial(one_after_another, experts),
    }
    launched = {system: replayed(work) for system, work in works.items()}
    graphs = {(system, "graph"): replayed(device.captured(work)) for system, work in works.items()}
    times = interleave(launched | graphs, REPETITIONS, device)
    row = {
        "model": model,
        "E": config.E,
        "shape": config.sizes,
        "dtype": config.dtype,
        "kernel": blocks.options["version"],
        "rows_of_expert": config.L // config.E,
        "ms": times["ours"].median,
        "quartiles_ms": list(times["ours"].quartiles),
        "sequential_ms": times["sequential"].median,
        "sequential_quartiles_ms": list(times["sequential"].quartiles),
        "graph_ms": times["ours", "graph"].median,
        "sequential_graph_ms": times["sequential", "graph"].median,
    }
    return [row | errors]


def one_after_another(experts: Experts) -> list[Tensor]:
    """Return the results of all six products, each by a loop over the experts in plain torch."""
    return [
        torch.mm(left, right)
        for product in PRODUCTS.values()
        for left, right in zip(*map(torch.unbind, product.dense(experts)), strict=True)
    ]


# Jobs -----------------------------------------------------------------------------------------------------------------


def figure_9(device: Device) -> list[Callable[[], Rows]]:
    """Return a job for each of the 18 problems, see `time_product`; they should take 5 minutes on an H100."""
    return [
        partial(time_product, model, name, local_layer(model), device) for model in MICRO_BATCHES for name in PRODUCTS
    ]


def figure_10(device: Device) -> list[Callable[[], Rows]]:
    """Return a job for each model and number of experts, see `time_experts`; they should take 5 minutes on an H100."""
    return [partial(time_experts, model, local_layer(model, E), device) for model in MICRO_BATCHES for E in EXPERTS]
