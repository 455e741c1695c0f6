"""Large cases of MegaBlocks' kernels."""

from collections.abc import Callable

import numpy as np

from moeblaze_ref.backends.numpy_ref import activation
from moeblaze_ref.backends.raw_cuda import block_sparse as stage
from moeblaze_ref.backends.raw_cuda import gemm
from moeblaze_ref.core.structures import PaddedBins, Topology
from moeblaze_ref.runtime import ceil_div
from moeblaze_ref.runtime.source import Size
from moeblaze_ref.runtime.sparse import Launch, Parts
from moeblaze_ref.verify.large.cases import ALL, Case, exactly, last_block, values
from moeblaze_ref.verify.large.layout import number_in_bands

B = stage.BLOCK
E, WIDE, HIGH = 1024, 2, 2  # experts, block columns of each, block rows of the last one
BLOCK_ROWS = 2**17 + HIGH
P, h = BLOCK_ROWS * B, WIDE * B  # P h > 2**32
N = E * h
NNZ = BLOCK_ROWS * WIDE
OWN = HIGH * B  # rows of the last expert
BLOCKS = 2**24  # of 7_persistent: more than there are tiles
MANY, WIDTH, VALUES = 2**22 + 4, 1024, 2**18 + 1  # rows and their width; blocks of values


def cases() -> list[Case]:
    """Every kernel whose indices can pass 2**31; those of the structures see rows, blocks and experts alone."""
    products = [product(version) for version in stage.VERSIONS for product in PRODUCTS]
    return [_activate(), _activate_backward(), _padded_gather(), _gate_gradient(), *products, _large_block()]


# ---- what the products are given ----


def _topology(executor) -> Topology:
    lengths = (BLOCK_ROWS + 1, NNZ, NNZ, E * WIDE + 1, NNZ)
    rows, columns, row_of_block, ends, order = (executor.empty((length,), "int32") for length in lengths)
    return Topology(rows, columns, row_of_block, ends, order, B)


def _structures() -> dict:
    """The indices of the last expert's blocks, and where every block row begins."""
    rows = np.repeat(np.arange(BLOCK_ROWS - HIGH, BLOCK_ROWS), WIDE)
    columns = np.tile(np.arange(E * WIDE - WIDE, E * WIDE), HIGH)
    numbers = np.arange(NNZ - HIGH * WIDE, NNZ).reshape(HIGH, WIDE)
    last = np.s_[-HIGH * WIDE :]
    return {
        "row_offsets": [(ALL, WIDE * np.arange(BLOCK_ROWS + 1))],
        "row_indices": [(last, rows)],
        "column_indices": [(last, columns)],
        "column_offsets": [(np.s_[-WIDE - 1 :], NNZ - HIGH * np.arange(WIDE, -1, -1))],
        "transpose_indices": [(last, numbers.T.ravel())],
    }


def _given(*names: str, **renamed: str) -> dict:
    """Some of the structures, under the names of a kernel's arguments."""
    found = _structures()
    return {name: found[renamed.get(name, name)] for name in (*names, *renamed)}


def _depth(version: str) -> int:
    """K: E h K > 2**32 where each element of a result has a thread, else 2**31, since a sum may be K deep."""
    return 16_400 if version == "1_naive" else 8_208


def _dtype(version: str) -> str:
    return "float32" if version in ("1_naive", "2_tiled") else "bfloat16"


def _operand(version: str, *shape: int, seed: int = 0) -> np.ndarray:
    return values(*shape, dtype=_dtype(version), seed=seed)


def _stored(version: str) -> tuple[list, np.ndarray]:
    """The last expert's blocks as they are given, and the matrix (OWN, h) that they are."""
    blocks = _operand(version, HIGH * WIDE, B, B, seed=9)
    matrix = exactly(blocks).reshape(HIGH, WIDE, B, B).swapaxes(1, 2).reshape(OWN, h)
    return [(np.s_[-HIGH * WIDE :], blocks)], matrix


