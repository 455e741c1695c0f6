"""MegaBlocks: a dropless MoE as products with block-sparse matrices, as Numba kernels.

    Dispatch
      pad:                padded_offsets (E + 1,), two kernels; slots (P,), rows (R,), two kernels
      build_topology:     the blocks' three arrays (nnz,), one kernel; both arrays of offsets, one kernel
    x (L, d), w1, w2 (E, d, h), w3 (E h, d), PaddedBins, Topology
      padded_gather:      x -> rows (P, d), one kernel
      sdd:                rows, w1 or w2 -> a or b (nnz, block, block), one kernel
      activate:           a, b -> y_swi (nnz, block, block), one kernel
      dsd:                y_swi, w3 -> y (P, d), one kernel
      padded_scatter:     y, gates (L, k) -> out (L, d), one kernel
    and backward: gate_gradient, activate_backward, dds, and the same products with transposed operands

Arrays are numpy's, or on the GPU CuPy's; results are of the kind of what was given.
Source: MegaBlocks (arXiv 2211.15841), sections 4 and 5. Nothing is sorted: an expert's blocks are a full rectangle of
the matrix (P, E h), so where each of them lies, in either order, follows from the offsets of the bins. The products are
naive, one thread an element of the result, and visit the stored blocks alone; a dense matrix that comes as its parts
side by side is read where it lies. Each output element has one writer and each sum one order: same input, same bits.
"""

import functools
import sys

from moeblaze_ref.backends.numba_cuda import dispatch as dispatch_stage
from moeblaze_ref.backends.numba_cuda.activation import NONLINEARITY
from moeblaze_ref.backends.numba_cuda.combine import combine_kernel, d_gates_kernel
from moeblaze_ref.backends.numba_cuda.runtime import (
    ARRAYS,
    THREADS,
    ZERO,
    all_to_device,
    blocks_for,
    cuda,
    float32_output,
    int32_output,
    launch,
    per_element,
    to_caller,
    to_device,
)
from moeblaze_ref.core import sparse_contracts
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import bodies, implements
from moeblaze_ref.core.structures import EMPTY, PaddedBins, Topology
from moeblaze_ref.systems import megablocks

# Padded bins


@cuda.jit
def padded_lengths_kernel(expert_token_offsets, block, lengths):
    """Round every expert's number of rows up to whole blocks.

    Source        MegaBlocks, section 5.2
    Grid          ceil(E / THREADS) blocks of THREADS threads, a thread for each expert
    Shared bytes  0
    Global bytes  reads 8 E; writes 4 E
    """
    expert = cuda.grid(1)
    if expert < lengths.shape[0]:
        rows = expert_token_offsets[expert + 1] - expert_token_offsets[expert]
        lengths[expert] = (rows + block - 1) // block * block


@cuda.jit
def mark_padding_kernel(expert_token_offsets, padded_offsets, slots):
    """Mark the rows of every bin that come after its expert's own.

    Source        MegaBlocks, section 5.2
    Grid          E blocks of THREADS threads, a block for each expert
    Shared bytes  0
    Global bytes  reads 16 E THREADS; writes 4 P - 4 R
    """
    expert = cuda.blockIdx.x
    filled = expert_token_offsets[expert + 1] - expert_token_offsets[expert]
    first = padded_offsets[expert] + filled + cuda.threadIdx.x
    for row in range(first, padded_offsets[expert + 1], THREADS):
        slots[row] = EMPTY


@cuda.jit
def place_rows_kernel(token_expert_indices, token_index_map, expert_token_offsets, padded_offsets, slots, rows):
    """Move every slot's row by as much as padding shifts its expert's group, and write both directions of the move.

    Source        MegaBlocks, section 5.2
    Grid          ceil(R / THREADS) blocks of THREADS threads, a thread for each slot
    Shared bytes  0
    Global bytes  reads 16 R; writes 8 R
    """
    slot = cuda.grid(1)
    if slot < rows.shape[0]:
        expert = token_expert_indices[slot]
        row = token_index_map[slot] + padded_offsets[expert] - expert_token_offsets[expert]
        rows[slot] = row
        slots[row] = slot


