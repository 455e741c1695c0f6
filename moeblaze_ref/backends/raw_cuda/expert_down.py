"""The down-projection in raw CUDA: launches kernels_cuda/expert_down/."""

from collections.abc import Callable
from typing import Any

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.arrays import dtype_of, part_of, pitch_of, whole_rows
from moeblaze_ref.core.contract import implements
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, ceil_div, executor_for

VERSIONS = gemm.VERSIONS
SUMMED_VERSION = "as_printed"
SUMMED_VERSIONS = {SUMMED_VERSION: gemm.WIDE}  # of `summed_forward`, which has no y and no backward of its own
DEFAULT_VERSION = "2_tiled"


@implements(stage_contracts.EXPERT_DOWN, gemm.ARRAYS)
def forward(
    y_swi: Array, w3: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Sums are float32, rounded once. ``3_mma_tf32`` rounds its operands to 10 bits of mantissa; nothing chooses it by
    itself.
    """
    _, h, d = w3.shape
    gemm.check_version("expert_down", version, VERSIONS, y_swi, d=d, h=h)
    executor = executor or executor_for(y_swi)
    return rows(executor, version, y_swi, w3, dispatch, d)


def rows(executor: Executor, version: str, y_swi: Array, w3: Array, dispatch: Dispatch, d: int) -> Array:
    """Rows of y in as many columns as ``w3`` has: all d of them, or a part."""
    _, h, width = w3.shape
    dtype = dtype_of(y_swi)
    y = executor.empty((dispatch.R, width), dtype)
    if dispatch.R:
        tile = tiles.choose(executor, version, "expert_down", dispatch.R, dispatch.E, d, h)
        # The kernel does not depend on the activation.
        module = executor.load(gemm.file_of("expert_down", version), **gemm.constants(dtype, "swiglu", tile))
        y_swi = gemm.hidden_rows(executor, version, y_swi)
        w3 = gemm.weights_in_sectors(executor, version, w3, dispatch)
        module.launch(
            "expert_down",
            **gemm.rows_launch(executor, version, dispatch, width, tile),
            y_swi=gemm.operand(executor, version, y_swi, gemm.ROWS_BOX),
            w3=gemm.operand(executor, version, w3, gemm.WEIGHTS_BOX),
            expert_token_offsets=dispatch.expert_token_offsets,
            y=y,
            d=width,
            h=h,
        )
    return y


@implements(stage_contracts.EXPERT_DOWN_IN_PARTS, gemm.ARRAYS)
def output_in_parts(
    y_swi: Array,
    w3: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array | None:
    """`forward` and `combine.forward` in one, some columns after the others."""
    _, h, d = w3.shape
    parts = gemm.parts_of_y(version, dispatch.R, d, h)
    if len(parts) == 1:
        return None
    dtype = gemm.check_version("expert_down", version, VERSIONS, y_swi, d=d, h=h)
    gemm.check_slots(dispatch)
    executor = executor or executor_for(y_swi)
    out = executor.empty((dispatch.L, d), dtype)
    for first, width in parts:
        y = rows(executor, version, y_swi, part_of(w3, 2, first, width), dispatch, d)
        gemm.sum_rows(executor, y, dispatch.token_index_map, dispatch.k, out, gates, first)
        del y  # before the next part is born
    return out


@implements(stage_contracts.EXPERT_DOWN_SUMMED, gemm.ARRAYS)
def summed_forward(
    y_swi: Array,
    w3: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = SUMMED_VERSION,
) -> Array:
    """A token's rows are added in float32 in the order of its experts, and rounded once: always the same bits. Sums
    (L, d) in float32 are stored, unless out is float32 itself. One launch an expert; the launches of a stream run one
    after the other. The product is that of `gemm.portable_version`.
    """
    return _summed(_add_experts, y_swi, w3, gates, dispatch, executor, version)


@implements(stage_contracts.EXPERT_DOWN_ATOMIC, gemm.ARRAYS)
def atomic_forward(
    y_swi: Array, w3: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None
) -> Array:
    """A lesson, used by nothing: atomic additions in one launch. A token's rows are added in the order in which the
    blocks come.
    """
    return _summed(_add_rows, y_swi, w3, gates, dispatch, executor, SUMMED_VERSION)


def _summed(add, y_swi, w3, gates, dispatch, executor, version):
    """The rounded sums that ``add`` fills."""
    dtype = gemm.check_version("expert_down", version, SUMMED_VERSIONS, y_swi)
    executor = executor or executor_for(y_swi)
    L, d = dispatch.L, w3.shape[2]
    sums = executor.full((L, d), "float32", 0)
    if dispatch.R:
        gate_of_row = gates_of_rows(executor, dispatch, gates)
        operands = {
            "y_swi": gemm.hidden_rows(executor, version, y_swi),
            "w3": w3,
            "gate_of_row": gate_of_row,
            "expert_token_indices": dispatch.expert_token_indices,
            "expert_token_offsets": dispatch.expert_token_offsets,
            "sums": sums,
            "d": d,
            "h": w3.shape[1],
        }
        add(executor, dispatch, operands)
    if dtype == "float32" or L == 0:
        return executor.cast(sums, dtype)
    out = executor.empty((L, d), dtype)
    module = executor.load("expert_down/as_printed.cu", **gemm.constants(dtype))
    module.launch("round_sums", **gemm.per_element(L * d), sums=sums, out=out, L=L, d=d)
    return out


def _add_experts(executor, dispatch, operands):
    """One launch an expert, each of as many tiles as the longest group that there can be."""
    module, tile = _module_of_sums(executor, "as_printed", dispatch, operands)
    rows, columns = gemm.extent(tile)
    launch = gemm.per_tile(tile, (ceil_div(dispatch.L, rows), ceil_div(operands["d"], columns)))
    for expert in range(dispatch.E):
        module.launch("add_expert", **launch, **operands, expert=expert)


def _add_rows(executor, dispatch, operands):
    """One launch for all experts."""
    module, tile = _module_of_sums(executor, "lesson_atomic", dispatch, operands)
    launch = gemm.rows_launch(executor, SUMMED_VERSION, dispatch, operands["d"], tile)
    module.launch("add_rows", **launch, **operands)


def _module_of_sums(executor, name, dispatch, operands):
    """A file that sums in its epilogue, compiled for the tile of the product that it is built on, and the tile."""
    dtype, d, h = dtype_of(operands["y_swi"]), operands["d"], operands["h"]
    tile = tiles.choose(executor, gemm.portable_version(dtype, d, h), "expert_down", dispatch.R, dispatch.E, d, h)
    return executor.load(f"expert_down/{name}.cu", **gemm.constants(dtype, tile=tile)), tile


@implements(stage_contracts.EXPERT_DOWN_D_HIDDEN, gemm.ARRAYS)
def hidden_gradients(
    d_out: Array,
    gates: Array,
    a: Array,
    b: Array | None,
    w3: Array,
    dispatch: Dispatch,
    activation: str,
    y_swi: Array | None = None,
    overwrite: bool = False,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> tuple[Array, Array | None, Array, Array]:
    """y_swi is checked and not read: the epilogue has a and b in registers and rebuilds it there. The thread that
    overwrites an element has read it.
    """
    _, h, d = w3.shape
    dtype = gemm.check_version("expert_down", version, VERSIONS, a, ("d_out", d_out), d=d, h=h)
    executor = executor or executor_for(a)
    a = gemm.hidden_rows(executor, version, a)
    b = None if b is None else gemm.hidden_rows(executor, version, b, beside=a)
    d_a = a if overwrite else gemm.like(executor, a)
    d_b = b if overwrite or b is None else gemm.like(executor, b)
    gated_y = gemm.like(executor, a)
    tile = tiles.choose(executor, version, "d_hidden", dispatch.R, dispatch.E, d, h)

    def launch(gate_of_row, gate_terms):
        module = executor.load(gemm.file_of("expert_down", version), **gemm.constants(dtype, activation, tile))
        weights = gemm.weights_in_sectors(executor, version, w3, dispatch)
        module.launch(
            "d_hidden",
            **gemm.rows_launch(executor, version, dispatch, h, tile),
            d_out=gemm.gathered_rows(version, d_out),
            gate_of_row=gate_of_row,
            a=whole_rows(a),
            b=gemm.rows_or_nothing(executor, b, a),
            w3=gemm.operand(executor, version, weights, gemm.WEIGHTS_TRANSPOSED_BOX),
            expert_token_indices=dispatch.expert_token_indices,
            expert_token_offsets=dispatch.expert_token_offsets,
            d_a=whole_rows(d_a),
            d_b=gemm.rows_or_nothing(executor, d_b, a),
            gated_y=whole_rows(gated_y),
            gate_terms=gate_terms,
            d=d,
            h=h,
            **gemm.pitches(version, d_out, pitch_of(a)),
        )

    d_gates = gates_gradient(executor, dispatch, gates, gemm.gate_terms(version, h, tile), launch)
    return d_a, d_b, gated_y, d_gates


def gates_gradient(
    executor: Executor, dispatch: Dispatch, gates: Array, terms: int, launch: Callable[[Array, Array], Array | None]
) -> Array:
    """The gradients of the gates, from a kernel that leaves so many partial sums of each row's.

    ``launch(gate_of_row, gate_terms)`` runs it: (R,) and (R, terms), both float32 and in expert order. It may return
    more terms (R, more).
    """
    d_gates = executor.empty(gates.shape, "float32")
    if dispatch.R == 0:
        return d_gates
    gate_of_row = gates_of_rows(executor, dispatch, gates)
    gate_terms = executor.empty((dispatch.R, terms), "float32")
    more_terms = launch(gate_of_row, gate_terms)
    operands: dict[str, Any] = {"gate_terms": gate_terms, "d_gates": d_gates, "terms": terms}
    operands |= {"more_terms": gemm.or_nothing(executor, more_terms, gate_terms)}
    _launch_per_slot(executor, dispatch, "d_gates", **operands, more=0 if more_terms is None else more_terms.shape[1])
    return d_gates


def gates_of_rows(executor: Executor, dispatch: Dispatch, gates: Array) -> Array:
    """Return the gates (R,) in expert order."""
    gate_of_row = executor.empty((dispatch.R,), "float32")
    if dispatch.slots:
        _launch_per_slot(executor, dispatch, "gate_rows", gates=gates, gate_of_row=gate_of_row)
    return gate_of_row


def _launch_per_slot(executor: Executor, dispatch: Dispatch, kernel: str, **operands: Any) -> None:
    slots = {**gemm.per_element(dispatch.slots), "token_index_map": dispatch.token_index_map, "R": dispatch.slots}
    executor.load("expert_down/gates.cu", THREADS=gemm.THREADS).launch(kernel, **slots, **operands)


@implements(stage_contracts.EXPERT_DOWN_D_W3, gemm.ARRAYS)
def weight_gradient(
    gated_y: Array, d_out: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    operands, shape = {"gated_y": gated_y, "d_out": d_out}, (gated_y.shape[1], d_out.shape[1])
    return gemm.weight_gradient("expert_down", "d_w3", operands, shape, dispatch, executor, version)
