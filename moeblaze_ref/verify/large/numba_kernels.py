"""Large cases of the Numba kernels, on the simulator: it computes indices as Python does, but arrays hold 32 bits."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from moeblaze_ref.backends.numba_cuda import activation, block_sparse, combine, dispatch, expert_down, expert_up, gating
from moeblaze_ref.backends.numba_cuda.runtime import EXECUTOR, THREADS, blocks_for
from moeblaze_ref.backends.numpy_ref import activation as reference
from moeblaze_ref.backends.numpy_ref import gating as gating_reference
from moeblaze_ref.core import stage_contracts
from moeblaze_ref.core.contract import INT32
from moeblaze_ref.core.structures import EMPTY
from moeblaze_ref.runtime.sparse import Launch, Parts, Reservation
from moeblaze_ref.verify.large import combine as raw_combine
from moeblaze_ref.verify.large.cases import ALL, exactly, values

L, d, k, E, h = 2**22 + 1, 1024, 2, 1024, 4100  # L d, E d h > 2**32
R = L * k
LAST = np.s_[-1:]
COLUMNS = slice(d - THREADS, d)  # of the last block, if each element of rows of d has a thread
ROW = R - 3
FEW = 2  # rows of the last expert
SIZES = {"L": L, "d": d, "k": k, "E": E, "h": h, "R": R}
ONE_EACH = SIZES | {"k": 1, "R": L}  # one expert a token
TENSORS = stage_contracts.tensors()
# Tensors that no contract has: their axes.
INDICES = {"token_expert_indices": "R", "expert_token_offsets": "E+1"}


@dataclass(frozen=True, eq=False)
class NumbaCase:
    """A Numba kernel at sizes of which some product passes 2**31; its last block runs."""

    stage: str  #: this and the next two as in `Case`
    kernel: str
    passes: str
    function: Any  #: Numba's
    given: Mapping[str, Any]  #: as in `Launch`
    expected: Mapping[str, Any]  #: as in `Launch`
    blocks: int  #: of the grid
    sizes: dict[str, int] = field(default_factory=lambda: SIZES)
    arguments: dict[str, Any] = field(default_factory=dict)  #: numbers, and (shape, dtype) that the sizes do not tell
    threads: int = THREADS  #: of a block
    shared_bytes: int = 0  #: of a block
    dtype: str = "float32"
    version = None

    def run(self) -> SimpleNamespace:
        """Run the block; return its worst error.

        Raises
        ------
        IndexError
            If it leaves the elements that it is to access.
        """
        from moeblaze_ref.backends.numba_cuda.sparse import OpenArray, run_blocks

        names = inspect.signature(self.function.fn).parameters
        arguments = {name: self._argument(name) for name in names}
        memory = {name: Reservation(*shape) for name, shape in arguments.items() if isinstance(shape, tuple)}
        launch = Launch(self.kernel, lambda grid: [grid], self.given, self.expected)

        def opened(name, place):
            part = memory[name].array[place]
            memory[name].open(part)
            return part

        launch.lay_out(opened)
        passed = [OpenArray(name, memory[name]) if name in memory else value for name, value in arguments.items()]
        run_blocks(self.function, self.blocks, self.threads, [self.blocks - 1], passed, self.shared_bytes)
        errors = launch.errors({name: reservation.array for name, reservation in memory.items()})
        return SimpleNamespace(worst=max(errors.values()))

    def _argument(self, name: str) -> Any:
        """A number, or the shape and dtype of an array."""
        if name in self.arguments:
            return self.arguments[name]
        axes, kind = (INDICES[name], INT32) if name in INDICES else (TENSORS[name].axes, TENSORS[name].kind)
        sizes = self.sizes | {"E+1": self.sizes["E"] + 1}
        return tuple(sizes[axis] for axis in axes.split()), INT32 if kind == INT32 else "float32"


def cases() -> list[NumbaCase]:
    """The kernels that index by an element of all; none where Numba has a GPU instead of its simulator."""
    if EXECUTOR != "simulator":
        return []
    found = [*_of_rows(), _act(), _up(), _d_x(), _down(), _d_w(), _d_w3(), _d_hidden()]
    found += [_softmax_top_k(), _d_logits(), _load_balancing_terms(), _router_z_terms()]
    found += [_dense_map(), _expert_lengths(), _write_indices()]
    return found + [_padded_gather(), _sum_rows(), _sdd(), _dsd(), _dds(), _activate(), _activate_backward()]


def floats(*shape: int) -> tuple[tuple[int, ...], str]:
    """A float32 array."""
    return shape, "float32"


def integers(*shape: int) -> tuple[tuple[int, ...], str]:
    """An int32 array."""
    return shape, "int32"


# ---- combine ----

ROWS_PASS = f"R d, L d: L={L}, k={k}, d={d}"


PLACES = [(np.s_[-k:], (ROW, ROW + 1))]


def _of_rows() -> Iterator[NumbaCase]:
    """The combine's launches of raw CUDA, whose sizes these are, with the columns of a block of these threads."""
    for function, launch, elements in (
        (combine.combine_kernel, raw_combine.gather(COLUMNS), L * d),
        (combine.d_y_kernel, raw_combine.d_y(COLUMNS), R * d),
        (combine.d_gates_kernel, raw_combine.d_gates(), R),
    ):
        blocks = blocks_for(elements)
        yield NumbaCase("combine", launch.kernel, ROWS_PASS, function, launch.given, launch.expected, blocks)