@implements(sparse_contracts.PAD, ARRAYS)
def pad(dispatch, block=128):
    """One number, the count P of padded rows, is read back from the device: the arrays of that length cannot be made
    before it is known. The published system waits for it too.
    """
    block = int(block)  # a narrow integer of numpy would overflow
    experts, positions, offsets = all_to_device(
        dispatch.token_expert_indices, dispatch.token_index_map, dispatch.expert_token_offsets
    )
    lengths = int32_output(dispatch.E)
    launch(padded_lengths_kernel, blocks_for(dispatch.E), THREADS, offsets, block, lengths)
    padded_offsets = dispatch_stage._scan(lengths)
    slots = int32_output(int(padded_offsets[dispatch.E]))  # (P,)
    rows = int32_output(dispatch.R)
    launch(mark_padding_kernel, dispatch.E, THREADS, offsets, padded_offsets, slots)
    launch(place_rows_kernel, blocks_for(dispatch.R), THREADS, experts, positions, offsets, padded_offsets, slots, rows)
    padded_offsets, slots, rows = to_caller(dispatch.expert_token_offsets, padded_offsets, slots, rows)
    return PaddedBins(padded_offsets, slots, rows, dispatch.k, block)


# The topology


@cuda.jit
def topology_blocks_kernel(padded_offsets, block, wide, column_indices, row_indices, transpose_indices):
    """Number the blocks of every expert along its rows, and say which number comes where along its columns.

    An expert's blocks are a rectangle of ``wide`` block columns; block (row, column) of it is block row * wide + column
    of the expert's in the one order, and block column * rows + row in the other.

    Source        MegaBlocks, sections 5.1.3 and 5.1.4
    Grid          E blocks of THREADS threads, a block for each expert
    Shared bytes  0
    Global bytes  reads 8 E THREADS; writes 12 nnz
    """
    expert = cuda.blockIdx.x
    first_row = padded_offsets[expert] // block
    rows = padded_offsets[expert + 1] // block - first_row
    first = first_row * wide  # number of the expert's first block
    for here in range(cuda.threadIdx.x, rows * wide, THREADS):
        row, column = here // wide, here % wide
        row_indices[first + here] = first_row + row
        column_indices[first + here] = expert * wide + column
        transpose_indices[first + column * rows + row] = first + here


@cuda.jit
def topology_offsets_kernel(padded_offsets, block, wide, row_offsets, column_offsets):
    """Say where the block rows and block columns of every expert end, which is where the next ones begin.

    Source        MegaBlocks, sections 5.1.3 and 5.1.4
    Grid          E blocks of THREADS threads, a block for each expert
    Shared bytes  0
    Global bytes  reads 8 E THREADS; writes 8 + 4 P / block + 4 E h / block
    """
    expert, thread = cuda.blockIdx.x, cuda.threadIdx.x
    first_row, end_row = padded_offsets[expert] // block, padded_offsets[expert + 1] // block
    for row in range(first_row + thread, end_row, THREADS):
        row_offsets[row + 1] = (row + 1) * wide
    for column in range(thread, wide, THREADS):
        column_offsets[expert * wide + column + 1] = first_row * wide + (column + 1) * (end_row - first_row)
    if expert == 0 and thread == 0:
        row_offsets[0] = 0
        column_offsets[0] = 0


@implements(sparse_contracts.BUILD_TOPOLOGY, ARRAYS)
def build_topology(bins, h):
    high, wide = bins.P // bins.block, h // bins.block  # block rows of all experts, block columns of one
    offsets = int32_output(high + 1), int32_output(bins.E * wide + 1)
    blocks = tuple(int32_output(high * wide) for _ in range(3))
    padded_offsets = to_device(bins.padded_offsets)
    launch(topology_blocks_kernel, bins.E, THREADS, padded_offsets, bins.block, wide, *blocks)
    launch(topology_offsets_kernel, bins.E, THREADS, padded_offsets, bins.block, wide, *offsets)
    row_offsets, column_offsets = to_caller(bins.padded_offsets, *offsets)
    column_indices, row_indices, transpose_indices = to_caller(bins.padded_offsets, *blocks)
    return Topology(row_offsets, column_indices, row_indices, column_offsets, transpose_indices, bins.block)


# Rows into bins and back


