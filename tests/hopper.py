"""The kernels of the rungs 4_hopper, each launched on inputs of its own, and what numpy_ref says of them.

Their arguments on both executors: who wires them into the stages must pass the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moeblaze_ref.cases import Case, relative_error
from moeblaze_ref.comparisons import BOUNDS
from moeblaze_ref.numpy_ref import activation as reference_activation
from moeblaze_ref.numpy_ref import expert_down, expert_up
from moeblaze_ref.numpy_ref.dispatch import build_by_sort, expert_groups
from moeblaze_ref.raw_cuda import gemm
from moeblaze_ref.raw_cuda.runtime import Executor, ceil_div
from moeblaze_ref.raw_cuda.runtime.tensor_map import TensorMap
from moeblaze_ref.structures import Dispatch

THREADS = 3 * 128
TILE_COLUMNS = 256  # hopper_gemm.cuh
STAGES, STAGE_BYTES = 4, (128 + 256) * 64 * 2
SPARE_BYTES = 1024 + 64  # to begin at a multiple of 1024, and the barriers

# Boxes of the operands: 64 elements along their rows, and how many rows a tile has of the depth or across it.
ROWS = 64, 128  # of activations, the depth along the rows
DEPTH = 64, 64  # of activations, the rows being the depth
WEIGHTS = 64, 64, 1  # the rows being the depth
WEIGHTS_TRANSPOSED = 64, 256, 1  # the depth along the rows

ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place


@dataclass(frozen=True)
class Inputs:
    """What the six kernels take, rounded to one dtype; the hidden gradients and gated_y are numpy_ref's."""

    case: Case
    dispatch: Dispatch
    gate_of_row: np.ndarray
    hidden: dict[str, np.ndarray]

    @classmethod
    def make(cls, case: Case, dtype: str) -> "Inputs":
        """Those of a case; the gates are random."""
        case, dispatch = case.astype(dtype), build_by_sort(case.topk_experts, case.E)
        wide, gate_of_row = case.astype("float64"), np.random.default_rng(1).random(dispatch.R, np.float32)
        hidden = dict(zip(("a", "b", "y_swi"), _up(wide, dispatch), strict=True))
        hidden = {name: None if array is None else array.astype(dtype) for name, array in hidden.items()}
        found = _gradients(wide, dispatch, gate_of_row, hidden["a"], hidden["b"])
        gradients = {name: None if found[name] is None else found[name].astype(dtype) for name in GRADIENTS}
        return cls(case, dispatch, gate_of_row, hidden | gradients)

    @property
    def sizes(self) -> dict[str, int]:
        """d, h and E."""
        E, d, h = self.case.weights.w1.shape
        return {"d": d, "h": h, "E": E}


GRADIENTS = ("d_a", "d_b", "gated_y")


def _up(wide, dispatch):
    return expert_up.forward(wide.x, wide.weights.w1, wide.weights.w2, dispatch, wide.activation)


def _gradients(wide, dispatch, gate_of_row, a, b):
    """Everything that d_hidden finds, in float64."""
    a, b = a.astype(np.float64), None if b is None else b.astype(np.float64)
    gate, y = gate_of_row[:, None].astype(np.float64), reference_activation.forward(a, b, wide.activation)
    d_ungated = np.empty_like(a)  # (R, h)
    for expert, group, tokens in expert_groups(dispatch):
        d_ungated[group] = wide.d_out[tokens] @ wide.weights.w3[expert].T
    d_a, d_b = reference_activation.backward(gate * d_ungated, a, b, wide.activation)
    return {"d_a": d_a, "d_b": d_b, "gated_y": gate * y, "gate": (d_ungated * y).sum(axis=1)}