def _last_rows(version: str) -> slice:
    """Rows of the last block of threads, in a block row or column."""
    return slice(-{"1_naive": 1, "2_tiled": gemm.TILE}.get(version, B), None)


def _last_columns(version: str) -> slice:
    """Return the columns of the last block of threads, of K columns."""
    of_block = {"1_naive": gemm.THREADS, "2_tiled": gemm.TILE, "3_mma": B, gemm.HOPPER: gemm.HOPPER_COLUMNS}[version]
    K = _depth(version)
    return slice(K - gemm.THREADS if version == "1_naive" else (ceil_div(K, of_block) - 1) * of_block, K)


def _of_matrix(version: str, *place: slice) -> tuple[slice, ...]:
    """Part of a matrix, which 7_persistent takes as a stack of one."""
    return (ALL, *place) if version == gemm.HOPPER else place


def _product(version: str, kernel: str, given: dict, expected: dict, call, rows: int, columns: int) -> Case:
    """A case of the last block; in 7_persistent that is the block of the last of (rows, columns) tiles."""
    blocks: Callable[[Size], list[Size]] = last_block
    if version == gemm.HOPPER:
        blocks = lambda _: [(number_in_bands(rows - 1, columns - 1, rows, columns), 0, 0)]
    passes = f"P h, P K, E h K: P={P}, E={E}, h={h}, K={_depth(version)}, block={B}"
    launch = Launch(kernel, blocks, given, expected)
    return Case("block_sparse", version, passes, _dtype(version), launch, call, BLOCKS)


# ---- the products ----


