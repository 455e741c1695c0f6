"""Check of a kernel in three parts: the inputs, the launches, possibly in another process, and the comparison.

The specification computes its results in the third part. So they do not exist while a reader's code runs.
"""

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from moeblaze_ref.core.config import is_gated
from moeblaze_ref.runtime.poison import poison
from moeblaze_ref.verify import comparisons
from moeblaze_ref.verify.cases import Case
from moeblaze_ref.verify.checker.budgets import Budget
from moeblaze_ref.verify.checker.contracts import Arrays, dtype_of, set_problem
from moeblaze_ref.verify.checker.kernels import CudaKernel
from moeblaze_ref.verify.checker.report import Difference, Report, Result, first_difference, first_other_bits, unlike
from moeblaze_ref.verify.checker.runners import RUNNERS, Runner
from moeblaze_ref.verify.checker.trial import Answer, Description, Step, Terms, Trial
from moeblaze_ref.verify.large import readers

_MOST_RUNS = max(len(runner.orders) for runner in RUNNERS.values())


@dataclass(frozen=True)
class Exam:
    """The task of a kernel, and the steps of every case."""

    terms: Terms
    runner: str  #: where the kernel runs: one of `runners.RUNNERS`
    #: The case itself, with memory for every run, and the next step of the same shape, with memory for one.
    cases: list[tuple[Step, Step]]
    #: Memory for what the kernel writes in the case of `large.readers`; None if that case is not asked.
    large: np.ndarray | None = None
    unchecked: str = ""  #: why that case is not asked of a kernel of which all other cases are

    @classmethod
    def of(cls, terms: Terms, runner: str, cases: Iterable[Case], large: bool = False, unchecked: str = "") -> "Exam":
        """Make the inputs, those of the case of `large.readers` too if ``large``.

        Raises
        ------
        ValueError
            If there is no case.
        """
        adapted = (_with_activation(case, terms.activation).astype(terms.dtype) for case in cases)
        steps = [(_step(terms, case, _MOST_RUNS), _step(terms, case.steps()[1], 1)) for case in adapted]
        if not steps:
            raise ValueError("cases is empty, but a kernel is checked by at least one case")
        return cls(terms, runner, steps, _poisoned(readers.MEMORY, terms.dtype) if large else None, unchecked)

    @cached_property
    def text_trial(self) -> Trial | None:
        """Return the launch and parameters that a .cu file states; None for Numba, where the file would have to run."""
        return self.terms.trial(self.runner) if isinstance(self.terms.kernel, CudaKernel) else None

    @property
    def num_answers(self) -> int:
        """Number of answers if no case faults."""
        return len(self.cases) + (self.large is not None)

    def launches(self) -> Iterator[Description | Answer]:
        """Open the kernel and launch it on every case, up to the first fault. Errors are those of `Terms.open`."""
        trial = self.terms.open()
        yield trial.description
        yield from self.answers(trial)

    def answers(self, trial: Trial) -> Iterator[Answer]:
        """Launch the opened kernel on every case, up to the first fault."""
        faults = ""
        for answer in trial.answers(self.cases):
            yield answer
            faults = answer.fault
        if self.large is not None and not faults:
            yield readers.launch(trial, self.large)

    def report(self, description: Description, answers: Sequence[Answer]) -> Report:
        """Compare what the launches wrote with the specification."""
        runner = RUNNERS[description.runner]
        results = [self._result(runner, *steps, answer) for steps, answer in zip(self.cases, answers, strict=False)]
        unchecked = self.unchecked
        trial = self.text_trial if self.large is not None and all(result.ok for result in results) else None
        if self.large is not None and trial is not None:
            problem = answers[-1].fault or readers.problem(trial, self.large)
            results += [Result(readers.SHAPE, problem, None, {})] * bool(problem)
            unchecked = "" if problem else readers.unchecked(trial, self.large)
        terms = self.terms
        names = terms.contract.task, terms.kernel.label, terms.backend, terms.dtype, description.launch
        return Report(*names, runner.quantities, results, unchecked)

    def _result(self, runner: Runner, first: Step, following: Step, answer: Answer) -> Result:
        shape = first.problem.case.shape
        if answer.fault:
            return Result(shape, answer.fault, None, {})
        taken = self.text_trial.parameters(first.problem) if self.text_trial else answer.parameters
        left_out = set(self.terms.contract.extras) - set(taken)
        first, following = (
            Step(step.problem, [{name: run[name] for name in run if name not in left_out} for run in step.outputs])
            for step in (first, following)
        )
        difference = self._difference(first)
        instability, unstable = _instability(runner, first)
        stale = None if difference else self._difference(following)
        in_next_step = f"in the next step of the same shape, with other routing, weights and gradients, {stale}"
        problems = [str(difference or ""), instability, in_next_step if stale else ""]
        if not any(problems):
            problems = _excesses(self.terms.budgets, answer)
        missed = {level: "; ".join(_excesses(budgets, answer)) for level, budgets in self.terms.levels.items()}
        wrong = difference or unstable or stale
        return Result(shape, "; ".join(filter(None, problems)), wrong, answer.counts, missed)

    def _difference(self, step: Step) -> Difference | None:
        problem, found = step.problem, step.outputs[0]
        if self.terms.rounded_once:
            return first_other_bits(problem, found)
        return first_difference(problem, found, self._baseline(problem.case))

    def _baseline(self, case: Case) -> Arrays:
        """Return plain torch's results in the case's dtype, for the bounds of narrow dtypes."""
        dtype = self.terms.dtype
        if dtype in comparisons.BOUNDS:
            return {}
        ways = comparisons.EXPECT[self.terms.contract.stage](case, getattr(torch, dtype)).values()
        return {name: array for way in ways for name, array in way.items()}


def _excesses(budgets: Iterable[Budget], answer: Answer) -> list[str]:
    """Return a sentence on each budget that is exceeded."""
    return [excess for budget in budgets if (excess := budget.excess(answer.counts, answer.symbols))]


def _instability(runner: Runner, step: Step) -> tuple[str, Difference | None]:
    """Describe the first later run that wrote different bits; empty if there is none."""
    first = step.outputs[0]
    for order, again in zip(runner.orders[1:], step.outputs[1:], strict=False):
        difference = unlike(step.problem, again, first)
        if difference:
            how = difference.sentence(f"in {runner.orders[0]}")
            return f"{runner.what_differs} ({order}): {how}", difference
    return "", None


def _step(terms: Terms, case: Case, runs: int) -> Step:
    problem = set_problem(terms.contract, case)
    shapes = problem.outputs.items()
    return Step(
        problem, [{name: _poisoned(shape, dtype_of(name, terms.dtype)) for name, shape in shapes} for _ in range(runs)]
    )


def _poisoned(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """An array that a forked process shares with this one. It has no name and no file that could be cut short."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = mmap.mmap(-1, max(size, 1))
    return poison(np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape))


def _with_activation(case: Case, activation: str) -> Case:
    """The same layer with another activation; an ungated one has no w2."""
    weights = case.weights if is_gated(activation) else case.weights._replace(w2=None)
    return replace(case, activation=activation, weights=weights)