@functools.cache
def padded_gather_kernel(weighted):
    """The kernel of `padded_gather` with or without gates, a constant in it."""

    @cuda.jit
    def kernel(x, gates, slots, k, rows):
        """Copy each padded row's token, times the gate of its slot; padding becomes zero.

        Source        MegaBlocks, section 5.2
        Grid          ceil(P d / THREADS) blocks of THREADS threads, a thread for each element
        Shared bytes  0
        Global bytes  reads 4 P d + 4 R d (1 + W); writes 4 P d
                      W is 1 with gates, else 0
        """
        num_rows, d = rows.shape
        element = cuda.grid(1)
        row, column = element // d, element % d
        if row < num_rows:
            slot = slots[row]
            value = ZERO
            if slot != EMPTY:
                value = x[slot // k, column]
                if weighted:
                    value *= gates[slot // k, slot % k]
            rows[row, column] = value

    return kernel


@cuda.jit
def sum_rows_kernel(y, rows, out):
    """Sum each token's rows, in the order of its slots.

    Source        MegaBlocks, section 5.2
    Grid          ceil(L d / THREADS) blocks of THREADS threads, a thread for each element
    Shared bytes  0
    Global bytes  reads 8 R d; writes 4 L d
    """
    num_tokens, d = out.shape
    element = cuda.grid(1)
    token, column = element // d, element % d
    if token < num_tokens:
        k = rows.shape[0] // num_tokens
        total = ZERO
        for slot in range(token * k, (token + 1) * k):
            total += y[rows[slot], column]
        out[token, column] = total


@implements(sparse_contracts.PADDED_GATHER, ARRAYS)
def padded_gather(x, bins, gates=None):
    rows = float32_output((bins.P, x.shape[1]))
    kernel = padded_gather_kernel(gates is not None)
    launch(kernel, blocks_for(rows.size), THREADS, *all_to_device(x, gates, bins.slots), bins.k, rows)
    return to_caller(x, rows)[0]


@implements(sparse_contracts.PADDED_SCATTER, ARRAYS)
def padded_scatter(y, bins, gates=None):
    """With gates it is the combine, whose kernel runs: the bins say where a slot's row is, as the dispatch did.

    Rows are summed in the order j = 0, ..., k - 1: always the same bits.
    """
    shape = bins.L, y.shape[1]
    if gates is None:
        return per_element(sum_rows_kernel, y, shape, y, bins.rows)
    return per_element(combine_kernel, y, shape, y, gates, bins.rows)


@implements(sparse_contracts.GATE_GRADIENT, ARRAYS)
def gate_gradient(d_out, y, bins):
    """The kernel is that of the combine."""
    return per_element(d_gates_kernel, d_out, (bins.L, bins.k), d_out, y, bins.rows)


# The three products


@functools.cache
def dense_element(transpose):
    """A device function: the element of a dense matrix, or of its transpose.

    The matrix is given as its parts side by side, (parts, rows, columns of a part).
    """

    @cuda.jit(device=True)
    def element(dense, row, column):
        if transpose:
            row, column = column, row
        columns = dense.shape[2]
        return dense[column // columns, row, column % columns]

    return element


@functools.cache
def sparse_dot(transpose_sparse, transpose_dense):
    """A device function: a row of a block-sparse matrix times a column of a dense one, each matrix or its transpose.

    Only stored blocks are visited. A row of the transpose is a block column: its blocks are found through
    transpose_indices, and read by columns.
    """
    dense_at = dense_element(transpose_dense)

    @cuda.jit(device=True)
    def dot(values, offsets, indices, transpose_indices, dense, row, column):
        block = values.shape[1]
        line, i = row // block, row % block
        total = ZERO
        for place in range(offsets[line], offsets[line + 1]):
            number = transpose_indices[place] if transpose_sparse else place
            first = indices[number] * block  # the row of the dense matrix that meets the block's first
            for t in range(block):
                value = values[number, t, i] if transpose_sparse else values[number, i, t]
                total += value * dense_at(dense, first + t, column)
        return total

    return dot


@functools.cache
def sdd_kernel(transpose_rhs):
    """The kernel of `sdd` for one layout of rhs, a constant in it."""
    rhs_at = dense_element(transpose_rhs)

    @cuda.jit
    def kernel(lhs, rhs, row_indices, column_indices, values):
        """Multiply for every stored element its row of lhs by its column of rhs.

        COO says at once where a block lies: no search through the offsets.

        Source        MegaBlocks, sections 5.1 and 5.1.3
        Grid          ceil(nnz block block / THREADS) blocks of THREADS threads, a thread for each stored element
        Shared bytes  0
        Global bytes  reads 8 nnz block block (1 + K); writes 4 nnz block block
                      lhs is (M, K)
        """
        nnz, block, _ = values.shape
        element = cuda.grid(1)
        number, i, j = element // (block * block), element // block % block, element % block
        if number < nnz:
            row, column = row_indices[number] * block + i, column_indices[number] * block + j
            total = ZERO
            for t in range(lhs.shape[1]):
                total += lhs[row, t] * rhs_at(rhs, t, column)
            values[number, i, j] = total

    return kernel


@functools.cache
def dsd_kernel(transpose_lhs, transpose_rhs):
    """The kernel of `dsd` for one layout of each operand, constants in it."""
    dot = sparse_dot(transpose_lhs, transpose_rhs)

    @cuda.jit
    def kernel(values, offsets, indices, transpose_indices, rhs, result):
        """Multiply each row of the sparse matrix by each column of rhs; a row that stores nothing gives zeros.

        ``offsets`` and ``indices`` are of the block rows and their columns, or if the sparse matrix is transposed of
        the block columns and their rows.

        Source        MegaBlocks, sections 5.1 and 5.1.4
        Grid          ceil(M K / THREADS) blocks of THREADS threads, a thread for each element
        Shared bytes  0
        Global bytes  reads 8 M K + 4 nnz block K (1 + T) + 8 nnz block block K; writes 4 M K
                      the result is (M, K), T is 1 if the sparse matrix is transposed, else 0
        """
        rows, columns = result.shape
        element = cuda.grid(1)
        row, column = element // columns, element % columns
        if row < rows:
            result[row, column] = dot(values, offsets, indices, transpose_indices, rhs, row, column)

    return kernel


@functools.cache
def dds_kernel(transpose_lhs):
    """The kernel of `dds` for one layout of lhs, a constant in it."""
    dot = sparse_dot(True, not transpose_lhs)  # of the transposes: (D S)^T = S^T D^T

    @cuda.jit
    def kernel(lhs, values, offsets, indices, transpose_indices, result):
        """Multiply each row of lhs by each column of the sparse matrix; a column that stores nothing gives zeros.

        ``offsets`` and ``indices`` are of the block columns and their rows.

        Source        MegaBlocks, sections 5.1 and 5.1.4
        Grid          ceil(N K / THREADS) blocks of THREADS threads, a thread for each element
        Shared bytes  0
        Global bytes  reads 8 N K + 8 nnz block K + 8 nnz block block K; writes 4 N K
                      the result is (K, N)
        """
        parts, rows, columns = result.shape
        element = cuda.grid(1)
        part, row, column = element // (rows * columns), element // columns % rows, element % columns
        if part < parts:
            place = part * columns + column  # the column in the whole matrix
            result[part, row, column] = dot(values, offsets, indices, transpose_indices, lhs, place, row)

    return kernel


@implements(sparse_contracts.SDD, ARRAYS)
def sdd(lhs, rhs, topology, transpose_rhs=False):
    operands = lhs, _parts(rhs), topology.row_indices, topology.column_indices
    return per_element(sdd_kernel(bool(transpose_rhs)), lhs, (topology.nnz, topology.block, topology.block), *operands)


@implements(sparse_contracts.DSD, ARRAYS)
def dsd(values, topology, rhs, transpose_lhs=False, transpose_rhs=False):
    rhs = _parts(rhs)
    lines = _by_column(topology) if transpose_lhs else _by_row(topology)
    shape = topology.shape[1 if transpose_lhs else 0], _extents(rhs)[0 if transpose_rhs else 1]
    return per_element(dsd_kernel(bool(transpose_lhs), bool(transpose_rhs)), values, shape, values, *lines, rhs)


@implements(sparse_contracts.DDS, ARRAYS)
def dds(lhs, values, topology, transpose_lhs=False, parts=1):
    shape = parts, lhs.shape[1 if transpose_lhs else 0], topology.shape[1] // parts
    return per_element(dds_kernel(bool(transpose_lhs)), lhs, shape, _parts(lhs), values, *_by_column(topology))


def _by_row(topology):
    """Return the indices with which `sparse_dot` visits block rows."""
    return topology.row_offsets, topology.column_indices, topology.transpose_indices


def _by_column(topology):
    """Return the indices with which `sparse_dot` visits block columns."""
    return topology.column_offsets, topology.row_indices, topology.transpose_indices


def _parts(dense):
    """A matrix as the one part of itself, (1, rows, columns); parts as they are."""
    return dense if dense.ndim == 3 else dense.reshape(1, *dense.shape)


def _extents(parts):
    """Rows and columns of the matrix whose parts (parts, rows, columns of a part) lie side by side."""
    return parts.shape[1], parts.shape[0] * parts.shape[2]


# Between the projections


@functools.cache
def activate_kernel(activation):
    """The kernel of `activate` for one activation, a constant in it."""
    act, _ = NONLINEARITY[activation]
    gated = is_gated(activation)

    @cuda.jit
    def kernel(a, b, y_swi):
        """Activate every stored element, padding included.

        Source        MegaBlocks, section 5.1; MoEBlaze, section 5: Y_swi = SiLU(A) * B
        Grid          ceil(nnz block block / THREADS) blocks of THREADS threads, a thread for each stored element
        Shared bytes  0
        Global bytes  reads 4 G nnz block block; writes 4 nnz block block
                      G is 2 if gated, else 1
        """
        nnz, block, _ = a.shape
        element = cuda.grid(1)
        number, i, j = element // (block * block), element // block % block, element % block
        if number < nnz:
            y = act(a[number, i, j])
            if gated:
                y *= b[number, i, j]
            y_swi[number, i, j] = y

    return kernel


@functools.cache
def activate_backward_kernel(activation):
    """The kernel of `activate_backward` for one activation, a constant in it."""
    act, slope = NONLINEARITY[activation]
    gated = is_gated(activation)

    @cuda.jit
    def kernel(d_y_swi, a, b, d_a, d_b):
        """Take the gradient of every stored element back through the activation.

        Source        MegaBlocks, section 5.1; MoEBlaze, section 5: dB = dY * SiLU(A), dA = dY * B * SiLU'(A)
        Grid          ceil(nnz block block / THREADS) blocks of THREADS threads, a thread for each stored element
        Shared bytes  0
        Global bytes  reads 4 nnz block block (1 + G); writes 4 G nnz block block
                      G is 2 if gated, else 1
        """
        nnz, block, _ = a.shape
        element = cuda.grid(1)
        number, i, j = element // (block * block), element // block % block, element % block
        if number < nnz:
            d_value, a_value = d_y_swi[number, i, j], a[number, i, j]
            if gated:
                d_a[number, i, j] = d_value * b[number, i, j] * slope(a_value)
                d_b[number, i, j] = d_value * act(a_value)
            else:
                d_a[number, i, j] = d_value * slope(a_value)

    return kernel


@implements(sparse_contracts.ACTIVATE, ARRAYS)
def activate(a, b, activation):
    return per_element(activate_kernel(activation), a, a.shape, a, b)


@implements(sparse_contracts.ACTIVATE_BACKWARD, ARRAYS)
def activate_backward(d_y_swi, a, b, activation):
    d_a, d_b = float32_output(a.shape), None if b is None else float32_output(b.shape)
    operands = all_to_device(d_y_swi, a, b)
    launch(activate_backward_kernel(activation), blocks_for(d_a.size), THREADS, *operands, d_a, d_b)
    return to_caller(a, d_a, d_b)


# The layer


@implements(megablocks.FORWARD, ARRAYS)
def forward(x, w1, w2, w3, dispatch, gates, activation, block=128):
    """On the GPU nothing leaves it between the steps but the number of padded rows."""
    return megablocks.forward(_stages(), x, w1, w2, w3, dispatch, gates, activation, block)


@implements(megablocks.BACKWARD, ARRAYS)
def backward(d_out, saved, w1, w2, w3):
    return megablocks.backward(_stages(), d_out, saved, w1, w2, w3)


@functools.cache
def _stages() -> megablocks.SparseStages:
    return bodies(megablocks.SparseStages, sys.modules[__name__])
