"""The notebooks of the exercises and of their solutions.

``python -m moeblaze_ref.course.exercises.notebooks`` writes them.

A sheet's two notebooks have the same questions. The one has unsolved code, and a cell that opens the editor above each
kernel. The other has the solutions.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moeblaze_ref.core import checks
from moeblaze_ref.course.exercises.exercise import (
    HARDEST,
    KINDS,
    Capstone,
    Construction,
    Exercise,
    KernelExercise,
    Prediction,
    Sheet,
    TorchExercise,
    WithKernel,
)
from moeblaze_ref.course.exercises.kernels import Kernel, helpers
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
from moeblaze_ref.course.exercises.submission import read_notebook
from moeblaze_ref.course.notebook import outputs
from moeblaze_ref.course.notebook.execution import METADATA
from moeblaze_ref.verify.checker.contracts import CONTRACTS
from moeblaze_ref.verify.in_subprocess import LIMIT_SECONDS

SETUP = """\
%load_ext moeblaze_ref.course.exercises
import math

from moeblaze_ref.core.config import preset
from moeblaze_ref.course.exercises import edit, hint, predict, solution"""
SETUP_TO_CONSTRUCT = SETUP.replace("import edit", "import construct, edit")

PREDICT = """\
- **Predict**: replace each `...` by a number or a formula, and run the cell. The project computes the numbers after
  that. Counts and bytes must be exact. The result of a division may be off by one percent. A `layer` has its sizes:
  `layer.L`, `d`, `h`, `E`, `k`, `R = L * k`, and `itemsize`, the bytes of one element."""
CONSTRUCT = """\
- **Construct**: replace each `...` by an example, and run the cell. Several examples are right. The project checks
  yours and says what is wrong."""
CHECK = f"""\
- **Fill the hole, find the bug**: run the cell `edit("NAME")`, change the kernel in the editor, and press Run. The
  comment `Your part` marks a hole. A bug is not marked.
- **The check** is that of `moeblaze check --kernel`. It needs no GPU. It runs the kernel on small hard cases in a
  subprocess, with several orders of the threads. Outputs start as poison, and every access is checked and
  counted. The first check is the slowest, because it loads the checker. A check ends after {LIMIT_SECONDS} seconds.
- **Numba** kernels run in Numba's simulator. It accepts some Python that a GPU refuses, such as numpy's functions: do
  not use it. The simulator has no functions of a warp.
- **Names**: `THREADS` is the number of threads of a block. `EMPTY` is -1, in place of an index that does not exist.
  `ZERO` is 0 in float32. `DYNAMIC_SHARED(type, name)` declares the block's dynamic shared memory as an array. New to
  CUDA? Read [one page](../../docs/cuda.md).
- **Budget**: the most that all threads together may request from memory. `read` and `written` are bytes, `sectors` are
  units of 32 bytes, and `conflicts` are extra passes over the banks of shared memory. Symbols next to each other are
  multiplied: `4 R h` is `4 * R * h`.
