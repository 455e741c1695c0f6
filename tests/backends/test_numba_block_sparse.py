"""The block-sparse stage as Numba kernels: products that skip what is not stored, against the specification.

Structures match bit for bit, numbers the float64 specification on the same float32 operands.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
from helpers import Shape
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import counted_launch, rerun, stated_launch
from test_numba_experts import planted, strange, wide

from moeblaze_ref.backends.numba_cuda import block_sparse, combine, dispatch, runtime
from moeblaze_ref.backends.numpy_ref import block_sparse as reference
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.core.config import ACTIVATIONS, is_gated
from moeblaze_ref.core.structures import IndexArrays
from moeblaze_ref.verify.cases import relative_error
from moeblaze_ref.verify.comparisons import BOUNDS

BOUND = BOUNDS["float32"]
SMALL = Shape(9, 3, 4, 3, 2)  # experts of 6, 5 and 7 rows: whole blocks of 2, and padded ones
CASES = [  # (shape, block)
    (SMALL, 2),
    (SMALL._replace(L=0), 2),
    (SMALL._replace(L=1), 2),
    (SMALL._replace(L=5, k=3), 4),  # k = E, and one block column an expert
    (SMALL._replace(L=5, E=1, k=1), 2),
    (SMALL._replace(L=6, k=1, routing="hot"), 2),  # one expert gets every token, two get none
    (SMALL._replace(L=6, E=4, routing="empty"), 2),
    (SMALL._replace(L=4, d=1, h=1), 1),
    (SMALL._replace(L=4, h=6, E=11), 3),  # more experts than the simulator's blocks have threads
]

# What each call is: its function and the names of its arguments
CALLS = {
    "pad": "pad dispatch block",
    "build_topology": "build_topology bins h",
    "padded_gather": "padded_gather x bins",
    "padded_gather with gates": "padded_gather x bins gates",
    "padded_scatter": "padded_scatter y bins",
    "padded_scatter with gates": "padded_scatter y bins gates",
    "gate_gradient": "gate_gradient x y bins",
    "sdd": "sdd y wide_rhs topology",
    "sdd of parts": "sdd y w1 topology",
    "sdd, rhs transposed": "sdd y w3 topology yes",
    "dsd": "dsd a topology w3",
    "dsd, lhs transposed": "dsd a topology y yes",
    "dsd, rhs transposed, of parts": "dsd a topology w1 no yes",
    "dsd, both transposed": "dsd a topology y_columns yes yes",
    "dds": "dds y_columns a topology",
    "dds, lhs transposed, into parts": "dds y a topology yes E",
    "activate": "activate a b activation",
    "activate_backward": "activate_backward d_y a b activation",
}
EVERY_CALL = pytest.mark.parametrize("call", CALLS)


def make_inputs(shape, block, activation="swiglu"):
    """Operands of every call by name: float32 numbers of order 1, each operand its own."""
    rng = np.random.default_rng(5)
    chosen = build_by_sort(shape.topk_experts(), shape.E)
    bins = reference.pad(chosen, block)
    topology = reference.build_topology(bins, shape.h)
    L, d, h, E, k, _ = shape
    stored = (topology.nnz, block, block)
    sizes = {
        "x": (L, d),
        "y": (bins.P, d),
        "y_columns": (d, bins.P),
        "w1": (E, d, h),
        "wide_rhs": (d, E * h),
        "w3": (E * h, d),
        "a": stored,
        "b": stored,
        "d_y": stored,
        "gates": (L, k),
    }
    inputs = {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    if not is_gated(activation):
        inputs["b"] = None
    structures = {"dispatch": chosen, "bins": bins, "topology": topology}
    return inputs | structures | {"block": block, "h": h, "E": E, "activation": activation, "yes": True, "no": False}


def function_and_arguments(call, inputs):
    """The name of a call's function, and its arguments."""
    function, *names = CALLS[call].split()
    return function, [inputs[name] for name in names]


