"""Large cases of kernels beside those of `experts`, and of indices that need sizes of their own."""

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation as reference
from moeblaze_ref.backends.raw_cuda import activation, expert_down, expert_up, gemm, tiles
from moeblaze_ref.runtime import Executor, ceil_div
from moeblaze_ref.runtime.sparse import ZEROS, Launch
from moeblaze_ref.verify.large.cases import ALL, Case, dispatch_of, exactly, last_block, values
from moeblaze_ref.verify.large.experts import (
    VERSIONS,
    d_hidden,
    down,
    last_tokens,
    of_last_expert,
    rows_of_tokens,
    tall,
    weights,
    wide_model,
)
from moeblaze_ref.verify.large.layout import Layout, number_in_bands

# A row of this many columns, and the rows of a tile of 7_persistent: more than 2**31 elements.
HOPPER_WIDE = {"d_w": 16_909_440, "d_w3": 16_909_440, "d_hidden": 143_200_000}
MOST_BLOCKS = 512  # of a launch that computes a weight gradient
TALLEST = tiles.MmaTile(rows=256, columns=256)


def cases() -> list[Case]:
    """Return all large cases."""
    terms = [d_hidden(many_terms(version)) for version in VERSIONS[1:]]
    hopper = [d_hidden(Layout(gemm.HOPPER, L=16, E=1, d=64, h=HOPPER_WIDE["d_hidden"], rows=16)), _d_w(), _d_w3()]
    sums = [_add_expert(layout(version)) for layout in (wide_model, tall) for version in ("2_tiled", "3_mma")]
    sums += [_add_rows(layout(version)) for layout in (wide_model, tall) for version in ("2_tiled", "3_mma")]
    return [_act(), _d_gates(), _d_gates_of_more_terms(), *terms, *hopper, *sums, _round_sums(), _tall_tile()]


def many_terms(version: str) -> Layout:
    """R times the tiles of h: more than 2**32 terms of the gates' gradients, or 2**31 of 7_persistent."""
    columns = {"2_tiled": 64 * 65, "3_mma": 128 * 65, gemm.HOPPER: 256 * 33}[version]
    return Layout(version, L=2**26 + 4, E=1, d=8, h=columns, rows=2**26 + 4)


# ---- element by element ----


def _act() -> Case:
    R, h = 2**22 + 1, 1024
    a, place = values(gemm.THREADS), np.s_[-1:, -gemm.THREADS :]
    expected = {"act_a": [(place, reference.act(exactly(a)[None], "silu"))]}
    launch = Launch("act", last_block, {"a": [(place, a)]}, expected)
    call = lambda executor: activation.act.unchecked(executor.empty((R, h), "float32"), "silu", executor)
    return Case("layer", "1_elementwise", f"R h: R={R}, h={h}", "float32", launch, call)


def _d_gates() -> Case:
    """The last block has four slots, whose rows are the last in reverse order."""
    layout, count = tall("1_naive"), 4
    terms, last = values(count, layout.h), np.s_[-count:]
    given = {"gate_terms": [(last, terms[::-1])], "token_index_map": [(last, layout.L - 1 - np.arange(count))]}
    launch = Launch("d_gates", last_block, given, {"d_gates": [(last, exactly(terms).sum(axis=1, keepdims=True))]})

    call = layout.call(expert_down.hidden_gradients.unchecked, activation="swiglu", version="1_naive")
    return Case("expert_down", "gates", f"R h: {layout}", "float32", launch, call)


def _d_gates_of_more_terms() -> Case:
    """The same slots, whose rows have more terms than d_hidden leaves."""
    L, count, more = 2**22 + 4, 4, 1024
    terms, others, last = values(count, 1), values(count, more, seed=1), np.s_[-count:]
    given = {"gate_terms": [(last, terms[::-1])], "more_terms": [(last, others[::-1])]}
    given |= {"token_index_map": [(last, L - 1 - np.arange(count))]}
    sums = np.concatenate([exactly(terms), exactly(others)], axis=1).sum(axis=1, keepdims=True)
    launch = Launch("d_gates", last_block, given, {"d_gates": [(last, sums)]})

    def call(executor: Executor) -> None:
        more_terms, gates = [executor.empty((L, width), "float32") for width in (more, 1)]
        expert_down.gates_gradient(executor, dispatch_of(executor, L, 2, 1), gates, 1, lambda *_: more_terms)

    return Case("expert_down", "gates", f"R more: L={L}, more={more}", "float32", launch, call)


# ---- sums over a token's experts in the epilogue ----


def _sums_launch(layout: Layout, kernel: str, blocks, where: dict) -> Launch:
    rows, columns = layout.live_rows(), layout.live_columns(layout.d)
    count, width = rows.stop - rows.start, columns.stop - columns.start
    y_swi, gates, before = values(count, layout.h, dtype=layout.dtype), values(count), values(count, width)
    w3 = weights(layout, layout.h, layout.h, width, seed=1)
    sums = before + exactly(gates)[:, None] * (exactly(y_swi) @ exactly(w3))
    given = rows_of_tokens(layout, rows) | {"gate_of_row": [(np.s_[rows], gates)]}
    given |= {"y_swi": [(np.s_[rows], y_swi)], "w3": of_last_expert(w3, columns=columns)}
    given |= {"sums": last_tokens(before, columns)}
    return Launch(kernel, blocks, given, {"sums": last_tokens(sums, columns)}, where)