class Launch:
    """One launch: puts arrays where the executor's kernels can take them, and brings the outputs back."""

    def __init__(self, executor: Executor, module, blocks: int, inputs: Inputs):
        self.executor, self.module, self.blocks, self.inputs = executor, module, blocks, inputs
        self._placed = {}

    def array(self, array: np.ndarray | None):
        """The array on the executor; the same place each time. None is an empty one."""
        if id(array) not in self._placed:
            host = np.empty(0, self.inputs.case.x.dtype) if array is None else array
            self._placed[id(array)] = self.executor.from_numpy(np.ascontiguousarray(host))
        return self._placed[id(array)]

    def map(self, array: np.ndarray | None, box: tuple[int, ...], instead: np.ndarray) -> TensorMap:
        """A tensor map of the array, or, for an operand that ungated activations have not, of another."""
        return TensorMap(self.array(instead if array is None else array), box)

    def out(self, *shape: int, dtype: str | None = None):
        """A poisoned output."""
        return self.executor.empty(shape, dtype or str(self.inputs.case.x.dtype))

    def __call__(self, kernel: str, outputs: dict, **arguments) -> dict[str, np.ndarray]:
        """Run the kernel; the outputs, as numpy arrays."""
        sizes = self.inputs.sizes
        shared_bytes = SPARE_BYTES + STAGES * STAGE_BYTES + 8 * (sizes["E"] + 1)
        self.module.launch(kernel, self.blocks, THREADS, shared_bytes, **arguments, **outputs, **sizes)
        return {name: self.executor.to_numpy(array) for name, array in outputs.items()}

    @property
    def indices(self) -> dict:
        """The lists of the dispatch that kernels take."""
        dispatch = self.inputs.dispatch
        names = "expert_token_indices", "expert_token_offsets"
        return {name: self.array(getattr(dispatch, name)) for name in names}


def run_expert_up(launch, inputs, d, h, E):
    weights, R = inputs.case.weights, inputs.dispatch.R
    maps = {"w1": launch.map(weights.w1, WEIGHTS, weights.w1), "w2": launch.map(weights.w2, WEIGHTS, weights.w1)}
    outputs = {name: launch.out(R, h) for name in ("a", "b", "y_swi")}
    found = launch("expert_up", outputs, x=launch.array(inputs.case.x), **maps, **launch.indices)
    return {name: found[name] for name in found if inputs.hidden[name] is not None}


def run_d_x_rows(launch, inputs, d, h, E):
    weights, hidden = inputs.case.weights, inputs.hidden
    maps = {
        "d_a": launch.map(hidden["d_a"], ROWS, hidden["d_a"]),
        "d_b": launch.map(hidden["d_b"], ROWS, hidden["d_a"]),
        "w1": launch.map(weights.w1, WEIGHTS_TRANSPOSED, weights.w1),
        "w2": launch.map(weights.w2, WEIGHTS_TRANSPOSED, weights.w1),
    }
    offsets = {"expert_token_offsets": launch.indices["expert_token_offsets"]}
    return launch("d_x_rows", {"rows": launch.out(inputs.dispatch.R, d)}, **maps, **offsets)


def run_d_w(launch, inputs, d, h, E):
    d_a = inputs.hidden["d_a"]
    given = {"d_hidden_map": launch.map(d_a, DEPTH, d_a), "d_hidden": launch.array(d_a)}
    return launch("d_w", {"d_w": launch.out(E, d, h)}, **given, x=launch.array(inputs.case.x), **launch.indices)


def run_expert_down(launch, inputs, d, h, E):
    y_swi, w3 = inputs.hidden["y_swi"], inputs.case.weights.w3
    maps = {"y_swi": launch.map(y_swi, ROWS, y_swi), "w3": launch.map(w3, WEIGHTS, w3)}
    offsets = {"expert_token_offsets": launch.indices["expert_token_offsets"]}
    return launch("expert_down", {"y": launch.out(inputs.dispatch.R, d)}, **maps, **offsets)


def run_d_hidden(launch, inputs, d, h, E):
    hidden, w3, R = inputs.hidden, inputs.case.weights.w3, inputs.dispatch.R
    given = {name: launch.array(hidden[name]) for name in ("a", "b")}
    given |= {"d_out": launch.array(inputs.case.d_out), "w3": launch.map(w3, WEIGHTS_TRANSPOSED, w3)}
    outputs = {name: launch.out(R, h) for name in GRADIENTS}
    outputs["gate_terms"] = launch.out(R, ceil_div(h, TILE_COLUMNS), dtype="float32")
    gate_of_row = launch.array(inputs.gate_of_row)
    found = launch("d_hidden", outputs, gate_of_row=gate_of_row, **given, **launch.indices)
    found = {name: array for name, array in found.items() if hidden.get(name, array) is not None}
    return found | {"gate_terms": found["gate_terms"].sum(axis=1)}


