"""Which options the cross-check switches on: options x stages x backends, counted from the cases that it runs.

`check.reachable` decides which cases a backend runs; nothing here repeats it. A cell holds the number of checks, a rung
and a case each, or the reason why there is none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter

from moeblaze_ref import check
from moeblaze_ref.backends import BACKENDS, CHECKED, JUDGE, STAGES, Backend
from moeblaze_ref.capacity import DROP_POLICIES
from moeblaze_ref.cases import CAPACITY_FACTORS, Case, option_cases, standard_cases
from moeblaze_ref.comparisons import fitting
from moeblaze_ref.config import ACTIVATIONS, POLICIES


@dataclass(frozen=True)
class Option:
    """Something that a case chooses.

    Parameters
    ----------
    name : str
    values : tuple of str
        All that it may be.
    of : callable
        The value of a case, not yet a string.
    """

    name: str
    values: tuple[str, ...]
    of: Callable[[Case], object]


SWITCH = ("False", "True")
OPTIONS = (
    Option("renormalize", SWITCH, attrgetter("renormalize")),
    Option("policy", tuple(POLICIES), attrgetter("policy")),
    Option("load_balancing_loss", SWITCH, lambda case: case.d_losses[0] != 0),
    Option("router_z_loss", SWITCH, lambda case: case.d_losses[1] != 0),
    Option("activation", ACTIVATIONS, attrgetter("activation")),
    Option("capacity_factor", tuple(map(str, CAPACITY_FACTORS)), attrgetter("capacity_factor")),
    Option("drop_policy", tuple(DROP_POLICIES), attrgetter("drop_policy")),
)

ROUTER = ("renormalize", "load_balancing_loss", "router_z_loss")
CAPACITY = ("activation", "capacity_factor", "drop_policy")
# The options that each check reads of a case.
READS: dict[str, tuple[str, ...]] = {
    "gating": ROUTER,
    "dispatch": (),
    "expert_up": ("activation",),
    "expert_down": ("activation",),
    "combine": (),
    "layer": (*ROUTER, "policy", "activation"),
    "block_sparse": ("activation",),
    "capacity": CAPACITY,
    "torch_layer": (*ROUTER, "policy", "activation"),
    "torch_block_sparse": (*ROUTER, "activation"),
    "torch_capacity": (*ROUTER, *CAPACITY),
}

NOT_READ, NO_STAGE = "not read", "no stage"
REASONS = {NOT_READ: "the stage has no such option", NO_STAGE: "the backend has no such stage"}


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Parameters
    ----------
    stage, option, value : str
        The value is "-" where the stage does not read the option.
    cells : dict of str to int or str
        By backend: how many checks have this value, or why none has.
    """

    stage: str
    option: str
    value: str
    cells: dict[str, int | str]


def checks(backend: Backend, stage: str) -> list[Case]:
    """The cases that a backend runs of a stage, once for each rung; empty if it has no such stage."""
    cases = standard_cases() + option_cases()
    if backend is JUDGE:
        return fitting("capacity", None, cases) if stage == "torch_capacity" else []
    if stage in STAGES:
        rungs = backend.rungs(stage) if stage in backend.stages else ()
        return [case for rung in rungs for case in check.reachable(backend, stage, rung, cases)]
    return check.cases_of_layers().get(stage, []) if backend.name in check.LAYER_DEVICES else []


def lines() -> Iterator[Line]:
    """The whole table, stage by stage."""
    backends = [JUDGE if name == JUDGE.name else BACKENDS[name] for name in CHECKED]
    for stage in READS:
        of_backends = {backend.name: _checks_or_reason(backend, stage) for backend in backends}
        for option in OPTIONS:
            for value in option.values if option.name in READS[stage] else ("-",):
                cells = {name: _cell(option, value, cases) for name, cases in of_backends.items()}
                yield Line(stage, option.name, value, cells)


def _checks_or_reason(backend: Backend, stage: str) -> list[Case] | str:
    """`checks`, or why there are none."""
    try:
        return checks(backend, stage) or NO_STAGE
    except ImportError as error:
        return f"cannot be imported: {error}"


def _cell(option: Option, value: str, cases: list[Case] | str) -> int | str:
    if isinstance(cases, str):
        return cases
    return NOT_READ if value == "-" else sum(str(option.of(case)) == value for case in cases)


def gaps(table: list[Line]) -> list[str]:
    """The cells in which a backend runs a stage and never has the value."""
    return [
        f"{line.stage} on {backend}: {line.option} is never {line.value}"
        for line in table
        for backend, cell in line.cells.items()
        if cell == 0
    ]
