"""A reader's torch code: what its text may say, and how it is run."""

import ast
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells import messages

MODULES = ("collections", "contextlib", "dataclasses", "functools", "itertools", "math", "torch", "typing")
FUNCTIONS = (  #: of Python, refused
    *("__import__", "breakpoint", "compile", "eval", "exec", "getattr", "globals", "input", "locals", "open"),
    *("setattr", "vars"),
)
IN_PLACE = {"_cdata": ": `data_ptr()` says which storage it is"}  #: what to use in place of a name that is refused
METHODS = ("__call__", "__enter__", "__exit__", "__init__", "__torch_dispatch__", "__torch_function__")


class Cell(NamedTuple):
    """A reader's code."""

    file: str  #: its name in messages
    text: str
    name: str  #: of the function or class that it must define
    refused: tuple[str, ...] = ()  #: names that the exercise does without, of functions, modules or attributes

    def check(self) -> None:
        """Check the text; nothing of it runs.

        This keeps an honest answer from what the exercise does without. It protects nothing: the confined processes do.

        Raises
        ------
        ValueError
            If it is no Python, imports a module that is none of `MODULES`, or names something that is refused.
        """
        try:
            nodes: list[Any] = [*ast.walk(ast.parse(self.text))]
        except SyntaxError as error:
            raise ValueError(f"SyntaxError: {error.msg} ({self.file}, line {error.lineno})") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{self.file} is not Python: {type(error).__name__}: {error}") from None
        for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
            for problem in self._problems(node):
                raise ValueError(f"{self.file}, line {node.lineno}: {problem}")

    def _problems(self, node: Any) -> Iterator[str]:
        for module in _imported(node):
            if module.partition(".")[0] not in MODULES:
                yield f"imports {module or 'from this folder'}, but the answer may import {', '.join(MODULES)} alone"
        for name in _names(node):
            private = name.startswith("_") and name.strip("_") and name not in METHODS
            if private or name in (*FUNCTIONS, *self.refused):
                yield f"names {name}, but the answer must do without it{IN_PLACE.get(name, '')}"

    def define(self) -> Any:
        """Run the code, and return what it defines under its name.

        Raises
        ------
        ValueError
            If it defines nothing of that name.
        """
        namespace: dict[str, Any] = {"__name__": "answer"}
        exec(compile(self.text, self.file, "exec"), namespace)
        if self.name not in namespace:
            raise ValueError(f"the cell must define {self.name}")
        return namespace[self.name]

    def answer(self, steps: Callable[[Any], Iterable[dict[str, Any]]], pipe: Send) -> None:
        """Run the code and take the steps with what it defines; send what each gives, or the error that there is."""
        torch.set_num_threads(1)  # more would be none after the fork
        try:
            for message in steps(self.define()):
                messages.send(pipe, message)
        except Exception as error:  # whatever a reader's code does
            messages.send(pipe, {"error": f"{type(error).__name__}: {error}{self._line_of(error)}"})

    def _line_of(self, error: Exception) -> str:
        """Return the line of the code at which an error arose, or an empty text."""
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == self.file]
        return f" ({self.file}, line {lines[-1]})" if lines else ""


def _imported(node: ast.AST) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(level=level, module=module):
            return ["" if level else str(module)]
    return []


def _names(node: ast.AST) -> list[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return [name]
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return [part for alias in names for part in alias.name.split(".")]
    return []
