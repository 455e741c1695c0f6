"""What the block-sparse stage accepts, in every backend: whole blocks, indices that agree, one dtype, finite values.

Inside a layer they look at no element, `checks.trusted_values`: it has checked what it was given, and its stages made
the rest.
"""

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.structures import EMPTY, PaddedBins, Topology

MAX_INT32 = checks.MAX_ROUTED_ROWS  # rows and columns that indices can name, and blocks


def check_block(block, h=None) -> int:
    """``block`` as an int of at least 1 that divides ``h``, if one is given."""
    block = checks.check_int("block", block, at_least=1)
    if h is not None and h % block:
        raise ValueError(f"h is {h}, but it must be a multiple of the block size {block}")
    return block


def _owned(first, end):
    """The numbers first to end, without end, in words."""
    return f"{int(first)}..{int(end) - 1}" if first < end else "none"


# Padded bins ----------------------------------------------------------------------------------------------------------


@checks.unless_trusted
def check_pad(dispatch, block):
    """A Dispatch, and a block size with which the padded rows, at most R + E (block - 1), fit int32."""
    checks.check_dispatch(dispatch)
    check_block(block)
    most = dispatch.R + dispatch.E * (int(block) - 1)
    if most > MAX_INT32:
        raise ValueError(
            f"block is {block}, but R + E (block - 1) = {most} padded rows may come of it, and int32 indices allow at "
            f"most 2**31 - 1024 = {MAX_INT32}"
        )


@checks.unless_trusted
def check_build_topology(bins, h):
    """PaddedBins, and a width h that their blocks divide into no more blocks than int32 can number."""
    check_bins(bins)
    checks.check_int("h", h, at_least=1)
    check_block(bins.block, h)
    blocks = bins.P // bins.block * (int(h) // bins.block)
    if blocks > MAX_INT32:
        raise ValueError(
            f"h is {h}, but P h / block**2 = {blocks} blocks come of it, and int32 indices allow at most "
            f"2**31 - 1024 = {MAX_INT32}"
        )
    checks.check_int("E h, the columns of the topology,", bins.E * int(h), at_least=1, at_most=MAX_INT32)


def check_bins(bins):
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


@checks.scans
def _check_whole_blocks(bins):
    broken = bins.padded_offsets % bins.block != 0
    if bool(broken.any()):
        (e,) = checks.first(broken)
        raise ValueError(
            f"padded_offsets[{e}] is {int(bins.padded_offsets[e])}, but it must be a multiple of the block size "
            f"{bins.block}"
        )


@checks.scans
def _check_inverse(bins):
    """Every slot's row holds it, and every other row is padding."""
    wrong = bins.slots[bins.rows] != checks.numbers_of(bins.rows)
    if bool(wrong.any()):
        (slot,) = checks.first(wrong)
        row = int(bins.rows[slot])
        raise ValueError(f"rows[{slot}] is {row}, but slots[{row}] is {int(bins.slots[row])}: it must be {slot}")
    stray = bins.slots != EMPTY
    stray[bins.rows] = False
    if bool(stray.any()):
        (row,) = checks.first(stray)
        raise ValueError(f"slots[{row}] is {int(bins.slots[row])}, but rows leads no slot there: it must be {EMPTY}")


@checks.scans
def _check_padding_last(bins):
    """Slots ascend inside a group, and padding follows them."""
    order = bins.slots.copy()
    order[order == EMPTY] = bins.R  # after every slot
    falls = order[1:] < order[:-1]
    begins = bins.padded_offsets[(bins.padded_offsets > 0) & (bins.padded_offsets < bins.P)]
    falls[begins - 1] = False  # another expert's group
    if bool(falls.any()):
        (row,) = checks.first(falls)
        raise ValueError(
            f"slots[{row + 1}] is {int(bins.slots[row + 1])}, but slots[{row}] is {int(bins.slots[row])} of the same "
            f"expert: they must ascend, with padding ({EMPTY}) last"
        )


# Topologies -----------------------------------------------------------------------------------------------------------


def check_topology(topology):
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


@checks.scans
def _check_rows(topology):
    """Every block lies between its block row's offsets."""
    number = checks.numbers_of(topology.row_indices)
    first = topology.row_offsets[topology.row_indices]
    end = topology.row_offsets[topology.row_indices + 1]
    outside = (number < first) | (number >= end)
    if bool(outside.any()):
        (block,) = checks.first(outside)
        row = int(topology.row_indices[block])
        raise ValueError(
            f"row_indices[{block}] is {row}, but by row_offsets the blocks of block row {row} are "
            f"{_owned(first[block], end[block])}"
        )


@checks.scans
def _check_order_in_rows(topology):
    """Block columns ascend inside a block row, none twice."""
    at = _first_fall(topology.column_indices, topology.row_indices)
    if at is not None:
        columns = topology.column_indices
        raise ValueError(
            f"column_indices[{at + 1}] is {int(columns[at + 1])}, but column_indices[{at}] is {int(columns[at])} in "
            f"the same block row: they must ascend"
        )


@checks.scans
def _check_columns(topology):
    """Every transpose index is a block of the block column that owns its place."""
    order = topology.transpose_indices
    columns, number = topology.column_indices[order], checks.numbers_of(order)
    first, end = topology.column_offsets[columns], topology.column_offsets[columns + 1]
    outside = (number < first) | (number >= end)
    if bool(outside.any()):
        (at,) = checks.first(outside)
        raise ValueError(
            f"transpose_indices[{at}] is {int(order[at])}, a block of block column {int(columns[at])}, but by "
            f"column_offsets the places of that column are {_owned(first[at], end[at])}"
        )


