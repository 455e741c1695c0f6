"""MegaBlocks: a dropless MoE as products with block-sparse matrices.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5. Routed rows are copied into bins, each expert's padded to whole
blocks, so that what lies between the two projections is a matrix (P, E h) of which each block row stores the h columns
of one expert. In the paper's names S is a sparse operand and D a dense one, the result first: SDD, DSD, DDS.

A dense matrix with the N = E h columns of the sparse one may be given as its parts side by side, (E, rows, h) for
(rows, E h): so w1 of all experts is one matrix as it lies in memory. w3 (E, h, d) is one once reshaped to (E h, d).
"""

import sys

import numpy as np

from moeblaze_ref.backends.numpy_ref import DTYPES
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.core import checks, sparse_contracts
from moeblaze_ref.core.structures import EMPTY, PaddedBins, Topology
from moeblaze_ref.systems import megablocks

# The structures -------------------------------------------------------------------------------------------------------


def pad(dispatch, block=128):
    """Bins of whole blocks: where every routed row lies once each expert's group is padded.

    Parameters
    ----------
    dispatch : Dispatch
    block : int
        Rows of a block.

    Returns
    -------
    PaddedBins
        An expert without rows has an empty bin.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_pad`.

    Notes
    -----
    MegaBlocks, section 5.2: groups are padded to a multiple of the block size.
    """
    sparse_contracts.check_pad(dispatch, block)
    block = int(block)  # a narrow integer of numpy would overflow
    lengths = np.diff(dispatch.expert_token_offsets)  # (E,)
    padded_offsets = np.zeros(dispatch.E + 1, np.int32)
    padded_offsets[1:] = np.cumsum(-(-lengths // block) * block)
    moved = padded_offsets[:-1] - dispatch.expert_token_offsets[:-1]  # (E,) by how much padding shifts each group
    rows = dispatch.token_index_map + moved[dispatch.token_expert_indices]  # (R,)
    slots = np.full(padded_offsets[-1], EMPTY, np.int32)  # (P,)
    slots[rows] = np.arange(dispatch.R)
    return PaddedBins(padded_offsets, slots, rows, dispatch.k, block)


def build_topology(bins, h):
    """The block-sparse matrix (P, E h) of the bins: a block row stores the h columns of its rows' expert.

    Parameters
    ----------
    bins : PaddedBins
    h : int
        Expert width, a multiple of the block size.

    Returns
    -------
    Topology
        Of P h / block**2 blocks. The transpose indices follow from the structure: a block column has the block rows of
        its expert, so nothing is sorted.

    Raises
    ------
    ValueError, TypeError
        If the block size does not divide h, or as `sparse_contracts.check_build_topology`.

    Notes
    -----
    MegaBlocks, sections 5.1.3 (hybrid blocked-CSR-COO) and 5.1.4 (transpose indices).
    """
    sparse_contracts.check_build_topology(bins, h)
    wide = h // bins.block  # block columns of an expert
    high = np.diff(bins.padded_offsets) // bins.block  # (E,) block rows of each expert
    column_indices, row_indices, transpose_indices = [], [], []
    first_row = 0
    for expert, rows in enumerate(high):
        blocks = first_row * wide + np.arange(rows * wide).reshape(rows, wide)  # numbers, as they lie
        column_indices.append(np.tile(expert * wide + np.arange(wide), rows))
        row_indices.append(np.repeat(first_row + np.arange(rows), wide))
        transpose_indices.append(blocks.T.ravel())
        first_row += rows
    return Topology(
        row_offsets=_int32(np.arange(first_row + 1) * wide),
        column_indices=_int32(np.concatenate(column_indices)),
        row_indices=_int32(np.concatenate(row_indices)),
        column_offsets=_int32(np.concatenate([[0], np.cumsum(np.repeat(high, wide))])),
        transpose_indices=_int32(np.concatenate(transpose_indices)),
        block=bins.block,
    )


def topology_of(mask, block):
    """The Topology of any mask: what the five arrays mean, by definition.

    Parameters
    ----------
    mask : ndarray (M / block, N / block), bool
        Which blocks are stored.
    block : int

    Returns
    -------
    Topology

    Raises
    ------
    ValueError, TypeError
        If the mask is not a matrix of bools or block is no integer of at least 1.
    """
    checks.check_array("mask", mask, rank=2, dtypes=("bool",), contiguous=False)
    block = sparse_contracts.check_block(block)
    rows, columns = mask.nonzero()  # row by row
    columns_of_transpose, rows_of_transpose = mask.T.nonzero()  # column by column
    number = np.zeros(mask.shape, np.int32)
    number[rows, columns] = np.arange(rows.size)
    return Topology(
        row_offsets=_offsets(mask.sum(axis=1)),
        column_indices=_int32(columns),
        row_indices=_int32(rows),
        column_offsets=_offsets(mask.sum(axis=0)),
        transpose_indices=number[rows_of_transpose, columns_of_transpose],
        block=block,
    )


def _offsets(counts):
    return _int32(np.concatenate([[0], np.cumsum(counts)]))


def _int32(array):
    return array.astype(np.int32)


def to_dense(values, topology):
    """The matrix (M, N) with zeros where no block is stored.

    Parameters
    ----------
    values : ndarray (nnz, block, block), float64 or float32
    topology : Topology

    Returns
    -------
    ndarray (M, N)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_topology`, or if the values are not the topology's.
    """
    sparse_contracts.check_topology(topology)
    sparse_contracts.check_values("values", values, topology, DTYPES)
    M, N = topology.shape
    dense = np.zeros((M // topology.block, N // topology.block, topology.block, topology.block), values.dtype)
    dense[topology.row_indices, topology.column_indices] = values
    return dense.transpose(0, 2, 1, 3).reshape(M, N)


def from_dense(dense, topology):
    """The stored blocks of a matrix, (nnz, block, block); the others are lost.

    Parameters
    ----------
    dense : ndarray (M, N), float64 or float32
    topology : Topology

    Returns
    -------
    ndarray (nnz, block, block)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_topology`, or if the shapes disagree.
    """
    sparse_contracts.check_topology(topology)
    checks.check_tensor("dense", dense, dict(zip("MN", topology.shape, strict=True)), DTYPES)
    block, (M, N) = topology.block, topology.shape
    blocks = dense.reshape(M // block, block, N // block, block).transpose(0, 2, 1, 3)
    return blocks[topology.row_indices, topology.column_indices]


# Rows into bins and back ----------------------------------------------------------------------------------------------


def padded_gather(x, bins, gates=None):
    """Rows of x copied into the bins, times their gates if there are any; padding is zero.

    Parameters
    ----------
    x : ndarray (L, d), float64 or float32
    bins : PaddedBins
    gates : ndarray (L, k), optional

    Returns
    -------
    rows : ndarray (P, d)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_gather`.

    Notes
    -----
    MegaBlocks, section 5.2. With gates it is the gradient of `padded_scatter` by y.
    """
    sparse_contracts.check_gather(x, bins, gates, DTYPES)
    rows = np.zeros((bins.P, x.shape[1]), x.dtype)  # (P, d)
    filled = bins.slots != EMPTY
    slots = bins.slots[filled]
    rows[filled] = x[slots // bins.k]
    if gates is not None:
        rows[filled] *= gates.ravel()[slots, None]
    return rows


def padded_scatter(y, bins, gates=None):
    """Each token's sum of its rows in the bins, times its gates if there are any.

    Parameters
    ----------
    y : ndarray (P, d), float64 or float32
    bins : PaddedBins
    gates : ndarray (L, k), optional

    Returns
    -------
    out : ndarray (L, d)
        Summed in the order j = 0, ..., k - 1: always the same bits.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_scatter`.

    Notes
    -----
    MegaBlocks, section 5.2. Without gates it is the gradient of `padded_gather`.
    """
    sparse_contracts.check_scatter(y, bins, gates, DTYPES)
    out = np.zeros((bins.L, y.shape[1]), y.dtype)  # (L, d)
    for j, rows in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        out += y[rows] if gates is None else gates[:, j, None] * y[rows]
    return out


def gate_gradient(d_out, y, bins):
    """Gradient of the gates: <d_out, y> of each slot.

    Parameters
    ----------
    d_out : ndarray (L, d)
    y : ndarray (P, d)
        As it went into `padded_scatter`.
    bins : PaddedBins

    Returns
    -------
    d_gates : ndarray (L, k)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_gate_gradient`.
    """
    sparse_contracts.check_gate_gradient(d_out, y, bins, DTYPES)
    d_gates = np.empty((bins.L, bins.k), y.dtype)  # (L, k)
    for j, rows in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        d_gates[:, j] = (d_out * y[rows]).sum(axis=1)
    return d_gates


# The three products ---------------------------------------------------------------------------------------------------


def sdd(lhs, rhs, topology, transpose_rhs=False):
    """S = D D: the stored blocks of lhs rhs, and no others.

    Parameters
    ----------
    lhs : ndarray (M, K), float64 or float32
    rhs : ndarray (K, N), or its parts (E, K, N / E) side by side
        (N, K) with ``transpose_rhs``.
    topology : Topology
        Of a matrix (M, N).
    transpose_rhs : bool
        Multiply by the transpose of rhs.

    Returns
    -------
    values : ndarray (nnz, block, block)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_sdd`.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.3.
    """
    sparse_contracts.check_sdd(lhs, rhs, topology, transpose_rhs, DTYPES)
    block, rhs = topology.block, _matrix(rhs).T if transpose_rhs else _matrix(rhs)
    values = np.empty((topology.nnz, block, block), lhs.dtype)
    for number, (row, column) in enumerate(zip(topology.row_indices, topology.column_indices, strict=True)):
        values[number] = _rows(lhs, row, block) @ rhs[:, column * block : (column + 1) * block]
    return values


def dsd(values, topology, rhs, transpose_lhs=False, transpose_rhs=False):
    """D = S D: a block-sparse matrix, or its transpose, times a dense one.

    Parameters
    ----------
    values : ndarray (nnz, block, block), float64 or float32
    topology : Topology
        Of a matrix (M, N).
    rhs : ndarray (N, K)
        With ``transpose_rhs`` (K, N), or its parts (E, K, N / E) side by side. With ``transpose_lhs`` M for N.
    transpose_lhs : bool
        Multiply the transpose of the sparse matrix: its blocks are visited by the transpose indices.
    transpose_rhs : bool
        Multiply by the transpose of rhs.

    Returns
    -------
    ndarray (M, K)
        (N, K) with ``transpose_lhs``; zeros in block rows that store nothing.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_dsd`.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.4.
    """
    sparse_contracts.check_dsd(values, topology, rhs, transpose_lhs, transpose_rhs, DTYPES)
    block, rhs = topology.block, _matrix(rhs).T if transpose_rhs else _matrix(rhs)
    result = np.zeros((topology.shape[1 if transpose_lhs else 0], rhs.shape[1]), values.dtype)
    for number, row, column in _visit(topology, by_column=transpose_lhs):
        if transpose_lhs:
            _rows(result, column, block)[...] += values[number].T @ _rows(rhs, row, block)
        else:
            _rows(result, row, block)[...] += values[number] @ _rows(rhs, column, block)
    return result


def dds(lhs, values, topology, transpose_lhs=False, parts=1):
    """D = D S: a dense matrix, or its transpose, times a block-sparse one.

    Parameters
    ----------
    lhs : ndarray (K, M), float64 or float32
        (M, K) with ``transpose_lhs``.
    values : ndarray (nnz, block, block)
    topology : Topology
        Of a matrix (M, N).
    transpose_lhs : bool
        Multiply the transpose of lhs.
    parts : int
        How many parts the result comes in, of whole blocks each.

    Returns
    -------
    ndarray (parts, K, N / parts)
        The result (K, N), its parts side by side; zeros in block columns that store nothing.

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_dds`.

    Notes
    -----
    MegaBlocks, sections 5.1 and 5.1.4: the blocks are visited by the transpose indices.
    """
    sparse_contracts.check_dds(lhs, values, topology, transpose_lhs, parts, DTYPES)
    block, lhs = topology.block, lhs if transpose_lhs else lhs.T  # (M, K)
    result = np.zeros((topology.shape[1], lhs.shape[1]), values.dtype)  # (N, K), of whole rows
    for number, row, column in _visit(topology, by_column=True):
        _rows(result, column, block)[...] += values[number].T @ _rows(lhs, row, block)
    n = topology.shape[1] // parts
    return np.ascontiguousarray(result.reshape(parts, n, lhs.shape[1]).transpose(0, 2, 1))


def _visit(topology, by_column):
    """Number, block row and block column of every block, in either order."""
    order = topology.transpose_indices if by_column else range(topology.nnz)
    for number in order:
        yield number, topology.row_indices[number], topology.column_indices[number]


def _rows(matrix, index, block):
    """A block of rows."""
    return matrix[index * block : (index + 1) * block]


def _matrix(dense):
    """Parts side by side as one matrix."""
    if dense.ndim == 2:
        return dense
    E, rows, columns = dense.shape
    return dense.transpose(1, 0, 2).reshape(rows, E * columns)


# Between the projections ----------------------------------------------------------------------------------------------


def activate(a, b, activation):
    """The activation of every stored value: act(a) * b if gated, else act(a).

    Parameters
    ----------
    a : ndarray (nnz, block, block), float64 or float32
    b : ndarray (nnz, block, block) or None
        None exactly for the ungated activations.
    activation : str
        One of ``config.ACTIVATIONS``.

    Returns
    -------
    y_swi : ndarray (nnz, block, block)

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_activate`.
    """
    sparse_contracts.check_activate(a, b, activation, DTYPES)
    return activation_stage.forward(*map(_as_rows, (a, b)), activation).reshape(a.shape)


def activate_backward(d_y, a, b, activation):
    """Gradients of a and b, with act(a) computed again.

    Parameters
    ----------
    d_y : ndarray (nnz, block, block)
        Gradient of y_swi.
    a, b, activation
        As they went into `activate`.

    Returns
    -------
    d_a : ndarray (nnz, block, block)
    d_b : ndarray (nnz, block, block) or None

    Raises
    ------
    ValueError, TypeError
        As `sparse_contracts.check_activate_backward`.
    """
    sparse_contracts.check_activate_backward(d_y, a, b, activation, DTYPES)
    found = activation_stage.backward(*map(_as_rows, (d_y, a, b)), activation)
    return tuple(None if gradient is None else gradient.reshape(a.shape) for gradient in found)


def _as_rows(values):
    """(nnz, block, block) as (nnz block, block): the activation does not ask which rows these are."""
    return None if values is None else values.reshape(-1, values.shape[-1])


# The layer ------------------------------------------------------------------------------------------------------------


def forward(x, w1, w2, w3, dispatch, gates, activation, block=128):
    """All experts of the layer, as `megablocks.forward`."""
    return megablocks.forward(sys.modules[__name__], DTYPES, x, w1, w2, w3, dispatch, gates, activation, block)


def backward(d_out, saved, w1, w2, w3):
    """Every gradient, as `megablocks.backward`."""
    return megablocks.backward(sys.modules[__name__], DTYPES, d_out, saved, w1, w2, w3)
