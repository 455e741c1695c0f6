"""A kernel's launches on the inputs of a case. They run in the process of the reader's code.

Nothing here knows what is right. The outputs go to memory that is shared with the process that compares them; what was
counted, and a fault, go there as an `Answer`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from moeblaze_ref.backends.raw_cuda.gemm import C_TYPE
from moeblaze_ref.backends.registry import BACKENDS
from moeblaze_ref.core import checks
from moeblaze_ref.core.config import ITEMSIZE, is_gated
from moeblaze_ref.runtime.source import Size
from moeblaze_ref.verify.checker.budgets import Budget
from moeblaze_ref.verify.checker.contracts import AXES, Arrays, Contract, Problem, dtype_of
from moeblaze_ref.verify.checker.kernels import CudaKernel, Launch, NumbaFile, NumbaKernel, choose_launch
from moeblaze_ref.verify.checker.report import Counts
from moeblaze_ref.verify.checker.runners import RUNNERS, Fault, runner_of


class Step(NamedTuple):
    """One step of a case: the inputs, and poisoned memory for what each run on them writes."""

    problem: Problem
    outputs: list[Arrays]


class Description(NamedTuple):
    """Description of a kernel, sent before its launches."""

    runner: str  #: where it runs: one of `runners.RUNNERS`
    launch: str  #: its grid, block and shared bytes


class Answer(NamedTuple):
    """Results of the launches on one case."""

    fault: str  #: what the kernel did that a GPU would not survive; empty if nothing
    counts: Counts  #: by quantity and tensor, of the first run
    symbols: dict[str, int]  #: what the formula of a budget may use
    parameters: tuple[str, ...]  #: the tensors and sizes that the kernel takes


@dataclass(frozen=True)
class Terms:
    """Terms of a check, made before the kernel runs.

    Raises
    ------
    ValueError
        If the backend does not take the kernel, or an activation or dtype is unknown or not the task's.
    """

    contract: Contract
    kernel: CudaKernel | NumbaKernel | NumbaFile
    backend: str  #: a backend that takes such a kernel
    asked: dict[str, str | None]  #: formulas for grid, block and shared bytes, or None
    budgets: tuple[Budget, ...]
    levels: dict[str, tuple[Budget, ...]]  #: budgets that a right kernel may miss, by level
    activation: str
    dtype: str
    constants: dict[str, Any]  #: preprocessor constants beyond the project's
    rounded_once: bool = False  #: True if the comparison is of bits, as of `checker.prepare`

    def __post_init__(self):
        checks.check_name("backend", self.backend, BACKENDS)
        if self.backend not in self.kernel.backends:
            takes = " or ".join(self.kernel.backends)
            raise ValueError(f"backend {self.backend} does not take {self.kernel.label}: it runs on {takes}")
        is_gated(self.activation)
        checks.check_name("dtype", self.dtype, C_TYPE)
        if self.dtype != "float32" and not self.contract.has_dtype:
            raise ValueError(
                f"dtype is {self.dtype}, but the tensors of {self.contract.task} are float32 and int32 only"
            )

    def open(self) -> "Trial":
        """The kernel, ready to be launched here.

        Raises
        ------
        ValueError, TypeError
            If the backend does not run here or does not count what a budget limits, or the kernel cannot be imported.
        """
        status = BACKENDS[self.backend].status()
        if not status.available:
            remedy = status.remedy and f"; {status.remedy}"
            raise ValueError(f"backend {self.backend} does not run here: {status.detail}{remedy}")
        runner = runner_of(self.backend)
        counted = RUNNERS[runner].quantities
        for budget in itertools.chain(self.budgets, *self.levels.values()):
            if budget.quantity not in counted:
                *some, last = counted or ("",)
                what = f"only {', '.join(some)} and {last} are" if counted else "nothing is"
                raise ValueError(f"a budget limits {budget.quantity}, but on {self.backend} {what} counted")
        return self.trial(runner)

    def trial(self, runner: str) -> "Trial":
        """The same, unchecked. Nothing of a .cu file runs."""
        kernel = self.kernel.open()
        launch = choose_launch(kernel.stated(), self.asked, self.contract, kernel.header)
        return Trial(self.contract, kernel, runner, launch, self.activation, self.dtype, self.constants)


@dataclass(frozen=True)
class Trial:
    """A kernel that can be launched."""

    contract: Contract
    kernel: CudaKernel | NumbaKernel
    runner: str  #: one of `runners.RUNNERS`
    launch: Launch
    activation: str
    dtype: str
    constants: dict[str, Any]  #: as `Terms` has them

    @property
    def description(self) -> Description:
        """Return the kernel's description."""
        return Description(self.runner, str(self.launch))

    def answers(self, cases: Iterable[Iterable[Step]]) -> Iterator[Answer]:
        """Launch on the steps of every case, up to the first fault."""
        for steps in cases:
            answer = self._answer(steps)
            yield answer
            if answer.fault:
                return

    def _answer(self, steps: Iterable[Step]) -> Answer:
        """The counts are those of the first run of the first step."""
        orders = range(len(RUNNERS[self.runner].orders))
        try:
            counts = [
                self._run(problem, memory, order)
                for problem, runs in steps
                for order, memory in zip(orders, runs, strict=False)
            ]
        except Fault as fault:
            return Answer(str(fault), {}, {}, ())
        problem = next(iter(steps)).problem
        symbols = self._symbols(problem)
        grid, *_ = self.launch.at(self.kernel.name, symbols)
        return Answer("", counts[0], symbols | {"blocks": math.prod(grid)}, self.parameters(problem))

    def _run(self, problem: Problem, memory: Arrays, order: int) -> Counts:
        """Launch once, into the memory, and return what was counted."""
        constants, launch, arguments = self.call(problem, memory)
        counts = self._launch(constants, launch, arguments, order)
        written = counts.get("written", {})  # what changes in a device's copy of an input does not come back
        for name, array in problem.inputs.items():
            if written.get(name) or (name in arguments and arguments[name].tobytes() != array.tobytes()):
                raise Fault(f"kernel {self.kernel.name} changes its input {name}")
        return counts

    def call(self, problem: Problem, memory: Arrays) -> tuple[dict[str, Any], tuple[Size, Size, int], dict[str, Any]]:
        """Return what a launch takes: constants; grid, block and shared bytes; arguments, inputs copied."""
        inputs = {name: array.copy() for name, array in problem.inputs.items()}
        # A tensor that the activation lacks is an array that the kernel must not read.
        absent = {name: np.empty((0,) * len(AXES[name]), dtype_of(name, self.dtype)) for name in self.contract.tensors}
        given = absent | problem.sizes | inputs | memory
        arguments = {name: given[name] for name in self.parameters(problem)}
        return self._constants(problem), self.launch.at(self.kernel.name, self._symbols(problem)), arguments

    def _launch(self, constants: dict[str, Any], launch: tuple, arguments: dict[str, Any], order: int) -> Counts:
        """Launch and return the counts; an empty grid, which CUDA refuses, is skipped."""
        runner, (grid, *_) = RUNNERS[self.runner], launch
        if 0 in grid:
            return {quantity: {} for quantity in runner.quantities}
        try:
            return runner.run(self.kernel, constants, launch, arguments, order)
        except Fault as fault:
            raise Fault(f"{fault} ({runner.orders[order]})" if order else str(fault)) from None

    def parameters(self, problem: Problem) -> tuple[str, ...]:
        """The tensors and sizes that the kernel takes. Errors are those of its ``fit``."""
        return self.kernel.fit(self.contract, self.dtype, self._constants(problem))

    def _constants(self, problem: Problem) -> dict[str, Any]:
        return self.constants_of(problem.case.renormalize)

    def _symbols(self, problem: Problem) -> dict[str, int]:
        return self.symbols_of(self._constants(problem), problem.sizes)

    def constants_of(self, renormalize: bool) -> dict[str, Any]:
        """Return the constants that the kernel is compiled with."""
        terms = {"ACTIVATION": self.activation, "RENORMALIZE": int(renormalize), "BALANCE": 1, "Z_LOSS": 1}
        return self.kernel.constants(self.dtype, terms | self.launch.threads, self.constants)

    def symbols_of(self, constants: dict[str, Any], sizes: dict[str, int]) -> dict[str, int]:
        """Return the symbols for formulas: the sizes of the case override the kernel's own constants."""
        terms = {"s": ITEMSIZE[self.dtype], "G": 1 + is_gated(self.activation)}
        return self.kernel.numbers(constants) | terms | sizes
