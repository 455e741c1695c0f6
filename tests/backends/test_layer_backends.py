"""The expert stages and the layer as Numba kernels, against the float64 specification on the same float32 numbers."""

import ast
import importlib
import inspect
import re
import types
from pathlib import Path

import numpy as np
import pytest
from helpers import Shape
from simulator import counted_launch, rerun, stated_launch

from moeblaze_ref.backends import numba_cuda
from moeblaze_ref.backends.numba_cuda import activation as activation_stage
from moeblaze_ref.backends.numba_cuda import combine, expert_down, expert_up, layer, router, runtime
from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES, is_gated
from moeblaze_ref.core.contract import bodies
from moeblaze_ref.systems import layer as body
from moeblaze_ref.verify.cases import relative_error
from moeblaze_ref.verify.comparisons import BOUNDS

ON_GPU = runtime.EXECUTOR == "cuda"
SMALL = Shape(13, 7, 6, 3, 2)
# Several tiles of an expert's rows, of d and of h, more columns than threads or nearly; nothing divides anything.
RAGGED = Shape(1027, 97, 203, 7, 3, "zipf") if ON_GPU else SMALL
SHAPES = [
    RAGGED,
    SMALL._replace(L=0),
    SMALL._replace(L=1),
    SMALL._replace(L=7, k=1),
    SMALL._replace(L=5, k=3),  # k = E
    SMALL._replace(L=7, E=1, k=1),
    SMALL._replace(L=11, k=1, routing="hot"),  # one expert gets every token, two get none
    SMALL._replace(L=6, E=4, routing="empty"),
    SMALL._replace(L=3, d=1, h=1),
]

# (stage, function): the names of its arguments
CALLS = {
    ("activation", "act"): ("a", "activation"),
    ("expert_up", "forward"): ("x", "w1", "w2", "dispatch", "activation"),
    ("expert_up", "input_gradient"): ("d_a", "d_b", "w1", "w2", "dispatch"),
    ("expert_up", "weight_gradient"): ("d_a", "x", "dispatch"),
    ("expert_down", "forward"): ("y_swi", "w3", "dispatch"),
    ("expert_down", "hidden_gradients"): ("d_out", "gates", "a", "b", "w3", "dispatch", "activation"),
    ("expert_down", "weight_gradient"): ("y_swi", "d_out", "dispatch"),
    ("combine", "forward"): ("y", "gates", "dispatch"),
    ("combine", "backward"): ("d_out", "y", "gates", "dispatch"),
}
EVERY_CALL = pytest.mark.parametrize("call", CALLS, ids=".".join)


def module(backend, stage):
    """The module of a stage, or of the activation, in a backend's package."""
    return importlib.import_module(f"{BACKENDS[backend].package}.{stage}")


def make_inputs(shape, activation="swiglu"):
    """Operands of every stage by name: float32 numbers of order 1, each operand its own."""
    case = shape.case(activation).astype(np.float32)
    rng = np.random.default_rng(3)
    gated, rows = is_gated(activation), shape.L * shape.k
    inputs = {"x": case.x, "w1": case.weights.w1, "w2": case.weights.w2, "w3": case.weights.w3, "d_out": case.d_out}
    for name in ("a", "b", "y_swi", "d_a", "d_b"):
        numbers = rng.standard_normal((rows, shape.h)).astype(np.float32)
        inputs[name] = numbers if gated or name not in ("b", "d_b") else None
    inputs["y"] = rng.standard_normal((rows, shape.d)).astype(np.float32)
    inputs["gates"] = rng.uniform(0.1, 1.0, (shape.L, shape.k)).astype(np.float32)
    return inputs | {"dispatch": build_by_sort(shape.topk_experts(), shape.E), "activation": activation}


def wide(value):
    """Float arrays as float64, anything else as it is."""
    return value.astype(np.float64) if isinstance(value, np.ndarray) else value


def results(stage, function, arguments):
    """What a function returns, as a tuple, its outputs being poisoned before the launches."""
    with runtime.poisoned_outputs():
        found = getattr(stage, function)(*arguments)
    return found if isinstance(found, tuple) else (found,)