def _sdd_case(version: str, rhs_parts: list, rhs: np.ndarray, shape: tuple, transpose: bool) -> Case:
    """The last stored block: rows of the last block row times the last columns."""
    K, lhs = _depth(version), _operand(version, B, _depth(version))
    places = ("row_offsets", "column_indices") if version == gemm.HOPPER else ("row_indices", "column_indices")
    given = _given(*places) | {"lhs": [(_of_matrix(version, np.s_[-B:]), lhs)], "rhs": rhs_parts}
    blocks = WIDE if version == gemm.HOPPER else 1  # in a tile
    lines = {"1_naive": slice(-gemm.THREADS // B, None), "2_tiled": slice(-gemm.TILE, None)}.get(version, ALL)
    columns = lines if version == "2_tiled" else ALL
    product = exactly(lhs[lines]) @ exactly(rhs[:, -blocks * B :][:, columns])
    product = product.reshape(len(product), blocks, -1).swapaxes(0, 1)

    def call(executor):
        operands = executor.empty((P, K), _dtype(version)), executor.empty(shape, _dtype(version))
        stage.sdd.unchecked(*operands, _topology(executor), transpose, executor, version)

    expected = {"values": [(np.s_[-blocks:, lines, columns], product)]}
    return _product(version, "sdd", given, expected, call, BLOCK_ROWS, 1)


def _sdd(version: str) -> Case:
    rhs = _operand(version, _depth(version), h, seed=1)
    return _sdd_case(version, [(np.s_[-1:], rhs)], rhs, (E, _depth(version), h), False)


def _sdd_transposed(version: str) -> Case:
    rhs = _operand(version, h, _depth(version), seed=1)
    return _sdd_case(version, [(_of_matrix(version, np.s_[-h:]), rhs)], rhs.T, (N, _depth(version)), True)


def _dsd_case(
    version: str, rhs: list, product: np.ndarray, shape: tuple, rows: int, places: dict, transposes: tuple[bool, bool]
) -> Case:
    stored, _ = _stored(version)
    live = _last_rows(version)
    expected = {"result": [(np.s_[live, _last_columns(version)], product[live])]}

    def call(executor):
        blocks, rhs = (executor.empty(size, _dtype(version)) for size in ((NNZ, B, B), shape))
        stage.dsd.unchecked(blocks, _topology(executor), rhs, *transposes, executor, version)

    tiles = rows // B, ceil_div(_depth(version), gemm.HOPPER_COLUMNS)
    return _product(version, "dsd", places | {"values": stored, "rhs": rhs}, expected, call, *tiles)


def _dsd(version: str) -> Case:
    columns, K = _last_columns(version), _depth(version)
    rhs = _operand(version, h, columns.stop - columns.start, seed=1)
    product = _stored(version)[1] @ exactly(rhs)
    given = [(_of_matrix(version, np.s_[-h:], columns), rhs)]
    return _dsd_case(version, given, product, (N, K), P, _by_row(), (False, False))


def _d_rows(version: str) -> Case:
    """The right operand transposed, and in parts."""
    columns, K = _last_columns(version), _depth(version)
    rhs = _operand(version, columns.stop - columns.start, h, seed=1)
    product = _stored(version)[1] @ exactly(rhs).T
    return _dsd_case(version, [(np.s_[-1:, columns], rhs)], product, (E, K, h), P, _by_row(), (False, True))


def _dsd_transposed(version: str) -> Case:
    """The sparse matrix transposed."""
    columns, K = _last_columns(version), _depth(version)
    rhs = _operand(version, OWN, columns.stop - columns.start, seed=1)
    product = _stored(version)[1].T @ exactly(rhs)
    given = [(_of_matrix(version, np.s_[-OWN:], columns), rhs)]
    return _dsd_case(version, given, product, (P, K), N, _by_column(), (True, False))


def _by_row() -> dict:
    return _given(offsets="row_offsets", others="column_indices")


def _by_column() -> dict:
    return _given("transpose_indices", offsets="column_offsets", others="row_indices")


def _dds(version: str) -> Case:
    """The left operand transposed, the result in parts."""
    stored, matrix = _stored(version)
    K = _depth(version)
    rows = slice(K - 1, K) if version == "1_naive" else _last_columns(version)
    columns = ALL if version == "1_naive" else _last_rows(version)
    lhs = _operand(version, OWN, rows.stop - rows.start, seed=1)
    product = exactly(lhs).T @ matrix
    given = _given("column_offsets", "row_indices", "transpose_indices")
    given |= {"lhs": [(_of_matrix(version, np.s_[-OWN:], rows), lhs)], "values": stored}

    def call(executor):
        operands = executor.empty((P, K), _dtype(version)), executor.empty((NNZ, B, B), _dtype(version))
        stage.dds.unchecked(*operands, _topology(executor), True, E, executor, version)

    expected = {"result": [(np.s_[-1:, rows, columns], product[:, columns])]}
    return _product(version, "dds", given, expected, call, N // B, ceil_div(K, gemm.HOPPER_COLUMNS))


PRODUCTS = _dsd, _dsd_transposed, _d_rows, _dds, _sdd, _sdd_transposed


# ---- element by element, and row by row ----


def _between(kernel: str, inputs: dict, outputs: dict, function) -> Case:
    """The last block of threads has the last lines of the last block."""
    lines = np.s_[-1:, -len(inputs["a"]) :]
    given, expected = ({name: [(lines, array)] for name, array in arrays.items()} for arrays in (inputs, outputs))
    passes = f"values: {VALUES} blocks of {B} x {B}"

    def call(executor):
        function.unchecked(*(executor.empty((VALUES, B, B), "float32") for _ in inputs), "swiglu", executor)

    return Case("block_sparse", "hidden", passes, "float32", Launch(kernel, last_block, given, expected), call)


def _lines(*names: str) -> dict[str, np.ndarray]:
    """Values for the named arrays: as many lines as a block of threads moves, four elements a thread."""
    count = 4 * gemm.THREADS // B
    return {name: values(count, B, seed=seed) for seed, name in enumerate(names)}


def _activate() -> Case:
    inputs = _lines("a", "b")
    outputs = {"y_swi": activation.forward(exactly(inputs["a"]), exactly(inputs["b"]), "swiglu")}
    return _between("activate", inputs, outputs, stage.activate)


def _activate_backward() -> Case:
    inputs = _lines("d_y_swi", "a", "b")
    d_y_swi, a, b = map(exactly, inputs.values())
    outputs = dict(zip(("d_a", "d_b"), activation.backward(d_y_swi, a, b, "swiglu"), strict=True))
    return _between("activate_backward", inputs, outputs, stage.activate_backward)


def _bins(executor) -> PaddedBins:
    offsets, slots, rows = (executor.empty((length,), "int32") for length in (2, MANY, MANY))
    return PaddedBins(offsets, slots, rows, k=1, block=1)


def _row_case(kernel: str, given: dict, expected: dict, call) -> Case:
    passes = f"P d, L d: P={MANY}, d={WIDTH}"
    return Case("block_sparse", "rows", passes, "float32", Launch(kernel, last_block, given, expected), call)


def _padded_gather() -> Case:
    """The last block of threads has the last row, which is of the token before the last."""
    x, gate = values(WIDTH), np.float32(0.5)
    place = np.s_[-2:-1]
    given = {"x": [(place, x)], "gates": [(place, gate)], "slots": [(np.s_[-1:], MANY - 2)]}

    def call(executor):
        x, gates = executor.empty((MANY, WIDTH), "float32"), executor.empty((MANY, 1), "float32")
        stage.padded_gather.unchecked(x, _bins(executor), gates, executor)

    return _row_case("padded_gather", given, {"rows": [(np.s_[-1:], gate * exactly(x))]}, call)


def _gate_gradient() -> Case:
    """The last block has four slots, a warp each; their rows are the last in reverse order."""
    count = 4
    d_out, y = (values(count, WIDTH, seed=seed) for seed in (1, 2))
    last = np.s_[-count:]
    given = {"d_out": [(last, d_out)], "y": [(last, y[::-1])], "rows": [(last, MANY - 1 - np.arange(count))]}
    terms = (exactly(d_out) * exactly(y)).sum(axis=1, keepdims=True)

    def call(executor):
        d_out, y = (executor.empty((MANY, WIDTH), "float32") for _ in range(2))
        stage.gate_gradient.unchecked(d_out, y, _bins(executor), executor)

    return _row_case("gate_gradient", given, {"d_gates": [(last, terms)]}, call)


# ---- a block so large that its own elements pass 2**31 ----


def _large_block() -> Case:
    """A row of two blocks for 3_mma, by the smallest tile: the last lines of the result."""
    block, tile = 46_400, stage.TILES[0]  # block * block > 2**31
    lines = np.s_[-tile.rows :]
    stored = values(2, tile.rows, block, dtype="bfloat16")
    rhs = values(2 * block, tile.columns, dtype="bfloat16", seed=1)
    product = exactly(np.hstack(list(stored))) @ exactly(rhs)
    given: dict[str, Parts] = {"offsets": [(ALL, (0, 2))], "others": [(ALL, (0, 1))]}
    given |= {"values": [(np.s_[:, lines], stored)], "rhs": [(ALL, rhs)]}
    launch = Launch("dsd", last_block, given, {"result": [(lines, product)]})
    shapes = {"values": (2, block, block), "rhs": rhs.shape, "result": (block, tile.columns)}
    sizes = {"rows": block, "K": tile.columns, "rhs_rows": 2 * block, "rhs_width": tile.columns}

    def call(executor):
        constants = gemm.constants("bfloat16", tile=tile) | {"TRANSPOSE_LHS": 0, "TRANSPOSE_RHS": 0, "BLOCK": block}
        module = executor.load("block_sparse/3_mma.cu", **constants)
        arrays = {name: executor.empty(shape, "bfloat16") for name, shape in shapes.items()}
        arrays |= {name: executor.empty((2,), "int32") for name in ("offsets", "others", "transpose_indices")}
        module.launch("dsd", **gemm.per_tile(tile, (block // tile.rows, 1)), **arrays, **sizes)

    return Case("block_sparse", "3_mma", f"block**2: block={block}", "bfloat16", launch, call)
