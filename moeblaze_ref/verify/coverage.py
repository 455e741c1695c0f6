"""Coverage of options, stages and backends, counted from the checks that `moeblaze check` runs.

`check.reachable` and `comparisons.TORCH_LAYERS` decide what a backend runs; nothing here repeats it. A cell holds, for
each kernel file, the number of checks, a dtype and a case each, or the reason why there is none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from moeblaze_ref.backends.raw_cuda.block_sparse import BLOCK, HOPPER_BLOCK
from moeblaze_ref.backends.raw_cuda.expert_down import SUMMED_VERSIONS
from moeblaze_ref.backends.raw_cuda.gemm import HOPPER, WIDE
from moeblaze_ref.backends.registry import BACKENDS, CHECKED, ORACLE, Backend
from moeblaze_ref.core.config import ACTIVATIONS, POLICIES
from moeblaze_ref.systems.capacity import DROP_POLICIES
from moeblaze_ref.verify import check
from moeblaze_ref.verify.cases import CAPACITY_FACTORS, GRADIENTS, WIDE_BLOCKS, Case, option_cases, standard_cases
from moeblaze_ref.verify.comparisons import FIRST_VERSION, TORCH_LAYERS, block_of, extended, is_cast

ONE = "-"  # in place of a kernel file, where a backend has one version


class Check(NamedTuple):
    """One check that a backend runs of a kernel file."""

    dtype: str
    case: Case  #: rounded to the dtype


@dataclass(frozen=True)
class Option:
    """Something that a check chooses."""

    name: str
    values: tuple[str, ...]  #: all values that it can have
    of: Callable[[Check], object]  #: the value of a check, not yet a string
    parameter: str  #: the argument of the functions and the torch layers that sets it; empty if none does


def _switch(name: str, of: Callable[[Case], bool], parameter: str) -> Option:
    return Option(name, ("False", "True"), lambda check: of(check.case), parameter)


def _choice(name: str, values: tuple[str, ...]) -> Option:
    return Option(name, values, lambda check: getattr(check.case, name), name)


_WANTED = {GRADIENTS: "all"} | {(name,): name for name in GRADIENTS}
OPTIONS = (
    _switch("renormalize", lambda case: case.renormalize, "renormalize"),
    _choice("policy", tuple(POLICIES)),
    _switch("load_balancing_loss", lambda case: case.d_losses[0] != 0, "d_load_balancing_loss"),
    _switch("router_z_loss", lambda case: case.d_losses[1] != 0, "d_router_z_loss"),
    _choice("activation", ACTIVATIONS),
    _choice("capacity_factor", tuple(map(str, CAPACITY_FACTORS))),
    _choice("drop_policy", tuple(DROP_POLICIES)),
    _switch("topk_experts", lambda case: case.replay, "topk_experts"),
    Option("wanted", ("all", *GRADIENTS), lambda check: _WANTED.get(check.case.wanted, "some"), "wanted"),
    _switch("overwrite", lambda case: case.overwrite, "overwrite"),
    _switch("autocast", is_cast, ""),
    _switch("keep_routing", lambda case: case.keep_routing, ""),
    Option("block", tuple(map(str, (8, BLOCK, *WIDE_BLOCKS))), lambda check: block_of(check.case), "block"),
    Option("dtype", ("float64", *WIDE), lambda check: check.dtype, "dtype"),
)


ROUTER = ("renormalize", "load_balancing_loss", "router_z_loss")
CAPACITY = ("activation", "capacity_factor", "drop_policy")
LAYER = (*ROUTER, "topk_experts", "activation", "wanted", "overwrite", "dtype")
TORCH = (*LAYER, "autocast", "keep_routing")
# The options that each check reads.
READS: dict[str, tuple[str, ...]] = {
    "gating": (*ROUTER, "dtype", "version"),
    "dispatch": ("version",),
    "expert_up": ("activation", "dtype", "version"),
    "expert_down": ("activation", "overwrite", "dtype", "version"),
    "combine": ("dtype", "version"),
    "layer": (*LAYER, "policy", "version"),
    "block_sparse": ("activation", "block", "dtype", "version"),
    "capacity": (*CAPACITY, "dtype"),
    "torch_layer": (*TORCH, "policy", "version"),
    "torch_block_sparse": (*TORCH, "block", "version"),
    "torch_memory_optimized": (*TORCH, "block", "version"),
    "torch_capacity": (*TORCH, "capacity_factor", "drop_policy"),
    "torch_dynamic_capacity": TORCH,
    "torch_sequential": TORCH,
}
VERSION = "version"  # the option that cells name: the kernel file
# Whose kernel files a torch layer chooses among.
_FILES = {"torch_layer": "layer", "torch_block_sparse": "block_sparse", "torch_memory_optimized": "block_sparse"}

# Arguments that no case chooses, and why.
ELSEWHERE = {
    "device": "the backend is the device",
    "hosted": "of expert parallelism, which has tests of its own",
    "router": "tests compare layers of each router with transformers' blocks",
    "shared": "tests compare layers with a shared expert with transformers' blocks",
    "stores": "the layer's policies choose it",
    "y_swi": "the layer's policies choose it",
}

NOT_READ, NO_STAGE, NO_FILE, NO_DTYPE = "not read", "none", "no file", "no dtype"
COMPILED, DEFAULT, FORWARD, WHOLE_BLOCKS = "in 1_naive", "as a stage", "forward", "whole blocks"
SIMULATED = "on a GPU"
REASONS = {
    NOT_READ: "the stage has no such option",
    NO_STAGE: "the backend has no such stage",
    NO_FILE: "the backend has no such kernel file",
    NO_DTYPE: "the kernel does not compute in this dtype",
    COMPILED: "each activation is compiled anew: 1_naive has all; the stages expert_up and expert_down check each file",
    DEFAULT: "the layer runs on its default file; the stages layer and block_sparse check each file",
    FORWARD: "the kernel has no backward",
    WHOLE_BLOCKS: f"the kernel's tiles need multiples of {HOPPER_BLOCK}",
    SIMULATED: "too large for Numba's simulator; checked where Numba finds a GPU",
}

Cell = dict[str, int | str]  # by kernel file


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    stage: str
    option: str
    value: str  #: "-" where the stage does not read the option
    #: By backend, then by kernel file ("-" where a backend has one version): how many checks have this value, or why
    #: none has.
    cells: dict[str, Cell]


def checks(backend: Backend, stage: str) -> dict[str, list[Check]]:
    """Return a backend's checks of a stage or a torch layer, by kernel file."""
    if stage in TORCH_LAYERS:
        layer = TORCH_LAYERS[stage]
        return {ONE: _in_dtypes(layer.dtypes, layer.cases())} if backend.name in layer.backends else {}
    if backend is ORACLE or stage not in backend.stages:
        return {}
    cases = standard_cases() + option_cases()
    return {
        version or ONE: _in_dtypes(dtypes, check.reachable(backend, stage, version, extended(stage, version, cases)))
        for version, dtypes in backend.versions(stage).items()
    }


