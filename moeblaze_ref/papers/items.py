"""Every item of the three papers: each equation with a number, each table, each figure, in the order of the papers."""

from collections.abc import Sequence

from moeblaze_ref.core import checks
from moeblaze_ref.papers.item import Item

# Of block_products.local_layer.
_ONE_GPU = "each of 8 GPUs has 8 of the 64 experts and the rows of table 3's micro batch, in sequences of 1,024 tokens"

_ALL = (
    Item("moeblaze-abstract", "MoEBlaze, abstract", "over 4x speed, over 50% less memory", "moeblaze:abstract"),
    Item("moeblaze-2.1", "MoEBlaze, section 2.1", "the routed-token buffer", "moeblaze:first_wall"),
    Item("moeblaze-2.2", "MoEBlaze, section 2.2", "the FFN intermediates", "moeblaze:second_wall"),
    Item(
        "moeblaze-3.1",
        "MoEBlaze, section 3.1",
        "the sum over experts in the second product",
        "moeblaze:fused_sum",
        measured_by="printed:sum_jobs",
    ),
    Item("moeblaze-fig2", "MoEBlaze, figure 2", "the four index structures of an example", "moeblaze:example"),
    Item(
        "moeblaze-4.2",
        "MoEBlaze, section 4.2",
        "dispatch in three steps",
        "moeblaze:steps",
        measured_by="printed:dispatch_jobs",
    ),
    Item("moeblaze-alg1", "MoEBlaze, algorithm 1", "what is saved for backward", "moeblaze:algorithm_1"),
    Item("moeblaze-table1", "MoEBlaze, table 1", "seven configurations", "moeblaze:table_1"),
    Item(
        "moeblaze-fig3",
        "MoEBlaze, figure 3",
        "saved bytes with the first activation",
        "moeblaze:figure_3",
        drawn_by="plots:figure_3",
    ),
    Item(
        "moeblaze-fig4",
        "MoEBlaze, figure 4",
        "speed with the first activation",
        "moeblaze:figure_4",
        measured_by="speed:figure_4",
        drawn_by="plots:speed",
    ),
    Item(
        "moeblaze-fig5", "MoEBlaze, figure 5", "saved bytes with SwiGLU", "moeblaze:figure_5", drawn_by="plots:figure_5"
    ),
    Item(
        "moeblaze-fig6",
        "MoEBlaze, figure 6",
        "speed with SwiGLU",
        "moeblaze:figure_6",
        measured_by="speed:figure_6",
        drawn_by="plots:speed",
    ),
    Item(
        "megablocks-fig2",
        "MegaBlocks, figure 2",
        "loss by capacity factor",
        "megablocks:figure_2",
        measured_by="capacities:jobs",
        continued=True,
        drawn_by="megablocks_plots:capacities",
    ),
    Item(
        "megablocks-metadata",
        "MegaBlocks, section 5.1",
        "bytes of the sparse format",
        "megablocks:metadata",
        assumption=_ONE_GPU,
    ),
    Item(
        "megablocks-fig5",
        "MegaBlocks, figure 5",
        "tiles of dense products",
        "megablocks:figure_5",
        measured_by="squares:jobs",
        drawn_by="megablocks_plots:squares",
    ),
    Item("megablocks-table1", "MegaBlocks, table 1", "dense Transformers", "megablocks:table_1"),
    Item("megablocks-table2", "MegaBlocks, table 2", "MoE Transformers", "megablocks:table_2"),
    Item(
        "megablocks-table3",
        "MegaBlocks, table 3",
        "largest micro batches",
        "micro_batches:table_3",
        assumption="A whole training step by `moeblaze plan`'s account: weights and gradients of 16 bits, float32 "
        "weights, AdamW's moments. Attention runs step by step, with dropout. Routing is even, and each GPU has 8 of "
        "the 64 experts. A GPU has 80e9 bytes, and nothing is added for an allocator. Batches are powers of two.",
    ),
    Item("megablocks-fig7", "MegaBlocks, figure 7", "end-to-end training", "megablocks:figure_7"),
    Item("megablocks-fig8", "MegaBlocks, figure 8", "speed over the best capacity factor", "megablocks:figure_8"),
    Item(
        "megablocks-fig9",
        "MegaBlocks, figure 9",
        "block-sparse products beside cuBLAS",
        "megablocks:figure_9",
        measured_by="block_products:figure_9",
        drawn_by="megablocks_plots:products",
        assumption=_ONE_GPU,
    ),
    Item(
        "megablocks-order",
        "MegaBlocks, section 6.3",
        "the order of the tiles",
        "megablocks:order_of_tiles",
        measured_by="squares:jobs_of_orders",
    ),
    Item(
        "megablocks-fig10",
        "MegaBlocks, figure 10",
        "one expert after another",
        "megablocks:figure_10",
        measured_by="block_products:figure_10",
        drawn_by="megablocks_plots:experts",
        assumption="the widths and rows of figure 9 at every E, and the time of all six products together",
    ),
    Item("moetuner-ilp1", "MoETuner, equations 1 to 7", "clusters of equal load", "moetuner:first_program"),
    Item("moetuner-ilp2", "MoETuner, equations 8 to 15", "a GPU for each cluster", "moetuner:second_program"),
    Item("moetuner-fig8", "MoETuner, figure 8", "stable routing statistics", "moetuner:figure_8"),
    Item("moetuner-measured", "MoETuner, evaluation", "what it measures", "moetuner:measured_claims"),
)
ITEMS = {item.id: item for item in _ALL}


def chosen(ids: Sequence[str]) -> list[Item]:
    """Return the items with these ids, in the order of the papers; all of them if none is named.

    Raises
    ------
    ValueError
        If there is no such item; the message proposes the nearest id.
    """
    for name in ids:
        checks.check_name("item", name, ITEMS)
    return [item for item in _ALL if not ids or item.id in ids]
