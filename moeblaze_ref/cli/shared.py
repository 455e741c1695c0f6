"""Options, consoles and errors that several commands share."""

import functools
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from moeblaze_ref.core import records
from moeblaze_ref.core.config import PRESETS
from moeblaze_ref.runtime.simt import cache

Presets = Annotated[
    list[str] | None, typer.Option("--preset", help=f"all, or one of {', '.join(PRESETS)}; repeatable.")
]
Tokens = Annotated[int | None, typer.Option(help="Tokens in a step, L, in place of the preset's.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing file even if this command did not write it.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the record that is there: what it holds is not run again.")
]
MOST_SECONDS = 10**6  # of a time limit
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


def file(text: str) -> Path:
    """Parse an option that names a file to write."""
    try:
        return records.file_named(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


to_file = functools.partial(typer.Option, parser=file)  # the option of a file to write


def each_name(repeated: list[str] | None) -> tuple[str, ...]:
    """The names of a repeatable option, each of which may be a list with commas; none twice."""
    return tuple(dict.fromkeys(",".join(repeated).split(","))) if repeated else ()


def stdout() -> Console:
    """Console for tables. Uses COLUMNS, or a fixed width when the output is a pipe."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)


def show(as_json: bool, data: Any, table: Callable[[], RenderableType], indent: int = 1):
    """Print ``data`` as JSON, or the table that ``table()`` returns."""
    if as_json:
        print(json.dumps(data, indent=indent))
    else:
        stdout().print(table())


def print_text(text: str):
    """Print on stdout without colors, markup or line breaks of Rich's own."""
    stdout().print(text, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_plots(written: list[Path], none: str = ""):
    """Name the plots that a command wrote, on stderr."""
    Console(stderr=True).print(f"plots: {', '.join(map(str, written)) or none}", soft_wrap=True)


def print_note(message: str):
    """Print on stderr, without markup, what a user should know of a result."""
    Console(stderr=True).print(f"note: {message}", highlight=False, soft_wrap=True, markup=False)


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn a wrong name, size or path into an error message without a traceback, and exit with status 2."""
    with _one_line(ValueError, TypeError, OSError, cache.SimtUnavailable):
        yield


def cache_errors() -> AbstractContextManager[None]:
    """Turn an unusable cache of compiled kernels into an error message without a traceback."""
    return _one_line(cache.SimtUnavailable)


@contextmanager
def _one_line(*errors: type[Exception]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        print_error(_in_words(error))
        raise typer.Exit(2) from None


def _in_words(error: Exception) -> str:
    """The message of an error; the system's own without its number, and with the file first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def print_error(message: str):
    """Print in red on stderr, without markup: an array's [3] stays, and so does :star:."""
    console = Console(stderr=True)
    console.print(f"error: {message}", style="red", highlight=False, soft_wrap=True, markup=False, emoji=False)
