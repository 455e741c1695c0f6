"""Drop, pad or block-sparse: recorded loads and their fates, a topology and the products over it, what each run asks.

Sources: GShard (arXiv 2006.16668), section 2.2, for a fixed capacity; MegaBlocks (arXiv 2211.15841), section 5, for
bins of whole blocks and their topology.
"""

import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moeblaze_ref.backends.numpy_ref import block_sparse, capacity, dispatch, gating
from moeblaze_ref.backends.raw_cuda import block_sparse as raw_sparse
from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import preset
from moeblaze_ref.core.drawing import board, cell, centered, heading, panels, squares
from moeblaze_ref.core.structures import EMPTY, Dispatch, Topology
from moeblaze_ref.course.notebook.dispatch import EXPERT_COLORS, PALE
from moeblaze_ref.course.notebook.routing import draw_fates, dropped_share, padding_share
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.memory.plots import BLACK, BLUE, GREEN, ORANGE, PURPLE, VERMILLION, drawn, stacked_bars
from moeblaze_ref.memory.rows import Rows, capacity_rows, megablocks_rows
from moeblaze_ref.runtime.simt.executor import LaunchReport, SimtExecutor
from moeblaze_ref.systems.capacity import expert_capacity
from moeblaze_ref.verify.cases import Case

DIM = "#666666"  # letters of what takes no part
FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)  # of a capacity

# Real routing --------------------------------------------------------------------------------------------------------


class Recording(NamedTuple):
    """Expert counts of a large model, recorded while it answered questions."""

    tokens: int
    k: int
    counts: np.ndarray  #: (layers, E) routed rows


@functools.cache
def recordings() -> dict[str, Recording]:
    """Counts of gpt-oss-20b by name: all answers, and one of them."""
    recorded = _recorded()
    return {
        one["name"]: Recording(one["tokens"], recorded["k"], np.array(one["counts"])) for one in recorded["recordings"]
    }


def recorded_source() -> str:
    """Return the source of the counts: the model, the link and the licence."""
    return "{model}. Source: {source}; {licence}.".format(**_recorded())


def _recorded():
    return json.loads((Path(__file__).parent / "gptoss20b_counts.json").read_text())


def steeper(counts: np.ndarray, skew: float, L: int, k: int) -> np.ndarray:
    """Return the rows of a step of L tokens with recorded routing, made more even or more skewed.

    Parameters
    ----------
    counts : ndarray (E,)
        Recorded rows of each expert.
    skew : float
        At least 0. An expert's share is its recorded share to this power: 0 is even, 1 as recorded.
    L, k : int
        Tokens of the step and choices of each.

    Returns
    -------
    ndarray (E,), int64
        L * k rows together. No expert has more than L, since a token chooses it once at most: what would be above goes
        to the others.

    Raises
    ------
    ValueError
        If skew is negative, or fewer than k experts were ever chosen.
    """
    if skew < 0:
        raise ValueError(f"skew is {skew}, but it must be at least 0")
    weights = (counts / counts.sum()) ** skew  # (E,)
    checks.check_k(k, int((weights > 0).sum()))
    full = np.zeros(counts.size, bool)  # experts that every token chooses
    while True:
        rest = L * (k - full.sum())
        rows = np.where(full, L, rest * weights / max(weights[~full].sum(), np.finfo(float).tiny))  # (E,)
        over = (rows > L) & ~full
        if not over.any():
            return _rounded(rows, L * k)
        full |= over


def _rounded(rows, total):
    """Whole numbers that add up to the total: the largest fractions are rounded up."""
    whole = np.floor(rows + 1e-9).astype(np.int64)
    up = np.argsort(whole - rows, kind="stable")[: total - whole.sum()]
    whole[up] += 1
    return whole


# Fates of rows -------------------------------------------------------------------------------------------------------