- **Division of the work**: the checker refuses a correct kernel in which one thread does the work of many. `accesses`
  is the number of accesses to global and shared memory of the thread that makes the most. `barriers` is the number of
  barriers that a block passes. `threads` is the number of threads that write to memory. Some budgets name a
  means: `exchanges` between the lanes of a warp, `waits` at mbarriers, bytes `copied` by `cp.async`, and how many of
  them are still `under_way` after a wait, added up over all waits."""
TORCH = (
    "- **Write it in torch**: edit the code below `%%check` and run the cell. The code may import torch and a few "
    "modules of Python. The project runs it in processes of its own, on cases that it does not show. It compares the "
    "results with what plain torch computes in float64, in another process. The report has a line for each case."
)
CAPSTONE = (
    '- **Capstone**: run the cell `edit("NAME")`, write the kernel in the editor, and press Run. The table in its '
    "header states the launch; change the grid, the block and the shared bytes as you like. The kernel is checked like "
    "any other, without a GPU. It must be right, and its threads must divide the work. Its counted bytes then decide "
    "the level: the report says which level it reaches, and how far the next one is.\n"
    "- **Names**: `EMPTY`, `THREADS` and the other names of the project's headers are those of the "
    "[sheet of notebook 3](03_gather_gemm_swiglu.ipynb). All bytes are those that threads ask for, in float32."
)
ASK = """\
- **Difficulty**: 1 is one line that follows from the question, 2 needs an idea, and 3 needs several ideas at once.
- **Help**: a wrong answer raises an error that names the first wrong number or element. `hint()` shows the next hint.
  From the second wrong answer on, the error shows it too. `solution()` shows the solution. Both are about the exercise
  that you tried last, or about the one that you name: `hint("NAME")`."""

EDIT = """\
- **Editor**: it shows each message on its line, steps through a CUDA kernel, and keeps your text.
  [Exercises](../../docs/exercises.md) says how to use it. You can also change the kernel in the cell below it, which
  begins with `%%check`, and run that cell. JupyterLab colours all of it as Python."""


def exercise_notebook(sheet: Sheet) -> NotebookNode:
    """The sheet as a reader finds it."""
    texts = {
        Prediction: PREDICT,
        Construction: CONSTRUCT,
        KernelExercise: CHECK,
        TorchExercise: TORCH,
        Capstone: CAPSTONE,
        WithKernel: EDIT,
    }
    how = "\n".join([*(text for kind, text in texts.items() if _has(sheet, kind)), ASK])
    return _notebook(sheet, "Exercises", "These exercises check what you learnt in", how, solved=False)


def solution_notebook(sheet: Sheet) -> NotebookNode:
    """The sheet solved, with what each exercise shows."""
    other = f"Try the exercises first: [{sheet.title}](../exercises/{sheet.course}.ipynb)."
    return _notebook(sheet, "Solutions", "These solutions belong to the exercises of", other, solved=True)


def _has(sheet: Sheet, kind: Any) -> bool:
    return any(isinstance(exercise, kind) for exercise in sheet.exercises)


def _notebook(sheet: Sheet, what: str, purpose: str, how: str, solved: bool) -> NotebookNode:
    cells = [
        new_markdown_cell("\n\n".join([*_head(sheet, what, purpose), how]), id="title"),
        new_code_cell(SETUP_TO_CONSTRUCT if _has(sheet, Construction) else SETUP, id="setup"),
    ]
    for place, exercise in enumerate(sheet.exercises, start=1):
        cells.append(new_markdown_cell("\n\n".join(_question(place, exercise)), id=exercise.name))
        if isinstance(exercise, WithKernel) and not solved:
            cells.append(new_code_cell(f'edit("{exercise.name}")', id=f"{exercise.name}-edit"))
        text = exercise.solution if solved else exercise.unsolved
        cells.append(new_code_cell(exercise.cell(text), id=f"{exercise.name}-answer"))
        if solved:
            cells.append(new_markdown_cell(exercise.why, id=f"{exercise.name}-why"))
    return new_notebook(cells=cells, metadata=METADATA, nbformat_minor=5)


def _head(sheet: Sheet, what: str, purpose: str) -> tuple[str, str]:
    """Return the title, and a sentence that says what the sheet is for."""
    if sheet.number is None:
        return f"# {what}: {sheet.title}", sheet.readers
    course = f"{purpose} notebook [{sheet.course[:2]}, {sheet.title}](../{sheet.course}.ipynb)."
    return f"# {what} {sheet.number}. {sheet.title}", course


def _question(place: int, exercise: Exercise) -> Iterator[str]:
    yield f"## {place}. {exercise.title}"
    yield f"*{KINDS[exercise.kind]}. Difficulty {exercise.difficulty} of {HARDEST}.* {exercise.question}"
    if isinstance(exercise, Capstone):
        limits = [f"**{level.capitalize()}**: {_listed(budgets)}." for level, budgets in exercise.levels.items()]
        yield "  \n".join([_task(exercise), *limits, f"**Division of the work**: {_listed(exercise.division)}."])
    if isinstance(exercise, KernelExercise):
        limits = [
            f"**Budget**: {_listed(exercise.budgets)}.",
            f"**Division of the work**: {_listed(exercise.division)}.",
        ]
        yield "  \n".join([_task(exercise), _launch(exercise.kernel), *limits])
        if used := helpers(exercise.solution):
            summary = "Code that this kernel uses from the project's headers"
            yield f"<details><summary>{summary}</summary>\n\n```c++\n{used}\n```\n\n</details>"


def _task(exercise: KernelExercise | Capstone) -> str:
    return f"Checked as `{exercise.task}`: {CONTRACTS[exercise.task].purpose}."


def _listed(budgets: tuple[str, ...]) -> str:
    return ", ".join(f"`{one}`" for one in budgets)


def _launch(kernel: Kernel) -> str:
    if not kernel.launch:
        return "Launched as the docstring says."
    dynamic = f", `{kernel.shared_bytes}` bytes of dynamic shared memory" if kernel.shared_bytes != "0" else ""
    scalar = f", `Scalar` is {kernel.dtype}" if kernel.dtype != "float32" else ""
    return f"Launched with a grid of `{kernel.grid}`, `THREADS = {kernel.block}`{dynamic}{scalar}."


def reset(name: str, path: Path) -> None:
    """Give an exercise's cell of a reader's notebook its first text again; all other cells stay.

    Raises
    ------
    ValueError
        If there is no such exercise, or the notebook has no cell for it.
    OSError
        If the notebook cannot be read or written.
    """
    exercise = EXERCISES[checks.check_name("exercise", name, EXERCISES)]
    if not path.exists():
        raise ValueError(
            f"there is no {path}; `moeblaze lab` copies the notebooks, --folder names another folder of them"
        )
    notebook = read_notebook(path)
    cells = [cell for cell in notebook.cells if cell.get("id") == f"{name}-answer"]
    if not cells:
        raise ValueError(f"{path} has no cell {name}-answer")
    for cell in cells:
        cell.source, cell.outputs, cell.execution_count = exercise.cell(exercise.unsolved), [], None
    path.write_text(outputs.text(notebook))


def files(folder: Path) -> dict[Path, str]:
    """Return the expected text of each notebook file below ``folder``."""
    made = {"exercises": exercise_notebook, "solutions": solution_notebook}
    return {
        folder / kind / f"{sheet.course}.ipynb": outputs.text(make(sheet))
        for kind, make in made.items()
        for sheet in SHEETS
    }


def write(folder: Path) -> None:
    """Write every notebook below ``folder``."""
    for path, text in files(folder).items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(Path("notebooks"))
