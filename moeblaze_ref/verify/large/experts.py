"""Large cases of the kernels of both projections."""

import math
from typing import NamedTuple, Self

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation
from moeblaze_ref.backends.raw_cuda import expert_down, expert_up, gemm
from moeblaze_ref.runtime.sparse import Launch, Parts
from moeblaze_ref.verify.large.cases import ALL, Case, exactly, last_block, values
from moeblaze_ref.verify.large.layout import MANY_BLOCKS, Layout

VERSIONS = ("1_naive", "2_tiled", "3_mma", gemm.HOPPER)
WIDEST = 64 * 65_535  # columns of as many tiles as a launch takes along y
DEEP = 1032  # DEEP * WIDEST > 2**32
FEW = 1028  # rows; FEW * WIDEST > 2**32
MANY = 2**22 + 4
SIDE = 1024  # MANY * SIDE > 2**32


def wide_hidden(version: str, rows: int = FEW) -> Layout:
    """d h > 2**32, so that E d h and R h are too."""
    return Layout(version, L=FEW, E=3, d=DEEP, h=WIDEST, rows=rows)


def wide_model(version: str, rows: int = FEW) -> Layout:
    """d h > 2**32, so that E h d, L d and R d are too."""
    return Layout(version, L=FEW, E=3, d=WIDEST, h=DEEP, rows=rows)


def wide_experts(version: str) -> Layout:
    """E d > 2**31."""
    return Layout(version, L=FEW, E=1024, d=WIDEST, h=16, rows=FEW)


def tall(version: str) -> Layout:
    """L d, R d and R h > 2**32."""
    return Layout(version, L=MANY, E=2, d=SIDE, h=SIDE, rows=68)


def cases() -> list[Case]:
    """Every kernel of both stages."""
    found = []
    for version in VERSIONS:
        found += _up_cases(version)
        found += [_d_x(tall(version))]
        found += [down(layout) for layout in (wide_model(version), tall(version))]
        found += [d_hidden(layout) for layout in (wide_hidden(version), tall(version))]
        found += [_d_w(tall(version)), _d_w3(tall(version))]
        if version != gemm.HOPPER:
            found += [
                _d_x(wide_experts(version)),
                _d_w(wide_hidden(version, rows=4)),
                _d_w3(wide_model(version, rows=4)),
            ]
    return found + [case for version in gemm.TEACHING for case in _up_cases(version)]


def _up_cases(version: str) -> list[Case]:
    return [_up(layout) for layout in (wide_hidden(version), tall(version))]


def _case(layout: Layout, stage: str, passes: str, launch: Launch, function, **options) -> Case:
    blocks = MANY_BLOCKS if layout.version == gemm.HOPPER else 4
    call = layout.call(function.unchecked, version=layout.version, **options)
    return Case(stage, layout.version, f"{passes}: {layout}", layout.dtype, launch, call, blocks)


def rows_of_tokens(layout: Layout, rows: slice) -> dict:
    """Return the arrays that lead a kernel from these rows to tokens, the last tokens in reverse order."""
    count = rows.stop - rows.start
    tokens = layout.L - 1 - np.arange(count)
    return {"expert_token_indices": [(np.s_[rows], tokens)], "expert_token_offsets": [(ALL, layout.offsets)]}


def last_tokens(array: np.ndarray, columns: slice = ALL) -> list:
    """Parts of a tensor (L, ...): the rows of those tokens."""
    return [(np.s_[-len(array) :, columns], array[::-1])]


def of_last_expert(array: np.ndarray, rows: slice = ALL, columns: slice = ALL) -> list:
    return [(np.s_[-1:, rows, columns], array)]


def weights(layout: Layout, depth: int, rows: int, columns: int, seed: int) -> np.ndarray:
    """Part (rows, columns) of a weight, for products of this depth that are of order 1."""
    return (values(rows, columns, seed=seed) / math.sqrt(depth)).astype(values(1, dtype=layout.dtype).dtype)