def errors(found, truth):
    """Relative error of each tensor that there is; each is float32 and of the right shape, or None on both sides."""
    assert [array is None for array in found] == [array is None for array in truth]
    pairs = [pair for pair in zip(found, truth, strict=True) if pair[0] is not None]
    assert all(array.dtype == np.float32 for array, _ in pairs)
    return [relative_error(*pair) for pair in pairs]


def worst_error(call, inputs, faulty=None):
    """The largest relative error of a stage's function, or of its faulty twin; NaN wins over every number."""
    stage, function = call
    arguments = [inputs[name] for name in CALLS[call]]
    truth = results(module("numpy", stage), function, map(wide, arguments))
    return np.max(errors(results(faulty or module("numba", stage), function, arguments), truth))


# The stages


@EVERY_CALL
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape(call, shape):
    assert worst_error(call, make_inputs(shape)) <= BOUNDS["float32"]


@pytest.mark.parametrize("call", [call for call, names in CALLS.items() if "activation" in names], ids=".".join)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(call, activation):
    assert worst_error(call, make_inputs(SMALL._replace(L=5), activation)) <= BOUNDS["float32"]


def test_an_ungated_layer_has_no_second_projection():
    inputs = make_inputs(SMALL, "relu2")
    assert worst_error(("expert_up", "input_gradient"), inputs) <= BOUNDS["float32"]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_far_from_zero_do_not_overflow(name):
    far = np.array([[-1e4, -90.0, 90.0, 1e4]], np.float32)
    reached = np.square(far) if name == "relu2" else far
    found = activation_stage.act(far, name)
    np.testing.assert_allclose(found[far > 0], reached[far > 0], rtol=1e-7)
    np.testing.assert_allclose(found[far < 0], 0.0, atol=1e-30)  # not all reach it: exp(-90) is a number