def _sums_case(layout: Layout, version: str, function, launch: Launch) -> Case:
    call = layout.call(function.unchecked)
    return Case("expert_down", version, f"L d, R h, E h d: {layout}", layout.dtype, launch, call)


def _add_expert(layout: Layout) -> Case:
    """The last tile of the last expert, in its own launch."""
    rows, columns = layout.extent()
    at = ceil_div(layout.rows, rows) - 1, ceil_div(layout.d, columns) - 1

    def blocks(grid):
        if layout.version == "2_tiled":
            return [(*at, 0)]
        number = number_in_bands(*at, *grid[:2])
        return [(number % grid[0], number // grid[0], 0)]

    launch = _sums_launch(layout, "add_expert", blocks, {"expert": layout.E - 1})
    return _sums_case(layout, "as_printed", expert_down.summed_forward, launch)


def _add_rows(layout: Layout) -> Case:
    launch = _sums_launch(layout, "add_rows", layout.row_blocks(layout.d), {})
    return _sums_case(layout, "lesson_atomic", expert_down.atomic_forward, launch)


def _round_sums() -> Case:
    layout = tall("3_mma")
    sums, place = values(gemm.THREADS), np.s_[-1:, -gemm.THREADS :]
    launch = Launch("round_sums", last_block, {"sums": [(place, sums)]}, {"out": [(place, exactly(sums))]})
    return _sums_case(layout, "as_printed", expert_down.summed_forward, launch)


# ---- rows so wide that those of one tile have more than 2**31 elements ----


def _tall_tile() -> Case:
    """A tile of 256 x 256 results, as the constants of 3_mma allow."""
    d = TALLEST.columns * 65_535
    case = down(Layout("3_mma", L=136, E=1, d=d, h=64, rows=136, tile=TALLEST))

    def call(executor):
        with tiles.trying(TALLEST):
            case.call(executor)

    return Case(case.stage, case.version, f"256 d: {case.passes}", case.dtype, case.launch, call)


def _hopper_weights(kernel: str, E: int, d: int, h: int, gathered: str, plain: str, product_of) -> Case:
    """The last expert has all rows, which are zeros but for the last columns.

    A block of 7_persistent takes many tiles of a weight gradient so large: zeros, and the last tile.
    """
    layout = Layout(gemm.HOPPER, L=4, E=E, d=d, h=h, rows=4)
    down_tiles, across = ceil_div(d, 128), ceil_div(h, 256)
    last_tile = E * down_tiles * across - 1
    block = last_tile % MOST_BLOCKS
    numbers = range(block, last_tile + 1, MOST_BLOCKS)
    last = {gathered: layout.last(d, 128), plain: layout.last(h, 256)}
    arrays = {
        name: values(layout.L, part.stop - part.start, dtype="bfloat16", seed=len(name)) for name, part in last.items()
    }
    given = rows_of_tokens(layout, slice(0, layout.L))
    given |= {gathered: [(ALL, ZEROS), *last_tokens(arrays[gathered], last[gathered])]}
    given |= {plain: [(ALL, ZEROS), (np.s_[:, last[plain]], arrays[plain])]}
    product = exactly(arrays[gathered]).T @ exactly(arrays[plain])
    expected = []
    for number in numbers:
        expert, inside = divmod(number, down_tiles * across)
        rows, columns = (
            slice(at * size, min((at + 1) * size, most))
            for at, size, most in ((inside % down_tiles, 128, d), (inside // down_tiles, 256, h))
        )
        part = product if number == numbers[-1] else np.zeros((rows.stop - rows.start, columns.stop - columns.start))
        expected.append(product_of(expert, rows, columns, part))
    launch = Launch(kernel, lambda _: [(block, 0, 0)], given, {kernel: expected})
    stage = expert_up if kernel == "d_w" else expert_down

    call = layout.call(stage.weight_gradient.unchecked, version=gemm.HOPPER)
    name = stage.__name__.rpartition(".")[2]
    return Case(name, gemm.HOPPER, f"E d h, and of one tile's rows: {layout}", "bfloat16", launch, call, MOST_BLOCKS)


def _d_w() -> Case:
    place = lambda expert, rows, columns, part: (np.s_[expert : expert + 1, rows, columns], part)
    return _hopper_weights("d_w", 2, 128, HOPPER_WIDE["d_w"], "x", "d_hidden", place)


def _d_w3() -> Case:
    """Stored transposed."""
    place = lambda expert, rows, columns, part: (np.s_[expert : expert + 1, columns, rows], part.T)
    return _hopper_weights("d_w3", 1, HOPPER_WIDE["d_w3"], 256, "d_out", "gated_y", place)