class Up(NamedTuple):
    """The last block of the up-projection: what it reads of each tensor, and what it writes."""

    rows: slice
    columns: slice
    x: np.ndarray
    w1: np.ndarray
    w2: np.ndarray
    outputs: dict[str, np.ndarray]  #: a, b and y_swi

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Return values for the last rows and columns."""
        d, rows, columns = layout.d, layout.live_rows(), layout.live_columns(layout.h, results=2)
        x = values(rows.stop - rows.start, d, dtype=layout.dtype)
        w1, w2 = (weights(layout, d, d, columns.stop - columns.start, seed) for seed in (1, 2))
        a, b = (exactly(x) @ exactly(w) for w in (w1, w2))
        return cls(rows, columns, x, w1, w2, {"a": a, "b": b, "y_swi": activation.forward(a, b, "swiglu")})

    def given(self, layout: Layout) -> dict[str, Parts]:
        """Return the parts of what leads to the weights."""
        return rows_of_tokens(layout, self.rows) | {"x": last_tokens(self.x)}


def _up(layout: Layout) -> Case:
    block = Up.of(layout)
    given = block.given(layout)
    given |= {name: of_last_expert(w, columns=block.columns) for name, w in (("w1", block.w1), ("w2", block.w2))}
    expected = {name: [(np.s_[block.rows, block.columns], array)] for name, array in block.outputs.items()}

    launch = Launch("expert_up", layout.row_blocks(layout.h, results=2), given, expected)
    return _case(layout, "expert_up", "L d, R h, d h", launch, expert_up.forward, activation="swiglu")


def _d_x(layout: Layout) -> Case:
    """Gradients of the last token (1_naive), or of the last rows."""
    d, h, naive = layout.d, layout.h, layout.version == "1_naive"
    rows, columns = layout.live_rows(), layout.live_columns(d)
    width = columns.stop - columns.start
    d_a, d_b = (values(rows.stop - rows.start, h, dtype=layout.dtype, seed=seed) for seed in (1, 2))
    w1, w2 = (weights(layout, 2 * h, width, h, seed) for seed in (3, 4))
    sums = exactly(d_a) @ exactly(w1).T + exactly(d_b) @ exactly(w2).T
    given: dict[str, Parts] = {name: [(np.s_[rows], array)] for name, array in (("d_a", d_a), ("d_b", d_b))}
    given |= {name: of_last_expert(w, rows=columns) for name, w in (("w1", w1), ("w2", w2))}
    if naive:
        given |= {"token_expert_indices": [(np.s_[-1:], layout.E - 1)]}
        given |= {"token_index_map": [(np.s_[-1:], layout.L - 1)]}
    else:
        given |= {"expert_token_offsets": [(ALL, layout.offsets)]}

    kernel, blocks = ("d_x", last_block) if naive else ("d_x_rows", layout.row_blocks(d))
    expected = {"d_x" if naive else "rows": [(np.s_[rows, columns], sums)]}
    launch = Launch(kernel, blocks, given, expected)
    return _case(layout, "expert_up", "R d, R h, E d h", launch, expert_up.input_gradient)


def down(layout: Layout) -> Case:
    d, h = layout.d, layout.h
    rows, columns = layout.live_rows(), layout.live_columns(d)
    y_swi = values(rows.stop - rows.start, h, dtype=layout.dtype)
    w3 = weights(layout, h, h, columns.stop - columns.start, seed=1)
    given = {"y_swi": [(np.s_[rows], y_swi)], "w3": of_last_expert(w3, columns=columns)}
    given |= {"expert_token_offsets": [(ALL, layout.offsets)]}
    expected = {"y": [(np.s_[rows, columns], exactly(y_swi) @ exactly(w3))]}

    launch = Launch("expert_down", layout.row_blocks(d), given, expected)
    return _case(layout, "expert_down", "R h, R d, h d", launch, expert_down.forward)


class HiddenGradients(NamedTuple):
    """The last block of the hidden layer's gradients: what it reads of each tensor, and what it writes."""

    rows: slice
    columns: slice
    d_out: np.ndarray
    gates: np.ndarray
    a: np.ndarray
    b: np.ndarray
    w3: np.ndarray
    outputs: dict[str, np.ndarray]  #: d_a, d_b and gated_y
    terms: np.ndarray  #: of the gates' gradients

    @classmethod
    def of(cls, layout: Layout) -> Self:
        """Return values for the last rows and columns."""
        d, rows, columns = layout.d, layout.live_rows(), layout.live_columns(layout.h)
        count, width = rows.stop - rows.start, columns.stop - columns.start
        d_out, gates = values(count, d, dtype=layout.dtype), values(count)
        a, b = (values(count, width, dtype=layout.dtype, seed=seed) for seed in (1, 2))
        w3 = weights(layout, d, width, d, seed=3)
        d_y = exactly(d_out) @ exactly(w3).T
        gate, y = exactly(gates)[:, None], activation.forward(exactly(a), exactly(b), "swiglu")
        d_a, d_b = activation.backward(gate * d_y, exactly(a), exactly(b), "swiglu")
        outputs = {"d_a": d_a, "d_b": d_b, "gated_y": gate * y}
        return cls(rows, columns, d_out, gates, a, b, w3, outputs, d_y * y)

    def given(self, layout: Layout) -> dict[str, Parts]:
        """Return the parts of what no layout of the weights moves."""
        rows = {"d_out": last_tokens(self.d_out), "gate_of_row": [(np.s_[self.rows], self.gates)]}
        return rows_of_tokens(layout, self.rows) | rows

    def gate_terms(self, layout: Layout) -> Parts:
        """Return the parts of the terms: one an element in 1_naive, else one a tile."""
        if layout.version == "1_naive":
            return [(np.s_[self.rows, self.columns], self.terms)]
        return [(np.s_[self.rows, -1:], self.terms.sum(axis=1, keepdims=True))]