def fates_picture(counts: Sequence[int], capacity_factor: float, block: int) -> Figure:
    """Each expert's rows under a fixed capacity and in bins of whole blocks: computed, dropped, padding.

    ``counts`` are routed rows, drawn from the busiest expert to the idlest; a block has ``block`` rows.
    """
    counts = sorted(map(int, counts), reverse=True)
    places = expert_capacity(sum(counts), len(counts), capacity_factor)
    figure, (upper, lower) = panels(10, 5, 2, 1, sharex=True, sharey=True)
    _fates(upper, capacity_rows(counts, places), f"fixed capacity, C = {places:,}")
    upper.axhline(places, color=BLACK, linewidth=0.8)
    _fates(lower, megablocks_rows(counts, block), f"whole blocks of {block}")
    lower.set_xlabel("expert, from the busiest to the idlest")
    upper.legend(*lower.get_legend_handles_labels(), frameon=False, ncols=3, loc="upper right")
    return figure


def recorded_fates(
    recording: str, layer_number: int, skew: float, capacity_factor: float, L: int, block: int
) -> Figure:
    """`fates_picture` of one layer of one of `recordings`, scaled to L tokens and made `steeper`."""
    one = recordings()[recording]
    counts = steeper(one.counts[layer_number], skew, L, one.k).tolist()
    return fates_picture(counts, capacity_factor, block)


def _fates(axes, rows: Rows, name):
    draw_fates(axes, rows, hatch="////", linewidth=0.5)
    shares = f"{dropped_share(rows):.1%} of the rows dropped, {padding_share(rows):.1%} of the work is padding"
    heading(axes, f"{name}: {shares}")
    axes.set_ylabel("rows")


def factor_picture(recording: Recording, L: int, block: int = 128) -> Figure:
    """Dropped rows and padding against the capacity factor, a line for each layer; beside them what blocks pad.

    The step has L tokens.
    """
    layers = [steeper(one, 1.0, L, recording.k).tolist() for one in recording.counts]
    capacities = [expert_capacity(sum(layers[0]), len(layers[0]), factor) for factor in FACTORS]
    figure, (dropped, padding) = panels(10, 3.6, 1, 2, sharey=True)
    for axes, share in ((dropped, dropped_share), (padding, padding_share)):
        for counts in layers:
            shares = [100 * share(capacity_rows(counts, capacity)) for capacity in capacities]
            axes.plot(FACTORS, shares, color=ORANGE, linewidth=0.8, label="capacity, a layer")
        worst = 100 * max(share(megablocks_rows(counts, block)) for counts in layers)
        axes.axhline(worst, color=PURPLE, linewidth=2, label=f"blocks of {block}, the worst layer")
        axes.set(xlabel="capacity factor", ylim=(-2, 100))
    dropped.set_ylabel("share, %")
    heading(dropped, f"dropped, % of the routed rows (L = {L:,})")
    heading(padding, "padding, % of the computed rows")
    dropped.legend(handles=dropped.lines[-2:], frameon=False)
    return figure


def tokens_picture(recording: Recording, layer: int) -> Figure:
    """Draw the padding of blocks, in % of the computed rows, against a step's tokens, a line for each block size."""
    tokens = [2**power for power in range(7, 18)]
    figure, axes = panels(8, 3.6)
    for block, color in zip((16, 32, 64, 128), (GREEN, BLUE, ORANGE, PURPLE), strict=True):
        steps = (steeper(recording.counts[layer], 1.0, L, recording.k) for L in tokens)
        shares = [100 * padding_share(megablocks_rows(counts.tolist(), block)) for counts in steps]
        axes.plot(tokens, shares, marker="o", markersize=3, label=f"block of {block}", **drawn(color))
    axes.set_xscale("log", base=2)
    axes.set_xticks(tokens, [f"{L:,}" if L < 1024 else f"{L // 1024}k" for L in tokens])
    axes.set(xlabel="L, tokens in a step", ylabel="padding, % of the\ncomputed rows", ylim=(0, 100))
    axes.legend(frameon=False)
    return figure


class Loss(NamedTuple):
    """The rows that each token loses under a fixed capacity."""

    lost: np.ndarray  #: (L, k) bool, slots without a row
    slots: int  #: of them
    tokens: int  #: that lost all of their slots


def drop(topk_experts: np.ndarray, gates: np.ndarray, num_experts: int, capacity_factor: float, policy: str) -> Loss:
    """Return the slots without a row, by ``numpy_ref.capacity.fill``.

    Parameters
    ----------
    topk_experts, gates : ndarray (L, k)
    num_experts : int
    capacity_factor : float
    policy : str
        One of ``capacity.DROP_POLICIES``.
    """
    routed = dispatch.build(topk_experts, num_experts)
    rows = expert_capacity(routed.R, num_experts, capacity_factor)
    bins = capacity.fill(routed, gates, rows, policy)
    found = capacity.dropped(bins, routed)
    return Loss((bins.rows == EMPTY).reshape(topk_experts.shape), found.slots, found.tokens)


