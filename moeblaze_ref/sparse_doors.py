"""What the block-sparse stage accepts, in every backend: whole blocks, indices that agree, one dtype, finite values.

Inside a layer these doors stand open, `doors.trusted`: it has checked what it was given, and its stages made the rest.
"""

from moeblaze_ref import doors
from moeblaze_ref.config import is_gated
from moeblaze_ref.structures import EMPTY, PaddedBins, Topology


def check_block(block, h=None):
    """A block size of at least 1 that divides ``h``, if one is given."""
    doors.check_int("block", block, at_least=1)
    if h is not None and h % block:
        raise ValueError(f"h is {h}, but it must be a multiple of the block size {block}")


# Padded bins ----------------------------------------------------------------------------------------------------------


def check_bins(bins):
    """PaddedBins whose groups are whole blocks, and whose slots and rows are each other's inverse."""
    doors.check_type("bins", bins, PaddedBins)
    doors.check_int("bins.k", bins.k, at_least=1)
    check_block(bins.block)
    for name, array in bins.arrays().items():
        doors.check_array(name, array, rank=1, dtypes=("int32",))
    doors.check_int("E, one less than the padded_offsets,", bins.E, at_least=1)
    if bins.R % bins.k:
        raise ValueError(f"bins has R = {bins.R} routed rows, but R must be a multiple of k = {bins.k}")
    doors.check_rise("padded_offsets", bins.padded_offsets, bins.P, "P")
    _check_whole_blocks(bins)
    doors.check_index("rows", bins.rows, bins.P, "padded rows")
    _check_inverse(bins)


@doors.scans
def _check_whole_blocks(bins):
    broken = bins.padded_offsets % bins.block != 0
    if bool(broken.any()):
        (e,) = doors.first(broken)
        raise ValueError(
            f"padded_offsets[{e}] is {int(bins.padded_offsets[e])}, but it must be a multiple of the block size "
            f"{bins.block}"
        )


@doors.scans
def _check_inverse(bins):
    """Every slot's row holds it, and every other row is padding."""
    wrong = bins.slots[bins.rows] != doors.numbers_of(bins.rows)
    if bool(wrong.any()):
        (slot,) = doors.first(wrong)
        row = int(bins.rows[slot])
        raise ValueError(f"rows[{slot}] is {row}, but slots[{row}] is {int(bins.slots[row])}: it must be {slot}")
    filled = int((bins.slots != EMPTY).sum())
    if filled != bins.R:
        raise ValueError(f"slots holds {filled} slots, but it must hold each of the {bins.R} once, else {EMPTY}")


# Topologies -----------------------------------------------------------------------------------------------------------


