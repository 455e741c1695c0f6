"""MegaBlocks: a dropless MoE as products with block-sparse matrices.

Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5. Routed rows are copied into bins, each expert's padded to whole
blocks, so that what lies between the two projections is a matrix (P, E h) of which each block row stores the h columns
of one expert. In the paper's names S is a sparse operand and D a dense one, the result first: SDD, DSD, DDS.

A dense matrix with the N = E h columns of the sparse one may be given as its parts side by side, (E, rows, h) for
(rows, E h): so w1 of all experts is one matrix as it lies in memory. w3 (E, h, d) is one once reshaped to (E h, d).
"""

import functools
import sys

import numpy as np

from moeblaze_ref.backends.numpy_ref import ARRAYS
from moeblaze_ref.backends.numpy_ref import activation as activation_stage
from moeblaze_ref.core import sparse_contracts
from moeblaze_ref.core.contract import bodies, implements
from moeblaze_ref.core.structures import EMPTY, PaddedBins, Topology
from moeblaze_ref.systems import megablocks

# The structures -------------------------------------------------------------------------------------------------------


@implements(sparse_contracts.PAD, ARRAYS)
def pad(dispatch, block=128):
    block = int(block)  # a narrow integer of numpy would overflow
    lengths = np.diff(dispatch.expert_token_offsets)  # (E,)
    padded_offsets = np.zeros(dispatch.E + 1, np.int32)
    padded_offsets[1:] = np.cumsum(-(-lengths // block) * block)
    moved = padded_offsets[:-1] - dispatch.expert_token_offsets[:-1]  # (E,) by how much padding shifts each group
    rows = dispatch.token_index_map + moved[dispatch.token_expert_indices]  # (R,)
    slots = np.full(padded_offsets[-1], EMPTY, np.int32)  # (P,)
    slots[rows] = np.arange(dispatch.R)
    return PaddedBins(padded_offsets, slots, rows, dispatch.k, block)


@implements(sparse_contracts.BUILD_TOPOLOGY, ARRAYS)
def build_topology(bins, h):
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


@implements(sparse_contracts.TOPOLOGY_OF, ARRAYS)
def topology_of(mask, block):
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
        block=int(block),
    )


def _offsets(counts):
    return _int32(np.concatenate([[0], np.cumsum(counts)]))


def _int32(array):
    return array.astype(np.int32)


@implements(sparse_contracts.TO_DENSE, ARRAYS)
def to_dense(values, topology):
    M, N = topology.shape
    dense = np.zeros((M // topology.block, N // topology.block, topology.block, topology.block), values.dtype)
    dense[topology.row_indices, topology.column_indices] = values
    return dense.transpose(0, 2, 1, 3).reshape(M, N)


@implements(sparse_contracts.FROM_DENSE, ARRAYS)
def from_dense(dense, topology):
    block, (M, N) = topology.block, topology.shape
    blocks = dense.reshape(M // block, block, N // block, block).transpose(0, 2, 1, 3)
    return blocks[topology.row_indices, topology.column_indices]


# Rows into bins and back ----------------------------------------------------------------------------------------------


@implements(sparse_contracts.PADDED_GATHER, ARRAYS)
def padded_gather(x, bins, gates=None):
    rows = np.zeros((bins.P, x.shape[1]), x.dtype)  # (P, d)
    filled = bins.slots != EMPTY
    slots = bins.slots[filled]
    rows[filled] = x[slots // bins.k]
    if gates is not None:
        rows[filled] *= gates.ravel()[slots, None]
    return rows


@implements(sparse_contracts.PADDED_SCATTER, ARRAYS)
def padded_scatter(y, bins, gates=None):
    """Rows are summed in the order j = 0, ..., k - 1: always the same bits."""
    out = np.zeros((bins.L, y.shape[1]), y.dtype)  # (L, d)
    for j, rows in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        out += y[rows] if gates is None else gates[:, j, None] * y[rows]
    return out


@implements(sparse_contracts.GATE_GRADIENT, ARRAYS)
def gate_gradient(d_out, y, bins):
    d_gates = np.empty((bins.L, bins.k), y.dtype)  # (L, k)
    for j, rows in enumerate(bins.rows.reshape(bins.L, bins.k).T):
        d_gates[:, j] = (d_out * y[rows]).sum(axis=1)
    return d_gates


# The three products ---------------------------------------------------------------------------------------------------


@implements(sparse_contracts.SDD, ARRAYS)
def sdd(lhs, rhs, topology, transpose_rhs=False):
    block, rhs = topology.block, _matrix(rhs).T if transpose_rhs else _matrix(rhs)
    values = np.empty((topology.nnz, block, block), lhs.dtype)
    for number, (row, column) in enumerate(zip(topology.row_indices, topology.column_indices, strict=True)):
        values[number] = _rows(lhs, row, block) @ rhs[:, column * block : (column + 1) * block]
    return values


@implements(sparse_contracts.DSD, ARRAYS)
def dsd(values, topology, rhs, transpose_lhs=False, transpose_rhs=False):
    block, rhs = topology.block, _matrix(rhs).T if transpose_rhs else _matrix(rhs)
    result = np.zeros((topology.shape[1 if transpose_lhs else 0], rhs.shape[1]), values.dtype)
    for number, row, column in _visit(topology, by_column=transpose_lhs):
        if transpose_lhs:
            _rows(result, column, block)[...] += values[number].T @ _rows(rhs, row, block)
        else:
            _rows(result, row, block)[...] += values[number] @ _rows(rhs, column, block)
    return result


@implements(sparse_contracts.DDS, ARRAYS)
def dds(lhs, values, topology, transpose_lhs=False, parts=1):
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


@implements(sparse_contracts.ACTIVATE, ARRAYS)
def activate(a, b, activation):
    return activation_stage.forward.unchecked(a, b, activation)  # which does not ask whose rows these are


@implements(sparse_contracts.ACTIVATE_BACKWARD, ARRAYS)
def activate_backward(d_y_swi, a, b, activation):
    return activation_stage.backward.unchecked(d_y_swi, a, b, activation)


# The layer ------------------------------------------------------------------------------------------------------------


@implements(megablocks.FORWARD, ARRAYS)
def forward(x, w1, w2, w3, dispatch, gates, activation, block=128):
    return megablocks.forward(_stages(), x, w1, w2, w3, dispatch, gates, activation, block)


@implements(megablocks.BACKWARD, ARRAYS)
def backward(d_out, saved, w1, w2, w3):
    return megablocks.backward(_stages(), d_out, saved, w1, w2, w3)


@functools.cache
def _stages() -> megablocks.SparseStages:
    return bodies(megablocks.SparseStages, sys.modules[__name__])
