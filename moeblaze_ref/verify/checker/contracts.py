"""Contracts of the tasks: the inputs of a reader's kernel, and the outputs that it must write.

Those of a stage's function come from `core.stage_contracts`; the steps of block_sparse are kernels alone.

A task is a stage, or a stage and one of its steps or gradients: ``expert_up``, ``expert_up.d_x``.
Tensors and sizes have the project's names, by which a kernel's parameters are matched, so their
order is free and a kernel declares only what it needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation, block_sparse, combine, dispatch, expert_down, expert_up, gating
from moeblaze_ref.core import checks, stage_contracts
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.contract import DTYPE, INT32, ROUTING, Structure, Tensor, Value
from moeblaze_ref.core.contract import Contract as FunctionContract
from moeblaze_ref.core.structures import Dispatch, PaddedBins
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import Case

SIZES = ("L", "d", "h", "E", "k", "R")
BLOCK_SIZES = ("P", "nnz", "side", "wide")  # of block_sparse: padded rows, stored blocks, their side, blocks along h
ROUTES = ("expert_token_indices", "expert_token_offsets", "token_expert_indices", "token_index_map")
SLOT_ORDER = ROUTES[2:]  # (R,) as (L, k), row-major; other (R, ...) are in expert order

# Every tensor that a kernel may meet: those of the stages' contracts, the index structures, and what only kernels have.
_STATED = stage_contracts.tensors()
_OF_KERNELS = dict.fromkeys(("d_load_balancing_loss", "d_router_z_loss"), "1")
_OF_KERNELS |= {"gate_of_row": "R", "gate_terms": "R h", "shares": "E"}  # float32
_INDICES = dict.fromkeys(ROUTES, "R") | {"expert_token_offsets": "E+1"}
_INDICES |= dict.fromkeys(("column_indices", "row_indices", "transpose_indices"), "nnz")
_INDICES |= {"padded_offsets": "E+1", "row_offsets": "M+1", "column_offsets": "N+1"}  # M and N: block rows and columns
_OF_BLOCKS = {"values": "nnz side side", "padded_x": "P d", "padded_y": "P d"}
_SHAPES = {name: tensor.axes for name, tensor in _STATED.items()} | _OF_KERNELS | _INDICES | _OF_BLOCKS
AXES = {name: tuple(shape.split()) for name, shape in _SHAPES.items()}
_KINDS = {DTYPE: "Scalar", ROUTING: "float", INT32: "int"}  # Scalar is the dtype under test
HOLDS = {name: _KINDS[tensor.kind] for name, tensor in _STATED.items()}
HOLDS |= dict.fromkeys(_OF_KERNELS, "float") | dict.fromkeys(_INDICES, "int") | dict.fromkeys(_OF_BLOCKS, "Scalar")
OF_A_GATE = ("b", "d_b")  # outputs that an ungated activation lacks

Arrays = dict[str, np.ndarray]


def dtype_of(name: str, dtype: str) -> str:
    """dtype of a tensor when ``dtype`` is under test."""
    return {"Scalar": dtype, "float": "float32", "int": "int32"}[HOLDS[name]]


@dataclass(frozen=True)
class Contract:
    """Contract of one task: the inputs of its kernel, and the outputs."""

    task: str  #: the stage, or the stage, a dot and its step
    purpose: str
    inputs: tuple[str, ...]  #: names in `AXES`; a kernel may leave some out
    outputs: tuple[str, ...]  #: names in `AXES`; each must be written
    grid: str  #: formula of the grid, in blocks of THREADS threads, unless the kernel states another one
    #: From the inputs in float64 (by name, with the dispatch, k, activation and renormalize) to the outputs by name, by
    #: the specification; None where the activation has no such tensor.
    expect: Callable[[SimpleNamespace], Arrays]
    extras: tuple[str, ...] = ()  #: outputs that a kernel may leave out

    @property
    def stage(self) -> str:
        """The stage that the task belongs to."""
        return self.task.partition(".")[0]

    @property
    def writes(self) -> tuple[str, ...]:
        """All outputs, the optional ones last."""
        return self.outputs + self.extras

    @property
    def tensors(self) -> tuple[str, ...]:
        """Inputs, then outputs."""
        return self.inputs + self.writes

    @property
    def has_dtype(self) -> bool:
        """Return True if some tensor has the dtype under test."""
        return any(HOLDS[name] == "Scalar" for name in self.tensors)

    @property
    def known_sizes(self) -> tuple[str, ...]:
        """The sizes that its kernel may take."""
        return SIZES + BLOCK_SIZES if self.stage == "block_sparse" else SIZES

    @property
    def sizes(self) -> tuple[str, ...]:
        """The sizes that its shapes are made of; all sizes of blocks, if it has any."""
        symbols = {symbol for name in self.tensors for symbol in AXES[name]} | {*BLOCK_SIZES}
        return tuple(size for size in self.known_sizes if size in symbols or f"{size}+1" in symbols)


@dataclass(frozen=True, eq=False)
class Problem:
    """One case of one contract: the inputs and the expected outputs."""

    contract: Contract
    case: Case  #: already rounded to the dtype under test
    dispatch: Dispatch
    bins: PaddedBins | None  #: of the stage block_sparse alone
    inputs: Arrays  #: those of the contract that the activation has

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the contract's ``known_sizes``, by name."""
        _, d, h = self.case.weights.w1.shape
        sizes = dict(zip(SIZES, (self.case.L, d, h, self.case.E, self.case.k, self.dispatch.R), strict=True))
        return sizes | (_block_sizes(self.bins, h) if self.bins else {})

    @property
    def extents(self) -> dict[str, int]:
        """The length of each axis, by its symbol in `AXES`."""
        extents = self.sizes | {"E+1": self.case.E + 1, "1": 1}
        if self.bins:
            extents |= {"M+1": self.bins.P // self.bins.block + 1, "N+1": self.case.E * extents["wide"] + 1}
        return extents

    @property
    def outputs(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the outputs that the activation has, by name."""
        extents = self.extents
        absent = () if is_gated(self.case.activation) else OF_A_GATE
        return {
            name: tuple(extents[axis] for axis in AXES[name]) for name in self.contract.writes if name not in absent
        }

    @cached_property
    def expected(self) -> Arrays:
        """The outputs by the specification, in float64 or int32. Computed when first asked for: after the launches."""
        exact = {name: a if a.dtype == np.int32 else a.astype(np.float64) for name, a in self.inputs.items()}
        absent = dict.fromkeys(self.contract.inputs)
        given = SimpleNamespace(**absent | exact, dispatch=self.dispatch, bins=self.bins, **self.sizes)
        given.activation, given.renormalize = self.case.activation, self.case.renormalize
        return {name: array for name, array in self.contract.expect(given).items() if array is not None}


def find_contract(task: str) -> Contract:
    """The contract of a task.

    Raises
    ------
    ValueError
        If there is no such task; the message proposes the nearest one, or the steps of a stage without one kernel.
    """
    steps = [name for name in CONTRACTS if name.startswith(f"{task}.")]
    if steps and task not in CONTRACTS:
        raise ValueError(f"no one kernel does all of {task}: check one of {', '.join(steps)}")
    return CONTRACTS[checks.check_name("task for one kernel", task, CONTRACTS)]


def set_problem(contract: Contract, case: Case) -> Problem:
    """The inputs that `moeblaze_ref.verify.check` would use for this case."""
    routes = dispatch.build_by_sort(case.topk_experts, case.E)
    tensors, bins = _tensors(case, routes), None
    if contract.stage == "block_sparse":
        bins = block_sparse.pad(routes, comparisons.block_of(case))
        tensors |= _block_tensors(case, bins, routes)
    inputs = {name: tensor for name in contract.inputs if (tensor := tensors[name]) is not None}
    return Problem(contract, case, routes, bins, inputs)


def _block_sizes(bins: PaddedBins, h: int) -> dict[str, int]:
    wide = h // bins.block
    return {"P": bins.P, "nnz": bins.P // bins.block * wide, "side": bins.block, "wide": wide}


def _block_tensors(case: Case, bins: PaddedBins, routes: Dispatch) -> Arrays:
    """The inputs of block_sparse; the stored blocks hold y_swi (R, h), and zeros in padding."""
    _, _, y_swi, _ = comparisons.hidden(case)
    h, block = y_swi.shape[1], bins.block
    padded = np.zeros((bins.P, h), y_swi.dtype)
    padded[bins.rows] = y_swi[routes.token_index_map]
    blocks = padded.reshape(bins.P // block, block, h // block, block).transpose(0, 2, 1, 3)
    values = np.array(blocks, order="C").reshape(-1, block, block)
    padded_x = block_sparse.padded_gather(case.x, bins)
    topology = block_sparse.build_topology(bins, h).arrays()
    return topology | {"padded_offsets": bins.padded_offsets, "values": values, "padded_x": padded_x}


def _tensors(case: Case, routes: Dispatch) -> dict[str, np.ndarray | None]:
    """Every input of every contract; C-contiguous, none a view of another."""
    a, b, y_swi, gates = comparisons.hidden(case)
    d_a, d_b = comparisons.d_hidden(case)
    gate_of_row = np.empty(routes.R, np.float32)  # (R,)
    gate_of_row[routes.token_index_map] = gates.ravel()
    gated_y = (gate_of_row[:, None] * y_swi.astype(np.float64)).astype(y_swi.dtype)  # (R, h)
    dense_map = dispatch.dense_map(case.topk_experts, case.E)
    tensors = routes.arrays() | {
        "logits": case.logits, "topk_experts": case.topk_experts,
        "shares": (np.diff(routes.expert_token_offsets) / max(routes.R, 1)).astype(np.float32),
        "d_load_balancing_loss": np.array([0.7 + case.step], np.float32),
        "d_router_z_loss": np.array([-0.2 - case.step], np.float32),
        "gates": gates, "d_gates": comparisons.d_gates(case), "gate_of_row": gate_of_row,
        "dense_map": dense_map, "lengths": dispatch.expert_lengths(dense_map),
        "x": case.x, "w1": case.weights.w1, "w2": case.weights.w2, "w3": case.weights.w3, "d_out": case.d_out,
        "a": a, "b": b, "y_swi": y_swi, "d_a": d_a, "d_b": d_b, "d_hidden": d_a, "gated_y": gated_y,
        "y": comparisons.expert_output(case),
    }  # fmt: skip
    return {name: None if array is None else np.array(array, order="C") for name, array in tensors.items()}


# ---- what the specification makes of the inputs --------------------------------------------


def _gating_backward(given):
    routing = given.d_gates, given.logits, given.topk_experts, given.renormalize
    return {"d_logits": gating.backward(*routing, given.d_load_balancing_loss[0], given.d_router_z_loss[0])}


def _dense_map(given):
    dense_map = dispatch.dense_map(given.topk_experts, given.E)
    return {"dense_map": dense_map, "token_expert_indices": given.topk_experts.ravel()}


def _d_hidden(given):
    routes = given.dispatch
    operands = given.d_out, given.gates, given.a, given.b, given.w3, routes, given.activation
    d_a, d_b, gated_y, _ = expert_down.hidden_gradients(*operands)
    y_swi = activation.forward(given.a, given.b, given.activation)  # (R, h)
    gathered = given.d_out[routes.expert_token_indices]  # (R, d)
    share = expert_down.forward(gathered, given.w3.transpose(0, 2, 1), routes) * y_swi  # of each gate's gradient
    return {"d_a": d_a, "d_b": d_b, "gated_y": gated_y, "gate_terms": share}


def _d_y(given):
    shape = given.dispatch.R, given.d_out.shape[1]
    return {"d_y": combine.backward(given.d_out, np.zeros(shape), given.gates, given.dispatch)[0]}


def _d_gates(given):
    gates = np.zeros((given.dispatch.L, given.k))
    return {"d_gates": combine.backward(given.d_out, given.y, gates, given.dispatch)[1]}


def _blocks(given):
    topology = block_sparse.build_topology(given.bins, given.h).arrays()
    return {name: topology[name] for name in _BLOCK_INDICES}


def _dsd(given):
    topology = block_sparse.build_topology(given.bins, given.h)
    return {"padded_y": block_sparse.dsd(given.values, topology, given.w3.reshape(-1, given.d))}


def _dds(given):
    topology = block_sparse.build_topology(given.bins, given.h)
    return {"d_w": block_sparse.dds(given.padded_x, given.values, topology, transpose_lhs=True, parts=given.E)}


def _named(names, arrays):
    return dict(zip(names, arrays, strict=True))


_IN_KERNELS = {"offsets": ("expert_token_offsets",), "dispatch": ROUTES}  # what a kernel has in place of an argument


def _of(
    function: FunctionContract, adds: tuple[str, ...] = (), but: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Inputs and outputs of a kernel that computes what a stage's function returns.

    These are the function's tensors without ``but``. A kernel also takes ``adds``, and index structures for a dispatch.
    """
    taken = [one for one in function.arguments if not isinstance(one, Value) and one.name not in but]
    tensors = [name for one in taken if isinstance(one, Tensor) for name in _IN_KERNELS.get(one.name, (one.name,))]
    routes = [name for one in taken if isinstance(one, Structure) for name in _IN_KERNELS[one.name]]
    outputs = [
        name for one in function.results if one.name not in but for name in _IN_KERNELS.get(one.name, (one.name,))
    ]
    return (*tensors, *adds, *routes), tuple(outputs)


_ROWS, _HIDDEN = ("expert_token_indices", "token_index_map"), ("a", "b", "y_swi")
_BLOCK_INDICES = ("column_indices", "row_indices", "transpose_indices")
_ALL = (
    Contract(
        "gating", "softmax over the experts and the k best of each token",
        *_of(stage_contracts.GATING), "ceil(L / THREADS)",
        lambda given: gating.forward(given.logits, given.k, given.renormalize)._asdict(),
    ),
    Contract(
        "gating.backward", "the logits' gradient from those of the gates and of both losses",
        *_of(stage_contracts.GATING_BACKWARD, adds=("shares", "d_load_balancing_loss", "d_router_z_loss")),
        "ceil(L / THREADS)", _gating_backward,
    ),
    Contract(
        "dispatch.dense_map", "step 1: entry (i, e) is i if token i goes to expert e, else -1",
        *_of(stage_contracts.DENSE_MAP), "ceil(L / THREADS)", _dense_map, ("token_expert_indices",),
    ),
    Contract(
        "dispatch.expert_lengths", "step 2a: the tokens of each expert, counted down its column",
        *_of(stage_contracts.EXPERT_LENGTHS), "E", lambda given: {"lengths": dispatch.expert_lengths(given.dense_map)},
    ),
    Contract(
        "dispatch.expert_offsets", "step 2b: the exclusive prefix sum of the lengths, and R at its end",
        *_of(stage_contracts.EXPERT_OFFSETS), "1",
        lambda given: {"expert_token_offsets": dispatch.expert_offsets(given.lengths)},
    ),
    Contract(
        "dispatch.route_indices", "step 3: the position of every routed row",
        *_of(stage_contracts.ROUTE_INDICES), "E",
        lambda given: _named(
            _ROWS, dispatch.route_indices(given.dense_map, given.expert_token_offsets, given.topk_experts)
        ),
    ),
    Contract(
        "expert_up", "a = x w1, b = x w2, y_swi = act(a) * b for every routed row",
        *_of(stage_contracts.EXPERT_UP), "ceil(R h / THREADS)",
        lambda given: _named(
            _HIDDEN, expert_up.forward(given.x, given.w1, given.w2, given.dispatch, given.activation)
        ),
    ),
    Contract(
        "expert_up.d_x", "the gradient of x, summed over each token's slots",
        *_of(stage_contracts.EXPERT_UP_D_X), "ceil(L d / THREADS)",
        lambda given: {"d_x": expert_up.input_gradient(given.d_a, given.d_b, given.w1, given.w2, given.dispatch)},
    ),
    Contract(
        "expert_up.d_w", "the gradient of w1 from that of a, or of w2 from that of b; zeros for experts without rows",
        *_of(stage_contracts.EXPERT_UP_D_W), "ceil(E d h / THREADS)",
        lambda given: {"d_w": expert_up.weight_gradient(given.d_hidden, given.x, given.dispatch)},
    ),
    Contract(
        "expert_down", "y = y_swi w3 for every routed row",
        *_of(stage_contracts.EXPERT_DOWN), "ceil(R d / THREADS)",
        lambda given: {"y": expert_down.forward(given.y_swi, given.w3, given.dispatch)},
    ),
    Contract(
        "expert_down.d_hidden",
        "the gradients of a and b, gate * y_swi, and each element's share of its gate's gradient",
        *_of(stage_contracts.EXPERT_DOWN_D_HIDDEN, adds=("gate_of_row",), but=("y_swi", "d_gates")),
        "ceil(R h / THREADS)", _d_hidden, ("gate_terms",),
    ),
    Contract(
        "expert_down.d_w3", "the gradient of w3 from gate * y_swi; zeros for experts without rows",
        *_of(stage_contracts.EXPERT_DOWN_D_W3), "ceil(E h d / THREADS)",
        lambda given: {"d_w3": expert_down.weight_gradient(given.gated_y, given.d_out, given.dispatch)},
    ),
    Contract(
        "combine", "each token's sum of its rows of y, weighted by its gates",
        *_of(stage_contracts.COMBINE), "ceil(L d / THREADS)",
        lambda given: {"out": combine.forward(given.y, given.gates, given.dispatch)},
    ),
    Contract(
        "combine.d_y", "the gradient of y: gate * d_out of each row's token",
        *_of(stage_contracts.COMBINE_BACKWARD, but=("y", "d_gates")), "ceil(R d / THREADS)", _d_y,
    ),
    Contract(
        "combine.d_gates", "the gradient of the gates: <d_out, y> of each slot",
        *_of(stage_contracts.COMBINE_BACKWARD, but=("gates", "d_y")), "ceil(R / THREADS)", _d_gates,
    ),
    Contract(
        "block_sparse.pad_offsets", "where each expert's rows begin if its group fills whole blocks, and P at the end",
        ("expert_token_offsets",), ("padded_offsets",), "1",
        lambda given: {"padded_offsets": given.bins.padded_offsets},
    ),
    Contract(
        "block_sparse.blocks", "block row and block column of each stored block, and their order by block columns",
        ("padded_offsets",), _BLOCK_INDICES, "ceil(nnz / THREADS)", _blocks,
    ),
    Contract(
        "block_sparse.dsd", "the padded rows of y: the stored blocks, times w3 of all experts as one matrix",
        ("values", "w3", "row_offsets", *_BLOCK_INDICES), ("padded_y",), "ceil(P d / THREADS)", _dsd,
    ),
    Contract(
        "block_sparse.dds", "padded_x transposed, times the stored blocks: the gradient of w1 if the blocks hold d_a",
        ("padded_x", "values", "column_offsets", *_BLOCK_INDICES), ("d_w",), "ceil(E d h / THREADS)", _dds,
    ),
)  # fmt: skip
CONTRACTS = {contract.task: contract for contract in _ALL}
