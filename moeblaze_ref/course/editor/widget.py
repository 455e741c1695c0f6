"""The editor's part in the notebook's kernel: it runs the check and the stepper in threads, and tells the page."""

import html
import io
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import anywidget
from markdown_it import MarkdownIt
from traitlets import Bool, Bytes, Dict, Int, List, Unicode

from moeblaze_ref.core import checks
from moeblaze_ref.course.editor import messages
from moeblaze_ref.course.exercises import drafts
from moeblaze_ref.course.exercises.desk import Desk, Unsolved
from moeblaze_ref.course.notebook.pictures import alt_text
from moeblaze_ref.course.notebook.stepper import Stepper
from moeblaze_ref.runtime.record import LaunchRecord
from moeblaze_ref.verify import recording

FOLDER = Path(__file__).parent


class KernelEditor(anywidget.AnyWidget):
    """An editor of one kernel exercise, with the text that was last written for it.

    Parameters
    ----------
    name : str
        The exercise.
    desk : Desk
        What checks the kernel, as for ``%%check``.

    Raises
    ------
    ValueError
        If there is no such exercise, or it asks for no kernel.
    """

    _esm = FOLDER / "bundle.js"
    _css = FOLDER / "editor.css"

    name = Unicode().tag(sync=True)
    language = Unicode().tag(sync=True)  #: "c++" or "python"
    unsolved = Unicode().tag(sync=True)
    text = Unicode().tag(sync=True)
    limit = Int().tag(sync=True)  #: seconds that a check may take
    doing = Unicode().tag(sync=True)  #: "check", "step", or empty if nothing runs
    verdict = Unicode().tag(sync=True)  #: HTML
    right = Bool().tag(sync=True)
    marks: Any = List().tag(sync=True)  #: messages on lines: each `messages.Message` as a dictionary
    #: Of the stepper: the warps that there are, the chosen one, its number of steps, and the step, counted from 1.
    warps: Any = List(Unicode()).tag(sync=True)
    warp = Unicode().tag(sync=True)
    steps = Int().tag(sync=True)
    step = Int(1).tag(sync=True)
    picture = Bytes().tag(sync=True)  #: PNG
    alt = Unicode().tag(sync=True)
    line = Int(allow_none=True, default_value=None).tag(sync=True)  #: of the text, that the step is at
    lanes: Any = Dict().tag(sync=True)  #: how many lanes are at each line

    def __init__(self, name: str, desk: Desk):
        exercise = desk.kernel(name)
        limit = int(desk.limits.seconds)
        text = drafts.read(name) or exercise.unsolved
        super().__init__(name=name, language=exercise.language, unsolved=exercise.unsolved, text=text, limit=limit)
        self.exercise, self._desk = exercise, desk
        self._problem = ""  # of the last check
        self._stepper: Stepper | None = None
        self._thread: threading.Thread | None = None
        self._stopping: Connection | None = None
        self.on_msg(self._asked)
        self.observe(lambda change: drafts.keep(name, change.new), "text")
        self.observe(self._choose_warp, "warp")
        self.observe(self._draw, "step")

    def run(self, what: str, text: str) -> None:
        """Begin to "check" or to "step" a text in a thread, unless one of them runs.

        Raises
        ------
        ValueError
            If it is neither.
        """
        work = {"check": self._check, "step": self._step}[checks.check_name("action", what, ("check", "step"))]
        if self.doing:
            return
        self.text, self.doing = text, what
        stop, self._stopping = Pipe(duplex=False)
        self._thread = threading.Thread(target=self._run, args=(work, stop), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the check or the launch that runs, if any."""
        if self._stopping is not None:
            self._stopping.close()

    def wait(self) -> None:
        """Wait until what runs has ended."""
        if self._thread is not None:
            self._thread.join()

    def _asked(self, _: Any, content: Any, buffers: Any) -> None:
        """Do what a button asks for."""
        match content:
            case {"do": "stop"}:
                self.stop()
            case {"do": str(what), "text": str(text)}:
                self.run(what, text)

    # ---- in the thread ------------------------------------------------------------------------------

    def _run(self, work: Callable[[Connection], None], stop: Connection):
        self._tell("", right=False, found=[])
        self._show(None)
        try:
            work(stop)
        except KeyboardInterrupt:
            self._tell(_plain("You stopped it before there was a result."), right=False, found=[])
        except Exception as error:  # such as a machine without a compiler: the button's thread has no other output
            self._tell(_plain(f"{type(error).__name__}: {error}"), right=False, found=[])
        finally:
            stop.close()
            self.doing = ""

    def _check(self, stop: Connection):
        self._problem = ""
        try:
            shown = self._desk.check_text(self.name, self.text, [stop])
        except Unsolved as wrong:
            self._problem, _, _ = str(wrong).partition("\n\n")
            self._tell_wrong(str(wrong), messages.of_verdict(self._problem, self.exercise.file) or self._seen(stop))
        else:
            self._tell(MarkdownIt("commonmark", {"html": False}).render(str(shown.data)), right=True, found=[])

    def _seen(self, stop: Connection) -> list[messages.Message]:
        """Return what one recorded launch shows of the problem: a fault, races, the line that wrote a wrong element."""
        if self.exercise.language != "c++":
            return []
        try:
            record = self._recorded(stop)
        except (ValueError, TypeError, OSError):
            return []  # the verdict is known without it
        file = self.exercise.file
        return messages.of_record(record, file) + messages.of_element(record, self._problem, file)

    def _step(self, stop: Connection):
        if self.exercise.language != "c++":
            raise ValueError("the stepper is for CUDA kernels: Numba's simulator records no accesses")
        try:
            record = self._recorded(stop)
            stepper = Stepper(record)
        except (ValueError, TypeError, OSError) as error:
            return self._tell_wrong(str(error), messages.of_verdict(str(error), self.exercise.file))
        found = messages.of_record(record, self.exercise.file)
        self._tell(_plain("\n".join(dict.fromkeys(one.message for one in found))), right=False, found=found)
        self._show(stepper)

    def _recorded(self, stop: Connection) -> LaunchRecord:
        """A launch on the case in which the last check failed, else on the first."""
        exercise = self.exercise
        options: dict[str, Any] = {"shape": self._problem, "stop": [stop], **exercise.launch}
        return recording.record(exercise.file, self.text, exercise.entry, exercise.task, self._desk.limits, **options)

    def _tell_wrong(self, said: str, found: list[messages.Message]):
        """Show what was said; without a message on a line, its first part is on the line that declares the kernel."""
        line = messages.declaration(self.text, self.exercise.entry)
        otherwise = messages.Message(line, "error", said.partition("\n\n")[0])
        self._tell(_plain(said), right=False, found=found or [otherwise])

    # ---- what the page shows ------------------------------------------------------------------------

    def _tell(self, verdict: str, right: bool, found: list[messages.Message]):
        with self.hold_sync():
            self.verdict, self.right, self.marks = verdict, right, [one._asdict() for one in found]

    def _show(self, stepper: Stepper | None):
        """Show the first step of the first warp; without a stepper nothing."""
        self._stepper = stepper
        with self.hold_sync():
            self.warps, self.warp, self.picture, self.line, self.lanes = [], "", b"", None, {}
            if stepper is not None:
                self.warps = [*stepper.warps]
                self.warp = self.warps[0]

    def _choose_warp(self, _: Any):
        if self._stepper is None or not self.warp:
            return
        self.steps = self._stepper.count(self.warp)
        if self.step == 1:
            self._draw(None)
        else:
            self.step = 1

    def _draw(self, _: Any):
        if self._stepper is None:
            return
        figure = self._stepper.picture(self.warp, self.step)
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=100)
        with self.hold_sync():
            self.picture, self.alt = drawn.getvalue(), alt_text(figure)
            self.line, self.lanes = self._stepper.lines(self.warp, self.step, self.exercise.file)


def _plain(text: str) -> str:
    """A text as HTML shows it, line by line."""
    return f"<pre>{html.escape(text)}</pre>" if text else ""