def results(stage, call, inputs):
    """What a call returns, a structure or a tuple of arrays; the device's outputs are poisoned before the launches."""
    function, arguments = function_and_arguments(call, inputs)
    with runtime.poisoned_outputs():
        found = getattr(stage, function)(*arguments)
    return found if isinstance(found, tuple | IndexArrays) else (found,)


def error_between(found, truth):
    """The largest relative error, NaN before all numbers; a structure that differs anywhere is infinitely wrong."""
    if isinstance(truth, IndexArrays):
        return 0.0 if same_structure(found, truth) else np.inf
    assert [array is None for array in found] == [array is None for array in truth]
    pairs = [pair for pair in zip(found, truth, strict=True) if pair[0] is not None]
    assert all(array.dtype == np.float32 for array, _ in pairs)
    return np.max([relative_error(*pair) for pair in pairs])


def same_structure(found, truth):
    """Whether both are of one class, with equal numbers and arrays equal bit for bit."""
    pairs = [(getattr(found, field.name), getattr(truth, field.name)) for field in fields(truth)]
    return type(found) is type(truth) and all(
        np.array_equal(one, other) and getattr(one, "dtype", None) == getattr(other, "dtype", None)
        for one, other in pairs
    )


def worst_error(call, inputs, stage=block_sparse):
    """The error of a call on the device, or in a faulty twin of the stage."""
    truth = results(reference, call, {name: wide(value) for name, value in inputs.items()})
    return error_between(results(stage, call, inputs), truth)


# The stage


@EVERY_CALL
@pytest.mark.parametrize(("shape", "block"), CASES, ids=str)
def test_every_shape(call, shape, block):
    assert worst_error(call, make_inputs(shape, block)) <= BOUND


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("call", ["activate", "activate_backward"])
def test_every_activation(call, activation):
    assert worst_error(call, make_inputs(SMALL._replace(L=3), 2, activation)) <= BOUND


INPUTS = make_inputs(SMALL, 2)


