"""One integer program, several solvers: OR-Tools MathOpt with the settings that each of them needs."""

import datetime
import math
from dataclasses import dataclass

from ortools.math_opt.python import mathopt
from ortools.sat import sat_parameters_pb2

from moeblaze_ref import doors

# Gurobi needs a licence of its own; the others come with OR-Tools.
SOLVERS = {
    "cp_sat": mathopt.SolverType.CP_SAT,
    "highs": mathopt.SolverType.HIGHS,
    "scip": mathopt.SolverType.GSCIP,
    "gurobi": mathopt.SolverType.GUROBI,
}
DEFAULT_SOLVER = "cp_sat"
TIME_LIMIT = 60.0  # seconds of each program
WORKERS = 8  # of CP-SAT: strategies that help each other, on fewer cores too

_ENDED = (mathopt.TerminationReason.OPTIMAL, mathopt.TerminationReason.FEASIBLE)


@dataclass(frozen=True)
class Found:
    """The best solution so far.

    Parameters
    ----------
    values : dict of variable to float
    bound : float
        No solution is below it: proven.
    """

    values: dict
    bound: float


def minimise(model, solver: str, time_limit: float, start: dict | None = None, tolerance: float = 0.0) -> Found | None:
    """Solve a MathOpt model of integer variables and integer costs.

    Parameters
    ----------
    model : mathopt.Model
        With its objective, to be minimised.
    solver : str
        One of ``SOLVERS``.
    time_limit : float
        Seconds; the best solution so far counts when they are over.
    start : dict of variable to float, optional
        A solution to begin with.
    tolerance : float
        A solution within so much of the bound, in units of the objective, is good enough.

    Returns
    -------
    Found or None
        None if the time was over before there was any solution.

    Raises
    ------
    ValueError
        If there is no such solver, or the program is infeasible.
    """
    doors.check_name("solver", solver, SOLVERS)
    parameters = mathopt.SolveParameters(
        time_limit=datetime.timedelta(seconds=max(time_limit, 0.01)), absolute_gap_tolerance=tolerance
    )
    if solver == "cp_sat":
        parameters.threads = WORKERS
        # Beyond its default of 1e7, CP-SAT would cut the domains of counts, and call feasible programs infeasible.
        parameters.cp_sat = sat_parameters_pb2.SatParameters(mip_max_bound=1e15)
    hints = [mathopt.SolutionHint(variable_values=start)] if start else []
    settings = mathopt.ModelSolveParameters(solution_hints=hints)
    result = mathopt.solve(model, SOLVERS[solver], params=parameters, model_params=settings)
    if result.termination.reason == mathopt.TerminationReason.INFEASIBLE:
        raise Infeasible("no solution meets every constraint")
    if result.termination.reason not in _ENDED:
        return None
    bound = result.termination.objective_bounds.dual_bound
    return Found(result.variable_values(), bound if math.isfinite(bound) else -math.inf)


class Infeasible(ValueError):
    """No solution meets every constraint."""


def total(terms):
    """The sum of many terms of a model."""
    return mathopt.fast_sum(terms)


def new_model() -> mathopt.Model:
    """An empty model."""
    return mathopt.Model()