def d_hidden(layout: Layout) -> Case:
    block = HiddenGradients.of(layout)
    place = np.s_[block.rows, block.columns]
    given = block.given(layout) | {"a": [(place, block.a)], "b": [(place, block.b)]}
    given |= {"w3": of_last_expert(block.w3, rows=block.columns)}
    expected: dict[str, Parts] = {name: [(place, array)] for name, array in block.outputs.items()}
    expected["gate_terms"] = block.gate_terms(layout)

    launch = Launch("d_hidden", layout.row_blocks(layout.h), given, expected)
    function = expert_down.hidden_gradients
    return _case(layout, "expert_down", "L d, R h, E d h", launch, function, activation="swiglu")


def _d_w(layout: Layout) -> Case:
    launch = _weight_launch(layout, "d_w", ("x", layout.d), ("d_hidden", layout.h))
    return _weight_case(layout, "expert_up", launch, expert_up.weight_gradient)


def _d_w3(layout: Layout) -> Case:
    launch = _weight_launch(layout, "d_w3", ("gated_y", layout.h), ("d_out", layout.d))
    return _weight_case(layout, "expert_down", launch, expert_down.weight_gradient)


def _weight_case(layout, stage, launch, function) -> Case:
    passes = f"L d, R h, E {'d h' if stage == 'expert_up' else 'h d'}: {layout}"
    call = layout.call(function.unchecked, version=layout.version)
    return Case(stage, layout.version, passes, layout.dtype, launch, call, multiprocessors=64)


def _weight_launch(layout: Layout, kernel: str, left: tuple[str, int], right: tuple[str, int]) -> Launch:
    """left^T right over the rows of the last expert: the last rows and columns of its matrix."""
    rows = slice(layout.L - layout.rows, layout.L)
    sides = {}
    for seed, (name, width) in enumerate((left, right)):
        # 7_persistent has tiles of 128 columns of what it gathers, and of 256 of the other operand
        if layout.version == gemm.HOPPER:
            columns = layout.last(width, 128 if name in ("x", "d_out") else 256)
        else:
            columns = layout.last(width, layout.extent()[0]) if name == left[0] else layout.live_columns(width)
        sides[name] = columns, values(layout.rows, columns.stop - columns.start, dtype=layout.dtype, seed=seed)
    given = rows_of_tokens(layout, rows)
    for name, (columns, array) in sides.items():
        gathered = name in ("x", "d_out")
        given |= {name: last_tokens(array, columns) if gathered else [(np.s_[rows, columns], array)]}
    (left_columns, left_array), (right_columns, right_array) = sides[left[0]], sides[right[0]]
    product = exactly(left_array).T @ exactly(right_array)
    return Launch(kernel, last_block, given, {kernel: of_last_expert(product, left_columns, right_columns)})