def lost_picture(text: Sequence[bytes], loss: Loss, shown: int = 64) -> Figure:
    """The first bytes of several windows, a line each, on the colour of what they lost; the title counts all bytes.

    The windows have one length, and their bytes are the tokens in order; ``shown`` bytes of each are drawn.
    """
    lost = loss.lost.sum(axis=1).reshape(len(text), -1)  # (windows, length)
    k = loss.lost.shape[1]
    figure, axes = panels(10.5, 0.6 + 0.27 * len(text))
    counts = lost[:, :shown]
    corners = [(place, line) for line, place in np.ndindex(counts.shape)]
    colors = [VERMILLION if count == k else ORANGE if count else "none" for count in counts.flat]
    squares(axes, corners, colors, edgecolors="none")
    for place, line in corners:
        centered(axes, place + 0.5, line + 0.5, _letter(text[line][place]), size=9, in_layout=False)
    for color, name in ((ORANGE, "lost some of its experts"), (VERMILLION, "lost all of them")):
        cell(axes, (-9, 0), (1, 1), {"facecolor": color, "label": name})  # for the legend, outside of the picture
    axes.set(xlim=(0, shown), ylim=(len(text), 0), xticks=[])
    axes.set_yticks(np.arange(len(text)) + 0.5, [f"window {line}" for line in range(len(text))])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    said = (
        f"{loss.slots / loss.lost.size:.1%} of the slots dropped, {loss.tokens / len(loss.lost):.1%} of the tokens lost"
    )
    heading(axes, f"{said} (drawn: {counts.shape[1]} of {lost.shape[1]} bytes a window)")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    return figure


def _letter(byte):
    """Return the sign that stands for a byte of UTF-8: a part of a longer character is none by itself."""
    if byte >= 0x80:
        return "·"
    return chr(byte) if chr(byte).isprintable() else "¶"


# A tiny example ------------------------------------------------------------------------------------------------------

TINY_CHOICES = np.array([[0, 3], [0, 2], [3, 0], [0, 3], [2, 0], [3, 2], [0, 2], [3, 0]], np.int32)  # expert 1 has none
TINY_EXPERTS, TINY_BLOCK, TINY_WIDTH = 4, 4, 12  # E, rows and columns of a block, h


def tiny_dispatch():
    """The Dispatch of eight tokens that choose two of four experts: 7, 0, 4 and 5 rows."""
    return dispatch.build(TINY_CHOICES, TINY_EXPERTS)


def tiny_topology() -> Topology:
    """The topology of `tiny_dispatch` for three block columns an expert."""
    return block_sparse.build_topology(block_sparse.pad(tiny_dispatch(), TINY_BLOCK), TINY_WIDTH)


def bins_picture(capacity_factor: float, block: int) -> Figure:
    """The rows of three systems for the tiny routing, side by side: a token, padding, or dropped."""
    figure, axes = panels(10, 3.9)
    draw_bins(axes, tiny_dispatch(), capacity_factor, block)
    return figure