@pytest.mark.parametrize("path", sorted(Path(numba_cuda.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_kernels_are_plain(path):
    """No warp operations and no atomics: a reader needs threads, blocks, shared memory and barriers alone."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cuda"
    }
    assert not [
        name for name in used if re.match("atomic|shfl|syncwarp|ballot|vote|match|warp|lane|active|.*_sync", name)
    ]


def test_the_same_bits_every_time():
    inputs = make_inputs(RAGGED)
    for (stage, function), names in CALLS.items():
        arguments = [inputs[name] for name in names]
        first, again = (results(module("numba", stage), function, arguments) for _ in range(2))
        for one, other in zip(first, again, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_kept_y_swi_is_checked_and_not_read():
    inputs = make_inputs(SMALL)
    arguments = [inputs[name] for name in CALLS["expert_down", "hidden_gradients"]]
    kept = results(expert_down, "hidden_gradients", [*arguments, inputs["y_swi"]])
    for one, other in zip(kept, results(expert_down, "hidden_gradients", arguments), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"y_swi has shape \(25, 6\), but it must be \(R=26, h=6\)"):
        expert_down.hidden_gradients(*arguments, y_swi=inputs["y_swi"][1:])


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_the_gradients_of_a_and_b_may_take_their_places(activation):
    inputs = make_inputs(SMALL, activation)
    arguments = [inputs[name] for name in CALLS["expert_down", "hidden_gradients"]]
    expected = results(expert_down, "hidden_gradients", arguments)
    found = expert_down.hidden_gradients(*arguments, overwrite=True)
    assert found[0] is inputs["a"] and found[1] is inputs["b"]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def strange(array):
    """The same numbers, read-only and with strides that no copy of a block of memory has."""
    spread = np.repeat(array, 2, axis=-1)[..., ::2]
    spread.flags.writeable = False
    return spread


@EVERY_CALL
def test_operands_may_be_strided_and_read_only(call):
    inputs = make_inputs(SMALL)
    odd = {name: strange(value) if isinstance(value, np.ndarray) else value for name, value in inputs.items()}
    stage, function = call
    expected, found = (
        results(module("numba", stage), function, [operands[name] for name in CALLS[call]])
        for operands in (inputs, odd)
    )
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_no_buffer_of_routed_tokens(monkeypatch):
    """Nothing that the expert stages allocate is (R, d), but for y, which the down-projection returns."""
    inputs, shapes = make_inputs(SMALL), {}
    for call, names in CALLS.items():
        stage = module("numba", call[0])
        made = shapes[call] = []
        monkeypatch.setattr(
            stage, "float32_output", lambda shape, made=made: made.append(shape) or runtime.float32_output(shape)
        )
        results(stage, call[1], [inputs[name] for name in names])
    L, d, h, E, k, _ = SMALL
    hidden, weights = (L * k, h), (E, d, h)
    assert shapes["expert_up", "forward"] == [hidden] * 3
    assert shapes["expert_up", "input_gradient"] == [(L, d)]
    assert shapes["expert_up", "weight_gradient"] == [weights]
    assert shapes["expert_down", "forward"] == [(L * k, d)]
    assert shapes["expert_down", "hidden_gradients"] == [hidden, hidden, hidden, (L, k)]
    assert shapes["expert_down", "weight_gradient"] == [(E, h, d)]


# The layer


LAYER = RAGGED if ON_GPU else Shape(6, 5, 6, 3, 2, "zipf")


def run_layer(case, k, policy="minimal", renormalize=False, losses=(0.7, 0.3), stage=layer):
    """(out, both losses and every gradient; what was saved)."""
    with runtime.poisoned_outputs():
        output = stage.forward(case.x, case.weights, k, case.activation, policy, renormalize)
        gradients = stage.backward(case.d_out, output.saved, case.weights, *losses)
    return (*output[:3], *gradients), output.saved


def layer_errors(shape, activation="swiglu", renormalize=True, stage=layer):
    """Relative errors of the layer's results, the choice of experts being the specification's."""
    case = shape.case(activation).astype(np.float32)
    found, saved = run_layer(case, shape.k, renormalize=renormalize, stage=stage)
    exact = case.astype(np.float64)
    truth, expected = run_layer(exact, shape.k, renormalize=renormalize, stage=module("numpy", "layer"))
    np.testing.assert_array_equal(saved.dispatch.token_expert_indices, expected.dispatch.token_expert_indices)
    return errors(found, truth)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_layer_with_every_activation(activation):
    assert np.max(layer_errors(LAYER, activation)) <= BOUNDS["float32"]


@pytest.mark.parametrize("renormalize", [False, True], ids=["softmax", "renormalize"])
@pytest.mark.parametrize("shape", [SMALL._replace(L=1), SMALL._replace(L=0), LAYER._replace(k=3)], ids=str)
def test_the_layer_with_every_shape(shape, renormalize):
    assert np.max(layer_errors(shape, renormalize=renormalize)) <= BOUNDS["float32"]


@pytest.mark.parametrize("activation", ["swiglu", "gelu_tanh", "relu"])
def test_policies_agree_to_the_bit_and_keep_what_the_specification_keeps(activation):
    case = LAYER.case(activation).astype(np.float32)
    first, _ = run_layer(case, LAYER.k)
    for policy in POLICIES:
        found, saved = run_layer(case, LAYER.k, policy)
        for one, other in zip(found, first, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=policy)
        _, expected = run_layer(case, LAYER.k, policy, stage=module("numpy", "layer"))
        assert saved.tensors().keys() == expected.tensors().keys()
        kept = errors(saved.intermediates.values(), expected.intermediates.values())
        assert max(kept, default=0.0) <= BOUNDS["float32"]


# Planted faults: a fault planted in the text of a module must make the comparison fail

# The fault: (stage, function that shows it, what stands in the stage's module, what takes its place)
FAULTS = {
    "act: zeros": ("activation", "act", "nonlinearity(a[row, column])", "ZERO"),
    "act: last row dropped": ("activation", "act", "if row < a.shape[0]:", "if row < a.shape[0] - 1:"),
    "up: zeros": ("expert_up", "forward", "a_sum += x_value", "a_sum += ZERO"),
    "up: x not gathered": (
        "expert_up",
        "forward",
        "x[token, step + column]",
        "x[position % x.shape[0], step + column]",
    ),
    "up: wrong expert": (
        "expert_up",
        "forward",
        "w1[expert, step + row, hidden]",
        "w1[w1.shape[0] - 1 - expert, step + row, hidden]",
    ),
    "up: w1 for w2": ("expert_up", "forward", "w2[expert, step + row, hidden]", "w1[expert, step + row, hidden]"),
    "up: last row dropped": ("expert_up", "forward", "live = position < end", "live = position < end - 1"),
    "up: first tile of rows only": (
        "expert_up",
        "forward",
        "range(expert_token_offsets[expert], end, TILE)",
        "range(expert_token_offsets[expert], min(end, expert_token_offsets[expert] + TILE), TILE)",
    ),
    "up: first tile of d only": ("expert_up", "forward", "range(0, d, TILE)", "range(0, TILE, TILE)"),
    "up: last column dropped": ("expert_up", "forward", "if live and hidden < h:", "if live and hidden < h - 1:"),
    "up: b never written": ("expert_up", "forward", "b[position, hidden] = b_sum", "pass"),
    "up: no gate": ("expert_up", "forward", "act(a_sum) * b_sum", "act(a_sum)"),
    "up: activation of b": ("expert_up", "forward", "act(a_sum) * b_sum", "a_sum * act(b_sum)"),
    "up: rows in token order": (
        "expert_up",
        "forward",
        "y_swi[position, hidden] = act(a_sum) * b_sum",
        "y_swi[(position + 1) % y_swi.shape[0], hidden] = act(a_sum) * b_sum",
    ),
    "d_x: stale": ("expert_up", "input_gradient", "d_x[token, column] = total", "pass"),
    "d_x: last slot dropped": (
        "expert_up",
        "input_gradient",
        "range(token * k, (token + 1) * k)",
        "range(token * k, (token + 1) * k - 1)",
    ),
    "d_x: rows in token order": (
        "expert_up",
        "input_gradient",
        "token_expert_indices[slot], token_index_map[slot]",
        "token_expert_indices[slot], slot",
    ),
    "d_x: wrong expert": (
        "expert_up",
        "input_gradient",
        "token_expert_indices[slot], token_index_map[slot]",
        "token_expert_indices[token * k], token_index_map[slot]",
    ),
    "d_x: without d_b": (
        "expert_up",
        "input_gradient",
        "total += d_b[position, i] * w2[expert, column, i]",
        "total += ZERO",
    ),
    "d_w: first row dropped": (
        "expert_up",
        "weight_gradient",
        "range(expert_token_offsets[expert], expert_token_offsets[expert + 1])",
        "range(expert_token_offsets[expert] + 1, expert_token_offsets[expert + 1])",
    ),
    "d_w: x not gathered": (
        "expert_up",
        "weight_gradient",
        "x[expert_token_indices[position], row]",
        "x[position % x.shape[0], row]",
    ),
    "d_w: next expert's": (
        "expert_up",
        "weight_gradient",
        "d_w[expert, row, column] = total",
        "d_w[(expert + 1) % num_experts, row, column] = total",
    ),
    "down: wrong expert": (
        "expert_down",
        "forward",
        "w3[expert, i, column]",
        "w3[w3.shape[0] - 1 - expert, i, column]",
    ),
    "down: rows in token order": ("expert_down", "forward", "y[position, column] = total", "y[slot, column] = total"),
    "down: last input dropped": ("expert_down", "forward", "range(y_swi.shape[1])", "range(y_swi.shape[1] - 1)"),
    "down: last row dropped": ("expert_down", "forward", "if slot < num_routed:", "if slot < num_routed - 1:"),
    "hidden: gate left out of d_a": ("expert_down", "hidden_gradients", "d_y = gate * d_ungated", "d_y = d_ungated"),
    "hidden: gate left out of gate * y_swi": ("expert_down", "hidden_gradients", "= gate * y", "= y"),
    "hidden: gate of another slot": (
        "expert_down",
        "hidden_gradients",
        "gate = gates[token, j]",
        "gate = gates[token, gates.shape[1] - 1 - j]",
    ),
    "hidden: gate's gradient with the gate": (
        "expert_down",
        "hidden_gradients",
        "share += d_ungated * y",
        "share += d_y * y",
    ),
    "hidden: gate's gradient of one thread": ("expert_down", "hidden_gradients", "half = THREADS // 2", "half = 0"),
    "hidden: gate's gradient without its last threads": (
        "expert_down",
        "hidden_gradients",
        "half = THREADS // 2",
        "half = THREADS // 4",
    ),
    "hidden: d_out not gathered": (
        "expert_down",
        "hidden_gradients",
        "d_out[token, i]",
        "d_out[position % d_out.shape[0], i]",
    ),
    "hidden: wrong expert": (
        "expert_down",
        "hidden_gradients",
        "w3[expert, hidden, i]",
        "w3[w3.shape[0] - 1 - expert, hidden, i]",
    ),
    "hidden: slope left out": ("expert_down", "hidden_gradients", "d_y * b_value * slope(a_value)", "d_y * b_value"),
    "hidden: y_swi without b": ("expert_down", "hidden_gradients", "y *= b_value", "pass"),
    "hidden: one block of columns": (
        "expert_down",
        "hidden_gradients",
        "range(thread, a.shape[1], THREADS)",
        "range(thread, min(a.shape[1], THREADS - 3), THREADS)",
    ),
    "hidden: rows in token order": (
        "expert_down",
        "hidden_gradients",
        "token_expert_indices[slot], token_index_map[slot]\n        gate",
        "token_expert_indices[slot], slot\n        gate",
    ),
    "hidden: d_b stale": ("expert_down", "hidden_gradients", "d_b[position, hidden] = d_y * y", "pass"),
    "d_w3: d_out not gathered": (
        "expert_down",
        "weight_gradient",
        "d_out[expert_token_indices[position], column]",
        "d_out[position % d_out.shape[0], column]",
    ),
    "d_w3: last row dropped": (
        "expert_down",
        "weight_gradient",
        "range(expert_token_offsets[expert], expert_token_offsets[expert + 1])",
        "range(expert_token_offsets[expert], expert_token_offsets[expert + 1] - 1)",
    ),
    "combine: gate left out": ("combine", "forward", "gates[token, j] * y[", "y["),
    "combine: last slot dropped": ("combine", "forward", "for j in range(k):", "for j in range(k - 1):"),
    "combine: rows in token order": (
        "combine",
        "forward",
        "y[token_index_map[token * k + j], column]",
        "y[token * k + j, column]",
    ),
    "combine: last token dropped": ("combine", "forward", "if token < num_tokens:", "if token < num_tokens - 1:"),
    "d_y: gate left out": ("combine", "backward", "gates[token, j] * d_out[token, column]", "d_out[token, column]"),
    "d_y: rows in token order": ("combine", "backward", "d_y[token_index_map[slot], column]", "d_y[slot, column]"),
    "d_gates: rows in token order": ("combine", "backward", "slot // k, token_index_map[slot]", "slot // k, slot"),
    "d_gates: last column dropped": (
        "combine",
        "backward",
        "for column in range(y.shape[1]):",
        "for column in range(y.shape[1] - 1):",
    ),
}


def planted(stage, right, wrong):
    """A module with a fault in its text."""
    text = inspect.getsource(stage)
    assert right in text, f"{stage.__name__} no longer holds {right!r}: update the fault"
    faulty = types.ModuleType(stage.__name__)
    exec(compile(text.replace(right, wrong), stage.__name__, "exec"), vars(faulty))
    return faulty


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    stage, function, right, wrong = FAULTS[fault]
    error = worst_error((stage, function), make_inputs(RAGGED), planted(module("numba", stage), right, wrong))
    assert not error <= BOUNDS["float32"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_slope_of_another_activation_is_caught(activation, monkeypatch):
    act, _ = expert_down.NONLINEARITY[activation]
    _, other = expert_down.NONLINEARITY["relu" if activation in ("silu", "swiglu") else "silu"]
    monkeypatch.setitem(expert_down.NONLINEARITY, activation, (act, other))
    expert_down.d_hidden_kernel.cache_clear()
    try:
        inputs = make_inputs(SMALL._replace(L=5), activation)
        assert not worst_error(("expert_down", "hidden_gradients"), inputs) <= BOUNDS["float32"]
    finally:
        expert_down.d_hidden_kernel.cache_clear()


LAYER_FAULTS = {
    "d_x without the router's share": ("layer", "d_x += d_x_router", "d_x_router"),
    "gates not renormalised in the backward": ("layer", "chosen, saved.renormalize,", "chosen, False,"),
    "no balancing loss": ("layer", "renormalize, *d_losses)", "renormalize, 1.0, d_router_z_loss)"),
    "no z-loss": ("layer", "renormalize, *d_losses)", "renormalize, d_load_balancing_loss, 1.0)"),
    "d_wg of other tokens": ("router", "_matmul(x.T, d_logits)", "_matmul(x.T, d_logits[::-1])"),
    "matmul: last row dropped": ("router", "if row < rows:", "if row < rows - 1:"),
    "matmul: last term dropped": ("router", "range(left.shape[1])", "range(left.shape[1] - 1)"),
}


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_a_fault_planted_in_the_layer_is_caught(fault, monkeypatch):
    where, right, wrong = LAYER_FAULTS[fault]
    if where == "router":
        faulty = planted(module("numba", "router"), right, wrong)
        stages = layer._stages()._replace(router=bodies(body.RouterStage, faulty))
        monkeypatch.setattr(layer, "_stages", lambda: stages)
    else:
        faulty = planted(body, right, wrong)
        faulty.Saved = body.Saved  # which the checks know
        monkeypatch.setattr(layer, "layer", faulty)
    try:
        error = np.max(layer_errors(LAYER))
    except (AssertionError, ValueError):  # another choice of experts; a poisoned value in a check
        return
    assert not error <= BOUNDS["float32"]


# What the kernels' headers claim


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
def test_the_kernels_move_the_bytes_that_their_headers_state(monkeypatch, activation):
    if ON_GPU:  # only the simulator can count
        return rerun(f"{__file__}::test_the_kernels_move_the_bytes_that_their_headers_state")
    inputs, launched = make_inputs(SMALL, activation), []
    L, d, h, E, k, _ = SMALL
    lengths = np.diff(inputs["dispatch"].expert_token_offsets)
    sizes = {"L": L, "d": d, "h": h, "E": E, "k": k, "R": L * k, "THREADS": runtime.THREADS, "TILE": expert_up.TILE}
    sizes |= {"G": 2 if is_gated(activation) else 1, "C": -(-h // expert_up.TILE)}
    sizes["tiles"] = int((-(-lengths // expert_up.TILE)).sum())
    assert E < sizes["tiles"] and sizes["C"] == 2

    def checked_launch(kernel, blocks, threads, *arguments, shared_bytes=0):
        counted = counted_launch(kernel, blocks, threads, arguments, shared_bytes)
        assert counted == stated_launch(kernel, sizes), kernel.py_func.__doc__
        launched.append(kernel)

    for (stage, function), names in CALLS.items():
        monkeypatch.setattr(module("numba", stage), "launch", checked_launch)
        results(module("numba", stage), function, [inputs[name] for name in names])
    assert launched == [
        activation_stage.act_kernel(activation),
        expert_up.expert_up_kernel(activation),
        expert_up.d_x_kernel(is_gated(activation)),
        expert_up.d_w_kernel,
        expert_down.expert_down_kernel,
        expert_down.d_hidden_kernel(activation),
        expert_down.d_w3_kernel,
        combine.combine_kernel,
        combine.d_y_kernel,
        combine.d_gates_kernel,
    ]


def test_the_matmul_moves_the_bytes_that_its_header_states(monkeypatch):
    if ON_GPU:
        return rerun(f"{__file__}::test_the_matmul_moves_the_bytes_that_its_header_states")
    launched = []
    monkeypatch.setattr(
        router,
        "launch",
        lambda kernel, *launch, shared_bytes=0: launched.append(
            (counted_launch(kernel, *launch[:2], launch[2:], shared_bytes), stated_launch(kernel, sizes))
        ),
    )
    sizes = {"m": 5, "n": 3, "p": 4, "THREADS": runtime.THREADS}
    left, right = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in ((5, 4), (4, 3)))
    assert relative_error(router.forward(left, right), wide(left) @ wide(right)) <= BOUNDS["float32"]
    ((counted, stated),) = launched
    assert counted == stated


# The checks


INPUTS = make_inputs(SMALL)


@EVERY_CALL
def test_float64_is_refused(call):
    stage, function = call
    arguments = [wide(INPUTS[name]) for name in CALLS[call]]
    with pytest.raises(TypeError, match="has dtype float64, but it must be float32"):
        getattr(module("numba", stage), function)(*arguments)


@pytest.mark.parametrize(
    ("call", "change", "error", "message"),
    [
        (("expert_up", "forward"), {"w2": None}, ValueError, "w2 is None, but swiglu is gated"),
        (
            ("expert_up", "forward"),
            {"x": INPUTS["x"][:-1]},
            ValueError,
            r"x has shape \(12, 7\), but it must be \(L=13, d\)",
        ),
        (("expert_up", "input_gradient"), {"d_b": None}, ValueError, "d_b is None, but the layer is gated"),
        (
            ("expert_down", "forward"),
            {"w3": INPUTS["w1"]},
            ValueError,
            r"w3 has shape \(3, 7, 6\), but it must be \(E=3, h=6, d\)",
        ),
        (("expert_down", "hidden_gradients"), {"gates": INPUTS["gates"].T}, ValueError, r"gates has shape \(2, 13\)"),
        (("expert_down", "hidden_gradients"), {"activation": "gelu"}, ValueError, "gelu is not gated: b must be None"),
        (("combine", "forward"), {"y": np.full_like(INPUTS["y"], np.nan)}, ValueError, r"y\[0, 0\] is nan"),
        (("combine", "backward"), {"d_out": INPUTS["x"][:, 1:]}, ValueError, r"d_out has shape \(13, 6\)"),
        (("combine", "forward"), {"dispatch": None}, TypeError, "dispatch is a NoneType, but it must be a Dispatch"),
        (("activation", "act"), {"activation": "seglu"}, ValueError, "unknown activation 'seglu'. Did you mean"),
    ],
)
def test_bad_operands_are_refused(call, change, error, message):
    stage, function = call
    with pytest.raises(error, match=message):
        getattr(module("numba", stage), function)(*((INPUTS | change)[name] for name in CALLS[call]))


CASE = SMALL.case().astype(np.float32)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": wide(CASE.x)}, TypeError, "x has dtype float64, but it must be float32"),
        ({"weights": tuple(CASE.weights)}, TypeError, "weights is a tuple, but it must be a MoEWeights"),
        ({"weights": CASE.weights._replace(w3=CASE.weights.w1)}, ValueError, r"w3 has shape \(3, 7, 6\)"),
        ({"policy": "minimum"}, ValueError, "unknown policy 'minimum'. Did you mean 'minimal'"),
        ({"activation": "relu"}, ValueError, "relu is not gated: w2 must be None"),
        ({"k": 4}, ValueError, "k is 4, but there are only 3 experts"),
    ],
)
def test_bad_input_of_the_layer(change, error, message):
    with pytest.raises(error, match=message):
        layer.forward(**({"x": CASE.x, "weights": CASE.weights, "k": 2} | change))
