"""One kernel before the judge: case by case, over poison, in several orders, against the specification."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
import torch

from moeblaze_ref import comparisons, doors
from moeblaze_ref.cases import Case
from moeblaze_ref.config import ITEMSIZE, is_gated
from moeblaze_ref.judge.budgets import Budget
from moeblaze_ref.judge.contracts import AXES, Arrays, Contract, Problem, dtype_of, set_problem
from moeblaze_ref.judge.kernels import CudaKernel, Launch, NumbaKernel
from moeblaze_ref.judge.report import Counts, Difference, Result, first_difference, unlike
from moeblaze_ref.judge.runners import Fault, runner_of
from moeblaze_ref.raw_cuda.gemm import C_TYPE
from moeblaze_ref.raw_cuda.runtime.poison import poison


@dataclass(frozen=True)
class Trial:
    """A kernel, the task that it claims to do, and the terms.

    Parameters
    ----------
    contract : Contract
    kernel : CudaKernel or NumbaKernel
    backend : str
        As `runners.runner_of` has it.
    launch : Launch
    budgets : tuple of Budget
    activation, dtype : str
    constants : dict
        Preprocessor constants beyond the project's.

    Raises
    ------
    ValueError
        If an activation or dtype is unknown or not the task's, or the backend counts not what a budget limits.
    """

    contract: Contract
    kernel: CudaKernel | NumbaKernel
    backend: str
    launch: Launch
    budgets: tuple[Budget, ...]
    activation: str
    dtype: str
    constants: dict[str, Any]

    def __post_init__(self):
        is_gated(self.activation)
        doors.check_name("dtype", self.dtype, C_TYPE)
        if self.dtype != "float32" and not self.contract.has_dtype:
            raise ValueError(
                f"dtype is {self.dtype}, but the tensors of {self.contract.task} are float32 and int32 only"
            )
        for budget in self.budgets:
            if budget.quantity not in self.quantities:
                counted = f"only {' and '.join(self.quantities)}" if self.quantities else "nothing"
                raise ValueError(f"a budget limits {budget.quantity}, but on {self.backend} {counted} is counted")

    @property
    def quantities(self) -> tuple[str, ...]:
        """What the backend counts."""
        return runner_of(self.backend).quantities

    def results(self, cases: Iterable[Case]) -> Iterator[Result]:
        """The verdict on each case, up to the first fault."""
        for case in cases:
            try:
                yield self._judge(_with_activation(case, self.activation).astype(self.dtype))
            except Fault as fault:
                yield Result(case.shape, str(fault), None, {})
                return

    def _judge(self, case: Case) -> Result:
        problem = set_problem(self.contract, case)
        found, counts = self._run(problem, order=0)
        difference = first_difference(self.contract, problem, found, self._peer(case))
        instability, shown = self._instability(problem, found)
        problems = [str(difference) if difference else "", instability]
        if not any(problems):
            symbols = self._symbols(problem)
            grid, *_ = self.launch.at(self.kernel.name, symbols)
            problems = [budget.excess(counts, symbols | {"blocks": math.prod(grid)}) for budget in self.budgets]
        return Result(case.shape, "; ".join(filter(None, problems)), difference or shown, counts)

    def _instability(self, problem: Problem, found: Arrays) -> tuple[str, Difference | None]:
        """How the first later run that wrote other bits differs; empty if none did."""
        runner = runner_of(self.backend)
        for order in range(1, len(runner.orders)):
            again, _ = self._run(problem, order)
            difference = unlike(problem, again, found)
            if difference:
                how = difference.sentence(f"in {runner.orders[0]}")
                return f"{runner.what_differs} ({runner.orders[order]}): {how}", difference
        return "", None

    def _run(self, problem: Problem, order: int) -> tuple[Arrays, Counts]:
        """The outputs of one launch, over poison, and what was counted."""
        constants, symbols = self._constants(problem), self._symbols(problem)
        names = self.kernel.fit(self.contract, self.dtype, constants)
        inputs = {name: array.copy() for name, array in problem.inputs.items()}
        outputs = self._poisoned(problem, names)
        given = problem.sizes | inputs | outputs
        arguments = {name: given[name] if name in given else self._nothing(name) for name in names}
        launch = self.launch.at(self.kernel.name, symbols)
        counts = self._launch(constants, launch, arguments, order)
        written = counts.get("written", {})  # where inputs are copied to a device, what changes there does not come back
        for name, array in inputs.items():
            if written.get(name) or array.tobytes() != problem.inputs[name].tobytes():
                raise Fault(f"kernel {self.kernel.name} changes its input {name}")
        return outputs, counts

    def _launch(self, constants: dict[str, Any], launch: tuple, arguments: dict[str, Any], order: int) -> Counts:
        """What was counted; a grid without blocks, which CUDA refuses, is nothing to do."""
        grid, *_ = launch
        if 0 in grid:
            return {quantity: {} for quantity in self.quantities}
        runner = runner_of(self.backend)
        try:
            return runner.run(self.kernel, constants, launch, arguments, order)
        except Fault as fault:
            raise Fault(f"{fault} ({runner.orders[order]})" if order else str(fault)) from None

    def _poisoned(self, problem: Problem, names: tuple[str, ...]) -> Arrays:
        return {
            name: poison(np.empty(problem.expected[name].shape, dtype_of(name, self.dtype)))
            for name in names
            if name in problem.expected
        }

    def _nothing(self, name: str) -> np.ndarray:
        """What a kernel gets for a tensor that the activation lacks: an array that it must not follow."""
        return np.empty((0,) * len(AXES[name]), dtype_of(name, self.dtype))

    def _constants(self, problem: Problem) -> dict[str, Any]:
        return self.constants_of(problem.case.renormalize)

    def _symbols(self, problem: Problem) -> dict[str, int]:
        return self.symbols_of(self._constants(problem), problem.sizes)

    def constants_of(self, renormalize: bool) -> dict[str, Any]:
        """What the kernel is compiled with."""
        terms = {"ACTIVATION": self.activation, "RENORMALIZE": int(renormalize), "BALANCE": 1}
        return self.kernel.constants(self.dtype, terms | self.launch.threads, self.constants)

    def symbols_of(self, constants: dict[str, Any], sizes: dict[str, int]) -> dict[str, int]:
        """What formulas may use: a kernel's own constants yield to the sizes of the case."""
        terms = {"s": ITEMSIZE[self.dtype], "G": 1 + is_gated(self.activation)}
        return self.kernel.numbers(constants) | terms | sizes

    def _peer(self, case: Case) -> Arrays:
        """What plain torch makes of the case in the same dtype, for bounds of the narrow ones."""
        if self.dtype in comparisons.BOUNDS:
            return {}
        ways = comparisons.EXPECT[self.contract.stage](case, getattr(torch, self.dtype)).values()
        return {name: array for way in ways for name, array in way.items()}


def _with_activation(case: Case, activation: str) -> Case:
    """The same layer with another activation; an ungated one has no w2."""
    weights = case.weights if is_gated(activation) else case.weights._replace(w2=None)
    return replace(case, activation=activation, weights=weights)
