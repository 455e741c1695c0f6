"""The down-projection in raw CUDA: launches kernels_cuda/expert_down/."""

from moeblaze_ref.backends.raw_cuda import gemm, tiles
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor, ceil_div, executor_for

VERSIONS = gemm.VERSIONS
SUMMED_VERSION = "as_printed"
SUMMED_VERSIONS = {SUMMED_VERSION: gemm.WIDE}  # of `summed_forward`, which has no y and no backward of its own
DEFAULT_VERSION = "2_tiled"
GATE_DTYPES = ("float32",)


def forward(
    y_swi: Array, w3: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Every routed row's expert output, not yet weighted by its gate, in expert order.

    Parameters
    ----------
    y_swi : array (R, h), float32, float16 or bfloat16
    w3 : array (E, h, d)
    dispatch : Dispatch
    executor : Executor, optional
        Default: by where ``y_swi`` lives.
    version : str
        One of ``VERSIONS``. ``3_mma_tf32`` rounds its operands to 10 bits of mantissa; nothing chooses it by itself.

    Returns
    -------
    y : array (R, d)
        Sums are float32, rounded once.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_down_forward`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 5.
    """
    stage_contracts.check_expert_down_forward(y_swi, w3, dispatch, gemm.WIDE)
    _, h, d = w3.shape
    gemm.check_version("expert_down", version, VERSIONS, y_swi, d=d, h=h)
    executor = executor or executor_for(y_swi)
    return _rows(executor, version, y_swi, w3, dispatch, d)


def _rows(executor, version, y_swi, w3, dispatch, d):
    """Rows of y in as many columns as ``w3`` has: all d of them, or a part."""
    _, h, width = w3.shape
    dtype = checks.dtype_of(y_swi)
    y = executor.empty((dispatch.R, width), dtype)
    if dispatch.R:
        tile = tiles.choose(executor, version, "expert_down", dispatch.R, dispatch.E, d, h)
        # The kernel does not depend on the activation.
        module = executor.load(gemm.file_of("expert_down", version), **gemm.constants(dtype, "swiglu", tile))
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


def output_in_parts(
    y_swi: Array,
    w3: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = DEFAULT_VERSION,
) -> Array | None:
    """`forward` and `combine.forward` in one, some columns after the others, so that y never exists whole.

    Parameters
    ----------
    y_swi, w3, dispatch, executor, version
        As in `forward`.
    gates : array (L, k), float32

    Returns
    -------
    out : array (L, d) or None
        None where `gemm.parts_of_rows` does not divide y: then nothing is computed, and nothing checked.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_down_output`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, sections 3.1 and 5.
    """
    _, h, d = w3.shape
    parts = gemm.parts_of_rows(version, dispatch.R, d, h)
    if len(parts) == 1:
        return None
    stage_contracts.check_expert_down_output(y_swi, w3, gates, dispatch, gemm.WIDE, GATE_DTYPES)
    dtype = gemm.check_version("expert_down", version, VERSIONS, y_swi, d=d, h=h)
    gemm.check_slots(dispatch)
    executor = executor or executor_for(y_swi)
    out = executor.empty((dispatch.L, d), dtype)
    for first, width in parts:
        y = _rows(executor, version, y_swi, w3[:, :, first : first + width], dispatch, d)
        gemm.sum_rows(executor, y, dispatch.token_index_map, dispatch.k, out, gates, first)
        del y  # before the next part is born
    return out


def summed_forward(
    y_swi: Array,
    w3: Array,
    gates: Array,
    dispatch: Dispatch,
    executor: Executor | None = None,
    version: str = SUMMED_VERSION,
) -> Array:
    """The layer's output with the sum over a token's experts fused into the product, as the paper prints it.

    Parameters
    ----------
    y_swi : array (R, h), float32, float16 or bfloat16
    w3 : array (E, h, d)
    gates : array (L, k), float32
    dispatch : Dispatch
    executor : Executor, optional
        Default: by where ``y_swi`` lives.
    version : str
        One of ``SUMMED_VERSIONS``. It multiplies as `gemm.portable_version` says.

    Returns
    -------
    out : array (L, d)
        A token's rows are added in float32 in the order of its experts, and rounded once: always the same bits.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_down_output`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 3.1. y (R, d) is never stored, but sums (L, d) in float32 are, unless out is float32 itself. One
    launch an expert; the launches of a stream run one after the other.
    """
    return _summed(_add_experts, y_swi, w3, gates, dispatch, executor, version)


def atomic_forward(
    y_swi: Array, w3: Array, gates: Array, dispatch: Dispatch, executor: Executor | None = None
) -> Array:
    """`summed_forward` by atomic additions in one launch: a lesson, used by nothing.

    Parameters
    ----------
    y_swi, w3, gates, dispatch, executor
        As in `summed_forward`.

    Returns
    -------
    out : array (L, d)
        Not the same bits from run to run: a token's rows are added in the order in which blocks come.

    Raises
    ------
    ValueError, TypeError
        As `summed_forward`.
    """
    return _summed(_add_rows, y_swi, w3, gates, dispatch, executor, SUMMED_VERSION)


def _summed(add, y_swi, w3, gates, dispatch, executor, version):
    """The rounded sums that ``add`` fills."""
    stage_contracts.check_expert_down_output(y_swi, w3, gates, dispatch, gemm.WIDE, GATE_DTYPES)
    dtype = gemm.check_version("expert_down", version, SUMMED_VERSIONS, y_swi)
    executor = executor or executor_for(y_swi)
    L, d = dispatch.L, w3.shape[2]
    sums = executor.full((L, d), "float32", 0)
    if dispatch.R:
        gate_of_row = executor.empty((dispatch.R,), "float32")
        slots = {"token_index_map": dispatch.token_index_map, "R": dispatch.slots}
        gate_rows = {**slots, "gates": gates, "gate_of_row": gate_of_row}
        gate_module = executor.load("expert_down/0_gates.cu", THREADS=gemm.THREADS)
        gate_module.launch("gate_rows", **gemm.per_element(dispatch.slots), **gate_rows)
        operands = {
            "y_swi": y_swi,
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
    dtype, d, h = checks.dtype_of(operands["y_swi"]), operands["d"], operands["h"]
    tile = tiles.choose(executor, gemm.portable_version(dtype, d, h), "expert_down", dispatch.R, dispatch.E, d, h)
    return executor.load(f"expert_down/{name}.cu", **gemm.constants(dtype, tile=tile)), tile


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
    """From the layer's output gradient (L, d) back through gates, w3 and the activation.

    Parameters
    ----------
    d_out : array (L, d)
        Gradient of the layer's output; gathered by index, never expanded to (R, d).
    gates : array (L, k), float32
    a : array (R, h), float32, float16 or bfloat16
        Of relu y_swi may take its place, with the same results.
    b : array (R, h) or None
        None exactly for the ungated activations.
    w3 : array (E, h, d)
    dispatch : Dispatch
    activation : str
        One of ``config.ACTIVATIONS``.
    y_swi : array (R, h), optional
        Checked and not read: the epilogue has a and b in registers and rebuilds it there.
    overwrite : bool
        Write d_a and d_b over a and b and return those arrays: the thread that writes an element has read it.
    executor : Executor, optional
        Default: by where ``a`` lives.
    version : str
        One of ``VERSIONS``. ``3_mma_tf32`` rounds its operands to 10 bits of mantissa; nothing chooses it by itself.

    Returns
    -------
    d_a : array (R, h)
    d_b : array (R, h) or None
        None for the ungated activations.
    gated_y : array (R, h)
        gate * y_swi, which `weight_gradient` takes.
    d_gates : array (L, k), float32

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_down_hidden_gradients`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 5; SonicMoE for the gate gradient and the operand gate * y_swi of d_w3.
    """
    operands = d_out, gates, a, b, y_swi, w3, dispatch, activation
    stage_contracts.check_expert_down_hidden_gradients(*operands, overwrite, gemm.WIDE, GATE_DTYPES)
    _, h, d = w3.shape
    dtype = gemm.check_version("expert_down", version, VERSIONS, a, ("d_out", d_out), d=d, h=h)
    executor = executor or executor_for(a)
    d_a, d_b = (a, b) if overwrite else [like if like is None else executor.empty(like.shape, dtype) for like in (a, b)]
    gated_y, d_gates = executor.empty(a.shape, dtype), executor.empty(gates.shape, "float32")
    if dispatch.R == 0:
        return d_a, d_b, gated_y, d_gates
    gate_module = executor.load("expert_down/0_gates.cu", THREADS=gemm.THREADS)
    slots = {**gemm.per_element(dispatch.slots), "token_index_map": dispatch.token_index_map, "R": dispatch.slots}
    gate_of_row = executor.empty((dispatch.R,), "float32")
    gate_module.launch("gate_rows", **slots, gates=gates, gate_of_row=gate_of_row)
    tile = tiles.choose(executor, version, "d_hidden", dispatch.R, dispatch.E, d, h)
    terms = gemm.gate_terms(version, h, tile)
    gate_terms = executor.empty((dispatch.R, terms), "float32")
    module = executor.load(gemm.file_of("expert_down", version), **gemm.constants(dtype, activation, tile))
    module.launch(
        "d_hidden",
        **gemm.rows_launch(executor, version, dispatch, h, tile),
        d_out=d_out,
        gate_of_row=gate_of_row,
        a=a,
        b=gemm.or_nothing(executor, b, a),
        w3=gemm.operand(executor, version, w3, gemm.WEIGHTS_TRANSPOSED_BOX),
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_a=d_a,
        d_b=gemm.or_nothing(executor, d_b, a),
        gated_y=gated_y,
        gate_terms=gate_terms,
        d=d,
        h=h,
    )
    gate_module.launch("d_gates", **slots, gate_terms=gate_terms, d_gates=d_gates, terms=terms)
    return d_a, d_b, gated_y, d_gates


def weight_gradient(
    gated_y: Array, d_out: Array, dispatch: Dispatch, executor: Executor | None = None, version: str = DEFAULT_VERSION
) -> Array:
    """Gradient of w3; d_out is gathered again.

    Parameters
    ----------
    gated_y : array (R, h), float32, float16 or bfloat16
        gate * y_swi in expert order, from `hidden_gradients`.
    d_out : array (L, d)
        Gradient of the layer's output.
    dispatch : Dispatch
    executor : Executor, optional
        Default: by where ``d_out`` lives.
    version : str
        One of ``VERSIONS``. ``3_mma_tf32`` rounds its operands to 10 bits of mantissa; nothing chooses it by itself.

    Returns
    -------
    d_w3 : array (E, h, d)
        Zeros for an expert without rows.

    Raises
    ------
    ValueError, TypeError
        As `stage_contracts.check_expert_down_weight_gradient`, or if the version does not compute in this dtype.

    Notes
    -----
    MoEBlaze, section 5.
    """
    stage_contracts.check_expert_down_weight_gradient(gated_y, d_out, dispatch, gemm.WIDE)
    E, h, d = dispatch.E, gated_y.shape[1], d_out.shape[1]
    dtype = gemm.check_version("expert_down", version, VERSIONS, d_out, d=d, h=h)
    executor = executor or executor_for(d_out)
    if dispatch.R == 0:
        return executor.full((E, h, d), dtype, 0)
    d_w3 = executor.empty((E, h, d), dtype)
    tile = tiles.choose(executor, version, "d_w3", dispatch.R, E, d, h)
    # The kernel does not depend on the activation.
    module = executor.load(gemm.file_of("expert_down", version), **gemm.constants(dtype, "swiglu", tile))
    module.launch(
        "d_w3",
        **gemm.weights_launch(executor, version, E, h, d, tile),
        **gemm.mapped_too(executor, version, "gated_y", gated_y),
        gated_y=gated_y,
        d_out=d_out,
        expert_token_indices=dispatch.expert_token_indices,
        expert_token_offsets=dispatch.expert_token_offsets,
        d_w3=d_w3,
        d=d,
        h=h,
    )
    return d_w3
