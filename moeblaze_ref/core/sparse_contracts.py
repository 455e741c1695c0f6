"""Contracts of the block-sparse stage in every backend: whole blocks, consistent indices, one dtype, finite values.

The contracts come last, after the checks that they name.
"""

from dataclasses import replace

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import copy_of
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import ROUTING, Arguments, Contract, Structure, Tensor, Value
from moeblaze_ref.core.stage_contracts import ACTIVATION, DISPATCH, GATES, NO_GATE, UNGATED, W1, W2, W3, Dtypes
from moeblaze_ref.core.structures import EMPTY, Array, CapacityBins, PaddedBins, Topology

MAX_INT32 = checks.MAX_ROUTED_ROWS  # rows and columns that indices can name, and blocks


def check_block(block: int, h: int | None = None) -> int:
    """``block`` as an int of at least 1 that divides ``h``, if one is given."""
    block = checks.check_int("block", block, at_least=1)
    if h is not None and h % block:
        raise ValueError(f"h is {h}, but it must be a multiple of the block size {block}")
    return block


def _owned(first: int, end: int) -> str:
    """The numbers first to end, without end, in words."""
    return f"{first}..{end - 1}" if first < end else "none"


# Padded bins ----------------------------------------------------------------------------------------------------------


def _check_padded_rows(given: Arguments) -> None:
    """Check that with this block size the padded rows, at most R + E (block - 1), fit int32."""
    dispatch, block = given["dispatch"], given["block"]
    check_block(block)
    most = dispatch.R + dispatch.E * (int(block) - 1)
    if most > MAX_INT32:
        raise ValueError(
            f"block is {block}, but R + E (block - 1) = {most} padded rows may come of it, and int32 indices allow at "
            f"most 2**31 - 1024 = {MAX_INT32}"
        )


def _check_width(given: Arguments) -> None:
    """The bins' blocks divide the width h into no more blocks than int32 can number."""
    bins, h = given["bins"], given["h"]
    checks.check_int("h", h, at_least=1)
    check_block(bins.block, h)
    blocks = bins.P // bins.block * (int(h) // bins.block)
    if blocks > MAX_INT32:
        raise ValueError(
            f"h is {h}, but P h / block**2 = {blocks} blocks come of it, and int32 indices allow at most "
            f"2**31 - 1024 = {MAX_INT32}"
        )
    checks.check_int("E h, the columns of the topology,", bins.E * int(h), at_least=1, at_most=MAX_INT32)


def check_bins(bins: PaddedBins) -> None:
    """PaddedBins whose groups are whole blocks, ascending slots before padding, and whose rows are their inverse."""
    checks.check_type("bins", bins, PaddedBins)
    checks.check_int("bins.k", bins.k, at_least=1)
    check_block(bins.block)
    for name, array in bins.arrays().items():
        checks.check_array(name, array, rank=1, dtypes=("int32",))
    checks.check_int("E, one less than the padded_offsets,", bins.E, at_least=1)
    if bins.R % bins.k:
        raise ValueError(f"bins has R = {bins.R} routed rows, but R must be a multiple of k = {bins.k}")
    checks.check_rise("padded_offsets", bins.padded_offsets, bins.P, "P")
    _check_whole_blocks(bins)
    checks.check_index("rows", bins.rows, bins.P, "padded rows")
    _check_inverse(bins)
    _check_padding_last(bins)


def _check_whole_blocks(bins: PaddedBins) -> None:
    if (e := checks.first_place(bins.padded_offsets % bins.block != 0)) is not None:
        raise ValueError(
            f"padded_offsets[{e}] is {int(bins.padded_offsets[e])}, but it must be a multiple of the block size "
            f"{bins.block}"
        )


def _check_inverse(bins: PaddedBins) -> None:
    """Every slot's row holds it, and every other row is padding."""
    if (slot := checks.first_place(bins.slots[bins.rows] != checks.numbers_of(bins.rows))) is not None:
        row = int(bins.rows[slot])
        raise ValueError(f"rows[{slot}] is {row}, but slots[{row}] is {int(bins.slots[row])}: it must be {slot}")
    stray = bins.slots != EMPTY
    stray[bins.rows] = False
    if (at := checks.first_place(stray)) is not None:
        raise ValueError(f"slots[{at}] is {int(bins.slots[at])}, but rows leads no slot there: it must be {EMPTY}")


