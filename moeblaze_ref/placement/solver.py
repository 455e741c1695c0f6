"""One integer program, several solvers: OR-Tools MathOpt with the settings that each of them needs."""

import datetime
from dataclasses import dataclass

from moeblaze_ref.core import checks

# Their names in MathOpt. Gurobi needs a licence of its own; the others come with OR-Tools.
SOLVERS = {"cp_sat": "CP_SAT", "highs": "HIGHS", "scip": "GSCIP", "gurobi": "GUROBI"}
DEFAULT_SOLVER = "cp_sat"
TIME_LIMIT = 60.0  # seconds of each program
LONGEST = 1e9  # seconds: a time limit of thirty years
WORKERS = 8  # of CP-SAT: strategies that help each other, on fewer cores too


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


def minimise(model, solver: str, time_limit: float, start: dict | None = None) -> Found | None:
    """Solve a MathOpt model of integer variables and costs, none below 0, by one of ``SOLVERS``.

    When the time limit, in seconds and at most ``LONGEST``, is over, the best solution so far counts. ``start`` is a
    solution to begin with, the value of each variable.

    Returns
    -------
    Found or None
        None if the time was over before there was any solution.

    Raises
    ------
    ValueError
        If there is no such solver, it is not installed, or the program is infeasible.
    """
    checks.check_name("solver", solver, SOLVERS)
    mathopt = _mathopt()
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit, 0.01)),
        relative_gap_tolerance=0.0,  # HiGHS would stop at 1e-4
        absolute_gap_tolerance=0.5,  # objectives are whole numbers
    )
    if solver == "cp_sat":
        from ortools.sat import sat_parameters_pb2

        parameters.threads = WORKERS
        # Beyond its default of 1e7, CP-SAT would cut the domains of counts, and call feasible programs infeasible.
        parameters.cp_sat = sat_parameters_pb2.SatParameters(mip_max_bound=1e15)
    hints = [mathopt.SolutionHint(variable_values=start)] if start else []
    settings = mathopt.ModelSolveParameters(solution_hints=hints)
    result = _solve(model, solver, parameters, settings)
    reasons = mathopt.TerminationReason
    if result.termination.reason == reasons.INFEASIBLE:
        raise Infeasible("no solution meets every constraint")
    if result.termination.reason not in (reasons.OPTIMAL, reasons.FEASIBLE):
        return None
    optimal = result.termination.reason == reasons.OPTIMAL
    bounds = result.termination.objective_bounds
    return Found(result.variable_values(), round(bounds.primal_bound if optimal else max(bounds.dual_bound, 0)))


def _solve(model, solver, parameters, settings):
    mathopt = _mathopt()
    try:
        return mathopt.solve(model, mathopt.SolverType[SOLVERS[solver]], params=parameters, model_params=settings)
    except RuntimeError as error:
        if solver != "gurobi":
            raise
        others = ", ".join(name for name in SOLVERS if name != solver)
        raise ValueError(
            f"solver gurobi does not run here ({error}): install Gurobi and a licence for it, or choose one that comes "
            f"with OR-Tools: {others}"
        ) from None


def check_installed(solver: str):
    """Check that there is such a solver, and that it runs here: it gets an empty model to solve."""
    minimise(new_model(), solver, TIME_LIMIT)


def check_time_limit(time_limit: float):
    """``time_limit`` is above 0 and no more than solvers take."""
    if checks.check_positive("time_limit", time_limit) > LONGEST:
        raise ValueError(f"time_limit is {time_limit:g}, but it must be at most {LONGEST:g} seconds")


class Infeasible(ValueError):
    """Raised if no solution meets every constraint."""
