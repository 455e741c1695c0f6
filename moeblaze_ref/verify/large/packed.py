"""Large cases of the kernels of experts whose weights lie as a model stores them, in each layout."""

from collections.abc import Callable

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.backends.raw_cuda.packed import Packed
from moeblaze_ref.core import layouts
from moeblaze_ref.core.structures import Array
from moeblaze_ref.runtime import Executor
from moeblaze_ref.runtime.sparse import Launch, Parts
from moeblaze_ref.verify.large.cases import Case, dispatch_of, exactly, last_block, values
from moeblaze_ref.verify.large.corners import many_terms
from moeblaze_ref.verify.large.experts import HiddenGradients, Up, tall, wide_hidden
from moeblaze_ref.verify.large.layout import MANY_BLOCKS, Layout
from moeblaze_ref.verify.packed import joined

VERSIONS = ("2_tiled", "3_mma", gemm.HOPPER)
G = 2  # projections
# ab has the widest rows that the kernels accept.
WIDEST = Layout(gemm.HOPPER, L=4, E=2, d=64, h=gemm.MAX_WIDTH // G, rows=4)


def cases() -> list[Case]:
    """Every kernel of weights in each layout."""
    found = []
    for stored in layouts.LAYOUTS.values():
        for version in VERSIONS:
            sizes = [wide_hidden(version), tall(version)]
            sizes += [WIDEST] if version == gemm.HOPPER else []
            found += [_up(stored, layout) for layout in sizes]
            found += [_d_hidden(stored, layout) for layout in [*sizes, many_terms(version)]]
        found.append(_act(stored))
    return found


# ---- where a layout has what ----


def _both(stored: layouts.Layout, columns: slice, a: np.ndarray, b: np.ndarray, h: int) -> list:
    """Columns of ab, with those columns of a and of b; of gate_up, with those of w1 and w2."""
    if stored.interleaved:
        return [(slice(G * columns.start, G * columns.stop), joined(a, b, stored))]
    return [(columns, a), (slice(h + columns.start, h + columns.stop), b)]


def _in_rows(rows: slice, parts: list) -> Parts:
    return [(np.s_[rows, columns], array) for columns, array in parts]


def _of_last_expert(transposed: bool, parts: list) -> Parts:
    """Columns of a matrix, which may be stored transposed."""
    if transposed:
        return [(np.s_[-1:, columns], array.T) for columns, array in parts]
    return [(np.s_[-1:, :, columns], array) for columns, array in parts]


def _gate_up(stored: layouts.Layout, layout: Layout, block: Up) -> dict[str, Parts]:
    """Parts of gate_up, or of the two matrices that 7_persistent has tensor maps of."""
    both = _both(stored, block.columns, block.w1, block.w2, layout.h)
    if layout.version != gemm.HOPPER:
        return {"gate_up": _of_last_expert(stored.transposed, both)}
    if stored.interleaved:
        return dict.fromkeys(("w1", "w2"), _of_last_expert(False, both))
    matrices = {"w1": block.w1, "w2": block.w2}
    return {name: _of_last_expert(stored.transposed, [(block.columns, w)]) for name, w in matrices.items()}


# ---- the cases ----


def _case(
    stored: layouts.Layout,
    layout: Layout,
    stage: str,
    passes: str,
    launch: Launch,
    call: Callable[[Executor, Packed, Callable[..., Array]], None],
) -> Case:
    """A case of which ``call`` takes the executor, the stage, and a function that makes arrays of a shape."""

    def run(executor: Executor):
        packed = Packed(stored, True, executor, layout.version)
        call(executor, packed, lambda *shape: executor.empty(shape, layout.dtype))

    blocks = MANY_BLOCKS if layout.version == gemm.HOPPER else 4
    passes = f"{stored.name}: {passes}: {layout}"
    return Case(stage, f"packed/{layout.version}", passes, layout.dtype, launch, run, blocks)


def _up(stored: layouts.Layout, layout: Layout) -> Case:
    L, E, d, h, block = layout.L, layout.E, layout.d, layout.h, Up.of(layout)
    ab = _both(stored, block.columns, block.outputs["a"], block.outputs["b"], h)
    given = block.given(layout) | _gate_up(stored, layout, block)
    y_swi = [(block.columns, block.outputs["y_swi"])]
    expected = {"ab": _in_rows(block.rows, ab), "y_swi": _in_rows(block.rows, y_swi)}

    def call(executor, packed, empty):
        gate_up, _ = stored.shapes(E, d, h, gated=True)
        packed.project(empty(L, d), empty(*gate_up), None, dispatch_of(executor, L, E, 1), "swiglu")

    launch = Launch("expert_up", layout.row_blocks(h, results=G), given, expected)
    return _case(stored, layout, "expert_up", "L d, R h, E d h", launch, call)


def _d_hidden(stored: layouts.Layout, layout: Layout) -> Case:
    L, E, d, h, block = layout.L, layout.E, layout.d, layout.h, HiddenGradients.of(layout)
    ab = _both(stored, block.columns, block.a, block.b, h)
    d_ab = _both(stored, block.columns, block.outputs["d_a"], block.outputs["d_b"], h)
    # An output of the layer is a row of w3: down has them as gate_up has its columns, transposed.
    down = _of_last_expert(not stored.transposed, [(block.columns, block.w3.T)])
    given = block.given(layout) | {"ab": _in_rows(block.rows, ab), "down": down}
    gated_y = _in_rows(block.rows, [(block.columns, block.outputs["gated_y"])])
    expected = {"d_ab": _in_rows(block.rows, d_ab), "gated_y": gated_y, "gate_terms": block.gate_terms(layout)}

    def call(executor, packed, empty):
        _, down = stored.shapes(E, d, h, gated=True)
        gates, dispatch = executor.empty((L, 1), "float32"), dispatch_of(executor, L, E, 1)
        packed.hidden_gradients(empty(L, d), gates, empty(L, G * h), None, empty(*down), dispatch, "swiglu")

    launch = Launch("d_hidden", layout.row_blocks(h), given, expected)
    return _case(stored, layout, "expert_down", "L d, R h, E d h", launch, call)


def _act(stored: layouts.Layout) -> Case:
    """The last block has the last elements of a, from where they lie in ab."""
    R, h = 2**22 + 1, 1024
    columns, rows = slice(h - gemm.THREADS, h), slice(R - 1, R)
    a, b = (values(1, gemm.THREADS, seed=seed) for seed in (1, 2))
    expected = {"act_a": _in_rows(rows, [(columns, activation.act(exactly(a), "silu"))])}
    launch = Launch("act", last_block, {"ab": _in_rows(rows, _both(stored, columns, a, b, h))}, expected)

    def call(executor):
        Packed(stored, True, executor, "2_tiled").act(executor.empty((R, G * h), "float32"), "swiglu")

    passes = f"{stored.name}: R h: R={R}, h={h}"
    return Case("layer", "packed/act", passes, "float32", launch, call)