def _check_padding_last(bins: PaddedBins) -> None:
    """Slots ascend inside a group, and padding follows them."""
    order = copy_of(bins.slots)
    order[order == EMPTY] = bins.R  # after every slot
    falls = order[1:] < order[:-1]
    begins = bins.padded_offsets[(bins.padded_offsets > 0) & (bins.padded_offsets < bins.P)]
    falls[begins - 1] = False  # another expert's group
    if (row := checks.first_place(falls)) is not None:
        raise ValueError(
            f"slots[{row + 1}] is {int(bins.slots[row + 1])}, but slots[{row}] is {int(bins.slots[row])} of the same "
            f"expert: they must ascend, with padding ({EMPTY}) last"
        )


# Topologies -----------------------------------------------------------------------------------------------------------


def check_topology(topology: Topology) -> None:
    """A Topology whose five arrays describe the same blocks, each once."""
    checks.check_type("topology", topology, Topology)
    check_block(topology.block)
    for name, array in topology.arrays().items():
        checks.check_array(name, array, rank=1, dtypes=("int32",))
    for name in ("row_offsets", "column_offsets"):
        checks.check_int(f"the length of {name}", getattr(topology, name).shape[0], at_least=1)
        checks.check_rise(name, getattr(topology, name), topology.nnz, "nnz")
    for name in ("row_indices", "transpose_indices"):
        checks.check_shape(name, getattr(topology, name), {"nnz": topology.nnz})
    rows, columns = (extent // topology.block for extent in topology.shape)
    checks.check_index("row_indices", topology.row_indices, rows, "block rows")
    checks.check_index("column_indices", topology.column_indices, columns, "block columns")
    checks.check_index("transpose_indices", topology.transpose_indices, topology.nnz, "blocks")
    _check_rows(topology)
    _check_order_in_rows(topology)
    _check_columns(topology)
    _check_order_in_columns(topology)


def _check_rows(topology: Topology) -> None:
    """Every block lies between its block row's offsets."""
    number = checks.numbers_of(topology.row_indices)
    first = topology.row_offsets[topology.row_indices]
    end = topology.row_offsets[topology.row_indices + 1]
    if (block := checks.first_place((number < first) | (number >= end))) is not None:
        row = int(topology.row_indices[block])
        raise ValueError(
            f"row_indices[{block}] is {row}, but by row_offsets the blocks of block row {row} are "
            f"{_owned(int(first[block]), int(end[block]))}"
        )


def _check_order_in_rows(topology: Topology) -> None:
    """Block columns ascend inside a block row, none twice."""
    at = _first_fall(topology.column_indices, topology.row_indices)
    if at is not None:
        columns = topology.column_indices
        raise ValueError(
            f"column_indices[{at + 1}] is {int(columns[at + 1])}, but column_indices[{at}] is {int(columns[at])} in "
            f"the same block row: they must ascend"
        )


def _check_columns(topology: Topology) -> None:
    """Every transpose index is a block of the block column that owns its place."""
    order = topology.transpose_indices
    columns, number = topology.column_indices[order], checks.numbers_of(order)
    first, end = topology.column_offsets[columns], topology.column_offsets[columns + 1]
    if (at := checks.first_place((number < first) | (number >= end))) is not None:
        raise ValueError(
            f"transpose_indices[{at}] is {int(order[at])}, a block of block column {int(columns[at])}, but by "
            f"column_offsets the places of that column are {_owned(int(first[at]), int(end[at]))}"
        )


def _check_order_in_columns(topology: Topology) -> None:
    """Transpose indices visit ascending block rows inside a block column, no block twice."""
    order = topology.transpose_indices
    rows = topology.row_indices[order]
    at = _first_fall(rows, topology.column_indices[order])
    if at is not None:
        raise ValueError(
            f"transpose_indices[{at + 1}] is {int(order[at + 1])}, a block of block row {int(rows[at + 1])}, but "
            f"transpose_indices[{at}] is {int(order[at])}, of block row {int(rows[at])} in the same block column: "
            f"block rows must ascend"
        )


def _first_fall(indices: Array, group: Array) -> int | None:
    """The first place after which ``indices`` do not ascend although their ``group`` stays; None if there is none."""
    return checks.first_place((group[1:] == group[:-1]) & (indices[1:] <= indices[:-1]))


# Products -------------------------------------------------------------------------------------------------------------


def _check_mask(given: Arguments) -> None:
    checks.check_array("mask", given["mask"], rank=2, dtypes=("bool",), contiguous=False)
    check_block(given["block"])


def _check_to_dense(values: Array, topology: Topology, dtypes: Dtypes) -> None:
    check_topology(topology)
    _check_blocks("values", values, topology.nnz, topology.block, dtypes)


def _check_from_dense(dense: Array, topology: Topology, dtypes: Dtypes) -> None:
    check_topology(topology)
    checks.check_tensor("dense", dense, dict(zip("MN", topology.shape, strict=True)), dtypes)


def _check_blocks(name: str, values: Array, nnz: int | None, block: int, dtypes: Dtypes) -> None:
    checks.check_tensor(name, values, {"nnz": nnz, "block": block, "block again": block}, dtypes)


def _check_parts(name: str, dense: Array, rows: int | None, topology: Topology, dtypes: Dtypes) -> None:
    """``dense`` (rows, N), or its parts (E, rows, N / E) of whole blocks side by side; rows may be None."""
    N, block = topology.shape[1], topology.block
    if getattr(dense, "ndim", 2) != 3:  # what is no array is refused here
        checks.check_tensor(name, dense, {"rows": rows, "N": N}, dtypes)
        return
    parts, _, width = dense.shape
    if parts * width != N:
        raise ValueError(f"{name} has {parts} parts of {width} columns, but {N} columns are needed side by side")
    if width % block:
        raise ValueError(f"{name} has parts of {width} columns, but they must be multiples of the block size {block}")
    checks.check_tensor(name, dense, {"parts": parts, "rows": rows, "columns": width}, dtypes)


def _check_sdd(lhs: Array, rhs: Array, topology: Topology, transpose_rhs: bool, dtypes: Dtypes) -> None:
    """lhs (M, K) and rhs (K, N) or its parts, or (N, K) if ``transpose_rhs``, belong to a topology (M, N)."""
    check_topology(topology)
    M, N = topology.shape
    checks.check_tensor("lhs", lhs, {"M": M, "K": None}, dtypes)
    depth, same = lhs.shape[1], (checks.dtype_of(lhs),)
    if transpose_rhs:
        checks.check_tensor("rhs", rhs, {"N": N, "K": depth}, same)
    else:
        _check_parts("rhs", rhs, depth, topology, same)


def _check_dsd(
    values: Array, topology: Topology, rhs: Array, transpose_lhs: bool, transpose_rhs: bool, dtypes: Dtypes
) -> None:
    """values of a topology (M, N), and rhs (N, K), or (K, N) or its parts if ``transpose_rhs``.

    With ``transpose_lhs`` M takes the place of N, and there are no parts.
    """
    _check_to_dense(values, topology, dtypes)
    same, depth = (checks.dtype_of(values),), topology.shape[0 if transpose_lhs else 1]
    if transpose_rhs and not transpose_lhs:
        _check_parts("rhs", rhs, None, topology, same)
    else:
        checks.check_tensor(
            "rhs", rhs, {"K": None, "depth": depth} if transpose_rhs else {"depth": depth, "K": None}, same
        )


def _check_dds(lhs: Array, values: Array, topology: Topology, transpose_lhs: bool, parts: int, dtypes: Dtypes) -> None:
    """lhs (K, M), or (M, K) if ``transpose_lhs``, and values of a topology (M, N); N in ``parts`` of whole blocks."""
    _check_to_dense(values, topology, dtypes)
    M, N = topology.shape
    shape = {"M": M, "K": None} if transpose_lhs else {"K": None, "M": M}
    checks.check_tensor("lhs", lhs, shape, (checks.dtype_of(values),))
    checks.check_int("parts", parts, at_least=1)
    if N % (parts * topology.block):
        raise ValueError(
            f"parts is {parts}, but {N // topology.block} block columns do not fall into {parts} equal parts"
        )


# Between the projections ----------------------------------------------------------------------------------------------


def _check_activate(a: Array, b: Array | None, activation: str, dtypes: Dtypes) -> None:
    """a and b (nnz, block, block) belong together; b is there exactly if the activation is gated."""
    checks.check_second_projection("b", b, is_gated(activation), activation)
    checks.check_array("a", a, 3, dtypes, contiguous=False)
    _check_blocks("a", a, None, a.shape[2], dtypes)
    if b is not None:
        _check_blocks("b", b, a.shape[0], a.shape[2], (checks.dtype_of(a),))


def _check_activate_backward(d_y_swi: Array, a: Array, b: Array | None, activation: str, dtypes: Dtypes) -> None:
    """Check a and b by `_check_activate`, and that d_y_swi (nnz, block, block) belongs to them."""
    _check_activate(a, b, activation, dtypes)
    _check_blocks("d_y_swi", d_y_swi, a.shape[0], a.shape[2], (checks.dtype_of(a),))


# Layers that copy rows into bins, those of fixed capacity too ---------------------------------------------------------


def check_w2(given: Arguments) -> None:
    """w2 is there exactly if the activation is gated."""
    checks.check_second_projection("w2", given["w2"], is_gated(given["activation"]), given["activation"])


def check_experts_backward(
    bins: PaddedBins | CapacityBins,
    x_rows: Array,
    activation: str,
    h: int,
    d_out: Array,
    w1: Array,
    w2: Array | None,
    w3: Array,
) -> None:
    """d_out (L, d) and the experts' weights are of the sizes and the dtype of what a forward into bins has saved."""
    E, d, same = bins.E, x_rows.shape[-1], (checks.dtype_of(x_rows),)
    checks.check_tensor("d_out", d_out, {"L": bins.L, "d": d}, same)
    checks.check_tensor("w1", w1, {"E": E, "d": d, "h": h}, same)
    checks.check_second_projection("w2", w2, is_gated(activation), activation)
    if w2 is not None:
        checks.check_tensor("w2", w2, {"E": E, "d": d, "h": h}, same)
    checks.check_tensor("w3", w3, {"E": E, "h": h, "d": d}, same)


# ---- declared ----------------------------------------------------------------------------------------------------

BINS = Structure("bins", "PaddedBins", check_bins, "L k P")
TOPOLOGY = Structure("topology", "Topology", check_topology, "", "Of a matrix (M, N)")
WEIGHTS_OF_ROWS = replace(GATES, optional="if rows are not weighted")
VALUES = Tensor("values", "nnz block block", text="The stored blocks, in the order of the block rows")
A = Tensor("a", "nnz block block", text="x w1")
B = Tensor("b", "nnz block block", text="x w2", optional=UNGATED)
BLOCK = Value("block", "int", "Rows and columns of a block")
TRANSPOSE_RHS = Value("transpose_rhs", "bool", "Multiply by the transpose of rhs")

PAD = Contract(
    "Return bins of whole blocks: where every routed row lies once each expert's group is padded.",
    (DISPATCH, BLOCK),
    (Value("bins", "PaddedBins", "An expert without rows has an empty bin"),),
    "MegaBlocks, section 5.2: groups are padded to a multiple of the block size",
    after=_check_padded_rows,
    errors="the dispatch is not valid, block is below 1, or the padded rows could exceed what int32 counts",
)
BUILD_TOPOLOGY = Contract(
    "Return the block-sparse matrix (P, E h) of the bins: a block row stores the h columns of its rows' expert.",
    (BINS, Value("h", "int", "Expert width, a multiple of the block size")),
    (
        Value(
            "topology",
            "Topology",
            "Of P h / block**2 blocks. The transpose indices follow from the structure: a block column has the block "
            "rows of its expert, so nothing is sorted",
        ),
    ),
    "MegaBlocks, sections 5.1.3 (hybrid blocked-CSR-COO) and 5.1.4 (transpose indices)",
    after=_check_width,
    errors="the bins are not valid, the block size does not divide h, or rows, columns or blocks exceed what int32 "
    "counts",
)
TOPOLOGY_OF = Contract(
    "Return the Topology of any mask: what the five arrays mean, by definition.",
    (Value("mask", "ndarray (M / block, N / block), bool", "Which blocks are stored"), BLOCK),
    (Value("topology", "Topology"),),
    "MegaBlocks, sections 5.1.3 and 5.1.4",
    after=_check_mask,
    errors="the mask is not a matrix or block is below 1",
)
TO_DENSE = Contract(
    "Return the matrix with zeros where no block is stored.",
    (VALUES, TOPOLOGY),
    (Tensor("dense", "M N"),),
    "MegaBlocks, section 5.1.3",
    whole=_check_to_dense,
)
FROM_DENSE = Contract(
    "Return the stored blocks of a matrix; the others are lost.",
    (Tensor("dense", "M N"), TOPOLOGY),
    (VALUES,),
    "MegaBlocks, section 5.1.3",
    whole=_check_from_dense,
)

PADDED_GATHER = Contract(
    "Return rows of x copied into the bins, times their gates if there are any; padding is zero.",
    (Tensor("x", "L d"), BINS, WEIGHTS_OF_ROWS),
    (Tensor("rows", "P d"),),
    "MegaBlocks, section 5.2. With gates it is the gradient of ``padded_scatter`` by y",
)
PADDED_SCATTER = Contract(
    "Return each token's sum of its rows in the bins, times its gates if there are any.",
    (Tensor("y", "P d"), BINS, WEIGHTS_OF_ROWS),
    (Tensor("out", "L d"),),
    "MegaBlocks, section 5.2. Without gates it is the gradient of ``padded_gather``",
)
GATE_GRADIENT = Contract(
    "Return the gradient of the gates: <d_out, y> of each slot.",
    (Tensor("d_out", "L d"), Tensor("y", "P d", text="As it went into ``padded_scatter``"), BINS),
    (Tensor("d_gates", "L k", ROUTING),),
    "MegaBlocks, section 5.2",
    first="y",
)

SDD = Contract(
    "Return the stored blocks of lhs rhs, and no others: S = D D.",
    (
        Tensor("lhs", "M K"),
        Tensor("rhs", "K N", text="Or its parts (E, K, N / E) side by side. With ``transpose_rhs`` (N, K)"),
        TOPOLOGY,
        TRANSPOSE_RHS,
    ),
    (VALUES,),
    "MegaBlocks, sections 5.1 and 5.1.3",
    whole=_check_sdd,
)
DSD = Contract(
    "Return a block-sparse matrix, or its transpose, times a dense one: D = S D.",
    (
        VALUES,
        TOPOLOGY,
        Tensor(
            "rhs",
            "N K",
            text="With ``transpose_rhs`` (K, N), or its parts (E, K, N / E) side by side. With ``transpose_lhs`` M for "
            "N, and no parts",
        ),
        Value(
            "transpose_lhs",
            "bool",
            "Multiply the transpose of the sparse matrix: its blocks are visited by the transpose indices",
        ),
        TRANSPOSE_RHS,
    ),
    (Tensor("result", "M K", text="(N, K) with ``transpose_lhs``; zeros in block rows that store nothing"),),
    "MegaBlocks, sections 5.1 and 5.1.4",
    whole=_check_dsd,
)
DDS = Contract(
    "Return a dense matrix, or its transpose, times a block-sparse one: D = D S.",
    (
        Tensor("lhs", "K M", text="With ``transpose_lhs`` (M, K)"),
        VALUES,
        TOPOLOGY,
        Value("transpose_lhs", "bool", "Multiply the transpose of lhs"),
        Value("parts", "int", "How many parts the result comes in, of whole blocks each"),
    ),
    (
        Tensor(
            "result",
            "parts K N/parts",
            text="The matrix (K, N), its parts side by side; zeros in block columns that store nothing",
        ),
    ),
    "MegaBlocks, sections 5.1 and 5.1.4: the blocks are visited by the transpose indices",
    whole=_check_dds,
    errors=", the block columns do not fall into the parts",
)

ACTIVATE = Contract(
    "Return the activation of every stored value: act(a) * b if gated, else act(a).",
    (A, B, ACTIVATION),
    (Tensor("y_swi", "nnz block block"),),
    "MegaBlocks, section 5.1; MoEBlaze, section 5: Y_swi = SiLU(A) * B",
    whole=_check_activate,
    errors=NO_GATE,
)
ACTIVATE_BACKWARD = Contract(
    "Return the gradients of a and b, with act(a) computed again.",
    (Tensor("d_y_swi", "nnz block block", text="Gradient of y_swi"), A, B, ACTIVATION),
    (Tensor("d_a", "nnz block block"), Tensor("d_b", "nnz block block", optional=UNGATED)),
    "MegaBlocks, section 5.1; MoEBlaze, section 5: dB = dY * SiLU(A), dA = dY * B * SiLU'(A)",
    whole=_check_activate_backward,
    errors=NO_GATE,
)

# Arguments that all layers take. Each layer also has its own options.
EXPERTS = (Tensor("x", "L d", text="Tokens; L = 0 is valid"), W1, W2, W3, DISPATCH, GATES, ACTIVATION)
EXPERTS_BACKWARD = (
    Tensor("d_out", "L d", text="Gradient of the output"),
    Value("saved", "Saved", "From ``forward``; it is not changed, so a second backward gives the same again"),
    W1,
    W2,
    W3,
)