def check_topology(topology):
    """A Topology whose five arrays describe the same blocks, each once."""
    doors.check_type("topology", topology, Topology)
    check_block(topology.block)
    for name, array in topology.arrays().items():
        doors.check_array(name, array, rank=1, dtypes=("int32",))
    for name in ("row_offsets", "column_offsets"):
        doors.check_int(f"the length of {name}", getattr(topology, name).shape[0], at_least=1)
        doors.check_rise(name, getattr(topology, name), topology.nnz, "nnz")
    for name in ("row_indices", "transpose_indices"):
        doors.check_shape(name, getattr(topology, name), {"nnz": topology.nnz})
    rows, columns = (extent // topology.block for extent in topology.shape)
    doors.check_index("row_indices", topology.row_indices, rows, "block rows")
    doors.check_index("column_indices", topology.column_indices, columns, "block columns")
    doors.check_index("transpose_indices", topology.transpose_indices, topology.nnz, "blocks")
    _check_rows(topology)
    _check_sorted("column_indices", topology.column_indices, topology.row_indices, "block row")
    _check_columns(topology)


@doors.scans
def _check_rows(topology):
    """Every block lies between its block row's offsets."""
    number = doors.numbers_of(topology.row_indices)
    first = topology.row_offsets[topology.row_indices]
    end = topology.row_offsets[topology.row_indices + 1]
    outside = (number < first) | (number >= end)
    if bool(outside.any()):
        (block,) = doors.first(outside)
        row = int(topology.row_indices[block])
        raise ValueError(
            f"row_indices[{block}] is {row}, but block row {row} owns the blocks "
            f"{int(first[block])}..{int(end[block]) - 1} by row_offsets"
        )


@doors.scans
def _check_sorted(name, indices, group, what):
    """Indices of one ``group`` ascend, none twice."""
    falls = (group[1:] == group[:-1]) & (indices[1:] <= indices[:-1])
    if bool(falls.any()):
        (at,) = doors.first(falls)
        raise ValueError(
            f"{name}[{at + 1}] is {int(indices[at + 1])}, but {name}[{at}] is {int(indices[at])} in the same {what}: "
            f"they must ascend"
        )


@doors.scans
def _check_columns(topology):
    """Every transpose index is a block of the column that owns it, in the order of the block rows."""
    order = topology.transpose_indices
    columns, rows = topology.column_indices[order], topology.row_indices[order]
    number = doors.numbers_of(order)
    first, end = topology.column_offsets[columns], topology.column_offsets[columns + 1]
    outside = (number < first) | (number >= end)
    if bool(outside.any()):
        (at,) = doors.first(outside)
        raise ValueError(
            f"transpose_indices[{at}] is {int(order[at])}, a block of block column {int(columns[at])}, which owns "
            f"{int(first[at])}..{int(end[at]) - 1} by column_offsets"
        )
    _check_sorted("the block rows of transpose_indices", rows, columns, "block column")


# Products -------------------------------------------------------------------------------------------------------------


def check_values(name, values, topology, dtypes):
    """``values`` (nnz, block, block) of the topology."""
    sizes = {"nnz": topology.nnz, "block": topology.block, "block again": topology.block}
    doors.check_tensor(name, values, sizes, dtypes)


def check_parts(name, dense, rows, topology, dtypes):
    """``dense`` (rows, N), or its parts (E, rows, N / E) of whole blocks side by side; rows may be None."""
    N, block = topology.shape[1], topology.block
    if getattr(dense, "ndim", 2) != 3:  # what is no array is refused here
        doors.check_tensor(name, dense, {"rows": rows, "N": N}, dtypes)
        return
    parts, _, width = dense.shape
    if parts * width != N:
        raise ValueError(f"{name} has {parts} parts of {width} columns, but {N} columns are needed side by side")
    if width % block:
        raise ValueError(f"{name} has parts of {width} columns, but they must be multiples of the block size {block}")
    doors.check_tensor(name, dense, {"parts": parts, "rows": rows, "columns": width}, dtypes)


@doors.unless_trusted
def check_sdd(lhs, rhs, topology, transpose_rhs, dtypes):
    """lhs (M, K) and rhs (K, N) or its parts, or (N, K) if ``transpose_rhs``, belong to a topology (M, N)."""
    check_topology(topology)
    M, N = topology.shape
    doors.check_tensor("lhs", lhs, {"M": M, "K": None}, dtypes)
    depth, same = lhs.shape[1], (doors.dtype_of(lhs),)
    if transpose_rhs:
        doors.check_tensor("rhs", rhs, {"N": N, "K": depth}, same)
    else:
        check_parts("rhs", rhs, depth, topology, same)


@doors.unless_trusted
def check_dsd(values, topology, rhs, transpose_lhs, transpose_rhs, dtypes):
    """values of a topology (M, N), and rhs (N, K), or (K, N) or its parts if ``transpose_rhs``.

    With ``transpose_lhs`` M takes the place of N, and there are no parts.
    """
    check_topology(topology)
    check_values("values", values, topology, dtypes)
    same, depth = (doors.dtype_of(values),), topology.shape[0 if transpose_lhs else 1]
    if transpose_rhs and not transpose_lhs:
        check_parts("rhs", rhs, None, topology, same)
    else:
        doors.check_tensor(
            "rhs", rhs, {"K": None, "depth": depth} if transpose_rhs else {"depth": depth, "K": None}, same
        )


@doors.unless_trusted
def check_dds(lhs, values, topology, transpose_lhs, parts, dtypes):
    """lhs (K, M), or (M, K) if ``transpose_lhs``, and values of a topology (M, N); N in ``parts`` of whole blocks."""
    check_topology(topology)
    check_values("values", values, topology, dtypes)
    M, N = topology.shape
    shape = {"M": M, "K": None} if transpose_lhs else {"K": None, "M": M}
    doors.check_tensor("lhs", lhs, shape, (doors.dtype_of(values),))
    doors.check_int("parts", parts, at_least=1)
    if N % (parts * topology.block):
        raise ValueError(f"parts is {parts}, but {N // topology.block} block columns must fall into that many parts")


# Between the projections ----------------------------------------------------------------------------------------------


@doors.unless_trusted
def check_activate(a, b, activation, dtypes):
    """a (nnz, block, block), and b of its shape exactly for the gated activations."""
    gated = is_gated(activation)
    doors.check_second_projection("b", b, gated, activation)
    doors.check_tensor("a", a, {"nnz": None, "block": None, "block again": None}, dtypes)
    if gated:
        _check_like("b", b, a)


@doors.unless_trusted
def check_activate_backward(d_y, a, b, activation, dtypes):
    """d_y of the shape of a, and the rest as for `check_activate`."""
    check_activate(a, b, activation, dtypes)
    _check_like("d_y", d_y, a)


def _check_like(name, array, a):
    """``array`` of the shape and dtype of ``a`` (nnz, block, block)."""
    sizes = dict(zip(("nnz", "block", "block again"), a.shape, strict=True))
    doors.check_tensor(name, array, sizes, (doors.dtype_of(a),))


# Rows into bins and back ----------------------------------------------------------------------------------------------


@doors.unless_trusted
def check_gather(x, bins, gates, dtypes, gate_dtypes=None):
    """x (L, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    doors.check_tensor("x", x, {"L": bins.L, "d": None}, dtypes)
    _check_gates(gates, bins, x, gate_dtypes)


@doors.unless_trusted
def check_scatter(y, bins, gates, dtypes, gate_dtypes=None):
    """y (P, d) and gates (L, k), if there are any, belong to the bins."""
    check_bins(bins)
    doors.check_tensor("y", y, {"P": bins.P, "d": None}, dtypes)
    _check_gates(gates, bins, y, gate_dtypes)


def _check_gates(gates, bins, like, gate_dtypes):
    if gates is not None:
        doors.check_tensor("gates", gates, {"L": bins.L, "k": bins.k}, gate_dtypes or (doors.dtype_of(like),))


@doors.unless_trusted
def check_gate_gradient(d_out, y, bins, dtypes):
    """d_out (L, d) and y (P, d) belong to the bins."""
    check_bins(bins)
    doors.check_tensor("y", y, {"P": bins.P, "d": None}, dtypes)
    doors.check_tensor("d_out", d_out, {"L": bins.L, "d": y.shape[1]}, (doors.dtype_of(y),))