def _in_dtypes(dtypes: tuple[str, ...], cases: list[Case]) -> list[Check]:
    return [Check(dtype, case.astype(dtype)) for dtype in dtypes for case in cases]


def lines() -> Iterator[Line]:
    """The whole table, stage by stage."""
    backends = [ORACLE if name == ORACLE.name else BACKENDS[name] for name in CHECKED]
    for stage, read in READS.items():
        of_backends = {backend.name: _checks_or_reason(backend, stage) for backend in backends}
        for option in OPTIONS:
            for value in option.values if option.name in read else (ONE,):
                cells = {name: _cell(name, stage, option, value, found) for name, found in of_backends.items()}
                yield Line(stage, option.name, value, cells)
        for file in _files(stage) if VERSION in read else (ONE,):
            yield Line(stage, VERSION, file, {name: _of_file(stage, file, f) for name, f in of_backends.items()})


def _checks_or_reason(backend: Backend, stage: str) -> dict[str, list[Check]] | str:
    """`checks`, or why there are none."""
    try:
        return checks(backend, stage) or NO_STAGE
    except ImportError as error:
        return f"cannot be imported: {error}"


def _cell(backend: str, stage: str, option: Option, value: str, found: dict[str, list[Check]] | str) -> Cell:
    if isinstance(found, str):
        return {ONE: found}
    if value == ONE:
        return {ONE: NOT_READ}
    return {kernel: _number(backend, stage, kernel, option, value, of_kernel) for kernel, of_kernel in found.items()}


def _number(backend: str, stage: str, kernel: str, option: Option, value: str, found: list[Check]) -> int | str:
    """Return the number of checks of a kernel file with a value, or the reason for none; 0 if there is no reason."""
    if option.name == "overwrite" and stage == "expert_down" and kernel in SUMMED_VERSIONS:
        return FORWARD
    return sum(str(option.of(one)) == value for one in found) or _never(backend, stage, kernel, option.name, value) or 0


def _never(backend: str, stage: str, kernel: str, option: str, value: str) -> str:
    """Why no check of a kernel file has this value; empty if one must."""
    of_layer = (backend, stage, option) == ("simt", "layer", "activation")
    if of_layer and value != "swiglu" and kernel != FIRST_VERSION:
        return COMPILED
    if option == "block" and kernel == HOPPER and int(value) % HOPPER_BLOCK:
        return WHOLE_BLOCKS
    if option == "block" and backend == "numba" and int(value) >= BLOCK and check.is_simulated(BACKENDS[backend]):
        return SIMULATED
    if option == "dtype" and value not in _dtypes(backend, stage, kernel):
        return NO_DTYPE
    return ""


def _dtypes(backend: str, stage: str, kernel: str) -> tuple[str, ...]:
    if stage in TORCH_LAYERS:
        return TORCH_LAYERS[stage].dtypes
    return BACKENDS[backend].versions(stage)[None if kernel == ONE else kernel]


def _files(stage: str) -> list[str]:
    """The kernel files of a stage, or those among which a torch layer chooses."""
    versions = BACKENDS["simt"].versions(_FILES.get(stage, stage))
    return [version for version in versions if version is not None]


def _of_file(stage: str, file: str, found: dict[str, list[Check]] | str) -> Cell:
    """Return the number of checks on a kernel file."""
    if isinstance(found, str):
        return {ONE: found}
    if file == ONE:
        return {ONE: NOT_READ}
    if stage in _FILES:
        return {ONE: DEFAULT}
    return {file: len(found[file])} if file in found else {ONE: NO_FILE}


def gaps(table: list[Line]) -> list[str]:
    """Return the gaps: cells where a backend runs a kernel file but never with the value."""
    return [
        f"{line.stage} on {backend}{'' if kernel == ONE else f' {kernel}'}: {line.option} is never {line.value}"
        for line in table
        for backend, cell in line.cells.items()
        for kernel, number in cell.items()
        if number == 0
    ]