def run_d_w3(launch, inputs, d, h, E):
    gated_y = inputs.hidden["gated_y"]
    given = {"gated_y_map": launch.map(gated_y, DEPTH, gated_y), "gated_y": launch.array(gated_y)}
    outputs = {"d_w3": launch.out(E, h, d)}
    return launch("d_w3", outputs, **given, d_out=launch.array(inputs.case.d_out), **launch.indices)


@dataclass(frozen=True)
class Kernel:
    """Where a kernel is, and how it is launched."""

    stage: str
    run: Callable


KERNELS = {
    "expert_up": Kernel("expert_up", run_expert_up),
    "d_x_rows": Kernel("expert_up", run_d_x_rows),
    "d_w": Kernel("expert_up", run_d_w),
    "expert_down": Kernel("expert_down", run_expert_down),
    "d_hidden": Kernel("expert_down", run_d_hidden),
    "d_w3": Kernel("expert_down", run_d_w3),
}


def constants(case: Case) -> dict[str, str | int]:
    """Preprocessor constants of both files."""
    return gemm.constants(case.x, case.activation)


def found(kernel: str, inputs: Inputs, executor: Executor, blocks: int, text: str | None = None):
    """{output: array} of a launch of the kernel, or of ``text`` in the place of its file."""
    stage, run = KERNELS[kernel].stage, KERNELS[kernel].run
    module = executor.load(f"{stage}/4_hopper.cu", text=text, **constants(inputs.case))
    return run(Launch(executor, module, blocks, inputs), inputs, **inputs.sizes)


def expected(kernel: str, inputs: Inputs):
    """{output: array} in float64, by numpy_ref, from the same inputs."""
    wide, dispatch = inputs.case.astype("float64"), inputs.dispatch
    hidden = {name: None if array is None else array.astype(np.float64) for name, array in inputs.hidden.items()}
    match kernel:
        case "expert_up":
            a, b, _ = _up(wide, dispatch)
            y_swi = reference_activation.forward(hidden["a"], hidden["b"], wide.activation)  # of a and b as stored
            return {name: array for name, array in (("a", a), ("b", b), ("y_swi", y_swi)) if array is not None}
        case "expert_down":
            return {"y": expert_down.forward(hidden["y_swi"], wide.weights.w3, dispatch)}
        case "d_hidden":
            by_name = _gradients(wide, dispatch, inputs.gate_of_row, hidden["a"], hidden["b"])
            by_name["gate_terms"] = by_name.pop("gate")
            return {name: array for name, array in by_name.items() if array is not None}
        case "d_x_rows":
            return {"rows": _routed_input_gradients(wide.weights, dispatch, hidden["d_a"], hidden["d_b"])}
        case "d_w":
            return {"d_w": _by_expert(wide.x, hidden["d_a"], dispatch, gathered_first=True)}
        case "d_w3":
            return {"d_w3": _by_expert(wide.d_out, hidden["gated_y"], dispatch, gathered_first=False)}


def _routed_input_gradients(weights, dispatch, d_a, d_b):
    rows = np.empty((dispatch.R, weights.w1.shape[1]))  # (R, d)
    for expert, group, _ in expert_groups(dispatch):
        rows[group] = d_a[group] @ weights.w1[expert].T
        if d_b is not None:
            rows[group] += d_b[group] @ weights.w2[expert].T
    return rows


def _by_expert(by_token, by_row, dispatch, gathered_first):
    """One product over each expert's rows: of gathered rows and those in expert order, or the other way round."""
    products = np.zeros((dispatch.E, by_token.shape[1], by_row.shape[1]))
    for expert, group, tokens in expert_groups(dispatch):
        products[expert] = by_token[tokens].T @ by_row[group]
    return products if gathered_first else products.transpose(0, 2, 1)


def bounds(inputs: Inputs) -> dict[str, float]:
    """The relative error that each output may have: that of its one rounding."""
    names = "a", "b", "y_swi", "y", "rows", "d_w", "d_w3", *GRADIENTS
    return dict.fromkeys(names, ROUNDING[str(inputs.case.x.dtype)]) | {"gate_terms": BOUNDS["float32"]}


def errors(kernel: str, inputs: Inputs, executor: Executor, blocks: int, text: str | None = None) -> dict[str, float]:
    """{output: relative error}."""
    arrays, exact = found(kernel, inputs, executor, blocks, text), expected(kernel, inputs)
    assert arrays.keys() == exact.keys()
    return {name: relative_error(arrays[name], exact[name]) for name in exact}
