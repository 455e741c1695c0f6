"""One integer program, several solvers: OR-Tools MathOpt with the settings that each of them needs.

A solver ends after so much work, which it counts in units of its own: the same program and seed give the same solution,
however fast the machine is. The time limit ends it only where that takes too long.
"""

import datetime
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from moeblaze_ref.core import checks
from moeblaze_ref.placement.deadlines import Deadline

# Their names in MathOpt. Gurobi needs a licence of its own; the others come with OR-Tools.
SOLVERS = {"cp_sat": "CP_SAT", "highs": "HIGHS", "scip": "GSCIP", "gurobi": "GUROBI"}
DEFAULT_SOLVER = "cp_sat"
TIME_LIMIT = 180.0  # seconds of a method: several times what it needs on a machine without other work
LONGEST = 1e9  # seconds: a time limit of thirty years
WORKERS = 8  # of CP-SAT: strategies that help each other, in turn on one core
# Work for a second of the time limit: less than half of what we saw one core do in that time. CP-SAT and Gurobi count
# in their own deterministic seconds, HiGHS and SCIP in nodes of their trees.
CP_SAT_WORK, GUROBI_WORK, NODES = 0.1, 0.3, 20
SEEDS = 2**31  # solvers take seeds below


def _mathopt():
    """Import OR-Tools' MathOpt, which only placement needs."""
    try:
        from ortools.math_opt.python import mathopt
    except ModuleNotFoundError:
        raise ValueError("OR-Tools is not installed: pip install 'moeblaze_ref[placement]'") from None
    return mathopt


def new_model():
    """Return an empty model.

    Raises
    ------
    ValueError
        If OR-Tools is not installed.
    """
    return _mathopt().Model()


def total(terms):
    """Return the sum of many terms of a model."""
    return _mathopt().fast_sum(terms)


@dataclass(frozen=True)
class Found:
    """The best solution so far."""

    values: dict  #: of each variable
    bound: int  #: no solution is below it: proven; at least 0, as sums of what cannot be negative are


def minimise(
    model, solver: str, seconds: float, deadline: Deadline, seed: int = 0, start: dict | None = None
) -> Found | None:
    """Solve a MathOpt model of integer variables and costs, none below 0, by one of ``SOLVERS``.

    When the work is done, or at the deadline, the best solution so far counts.

    Parameters
    ----------
    model : Model
        Of `new_model`.
    solver : str
        One of ``SOLVERS``.
    seconds : float
        The work that the solver may do: what takes it less than so many seconds.
    deadline : Deadline
        The end if the work takes longer. Then another run may find another solution.
    seed : int
        The same seed finds the same solution, unless the deadline ends the solver.
    start : dict, optional
        A solution to begin with, the value of each variable.

    Returns
    -------
    Found or None
        None if it ended before there was any solution.

    Raises
    ------
    ValueError
        If there is no such solver, it is not installed, or the program is infeasible.
    """
    checks.check_name("solver", solver, SOLVERS)
    mathopt = _mathopt()
    parameters = mathopt.SolveParameters(
        random_seed=seed % SEEDS,
        relative_gap_tolerance=0.0,  # HiGHS would stop at 1e-4
        absolute_gap_tolerance=0.5,  # objectives are whole numbers
        **_SETTINGS[solver](seconds),
    )
    hints = [mathopt.SolutionHint(variable_values=start)] if start else []
    settings = mathopt.ModelSolveParameters(solution_hints=hints)
    result = _solve(model, solver, parameters, settings, deadline)
    reasons = mathopt.TerminationReason
    if result.termination.reason == reasons.INFEASIBLE:
        raise Infeasible("no solution meets every constraint")
    if result.termination.reason not in (reasons.OPTIMAL, reasons.FEASIBLE):
        return None
    optimal = result.termination.reason == reasons.OPTIMAL
    bounds = result.termination.objective_bounds
    return Found(result.variable_values(), round(bounds.primal_bound if optimal else max(bounds.dual_bound, 0)))


def _cp_sat(seconds):
    from ortools.sat import sat_parameters_pb2

    return {
        "threads": WORKERS,
        # Beyond its default of 1e7, CP-SAT would cut the domains of counts, and call feasible programs infeasible.
        "cp_sat": sat_parameters_pb2.SatParameters(
            mip_max_bound=1e15,
            interleave_search=True,
            interleave_batch_size=1,  # of strategies, between two looks at what the others found
            max_deterministic_time=CP_SAT_WORK * seconds,
        ),
    }


def _of_nodes(seconds):
    return {"node_limit": max(int(NODES * seconds), 1)}


def _gurobi(seconds):
    return {"threads": 1, "gurobi": _mathopt().GurobiParameters(param_values={"WorkLimit": str(GUROBI_WORK * seconds)})}


_SETTINGS: dict[str, Callable[[float], dict[str, Any]]] = {
    "cp_sat": _cp_sat,
    "highs": _of_nodes,
    "scip": _of_nodes,
    "gurobi": _gurobi,
}


def _solve(model, solver, parameters, settings, deadline):
    mathopt = _mathopt()
    until = _interrupted_at if solver == "cp_sat" else _limited_to
    try:
        with until(deadline, parameters) as interrupter:
            result = mathopt.solve(
                model,
                mathopt.SolverType[SOLVERS[solver]],
                params=parameters,
                model_params=settings,
                interrupter=interrupter,
            )
    except RuntimeError as error:
        if solver != "gurobi":
            raise
        others = ", ".join(name for name in SOLVERS if name != solver)
        raise ValueError(
            f"solver gurobi does not run here ({error}): install Gurobi and a licence for it, or choose one that comes "
            f"with OR-Tools: {others}"
        ) from None
    deadline.cut = deadline.cut or result.termination.limit in (mathopt.Limit.TIME, mathopt.Limit.INTERRUPTED)
    return result


@contextmanager
def _limited_to(deadline, parameters):
    """Give a solver the time that is left as its limit."""
    parameters.time_limit = datetime.timedelta(seconds=min(max(deadline.left(), 0.01), LONGEST))
    yield None


@contextmanager
def _interrupted_at(deadline, parameters):
    """Interrupt CP-SAT at the deadline. It would end before a time limit, and not say that this was why."""
    from ortools.util.python.solve_interrupter import SolveInterrupter

    interrupter = SolveInterrupter()
    timer = threading.Timer(min(max(deadline.left(), 0.01), LONGEST), interrupter.interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield interrupter
    finally:
        timer.cancel()


def check_installed(solver: str):
    """Check that there is such a solver, and that it runs here: it gets an empty model to solve."""
    minimise(new_model(), solver, TIME_LIMIT, Deadline(TIME_LIMIT))


def check_time_limit(time_limit: float):
    """``time_limit`` is above 0 and no more than solvers take."""
    if checks.check_positive("time_limit", time_limit) > LONGEST:
        raise ValueError(f"time_limit is {time_limit:g}, but it must be at most {LONGEST:g} seconds")


class Infeasible(ValueError):
    """Raised if no solution meets every constraint."""
