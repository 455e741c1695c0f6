"""Source code for a reader, from the files: Python functions, CUDA kernels, and what a kernel's header states."""

import difflib
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from IPython.display import Markdown

from moeblaze_ref.core import checks, kernel_headers
from moeblaze_ref.core.paths import PACKAGE
from moeblaze_ref.runtime.simt.executor import LaunchReport
from moeblaze_ref.runtime.source import kernel_text

# JupyterLab breaks long lines of shown source without it.
STYLE = "\n\n<style>.jp-RenderedMarkdown pre, .jp-RenderedMarkdown pre code { white-space: pre !important }</style>"
_DOCSTRING_SECTIONS = re.compile(r'\n\s*\n *\w+\n *-{3,}\n.*?(?=""")', re.DOTALL)


def show_source(*functions: Callable) -> Markdown:
    """Python functions and classes as their files have them; of a docstring, only the prose before its sections."""
    return shown(*map(_python_block, functions))


def _python_block(function):
    function = inspect.unwrap(function)  # a Numba kernel wraps its Python function
    source = textwrap.dedent(inspect.getsource(function))
    path = Path(inspect.getsourcefile(function) or "").relative_to(PACKAGE.parent).as_posix()
    return block("python", path, _DOCSTRING_SECTIONS.sub("", source, count=1))


def block(language: str, caption: str, code: str) -> str:
    """Return a block of source in Markdown, below its caption."""
    return f"`{caption}`\n```{language}\n{code.rstrip()}\n```"


def shown(*blocks: str) -> Markdown:
    """Blocks of source, one below the other. Their long lines scroll."""
    return Markdown("\n\n".join(blocks) + STYLE)


def show_kernel(file: str, *functions: str) -> Markdown:
    """CUDA functions and structs of ``kernels_cuda/<file>``, comments included; without names, the file's header.

    Raises
    ------
    ValueError
        If there is no such file, or no such function in it; the message proposes the nearest name.
    """
    text = kernel_text(file)
    blocks = [definition(text, name) for name in functions] or [kernel_header(file)]
    return shown(*(block("c++", f"kernels_cuda/{file}", code) for code in blocks))


def show_difference(function: str, before: str, after: str) -> Markdown:
    """Show the difference of a CUDA function between ``kernels_cuda/<before>`` and ``kernels_cuda/<after>``.

    Raises
    ------
    ValueError
        If a file or the function in it does not exist.
    """
    old, new = (definition(kernel_text(file), function).splitlines() for file in (before, after))
    lines = list(difflib.unified_diff(old, new, n=len(old) + len(new), lineterm=""))[3:]  # less its own header
    return shown(block("diff", f"{function}: kernels_cuda/{before} -> kernels_cuda/{after}", "\n".join(lines)))


def defined(text: str) -> list[str]:
    """The functions and structs of a CUDA text, in its order; an overloaded name once."""
    found = re.findall(_opening(r"\w+"), text, re.MULTILINE)
    return list(dict.fromkeys(function or struct for function, struct in found))


def definition(text: str, name: str) -> str:
    """A CUDA function or struct with the comment above it; its closing brace starts a line unless all is one line.

    Raises
    ------
    ValueError
        If the text has none of this name; the message proposes the nearest.
    """
    checks.check_name("CUDA function", name, defined(text))
    comment, template, body = r"(?:^//[^\n]*\n)*", r"(?:^template[^\n]*\n)?", r"(?:[^\n]*\}$|.*?^\};?)"
    found = re.search(comment + template + _opening(name) + body, text, re.MULTILINE | re.DOTALL)
    assert found, name  # as `defined` has found it
    return found.group()


def _opening(name):
    """Pattern of a function or struct from the start of its line to its brace; the name may stand on the line below."""
    parameters = r"\((?:[^()]|\([^()]*\))*\)"  # one may be a reference to an array: float (&tile)[16]
    struct = rf"struct (?:alignas{parameters} )?({name})"
    return rf"^(?![\s/#}}])[^\n;=]*(?:\n +)?\b(?:({name}){parameters}|{struct}) \{{"


def kernel_header(file: str) -> str:
    """The comment that a kernel file opens with."""
    found = re.match(r"(?://[^\n]*\n)+", kernel_text(file))
    assert found, f"{file} does not begin with a comment"
    return found.group()


# Statements of a header ----------------------------------------------------------------------------------------------


def stated_bytes(file: str) -> dict[str, dict[str, str]]:
    """The formulas of a header's table, {kernel: {"read": formula, "written": formula}}; it has a row a kernel."""
    rows = kernel_headers.table(kernel_text(file))
    return {name: {"read": row["bytes read"], "written": row["bytes written"]} for name, row in rows.items()}


def evaluate(formula: str, symbols: dict[str, int]) -> int:
    """The value of a header's formula, in which a space multiplies: ``4 L E + 2 R (k + 1)``.

    Raises
    ------
    ValueError
        If it uses a symbol that is not given.
    """
    return int(kernel_headers.number(formula, symbols))


def stated_beside_counted(file: str, launches: Sequence[LaunchReport], **symbols: int) -> list[dict[str, Any]]:
    """Rows for `table`: each launch's bytes as its header states them, and as the executor counted them."""
    return [
        {
            "kernel": launch.kernel,
            "bytes": direction,
            "the header's formula": f"`{formula}`",
            "its value": evaluate(formula, symbols),
            "counted": getattr(launch, f"{direction}_bytes"),
        }
        for launch in launches
        for direction, formula in stated_bytes(file)[launch.kernel].items()
    ]