# ---- the projections ----

EXPERTS_PASS = f"L d, R h, E d h: L=R={L}, E={E}, d={d}, h={h}"


def _act() -> NumbaCase:
    a, place = values(THREADS), np.s_[-1:, COLUMNS]
    expected = {"act_a": [(place, reference.act(exactly(a)[None], "silu"))]}
    given, passes, function = {"a": [(place, a)]}, f"R h: R={L}, h={d}", activation.act_kernel("silu")
    return NumbaCase("layer", "act", passes, function, given, expected, blocks_for(L * d), ONE_EACH | {"h": d})


def _experts(stage: str, kernel: str, function, given: dict, expected: dict, elements: int) -> NumbaCase:
    return NumbaCase(stage, kernel, EXPERTS_PASS, function, given, expected, blocks_for(elements), ONE_EACH)


def _offsets() -> list:
    """The last expert has the last rows."""
    return [(np.s_[-2:], (L - FEW, L))]


def _up() -> NumbaCase:
    """Many experts and few products: the block has a tile of its expert's last columns."""
    depth, wide, tile = 8, 2**19 + 3, expert_up.TILE
    column_tiles = -(-wide // tile)
    columns = slice((column_tiles - 1) * tile, wide)
    tokens = L - 1 - np.arange(FEW)
    x, (w1, w2) = values(FEW, depth), (values(depth, columns.stop - columns.start, seed=seed) for seed in (1, 2))
    a, b = (exactly(x) @ exactly(w) for w in (w1, w2))
    given: dict[str, Parts] = {"x": [(np.s_[-FEW:], x[::-1])], "expert_token_indices": [(np.s_[-FEW:], tokens)]}
    given |= {name: [(np.s_[-1:, :, columns], w)] for name, w in (("w1", w1), ("w2", w2))}
    given |= {"expert_token_offsets": _offsets()}
    outputs = {"a": a, "b": b, "y_swi": reference.forward(a, b, "swiglu")}
    expected = {name: [(np.s_[-FEW:, columns], array)] for name, array in outputs.items()}
    return NumbaCase(
        "expert_up",
        "expert_up",
        f"R h, E d h: R={L}, E={E}, d={depth}, h={wide}",
        expert_up.expert_up_kernel("swiglu"),
        given,
        expected,
        E * column_tiles,
        ONE_EACH | {"d": depth, "h": wide},
        threads=tile * tile,
        shared_bytes=4 * tile * tile * 3,
    )


def _d_x() -> NumbaCase:
    d_a, d_b = (values(h, seed=seed) for seed in (1, 2))
    w1, w2 = (values(THREADS, h, seed=seed) for seed in (3, 4))
    sums = exactly(w1) @ exactly(d_a) + exactly(w2) @ exactly(d_b)
    given = {"d_a": [(LAST, d_a)], "d_b": [(LAST, d_b)], "token_index_map": [(LAST, L - 1)]}
    given |= {"token_expert_indices": [(LAST, E - 1)]}
    given |= {name: [(np.s_[-1:, COLUMNS], w)] for name, w in (("w1", w1), ("w2", w2))}
    expected = {"d_x": [(np.s_[-1:, COLUMNS], sums)]}
    return _experts("expert_up", "d_x", expert_up.d_x_kernel(True), given, expected, L * d)


def _down() -> NumbaCase:
    y_swi, w3 = values(h), values(h, THREADS, seed=1)
    given = {"y_swi": [(LAST, y_swi)], "w3": [(np.s_[-1:, :, COLUMNS], w3)]}
    given |= {"token_expert_indices": [(LAST, E - 1)], "token_index_map": [(LAST, L - 1)]}
    expected = {"y": [(np.s_[-1:, COLUMNS], exactly(y_swi) @ exactly(w3))]}
    return _experts("expert_down", "expert_down", expert_down.expert_down_kernel, given, expected, L * d)


def _weights(stage: str, kernel: str, function, left: str, right: str, rows: int, columns: int) -> NumbaCase:
    """The last elements of the last expert's matrix: the last row, the last columns."""
    place = slice(columns - THREADS, columns)
    gathered = "x" if kernel == "d_w" else "d_out"
    arrays = {left: (values(FEW, 1), np.s_[rows - 1 : rows]), right: (values(FEW, THREADS), place)}
    given: dict[str, Parts] = {
        name: [(np.s_[-FEW:, part], array[::-1] if name == gathered else array)]
        for name, (array, part) in arrays.items()
    }
    given |= {"expert_token_indices": [(np.s_[-FEW:], L - 1 - np.arange(FEW))], "expert_token_offsets": _offsets()}
    product = exactly(arrays[left][0]).T @ exactly(arrays[right][0])
    expected = {kernel: [(np.s_[-1:, -1:, place], product)]}
    return _experts(stage, kernel, function, given, expected, E * rows * columns)


def _d_w() -> NumbaCase:
    return _weights("expert_up", "d_w", expert_up.d_w_kernel, "x", "d_hidden", d, h)


def _d_w3() -> NumbaCase:
    return _weights("expert_down", "d_w3", expert_down.d_w3_kernel, "gated_y", "d_out", h, d)


def _d_hidden() -> NumbaCase:
    """A block of one slot; as many experts as make up for few hidden elements."""
    hidden, experts = THREADS, 2**19 + 1
    d_out, (a, b), w3 = values(d), (values(hidden, seed=seed) for seed in (1, 2)), values(hidden, d, seed=3)
    gate, d_y = np.float32(0.5), exactly(w3) @ exactly(d_out)
    y = reference.forward(exactly(a)[None], exactly(b)[None], "swiglu")
    d_a, d_b = reference.backward(0.5 * d_y[None], exactly(a)[None], exactly(b)[None], "swiglu")
    given = {"d_out": [(LAST, d_out)], "gates": [(LAST, gate)], "a": [(LAST, a)], "b": [(LAST, b)], "w3": [(LAST, w3)]}
    given |= {"token_expert_indices": [(LAST, experts - 1)], "token_index_map": [(LAST, L - 1)]}
    outputs = {"d_a": d_a, "d_b": d_b, "gated_y": gate * y, "d_gates": (d_y * y).sum()}
    return NumbaCase(
        "expert_down",
        "d_hidden",
        f"L d, E d h: L={L}, E={experts}, d={d}, h={hidden}",
        expert_down.d_hidden_kernel("swiglu"),
        given,
        {name: [(LAST, array)] for name, array in outputs.items()},
        L,
        ONE_EACH | {"E": experts, "h": hidden},
        shared_bytes=4 * THREADS,
    )


# ---- gating ----

TOKENS_PASS = f"L E: L={L}, E={E}, k={k}"


def _gating(kernel: str, function, given: dict, expected: dict, shared_bytes: int = 0, **arguments) -> NumbaCase:
    """The last block has one token."""
    given, expected = (
        {name: [(LAST if rows else ALL, array)] for name, (rows, array) in parts.items()} for parts in (given, expected)
    )
    options: dict[str, Any] = {"arguments": arguments, "shared_bytes": shared_bytes}
    return NumbaCase("gating", kernel, TOKENS_PASS, function, given, expected, blocks_for(L), **options)


def _softmax_top_k() -> NumbaCase:
    logits = values(1, E)
    outputs = gating_reference.forward(exactly(logits), k)._asdict()
    given, expected = {"logits": (True, logits)}, {name: (True, array) for name, array in outputs.items()}
    return _gating("softmax_top_k", gating.softmax_top_k_kernel, given, expected, renormalize=False)


def _d_logits() -> NumbaCase:
    """Both losses as if they were means over the last token alone."""
    logits, d_gates = values(1, E), values(1, k)
    chosen = gating_reference.top_k(logits, k)
    shares = (np.bincount(chosen.ravel(), minlength=E) / k).astype(np.float32)
    d_logits = gating_reference.backward(exactly(d_gates), exactly(logits), chosen, False, 1.0, 1.0)
    arguments: dict[str, Any] = {"shares": floats(E), "d_losses": floats(2), "scales": floats(2), "renormalize": False}
    given = {"d_gates": (True, d_gates), "logits": (True, logits), "topk_experts": (True, chosen)}
    given |= {"shares": (False, shares), "d_losses": (False, (1, 1)), "scales": (False, (E, 2))}
    return _gating("d_logits", gating.d_logits_kernel, given, {"d_logits": (True, d_logits)}, **arguments)


def _load_balancing_terms() -> NumbaCase:
    probs, shares = np.abs(values(1, E)), np.abs(values(E))
    arguments = {"shares": floats(E), "terms": floats(blocks_for(L))}
    given, function = {"probs": (True, probs), "shares": (False, shares)}, gating.load_balancing_terms_kernel
    expected = {"terms": (True, exactly(probs) @ exactly(shares))}
    return _gating("load_balancing_terms", function, given, expected, gating.SHARED_BYTES, **arguments)


def _router_z_terms() -> NumbaCase:
    logits = values(1, E)
    terms = floats(blocks_for(L))
    expected = {"terms": (True, gating_reference.router_z_loss(exactly(logits)))}
    given, function = {"logits": (True, logits)}, gating.router_z_terms_kernel
    return _gating("router_z_terms", function, given, expected, gating.SHARED_BYTES, terms=terms)


# ---- dispatch ----


def _dispatch(kernel: str, passes: str, function, given: dict, expected: dict, blocks: int, **options) -> NumbaCase:
    return NumbaCase("dispatch", kernel, passes, function, given, expected, blocks, dtype="int32", **options)


def _dense_map() -> NumbaCase:
    chosen, dense_map = np.array([5, E - 1]), np.full(E, EMPTY)
    dense_map[chosen] = L - 1
    given, expected = {"topk_experts": [(LAST, chosen)]}, {"dense_map": [(LAST, dense_map)]}
    return _dispatch("dense_map", TOKENS_PASS, dispatch.dense_map_kernel, given, expected, blocks_for(L))


def _expert_lengths() -> NumbaCase:
    """A column of few tokens and many experts; the last token is another expert's."""
    tokens, experts = 2**12 + 1, 2**20
    sizes = SIZES | {"L": tokens, "E": experts}
    given = {"dense_map": [(ALL, None), (np.s_[-1:, -1:], EMPTY)]}
    expected = {"lengths": [(LAST, tokens - 1)]}
    passes, function = f"L E: L={tokens}, E={experts}", dispatch.expert_lengths_kernel
    options = {"sizes": sizes, "shared_bytes": 4 * THREADS}
    return _dispatch("expert_lengths", passes, function, given, expected, experts, **options)


def _write_indices() -> NumbaCase:
    """The last token went to the last two experts."""
    entries, tail = np.s_[-1:, -THREADS:], np.full(THREADS, EMPTY)
    dense_map, locations = tail.copy(), tail.copy()
    dense_map[-k:], locations[-k:] = L - 1, (ROW, ROW + 1)
    given: dict[str, Parts] = {"dense_map": [(entries, dense_map)], "location_map": [(entries, locations)]}
    given |= {"topk_experts": [(LAST, (E - 2, E - 1))]}
    expected = {"expert_token_indices": [(np.s_[ROW : ROW + 2], L - 1)], "token_index_map": PLACES}
    function = dispatch.write_indices_kernel
    return _dispatch("write_indices", TOKENS_PASS, function, given, expected, blocks_for(L * E))


# ---- block-sparse ----

B, BLOCKS, SIDE = 8, 2**26 + 1, 2**20  # BLOCKS B B > 2**32
LINE = np.s_[-1:, -1:]  # the last line of the last block: as many elements as a block has threads
STORED = floats(BLOCKS, B, B)


def _sparse(kernel: str, passes: str, function, given: dict, expected: dict, elements: int, **arguments) -> NumbaCase:
    blocks = blocks_for(elements)
    return NumbaCase("block_sparse", kernel, passes, function, given, expected, blocks, arguments=arguments)


def _padded_gather() -> NumbaCase:
    x = values(THREADS)
    given = {"x": [(np.s_[-1:, COLUMNS], x)], "gates": [(LAST, (0, 0.5))], "slots": [(LAST, L * k - 1)]}
    arguments = {"slots": integers(L), "k": k, "rows": floats(L, d)}
    expected = {"rows": [(np.s_[-1:, COLUMNS], 0.5 * exactly(x))]}
    function = block_sparse.padded_gather_kernel(True)
    return _sparse("padded_gather", ROWS_PASS, function, given, expected, L * d, **arguments)


def _sum_rows() -> NumbaCase:
    y = values(k, THREADS)
    given = {"y": [(np.s_[ROW : ROW + k, COLUMNS], y)], "rows": PLACES}
    expected = {"out": [(np.s_[-1:, COLUMNS], exactly(y).sum(axis=0))]}
    return _sparse("sum_rows", ROWS_PASS, block_sparse.sum_rows_kernel, given, expected, L * d, rows=integers(R))


def _sdd() -> NumbaCase:
    lhs, rhs, K = values(d), values(d, B, seed=1), d
    given = {"lhs": [(LAST, lhs)], "rhs": [(np.s_[-1:, :, -B:], rhs)]}
    given |= {"row_indices": [(LAST, SIDE - 1)], "column_indices": [(LAST, SIDE - 1)]}
    arguments = {"lhs": floats(SIDE * B, K), "rhs": floats(E, K, SIDE * B // E), "values": STORED}
    arguments |= {name: integers(BLOCKS) for name in ("row_indices", "column_indices")}
    expected = {"values": [(LINE, exactly(lhs) @ exactly(rhs))]}
    passes = f"M K, E K h, values: M=N={SIDE * B}, K={K}, {BLOCKS} blocks of {B} x {B}"
    function = block_sparse.sdd_kernel(False)
    return _sparse("sdd", passes, function, given, expected, BLOCKS * B * B, **arguments)


def _one_block(offsets: int) -> dict:
    """The last line of blocks has the last block, which meets the last line of the other side."""
    places = {"offsets": [(np.s_[-2:], (BLOCKS - 1, BLOCKS))], "transpose_indices": [(LAST, BLOCKS - 1)]}
    return places | {"indices": [(LAST, SIDE - 1)]}


SPARSE_INDICES = {"offsets": integers(SIDE + 1), "indices": integers(BLOCKS), "transpose_indices": integers(BLOCKS)}


def _dsd() -> NumbaCase:
    line, rhs = values(B), values(B, THREADS, seed=1)
    given = _one_block(SIDE) | {"values": [(LINE, line)], "rhs": [(np.s_[-1:, -B:, COLUMNS], rhs)]}
    arguments = SPARSE_INDICES | {"values": STORED, "rhs": floats(1, SIDE * B, d), "result": floats(SIDE * B, d)}
    expected = {"result": [(np.s_[-1:, COLUMNS], exactly(line) @ exactly(rhs))]}
    passes = f"M K, N K, values: M=N={SIDE * B}, K={d}, {BLOCKS} blocks of {B} x {B}"
    function = block_sparse.dsd_kernel(False, False)
    return _sparse("dsd", passes, function, given, expected, SIDE * B * d, **arguments)


def _dds() -> NumbaCase:
    lhs, block = values(B), values(B, B, seed=1)
    width = SIDE * B // E
    given = _one_block(SIDE) | {"values": [(LAST, block)], "lhs": [(np.s_[-1:, -B:, -1:], lhs[:, None])]}
    arguments = SPARSE_INDICES | {"values": STORED, "lhs": floats(1, SIDE * B, d), "result": floats(E, d, width)}
    expected = {"result": [(np.s_[-1:, -1:, -THREADS:], exactly(lhs) @ exactly(block))]}
    passes = f"M K, K N, values: M=N={SIDE * B}, K={d}, {BLOCKS} blocks of {B} x {B}"
    return _sparse("dds", passes, block_sparse.dds_kernel(True), given, expected, E * d * width, **arguments)


VALUES_PASS = f"values: {BLOCKS} blocks of {B} x {B}"


def _activate() -> NumbaCase:
    a, b = (values(THREADS, seed=seed) for seed in (1, 2))
    expected = {"y_swi": [(LINE, reference.forward(exactly(a)[None], exactly(b)[None], "swiglu"))]}
    arguments = {name: STORED for name in ("a", "b", "y_swi")}
    given, function = {"a": [(LINE, a)], "b": [(LINE, b)]}, block_sparse.activate_kernel("swiglu")
    return _sparse("activate", VALUES_PASS, function, given, expected, BLOCKS * B * B, **arguments)


def _activate_backward() -> NumbaCase:
    inputs = {name: values(THREADS, seed=seed) for seed, name in enumerate(("d_y_swi", "a", "b"))}
    d_y_swi, a, b = (exactly(array)[None] for array in inputs.values())
    d_a, d_b = reference.backward(d_y_swi, a, b, "swiglu")
    arguments = {name: STORED for name in ("d_y_swi", "a", "b", "d_a", "d_b")}
    given = {name: [(LINE, array)] for name, array in inputs.items()}
    expected, function = {"d_a": [(LINE, d_a)], "d_b": [(LINE, d_b)]}, block_sparse.activate_backward_kernel("swiglu")
    return _sparse("activate_backward", VALUES_PASS, function, given, expected, BLOCKS * B * B, **arguments)