@EVERY_CALL
def test_the_same_bits_every_time_even_of_strided_operands(call):
    odd = {name: strange(value) if isinstance(value, np.ndarray) else value for name, value in INPUTS.items()}
    first, again = results(block_sparse, call, INPUTS), results(block_sparse, call, odd)
    if isinstance(first, IndexArrays):
        assert same_structure(again, first)
    else:
        for one, other in zip(again, first, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("call", ["sdd of parts", "dsd, rhs transposed, of parts"])
def test_parts_are_addressed_where_they_lie(call, monkeypatch):
    passed = []
    monkeypatch.setattr(
        block_sparse, "all_to_device", lambda *arrays: passed.extend(arrays) or runtime.all_to_device(*arrays)
    )
    results(block_sparse, call, INPUTS)
    assert any(array is INPUTS["w1"] for array in passed)


# Products by definition, for any topology


@st.composite
def sparse_matrices(draw):
    """(values, topology, the dense matrix (M, N), the elements that are stored) of any mask, empty ones too."""
    block, high, wide_ = draw(st.integers(1, 2)), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    bits = draw(st.lists(st.booleans(), min_size=high * wide_, max_size=high * wide_))
    mask = np.array(bits, bool).reshape(high, wide_)
    topology = reference.topology_of(mask, block)
    values = normal(draw, topology.nnz, block, block)
    return values, topology, wide(reference.to_dense(values, topology)), np.kron(mask, np.ones((block, block))) == 1


def normal(draw, *shape):
    """Random numbers of a drawn seed."""
    return np.random.default_rng(draw(st.integers(0, 2**32 - 1))).standard_normal(shape).astype(np.float32)


def dense_operand(draw, rows, columns, transposed, block=None):
    """(the operand as a product takes it; the matrix that it stands for).

    With a block size it may come as one to three parts side by side.
    """
    matrix = normal(draw, rows, columns)
    stored = matrix.T if transposed else matrix
    if block is None or not draw(st.booleans()):
        return stored, wide(matrix)
    parts = draw(st.sampled_from([n for n in (1, 2, 3) if stored.shape[1] % (n * block) == 0]))
    return stored.reshape(stored.shape[0], parts, stored.shape[1] // parts).transpose(1, 0, 2), wide(matrix)


FEW = settings(max_examples=25, deadline=None)


@FEW
@given(sparse_matrices(), st.integers(1, 3), st.booleans(), st.data())
def test_sdd_is_the_dense_product_where_blocks_are_stored(sparse, depth, transpose_rhs, data):
    _, topology, _, stored = sparse
    M, N = topology.shape
    lhs = normal(data.draw, M, depth)
    rhs, matrix = dense_operand(data.draw, depth, N, transpose_rhs, None if transpose_rhs else topology.block)
    with runtime.poisoned_outputs():
        found = block_sparse.sdd(lhs, rhs, topology, transpose_rhs)
    assert relative_error(reference.to_dense(found, topology), np.where(stored, wide(lhs) @ matrix, 0.0)) <= BOUND


@FEW
@given(sparse_matrices(), st.integers(1, 3), st.booleans(), st.booleans(), st.data())
def test_dsd_is_the_product_of_the_dense_matrices(sparse, columns, transpose_lhs, transpose_rhs, data):
    values, topology, dense, _ = sparse
    lhs = dense.T if transpose_lhs else dense
    block = topology.block if transpose_rhs and not transpose_lhs else None
    rhs, matrix = dense_operand(data.draw, lhs.shape[1], columns, transpose_rhs, block)
    with runtime.poisoned_outputs():
        found = block_sparse.dsd(values, topology, rhs, transpose_lhs, transpose_rhs)
    assert relative_error(found, lhs @ matrix) <= BOUND


@FEW
@given(sparse_matrices(), st.integers(1, 3), st.booleans(), st.data())
def test_dds_is_the_product_of_the_dense_matrices(sparse, rows, transpose_lhs, data):
    values, topology, dense, _ = sparse
    M, N = topology.shape
    lhs, matrix = dense_operand(data.draw, rows, M, transpose_lhs)
    parts = data.draw(st.sampled_from([n for n in (1, 2, 3) if N % (n * topology.block) == 0]))
    with runtime.poisoned_outputs():
        found = block_sparse.dds(lhs, values, topology, transpose_lhs, parts)
    assert found.shape == (parts, rows, N // parts)
    assert relative_error(found.transpose(1, 0, 2).reshape(rows, N), matrix @ dense) <= BOUND


# The layer


def run_layer(stage, case, dispatch, gates, block):
    """(out and every gradient; what was saved)."""
    w1, w2, w3 = case.weights[1:]
    with runtime.poisoned_outputs():
        out, saved = stage.forward(case.x, w1, w2, w3, dispatch, gates, case.activation, block)
        gradients = stage.backward(case.d_out, saved, w1, w2, w3)
    return (out, *gradients), saved


def check_layer(shape, block, activation="swiglu"):
    """The layer's results, and what it saved, are the specification's."""
    case = shape.case(activation).astype(np.float32)
    inputs = make_inputs(shape, block)
    found, saved = run_layer(block_sparse, case, inputs["dispatch"], inputs["gates"], block)
    exact = case.astype(np.float64)
    truth, expected = run_layer(reference, exact, inputs["dispatch"], wide(inputs["gates"]), block)
    assert error_between(found, truth) <= BOUND
    assert same_structure(saved.bins, expected.bins) and same_structure(saved.topology, expected.topology)
    kept = [(saved.tensors()[name], tensor) for name, tensor in expected.tensors().items() if tensor.dtype != np.int32]
    assert saved.tensors().keys() == expected.tensors().keys()
    assert error_between(*zip(*kept, strict=True)) <= BOUND


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_with_every_activation(activation):
    check_layer(SMALL, 2, activation)


@pytest.mark.parametrize(("shape", "block"), CASES[1:], ids=str)
def test_the_layer_with_every_shape(shape, block):
    check_layer(shape, block)


# Planted faults: a fault planted in the text of the module must make the comparison fail

# The fault: (call that shows it, what stands in the module, what takes its place)
FAULTS = {
    "pad: one block too many": ("pad", "(rows + block - 1) // block", "(rows + block) // block"),
    "pad: no padding": ("pad", "(rows + block - 1) // block * block", "rows"),
    "pad: padding not marked": ("pad", "slots[row] = EMPTY", "pass"),
    "pad: last padding row left out": (
        "pad",
        "range(first, padded_offsets[expert + 1], THREADS)",
        "range(first, padded_offsets[expert + 1] - 1, THREADS)",
    ),
    "pad: wrong expert": (
        "pad",
        "expert = token_expert_indices[slot]",
        "expert = padded_offsets.shape[0] - 2 - token_expert_indices[slot]",
    ),
    "pad: rows stale": ("pad", "rows[slot] = row", "pass"),
    "pad: slots of tokens": ("pad", "slots[row] = slot", "slots[row] = slot // 2"),
    "pad: last slot dropped": ("pad", "if slot < rows.shape[0]:", "if slot < rows.shape[0] - 1:"),
    "topology: columns of the first expert": (
        "build_topology",
        "column_indices[first + here] = expert * wide + column",
        "column_indices[first + here] = column",
    ),
    "topology: rows of the expert": ("build_topology", "= first_row + row\n", "= row\n"),
    "topology: blocks not transposed": (
        "build_topology",
        "transpose_indices[first + column * rows + row]",
        "transpose_indices[first + here]",
    ),
    "topology: transposed without the experts before": (
        "build_topology",
        "transpose_indices[first + column * rows + row] = first + here",
        "transpose_indices[first + column * rows + row] = here",
    ),
    "topology: first blocks only": ("build_topology", "rows * wide, THREADS)", "min(rows * wide, 2), THREADS)"),
    "topology: no first offsets": ("build_topology", "column_offsets[0] = 0", "pass"),
    "topology: offsets of rows off by one": ("build_topology", "= (row + 1) * wide", "= row * wide"),
    "topology: offsets of columns of the expert": (
        "build_topology",
        "first_row * wide + (column + 1) * (end_row - first_row)",
        "(column + 1) * (end_row - first_row)",
    ),
    "gather: padding stale": (
        "padded_gather",
        "            rows[row, column] = value",
        "            if slot != EMPTY:\n                rows[row, column] = value",
    ),
    "gather: zeros": ("padded_gather", "value = x[slot // k, column]", "value = ZERO"),
    "gather: slot for token": ("padded_gather", "x[slot // k, column]", "x[slot % x.shape[0], column]"),
    "gather: last row dropped": ("padded_gather", "if row < num_rows:", "if row < num_rows - 2:"),
    "gather: gate left out": ("padded_gather with gates", "if weighted:", "if False:"),
    "gather: gate of another slot": (
        "padded_gather with gates",
        "gates[slot // k, slot % k]",
        "gates[slot // k, k - 1 - slot % k]",
    ),
    "scatter: last slot dropped": (
        "padded_scatter",
        "range(token * k, (token + 1) * k)",
        "range(token * k, (token + 1) * k - 1)",
    ),
    "scatter: rows in token order": ("padded_scatter", "y[rows[slot], column]", "y[slot, column]"),
    "scatter: last token dropped": ("padded_scatter", "if token < num_tokens:", "if token < num_tokens - 1:"),
    "scatter: gates left out": ("padded_scatter with gates", "if gates is None:", "if True:"),
    "scatter: slots for rows": (
        "padded_scatter with gates",
        "all_to_device(y, gates, bins.rows)",
        "all_to_device(y, gates, bins.slots)",
    ),
    "gate gradient: slots for rows": (
        "gate_gradient",
        "all_to_device(d_out, y, bins.rows)",
        "all_to_device(d_out, y, bins.slots)",
    ),
    "sdd: zeros": ("sdd", "total += lhs[row, t] * rhs_at(rhs, t, column)", "total += ZERO"),
    "sdd: last term dropped": ("sdd", "range(lhs.shape[1])", "range(lhs.shape[1] - 1)"),
    "sdd: last block dropped": (
        "sdd",
        "if number < nnz:\n            row, ",
        "if number < nnz - 1:\n            row, ",
    ),
    "sdd: wrong block row": ("sdd", "row_indices[number] * block + i", "row_indices[0] * block + i"),
    "sdd: wrong expert": ("sdd", "column_indices[number] * block + j", "column_indices[nnz - 1 - number] * block + j"),
    "sdd: blocks transposed": ("sdd", "values[number, i, j] = total", "values[number, j, i] = total"),
    "dense: first part only": (
        "sdd of parts",
        "dense[column // columns, row, column % columns]",
        "dense[0, row, column % columns]",
    ),
    "dense: wrong columns of a transpose": (
        "sdd, rhs transposed",
        "row, column = column, row",
        "row, column = column, row // 2",
    ),
    "dense: parts of a transpose": (
        "dsd, rhs transposed, of parts",
        "dense[column // columns, row, column % columns]",
        "dense[0, row, column % columns]",
    ),
    "dot: last block dropped": (
        "dsd",
        "range(offsets[line], offsets[line + 1])",
        "range(offsets[line], offsets[line + 1] - 1)",
    ),
    "dot: half a block": ("dsd", "for t in range(block):", "for t in range(block // 2):"),
    "dot: blocks transposed": ("dsd", "else values[number, i, t]", "else values[number, t, i]"),
    "dot: blocks of the transpose as they lie": (
        "dsd, lhs transposed",
        "values[number, t, i] if transpose_sparse",
        "values[number, i, t] if transpose_sparse",
    ),
    "dot: no transpose indices": (
        "dsd, lhs transposed",
        "transpose_indices[place] if transpose_sparse",
        "place if transpose_sparse",
    ),
    "dot: wrong rows of the dense matrix": ("dsd", "first = indices[number] * block", "first = line % 2 * block"),
    "dsd: last row dropped": ("dsd", "if row < rows:", "if row < rows - 1:"),
    "dsd: rows for columns": (
        "dsd, lhs transposed",
        "_by_column(topology) if transpose_lhs",
        "_by_row(topology) if transpose_lhs",
    ),
    "dds: last part dropped": ("dds, lhs transposed, into parts", "if part < parts:", "if part < parts - 1:"),
    "dds: first part everywhere": (
        "dds, lhs transposed, into parts",
        "place = part * columns + column",
        "place = column",
    ),
    "dds: no transpose indices": (
        "dds",
        "transpose_indices[place] if transpose_sparse",
        "place if transpose_sparse",
    ),
    "activate: no gate": ("activate", "y *= b[number, i, j]", "pass"),
    "activate: last block dropped": (
        "activate",
        "if number < nnz:\n            y = ",
        "if number < nnz - 1:\n            y = ",
    ),
    "activate backward: d_b stale": ("activate_backward", "d_b[number, i, j] = d_value * act(a_value)", "pass"),
    "activate backward: d_b without act": ("activate_backward", "d_value * act(a_value)", "d_value"),
    "activate backward: slope left out": ("activate_backward", "b[number, i, j] * slope(a_value)", "b[number, i, j]"),
    "activate backward: d_a without b": ("activate_backward", "d_value * b[number, i, j] * slope", "d_value * slope"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    call, right, wrong = FAULTS[fault]
    assert not worst_error(call, INPUTS, planted(block_sparse, right, wrong)) <= BOUND


# What the kernels' headers claim


def header_sizes(shape, block, inputs, call, found):
    """What the symbols of a header stand for in a call that gave ``found``."""
    L, d, h, E, k, _ = shape
    bins, topology = inputs["bins"], inputs["topology"]
    sizes = {"L": L, "d": d, "h": h, "E": E, "k": k, "R": L * k, "P": bins.P, "nnz": topology.nnz, "block": block}
    sizes |= {"THREADS": runtime.THREADS, "G": 2 if inputs["b"] is not None else 1, "W": int("gates" in call)}
    if call.startswith("sdd"):
        sizes["K"] = d
    elif call.startswith("dsd"):
        sizes |= {"M": found.shape[0], "K": found.shape[1], "T": int("lhs" in call or "both" in call)}
    elif call.startswith("dds"):
        sizes |= {"N": found.shape[0] * found.shape[2], "K": found.shape[1]}
    return sizes


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_the_kernels_move_the_bytes_that_their_headers_state(monkeypatch, activation):
    if runtime.EXECUTOR == "cuda":  # only the simulator can count
        return rerun(f"{__file__}::test_the_kernels_move_the_bytes_that_their_headers_state")
    inputs, launched = make_inputs(SMALL, 2, activation), []

    def noted_launch(kernel, blocks, threads, *arguments, shared_bytes=0):
        launched.append((kernel, counted_launch(kernel, blocks, threads, arguments, shared_bytes)))

    monkeypatch.setattr(block_sparse, "launch", noted_launch)
    kernels = []
    for call in CALLS:
        function, arguments = function_and_arguments(call, inputs)
        found = getattr(block_sparse, function)(*arguments)
        sizes = header_sizes(SMALL, 2, inputs, call, found)
        for kernel, counted in launched:
            assert counted == stated_launch(kernel, sizes), (call, kernel.py_func.__doc__)
        kernels += [kernel for kernel, _ in launched]
        launched.clear()
    assert kernels == [
        block_sparse.padded_lengths_kernel,
        dispatch.expert_offsets_kernel,
        block_sparse.mark_padding_kernel,
        block_sparse.place_rows_kernel,
        block_sparse.topology_blocks_kernel,
        block_sparse.topology_offsets_kernel,
        block_sparse.padded_gather_kernel(False),
        block_sparse.padded_gather_kernel(True),
        block_sparse.sum_rows_kernel,
        combine.combine_kernel,
        combine.d_gates_kernel,
        block_sparse.sdd_kernel(False),
        block_sparse.sdd_kernel(False),
        block_sparse.sdd_kernel(True),
        block_sparse.dsd_kernel(False, False),
        block_sparse.dsd_kernel(True, False),
        block_sparse.dsd_kernel(False, True),
        block_sparse.dsd_kernel(True, True),
        block_sparse.dds_kernel(False),
        block_sparse.dds_kernel(True),
        block_sparse.activate_kernel(activation),
        block_sparse.activate_backward_kernel(activation),
    ]


# The checks


def changed(structure, name, index, value):
    """A structure with one entry of one of its arrays changed."""
    array = getattr(structure, name).copy()
    array[index] = value
    return replace(structure, **{name: array})


@pytest.mark.parametrize("call", [call for call in CALLS if call not in ("pad", "build_topology")])
def test_float64_is_refused(call):
    function, arguments = function_and_arguments(call, {name: wide(value) for name, value in INPUTS.items()})
    with pytest.raises(TypeError, match="has dtype float64, but it must be float32"):
        getattr(block_sparse, function)(*arguments)


BINS, TOPOLOGY, NAN = INPUTS["bins"], INPUTS["topology"], np.full_like(INPUTS["a"], np.nan)


@pytest.mark.parametrize(
    ("call", "change", "error", "message"),
    [
        ("pad", {"block": 0}, ValueError, "block is 0, but it must be >= 1"),
        ("pad", {"block": 2.5}, TypeError, r"block is 2.5 \(float\), but it must be an integer"),
        ("pad", {"dispatch": None}, TypeError, "dispatch is a NoneType, but it must be a Dispatch"),
        ("build_topology", {"h": 5}, ValueError, "h is 5, but it must be a multiple of the block size 2"),
        (
            "build_topology",
            {"bins": changed(BINS, "padded_offsets", 1, 3)},
            ValueError,
            r"padded_offsets\[1\] is 3, but it must be a multiple of the block size 2",
        ),
        ("padded_gather", {"bins": changed(BINS, "rows", 3, 99)}, ValueError, r"rows\[3\] is 99"),
        ("padded_gather", {"x": INPUTS["x"][1:]}, ValueError, r"x has shape \(8, 3\), but it must be \(L=9, d\)"),
        ("padded_gather with gates", {"gates": INPUTS["gates"].T}, ValueError, r"gates has shape \(2, 9\)"),
        ("padded_scatter", {"y": INPUTS["y"][1:]}, ValueError, r"y has shape \(19, 3\), but it must be \(P=20, d\)"),
        ("gate_gradient", {"x": INPUTS["x"][:, 1:]}, ValueError, r"d_out has shape \(9, 2\)"),
        ("sdd", {"y": INPUTS["w1"]}, ValueError, r"lhs has shape \(3, 3, 4\), but it must have 2 dimensions"),
        ("sdd", {"wide_rhs": [[1.0]]}, TypeError, "rhs is a list, but it must be an array of float32"),
        (
            "sdd of parts",
            {"w1": INPUTS["w1"][1:]},
            ValueError,
            "rhs has 2 parts of 4 columns, but 12 columns are needed",
        ),
        ("sdd", {"topology": changed(TOPOLOGY, "row_offsets", 1, 99)}, ValueError, r"row_offsets\[2\] is"),
        ("dsd", {"a": NAN}, ValueError, r"values\[0, 0, 0\] is nan"),
        (
            "dsd",
            {"topology": changed(TOPOLOGY, "column_indices", 0, 6)},
            ValueError,
            r"column_indices\[0\] is 6, but there are only 6 block columns",
        ),
        (
            "dsd, lhs transposed",
            {"topology": changed(TOPOLOGY, "transpose_indices", 1, 0)},
            ValueError,
            r"transpose_indices\[1\] is 0, a block of block row 0",
        ),
        ("dsd", {"w3": INPUTS["w3"][1:]}, ValueError, r"rhs has shape \(11, 3\), but it must be \(depth=12"),
        (
            "dds",
            {"y_columns": INPUTS["y_columns"][:, 1:]},
            ValueError,
            r"lhs has shape \(3, 19\), but it must be \(K, M=20\)",
        ),
        ("dds, lhs transposed, into parts", {"E": 4}, ValueError, "parts is 4, but 6 block columns do not fall into 4"),
        ("activate", {"b": None}, ValueError, "b is None, but swiglu is gated: pass b"),
        ("activate", {"activation": "relu"}, ValueError, "relu is not gated: b must be None"),
        ("activate", {"activation": "seglu"}, ValueError, "unknown activation 'seglu'. Did you mean"),
        ("activate", {"b": INPUTS["b"][1:]}, ValueError, r"b has shape \(19, 2, 2\), but it must be \(nnz=20, block=2"),
        ("activate_backward", {"d_y": NAN}, ValueError, r"d_y\[0, 0, 0\] is nan"),
    ],
)
def test_bad_operands_are_refused(call, change, error, message):
    function, arguments = function_and_arguments(call, INPUTS | change)
    with pytest.raises(error, match=message):
        getattr(block_sparse, function)(*arguments)


def test_bad_input_of_the_layer():
    case = SMALL.case().astype(np.float32)
    w1, w2, w3 = case.weights[1:]
    with pytest.raises(ValueError, match="h is 4, but it must be a multiple of the block size 3"):
        block_sparse.forward(case.x, w1, w2, w3, INPUTS["dispatch"], INPUTS["gates"], "swiglu", 3)