def draw_bins(axes: Axes, routed: Dispatch, capacity_factor: float, block: int):
    """The rows of three systems for one routing, system by system: a token, padding, or dropped."""
    rows = expert_capacity(routed.R, routed.E, capacity_factor)
    places = capacity.fill(routed, np.ones((routed.L, routed.k)), rows, "by_arrival")
    bins = block_sparse.pad(routed, block)
    owners = np.repeat(np.arange(routed.E), np.diff(bins.padded_offsets))  # (P,)
    dropped = np.flatnonzero(places.rows == EMPTY)
    width = max(places.slots.size + dropped.size + 1, bins.P)
    axes.set(xlim=(-0.2, max(width, 24)), ylim=(9, -1), aspect="equal")
    axes.set_axis_off()
    said = (
        f"capacity: E*C = {routed.E} * {rows} rows; {dropped.size} dropped, {np.sum(places.slots == EMPTY)} padding",
        f"MegaBlocks: P = {bins.P} rows in blocks of {block}; {bins.P - routed.R} padding",
        f"MoEBlaze: no buffer; R = {routed.R} indices into x",
    )
    for top, text in zip((0, 3.3, 6.6), said, strict=True):
        axes.text(0, top - 0.35, text, ha="left", va="center", weight="bold", size=10)
    _strip(axes, 0, places.slots.ravel() // routed.k, np.repeat(np.arange(routed.E), rows))
    left = places.slots.size + 1
    _strip(axes, 0, dropped // routed.k, routed.token_expert_indices[dropped], left, crossed=True)
    if dropped.size:
        centered(axes, left + dropped.size / 2, 1.5, "dropped", size=9, color=VERMILLION)
    _strip(axes, 3.3, bins.slots // routed.k, owners)
    offsets = np.repeat(np.arange(routed.E), np.diff(routed.expert_token_offsets))  # (R,)
    _strip(axes, 6.6, routed.expert_token_indices, offsets, pale=True)


def _strip(axes, top, tokens, experts, left=0, crossed=False, pale=False):
    """Cells of tokens, ``EMPTY`` hatched, coloured by expert; crossed out ones are dropped, pale ones numbers only."""
    for place, (token, expert) in enumerate(zip(tokens, experts, strict=True)):
        x, color = left + place, EXPERT_COLORS[expert]
        face = "white" if token == EMPTY or crossed or pale else color
        look = {"facecolor": face, "edgecolor": color, "hatch": "////" if token == EMPTY else None, "linewidth": 1.5}
        cell(axes, (x + 0.06, top + 0.06), (0.88, 1), look, "" if token == EMPTY else token, size=10)
        if crossed:
            axes.plot([x + 0.1, x + 0.9], [top + 1, top + 0.1], color=VERMILLION, linewidth=1.5)
    if not crossed:
        for expert in np.unique(experts):
            places = np.flatnonzero(experts == expert)
            name = f"expert {expert}" if places.size > 1 else f"e{expert}"
            centered(axes, left + places.mean() + 0.5, top + 1.5, name, size=9)


# The topology --------------------------------------------------------------------------------------------------------


def topology_picture(topology: Topology, E: int) -> Figure:
    """Draw the stored blocks in their order, and below them the five arrays of the topology.

    It has at most some dozens of blocks. Each of its E experts has a colour, and as many block columns as another.
    """
    high, wide = _grid(topology)
    arrays = topology.arrays()
    long = max(map(len, arrays.values()))
    tall = high + len(arrays) * 1.25
    limits = {"xlim": (-6.5, max(wide, long) + 0.5), "ylim": (tall + 1.2, -1.2)}
    figure, axes = board(10, 0.36 * tall + 1.3, **limits, aspect="equal")
    _matrix(axes, (0, 0), (high, wide), _stored(topology), wide // E)
    for row in range(high):
        axes.text(-0.3, row + 0.5, f"block row {row}", ha="right", va="center", size=10)
    centered(axes, wide / 2, -0.6, "block columns, those of one expert in its colour", size=10)
    owners = _owners(topology, wide // E)
    for number, (name, array) in enumerate(arrays.items()):
        top = high + 1 + 1.25 * number
        axes.text(-0.3, top + 0.5, name, ha="right", va="center", size=10)
        for place, value in enumerate(array):
            color = EXPERT_COLORS[owners[name][place]] if name in owners else PALE
            _cell(axes, (place, top), color, value)
    return figure


def _grid(topology):
    return topology.row_offsets.size - 1, topology.column_offsets.size - 1


def _stored(topology):
    """{(block row, block column): number} of what is stored."""
    places = zip(topology.row_indices.tolist(), topology.column_indices.tolist(), strict=True)
    return {place: number for number, place in enumerate(places)}


def _owners(topology, columns):
    """The expert of every entry of the arrays that have one for each block."""
    by_number = topology.column_indices // columns
    return {
        "column_indices": by_number,
        "row_indices": by_number,
        "transpose_indices": by_number[topology.transpose_indices],
    }


def _cell(axes, place, color, text, active=True):
    look = {"facecolor": color, "edgecolor": "white", "alpha": 1 if active else 0.25}
    cell(axes, place, (1, 1), look, text, size=10, color=BLACK if active else DIM)


def _matrix(axes, place, grid, numbers, columns, active=None, transposed=False):
    """A block-sparse matrix; of the numbers in ``active`` the colour is full, None for all."""
    (left, top), (high, wide) = place, grid
    for row in range(high):
        for column in range(wide):
            number = numbers.get((column, row) if transposed else (row, column))
            corner = left + column, top + row
            if number is None:
                cell(axes, corner, (1, 1), {"facecolor": "white", "edgecolor": "#DDDDDD", "linewidth": 0.6})
            else:
                expert = (row if transposed else column) // columns
                _cell(axes, corner, EXPERT_COLORS[expert], number, active is None or number in active)


def transpose_picture(topology: Topology, E: int) -> Figure:
    """The values as they lie, row after row, and the order in which the transpose indices visit them."""
    wide = _grid(topology)[1]
    owners = topology.column_indices // (wide // E)
    figure, axes = board(10, 3.6, xlim=(-5.5, topology.nnz + 0.2), ylim=(6, -1), aspect="equal")
    heading(axes, f"{topology.nnz} blocks as they lie, row after row; below, a line from each to its column's turn")
    for number, owner in enumerate(owners):
        _cell(axes, (number, 0), EXPERT_COLORS[owner], number)
    for place, number in enumerate(topology.transpose_indices):
        _cell(axes, (place, 4), EXPERT_COLORS[owners[number]], number)
        axes.plot([number + 0.5, place + 0.5], [1.05, 3.95], color=EXPERT_COLORS[owners[number]], linewidth=1.5)
    for column, (first, end) in enumerate(pairwise(topology.column_offsets)):
        if end > first:
            centered(axes, (first + end) / 2, 5.45, str(column), size=10)
    for row, (first, end) in enumerate(pairwise(topology.row_offsets)):
        centered(axes, (first + end) / 2, -0.45, str(row), size=10)
    names = {-0.95: "block row", 0: "values in memory", 4: "transpose_indices", 4.95: "block column"}
    for top, name in names.items():
        axes.text(-0.3, top + 0.5, name, ha="right", va="center", size=10)
    return figure


# Products, block by block --------------------------------------------------------------------------------------------


class Product(NamedTuple):
    """A product of the layer: what its operands and its result are called."""

    lhs: str
    rhs: str
    result: str


PRODUCTS = {
    "SDD": Product("x_rows", "w1", "a"),
    "DSD": Product("y_swi", "w3", "y"),
    "DSD of the transpose": Product("y_swi^T", "d_y", "d_w3"),
}


class Step(NamedTuple):
    """One block of a result that is made whole, and the blocks that are read for it."""

    result: tuple[int, int] | int  #: block row and column of a sparse result, block row of a dense one
    numbers: tuple[int, ...]  #: blocks of the sparse matrix, by number
    dense: tuple[int, ...]  #: block rows of the dense operand; of SDD the block row of lhs and block column of rhs


def product_steps(product: str, topology: Topology) -> list[Step]:
    """Return the blocks that a product multiplies, found by running the specification on labelled operands.

    Labels of a sum are powers of two, so at most 50 blocks, block rows and block columns have one.

    Raises
    ------
    ValueError
        If the product is none of ``PRODUCTS``, or the topology is larger.
    """
    checks.check_name("product", product, PRODUCTS)
    largest = max(topology.nnz, *_grid(topology))
    checks.check_int("the largest of nnz, block rows and block columns", largest, at_least=0, at_most=50)
    if product == "SDD":
        return _sdd_steps(topology)
    return _dsd_steps(topology, transposed=product != "DSD")


def _sdd_steps(topology):
    """Fill block n of one operand with n, the other with ones: a result is the number of the block that it read."""
    M, N = topology.shape
    row_of, column_of = (np.arange(float(size)) // topology.block for size in (M, N))
    rows = block_sparse.sdd(row_of[:, None], np.ones((1, N)), topology)[:, 0, 0]
    columns = block_sparse.sdd(np.ones((M, 1)), column_of[None], topology)[:, 0, 0]
    places = zip(rows.astype(int).tolist(), columns.astype(int).tolist(), strict=True)
    return [Step(place, (number,), place) for number, place in enumerate(places)]


def _dsd_steps(topology, transposed):
    """Fill block n of one operand with 2**n, the other with ones: the bits of a sum are the blocks that it read."""
    block, inner = topology.block, _grid(topology)[0 if transposed else 1]
    ones = np.ones((topology.nnz, block, block))
    labelled = ones * 2.0 ** np.arange(topology.nnz)[:, None, None]
    rows = np.repeat(2.0 ** np.arange(inner), block)[:, None]  # (inner * block, 1)
    by_number = block_sparse.dsd(labelled, topology, np.ones_like(rows), transpose_lhs=transposed)
    by_row = block_sparse.dsd(ones, topology, rows, transpose_lhs=transposed)
    # A block row of the result is the sum over a block's columns: block times the label.
    return [
        Step(row, _bits(numbers / block), _bits(dense / block))
        for row, (numbers, dense) in enumerate(zip(by_number[::block, 0], by_row[::block, 0], strict=True))
    ]


def _bits(number):
    return tuple(bit for bit in range(int(number).bit_length()) if int(number) >> bit & 1)


def product_picture(product: str, step: int) -> Figure:
    """A product over the tiny topology: the blocks of a step in full colour, every other one pale.

    A step is the number of a block of a sparse result, or a block row of a dense one.

    Raises
    ------
    ValueError
        If the product is none of ``PRODUCTS``, or has no such step.
    """
    topology = tiny_topology()
    found = product_steps(product, topology)
    checks.check_int("step", step, at_least=0, at_most=len(found) - 1)
    draw = _draw_sdd if product == "SDD" else _draw_dsd
    return draw(product, topology, found[step])


def _draw_sdd(product, topology, step):
    (high, wide), (row, column) = _grid(topology), step.dense
    columns = wide // TINY_EXPERTS
    figure, axes = _product_axes(2.6 + wide, 2.9 + high, f"{_sum_of(product, step)}   (step {step.numbers[0]})")
    _dense(axes, (0, 2), high, "x_rows", {row}, _row_colors(topology, columns))
    for number in range(wide):
        _cell(axes, (2 + number, 0), EXPERT_COLORS[number // columns], number, number == column)
    axes.text(2 + wide / 2, -0.4, "w1: the block columns of all experts, side by side", ha="center", size=10)
    _matrix(axes, (2, 2), (high, wide), _stored(topology), columns, set(step.numbers))
    centered(axes, 2 + wide / 2, 2.5 + high, "a: what is stored, by number", size=10)
    for corner in ((0, 2 + row), (2 + column, 0), (2 + column, 2 + row)):
        _frame(axes, corner)
    return figure


def _draw_dsd(product, topology, step):
    transposed = product != "DSD"
    grid = _grid(topology)[::-1] if transposed else _grid(topology)
    columns = _grid(topology)[1] // TINY_EXPERTS
    (high, wide), names = grid, PRODUCTS[product]
    rows = _row_colors(topology, columns)
    of_expert = [EXPERT_COLORS[number // columns] for number in range(_grid(topology)[1])]
    lhs_colors, rhs_colors = (of_expert, rows) if transposed else (rows, of_expert)
    tall = max(high, wide)
    figure, axes = _product_axes(wide + 7, tall + 1.4, f"{_sum_of(product, step)}   (step {step.result})")
    _matrix(axes, (0, 0), grid, _stored(topology), columns, set(step.numbers), transposed)
    _dense(axes, (wide + 2, 0), wide, names.rhs, set(step.dense), rhs_colors)
    _dense(axes, (wide + 5, 0), high, names.result, {step.result}, lhs_colors)
    centered(axes, wide / 2, -0.5, names.lhs, size=10)
    for x, sign in ((wide + 1, "·"), (wide + 4, "=")):
        centered(axes, x, 1.5, sign, size=16)
    _frame(axes, (wide + 5, step.result))
    for inner in step.dense:
        _frame(axes, (inner, step.result))
        _frame(axes, (wide + 2, inner))
    return figure


def _product_axes(width, height, title):
    inches = 0.44 * width + 0.6, 0.44 * height + 1.2
    figure, axes = board(*inches, xlim=(-0.6, width), ylim=(height, -1), aspect="equal")
    heading(axes, title, weight="bold")
    return figure, axes


def _sum_of(product, step):
    """The step as a formula, such as ``y[2] = S4 w3[4] + S5 w3[5]``."""
    names = PRODUCTS[product]
    if product == "SDD":
        row, column = step.dense
        return f"a{step.numbers[0]} = x_rows[{row}] · w1[:, {column}]"
    mark = "^T" if names.lhs.endswith("^T") else ""
    pairs = zip(step.numbers, step.dense, strict=True)
    terms = [f"S{number}{mark} · {names.rhs}[{inner}]" for number, inner in pairs]
    return f"{names.result}[{step.result}] = {' + '.join(terms) or '0: nothing is stored'}"


def _row_colors(topology, columns):
    return [EXPERT_COLORS[topology.column_indices[first] // columns] for first in topology.row_offsets[:-1]]


def _dense(axes, place, rows, name, active, colors):
    """A dense operand or result, one block wide."""
    left, top = place
    for row in range(rows):
        _cell(axes, (left, top + row), colors[row], row, row in active)
    centered(axes, left + 0.5, top - 0.5, name, size=10)


def _frame(axes, corner):
    cell(axes, corner, (1, 1), {"facecolor": "none", "edgecolor": BLACK, "linewidth": 2, "zorder": 3})


# Bytes that a run asks for -------------------------------------------------------------------------------------------

VERSION = "3_mma"
PARTS = {  # of a layer, by what a launch does
    **dict.fromkeys(("pad_offsets", "pad_slots", "offsets", "blocks"), "bins and topology"),
    **dict.fromkeys(("padded_gather", "gate_gradient", "gate_rows", "d_gates"), "rows and gates"),
    **dict.fromkeys(("combine", "sum_rows"), "sums over experts"),
    **dict.fromkeys(("activate", "activate_backward"), "activation by itself"),
    **dict.fromkeys(
        ("sdd", "dsd", "dds", "expert_up", "expert_down", "d_hidden", "d_w3", "d_x_rows", "d_w"), "products"
    ),
}


class Run(NamedTuple):
    """A step of a layer's experts on the CPU: its launches, and its results."""

    launches: list[LaunchReport]
    results: dict[str, Any]  #: out and the gradients, in the dtype of the case


def run_megablocks(case: Case, block: int = 128) -> Run:
    """Forward and backward of MegaBlocks' experts in raw CUDA, counted; the case is in bfloat16 or float16."""
    executor, chosen = SimtExecutor(), gating.forward(case.logits, case.k)
    routed, gates = dispatch.build(chosen.topk_experts, case.E), chosen.gates.astype(np.float32)
    weights = case.weights[1:]
    with executor.recording() as launches:
        out, saved = raw_sparse.forward(case.x, *weights, routed, gates, case.activation, block, executor, VERSION)
        gradients = raw_sparse.backward(case.d_out, saved, *weights, executor=executor, version=VERSION)
    return Run(launches, {"out": out} | gradients._asdict())


def run_moeblaze(case: Case, policy: str = "paper") -> Run:
    """The same of MoEBlaze's layer, less the launches of its router and its dispatch."""
    executor = SimtExecutor()
    with executor.recording() as launches:
        made = raw_layer.forward(
            case.x, case.weights, case.k, case.activation, policy, executor=executor, version=VERSION
        )
        gradients = raw_layer.backward(case.d_out, made.saved, case.weights, executor=executor, version=VERSION)
    experts = [launch for launch in launches if launch.kernel in PARTS]
    return Run(experts, {"out": made.out} | gradients._asdict())


def work_by_part(run: Run) -> dict[str, tuple[int, int]]:
    """Launches, and the bytes that threads ask for in them, by part of the layer."""
    found = {part: (0, 0) for part in dict.fromkeys(PARTS.values())}
    for launch in run.launches:
        number, asked = found[PARTS[launch.kernel]]
        found[PARTS[launch.kernel]] = number + 1, asked + launch.read_bytes + launch.written_bytes
    return found


# Kept bytes ----------------------------------------------------------------------------------------------------------

COMPARED = (
    ("conventional", None),
    ("capacity", None),
    ("megablocks", None),
    ("moeblaze", "paper"),
    ("moeblaze", "minimal"),
)


def systems_bars(name: str, activation: str) -> Figure:
    """`plots.stacked_bars` of the four systems that run here, for a preset with another activation; even routing."""
    config = preset(name).config.replace(activation=activation)
    return stacked_bars([account(config, *variant) for variant in COMPARED])