@checks.scans
def _check_order_in_columns(topology):
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


def _first_fall(indices, group):
    """The first place after which ``indices`` do not ascend although their ``group`` stays; None if there is none."""
    falls = (group[1:] == group[:-1]) & (indices[1:] <= indices[:-1])
    return checks.first(falls)[0] if bool(falls.any()) else None


# Products -------------------------------------------------------------------------------------------------------------


def check_values(name, values, topology, dtypes):
    """``values`` (nnz, block, block) of the topology."""
    _check_blocks(name, values, topology.nnz, topology.block, dtypes)


def _check_blocks(name, values, nnz, block, dtypes):
    checks.check_tensor(name, values, {"nnz": nnz, "block": block, "block again": block}, dtypes)


def check_parts(name, dense, rows, topology, dtypes):
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


@checks.unless_trusted
def check_sdd(lhs, rhs, topology, transpose_rhs, dtypes):
    """lhs (M, K) and rhs (K, N) or its parts, or (N, K) if ``transpose_rhs``, belong to a topology (M, N)."""
    check_topology(topology)
    M, N = topology.shape
    checks.check_tensor("lhs", lhs, {"M": M, "K": None}, dtypes)
    depth, same = lhs.shape[1], (checks.dtype_of(lhs),)
    if transpose_rhs:
        checks.check_tensor("rhs", rhs, {"N": N, "K": depth}, same)
    else:
        check_parts("rhs", rhs, depth, topology, same)


@checks.unless_trusted
def check_dsd(values, topology, rhs, transpose_lhs, transpose_rhs, dtypes):
    """values of a topology (M, N), and rhs (N, K), or (K, N) or its parts if ``transpose_rhs``.

    With ``transpose_lhs`` M takes the place of N, and there are no parts.
    """
    check_topology(topology)
    check_values("values", values, topology, dtypes)
    same, depth = (checks.dtype_of(values),), topology.shape[0 if transpose_lhs else 1]
    if transpose_rhs and not transpose_lhs:
        check_parts("rhs", rhs, None, topology, same)
    else:
        checks.check_tensor(
            "rhs", rhs, {"K": None, "depth": depth} if transpose_rhs else {"depth": depth, "K": None}, same
        )


@checks.unless_trusted
def check_dds(lhs, values, topology, transpose_lhs, parts, dtypes):
    """lhs (K, M), or (M, K) if ``transpose_lhs``, and values of a topology (M, N); N in ``parts`` of whole blocks."""
    check_topology(topology)
    check_values("values", values, topology, dtypes)
    M, N = topology.shape
    shape = {"M": M, "K": None} if transpose_lhs else {"K": None, "M": M}
    checks.check_tensor("lhs", lhs, shape, (checks.dtype_of(values),))
    checks.check_int("parts", parts, at_least=1)
    if N % (parts * topology.block):
        raise ValueError(
            f"parts is {parts}, but {N // topology.block} block columns do not fall into {parts} equal parts"
        )


# Between the projections ----------------------------------------------------------------------------------------------


@checks.unless_trusted
def check_activate(a, b, activation, dtypes):
    """a and b (nnz, block, block) belong together; b is there exactly if the activation is gated."""
    checks.check_second_projection("b", b, is_gated(activation), activation)
    checks.check_array("a", a, 3, dtypes, contiguous=False)
    _check_blocks("a", a, None, a.shape[2], dtypes)
    if b is not None:
        _check_blocks("b", b, a.shape[0], a.shape[2], (checks.dtype_of(a),))


@checks.unless_trusted
def check_activate_backward(d_y, a, b, activation, dtypes):
    """As `check_activate`, and d_y (nnz, block, block) belongs to them."""
    check_activate(a, b, activation, dtypes)
    _check_blocks("d_y", d_y, a.shape[0], a.shape[2], (checks.dtype_of(a),))


# Rows into bins and back ----------------------------------------------------------------------------------------------


@checks.unless_trusted
def check_gather(x, bins, gates, dtypes, gate_dtypes=None):
    """x (L, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    checks.check_tensor("x", x, {"L": bins.L, "d": None}, dtypes)
    _check_gates(gates, bins, x, gate_dtypes)


@checks.unless_trusted
def check_scatter(y, bins, gates, dtypes, gate_dtypes=None):
    """y (P, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    checks.check_tensor("y", y, {"P": bins.P, "d": None}, dtypes)
    _check_gates(gates, bins, y, gate_dtypes)


def _check_gates(gates, bins, like, gate_dtypes):
    if gates is not None:
        checks.check_tensor("gates", gates, {"L": bins.L, "k": bins.k}, gate_dtypes or (checks.dtype_of(like),))


@checks.unless_trusted
def check_gate_gradient(d_out, y, bins, dtypes):
    """d_out (L, d) and y (P, d) belong to the bins."""
    check_bins(bins)
    checks.check_tensor("y", y, {"P": bins.P, "d": None}, dtypes)
    checks.check_tensor("d_out", d_out, {"L": bins.L, "d": y.shape[1]}, (checks.dtype_of(y),))
