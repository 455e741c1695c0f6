"""The notebooks of the exercises and of their solutions.

``python -m moeblaze_ref.course.exercises.notebooks`` writes them.

A sheet's two notebooks have the same cells, but for the code: unsolved in the one, solved in the other.
"""

from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from moeblaze_ref.core import checks
from moeblaze_ref.course.exercises.exercise import KINDS, Construction, Exercise, KernelExercise, Prediction, Sheet
from moeblaze_ref.course.exercises.kernels import THREADS, Kernel, helpers
from moeblaze_ref.course.exercises.sheets import EXERCISES, SHEETS
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

PREDICT = (
    "- **Predict**: put a number or a formula in the place of each `...`, then run the cell; only then does the "
    "project compute them. Counts must be exact, bytes are counted too; what comes out of a division may be off by one "
    "percent. A `layer` has its sizes: "
    "`layer.L`, `d`, `h`, `E`, `k`, `R = L * k`, and `itemsize`, the bytes of one element."
)
CONSTRUCT = (
    "- **Construct**: put an example in the place of each `...`, then run the cell. Several examples are right; the "
    "project checks yours, and says what is wrong with it."
)
CHECK = (
    "- **Fill the hole, find the bug**: edit the kernel below `%%check` and run the cell. The comment `Your part` "
    "marks a hole; a bug is not marked. The kernel is checked as by `moeblaze check --kernel`, in a process of its own "
    "and without a GPU: on small hard cases, over poisoned outputs, every access checked and its bytes counted, in "
    "several orders of the threads. Numba's simulator accepts Python that a GPU would refuse, such as numpy's "
    f"functions; do without it. After {LIMIT_SECONDS} seconds the check stops. The first check takes longest: it loads "
    "the checker itself. New to CUDA? [One page](../../docs/cuda.md) has what you need.\n"
    "- **Names**: `THREADS`, those of a block; `EMPTY`, -1, in place of an index that there is not; `ZERO`, 0 in "
    "float32; `DYNAMIC_SHARED(type, name)`, an array in the block's shared memory, of the bytes that the launch "
    "gives.\n"
    "- **Budget**: the most that all threads together may ask of memory, in bytes (`read`, `written`) or in `sectors` "
    "of 32 bytes. Neighbours are multiplied: `4 R h` is `4 * R * h`.\n"
    "- **Division of the work**: a kernel in which one thread does the work of many is refused, even if it is right. "
    "`accesses` counts those to global and shared memory by the thread that makes the most, `barriers` those "
    "that a block passes, `threads` those of the grid that write to memory."
)
ASK = (
    "- A wrong answer raises, and names the first number or element that differs. `hint()` gives a hint, which comes "
    "by itself the second time; `solution()` shows the solution. Both speak of the exercise tried last, or of the one "
    "that you "
    'name: `hint("NAME")`.'
)

EDIT = """\
- **Editor**: `edit("NAME")` in a new cell opens a kernel in an editor; `NAME` is the word after `%%check`. Its buttons
  run the check, show each message on its line, and step through a CUDA kernel.
  [Exercises](../../docs/exercises.md) says how to use it."""


def exercise_notebook(sheet: Sheet) -> NotebookNode:
    """The sheet as a reader finds it."""
    texts = {Prediction: PREDICT, Construction: CONSTRUCT, KernelExercise: f"{CHECK}\n{EDIT}"}
    how = "\n".join([*(text for kind, text in texts.items() if _has(sheet, kind)), ASK])
    other = f"Solutions, when you are done: [{sheet.title}](../solutions/{sheet.course}.ipynb)."
    return _notebook(sheet, "Exercises", f"{how}\n\n{other}", solved=False)


def solution_notebook(sheet: Sheet) -> NotebookNode:
    """The sheet solved, with what each exercise shows."""
    other = f"Try them first: [{sheet.title}](../exercises/{sheet.course}.ipynb)."
    return _notebook(sheet, "Solutions", other, solved=True)


def _has(sheet: Sheet, kind: type) -> bool:
    return any(isinstance(exercise, kind) for exercise in sheet.exercises)


def _notebook(sheet: Sheet, what: str, how: str, solved: bool) -> NotebookNode:
    cells = [
        new_markdown_cell("\n\n".join([*_head(sheet, what), how]), id="title"),
        new_code_cell(SETUP_TO_CONSTRUCT if _has(sheet, Construction) else SETUP, id="setup"),
    ]
    for place, exercise in enumerate(sheet.exercises, start=1):
        cells.append(new_markdown_cell("\n\n".join(_question(place, exercise)), id=exercise.name))
        text = exercise.solution if solved else exercise.unsolved
        cells.append(new_code_cell(exercise.cell(text), id=f"{exercise.name}-answer"))
        if solved:
            cells.append(new_markdown_cell(exercise.why, id=f"{exercise.name}-why"))
    return new_notebook(cells=cells, metadata=METADATA, nbformat_minor=5)


def _head(sheet: Sheet, what: str) -> tuple[str, str]:
    """The title, and what the sheet belongs to."""
    if sheet.number is None:
        return f"# {what}: {sheet.title}", "For readers of the [paper map](../../docs/paper_map.md)."
    course = f"Of notebook [{sheet.course[:2]}, {sheet.title}](../{sheet.course}.ipynb)."
    return f"# {what} {sheet.number}. {sheet.title}", course


def _question(place: int, exercise: Exercise) -> Iterator[str]:
    yield f"## {place}. {exercise.title}"
    yield f"*{KINDS[exercise.kind]}.* {exercise.question}"
    if isinstance(exercise, KernelExercise):
        budget, division = (", ".join(f"`{one}`" for one in each) for each in (exercise.budgets, exercise.division))
        task = f"Checked as `{exercise.task}`: {CONTRACTS[exercise.task].purpose}."
        limits = f"**Budget**: {budget}.", f"**Division of the work**: {division}."
        yield "  \n".join([task, _launch(exercise.kernel), *limits])
        if used := helpers(exercise.solution):
            summary = "What it uses of the project's headers"
            yield f"<details><summary>{summary}</summary>\n\n```c++\n{used}\n```\n\n</details>"


def _launch(kernel: Kernel) -> str:
    if not kernel.launch:
        return "Launched as the docstring says."
    dynamic = f", `{kernel.shared_bytes}` bytes of dynamic shared memory" if kernel.shared_bytes != "0" else ""
    return f"Launched with a grid of `{kernel.grid}`, `THREADS = {THREADS}`{dynamic}."


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
    notebook = nbformat.read(path, as_version=4)
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
