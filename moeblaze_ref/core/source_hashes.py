"""Hashes of the code that a record speaks of: has it changed since?

A record stores one hash for each part of the code that it measured (``PARTS``). A hash is of the text alone: comments,
docstrings, blank lines, the names of files, and where files and folders lie do not count. Moving a file or renaming a
folder therefore changes no hash.
"""

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moeblaze_ref.core.paths import PACKAGE, kernels_dir

CUDA, NUMBA, NUMPY, LAYERS = "CUDA kernels", "Numba kernels", "numpy functions", "layers"
PLACEMENT, PARALLEL, PLAN, CHECKS = "placement", "expert parallelism", "plan", "checks of layers"
# Of each part the files that hold its text: patterns below the package, and for .cu and .cuh below the kernels' folder.
# Files of a pattern behind "!" do not count: they belong to another part, or read and write other projects' files.
PARTS: dict[str, tuple[str, ...]] = {
    CUDA: (
        *("**/*.cu", "**/*.cuh", "backends/raw_cuda/*.py"),
        *("!parallel/*.cu", "!backends/raw_cuda/parallel.py"),
    ),
    NUMBA: ("backends/numba_cuda/*.py",),
    NUMPY: ("backends/numpy_ref/*.py",),
    LAYERS: (
        *("systems/layer.py", "systems/megablocks.py", "systems/capacity.py", "nn/oracle.py", "nn/routed_experts.py"),
        *(
            "nn/torch_node.py",
            "nn/torch_layer.py",
            "nn/torch_operands.py",
            "nn/torch_experts.py",
            "nn/torch_block_sparse.py",
            "nn/torch_capacity.py",
            "nn/torch_memory_optimized.py",
        ),
        *("nn/torch_sequential.py", "nn/torch_graphs.py", "runtime/torch_capture.py"),
    ),
    PLACEMENT: ("placement/*.py", *(f"!placement/{name}.py" for name in ("sources", "targets"))),
    PARALLEL: ("parallel/*.py", "parallel/*.cu", "backends/raw_cuda/parallel.py"),
    PLAN: ("plan/*.py",),
    CHECKS: ("verify/layers/**/*.py",),
}
# Files that run a command or show what it measured.
SHOWN = {"bench.py", "document.py", "findings.py", "plots.py", "report.py", "time_document.py", "time_tables.py"}
MEASURED = (CUDA, LAYERS)  # what most commands measure
OF_BACKEND = {"numpy": NUMPY, "numba": NUMBA, "simt": CUDA, "cuda": CUDA}


def of_backends(names: Iterable[str]) -> tuple[str, ...]:
    """Return the parts that a check of these backends runs, the layers among them."""
    return tuple(sorted({LAYERS, *(OF_BACKEND[name] for name in names if name in OF_BACKEND)}))


@functools.cache
def hashes(parts: tuple[str, ...], package: Path = PACKAGE, kernels: Path | None = None) -> dict[str, str]:
    """Return the hash of each part: 16 hexadecimal digits of SHA-256.

    Parameters
    ----------
    parts : tuple of str
        Of ``PARTS``.
    package, kernels : Path
        Folders of the package and of the kernels. Default: those of this process.
    """
    kernels = kernels or kernels_dir()
    return {part: _hash(_files(PARTS[part], package, kernels)) for part in parts}


def _files(patterns: tuple[str, ...], package: Path, kernels: Path) -> Iterable[Path]:
    found = [set(_matches(pattern.removeprefix("!"), package, kernels)) for pattern in patterns]
    others = {path for pattern, paths in zip(patterns, found, strict=True) if pattern[0] == "!" for path in paths}
    return set().union(*found) - others


def _matches(pattern: str, package: Path, kernels: Path) -> Iterable[Path]:
    folder = package if pattern.endswith(".py") else kernels
    return (path for path in folder.glob(pattern) if path.name not in SHOWN)


def _hash(files: Iterable[Path]) -> str:
    """The same for the same texts, whatever their files are called; a file without code does not count."""
    texts = (_python(path.read_text()) if path.suffix == ".py" else _cuda(path.read_text()) for path in files)
    each = sorted(hashlib.sha256(text.encode()).hexdigest() for text in texts if text)
    return hashlib.sha256("".join(each).encode()).hexdigest()[:16]


# Text -----------------------------------------------------------------------------------------------------------------

_COMMENT = re.compile(r'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_FOLDERS = re.compile(r'(?<=["\'])(?:[\w{}.-]+/)+')  # of a path in quotes


def _cuda(text: str) -> str:
    return _without_paths(_COMMENT.sub(lambda found: found[1] or " ", text), indented=False)


def _python(text: str) -> str:
    """Python without comments and docstrings; imports count by the names that they bring, not by their modules."""
    tree, lines = ast.parse(text), text.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in [*imports, *_docstrings(tree)]:
        end = node.end_lineno or node.lineno
        lines[node.lineno - 1 : end] = [""] * (end - node.lineno + 1)
    names = sorted({f"{one.name.split('.')[-1]} {one.asname or ''}".strip() for node in imports for one in node.names})
    return "\n".join(filter(None, [" ".join(names), _without_paths("\n".join(lines), indented=True)]))


def _docstrings(tree: ast.AST) -> Iterable[ast.stmt]:
    """The docstrings of a module, its classes and its functions, as statements."""
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, owners) and ast.get_docstring(node, clean=False) is not None:
            yield node.body[0]


def _without_paths(text: str, indented: bool) -> str:
    """Lines that are not blank, without the folders of paths in quotes; indentation has a meaning in Python alone."""
    lines = _FOLDERS.sub("", text).split("\n")
    return "\n".join(line.rstrip() if indented else " ".join(line.split()) for line in lines if line.strip())


# Marks ----------------------------------------------------------------------------------------------------------------


def mark(found: Mapping[str, Any]) -> str:
    """Return what to write behind a record's commit: which parts have changed since; empty if none has.

    Parameters
    ----------
    found : mapping
        With ``code``, the `hashes` of then; a record of an earlier version has none, and the mark says so.
    """
    if "code" not in found:
        return " (code not recorded)"
    return _said("code changed since", changed(found["code"]))


def mark_of_all(found: Mapping[str, Any]) -> str:
    """Return the `mark` of a file: its own, or if it notes a commit with each of its runs, that of all of them."""
    if "commit" in found:
        return mark(found)
    runs = [run for run in _runs(found) if "code" in run]
    if not runs:
        return mark({})
    return _said("code changed since some of them", sorted({part for run in runs for part in changed(run["code"])}))


def _runs(found: Any) -> Iterable[Mapping[str, Any]]:
    """Every object in a file that has a commit."""
    if isinstance(found, Mapping):
        if "commit" in found:
            yield found
        found = list(found.values())
    if isinstance(found, list):
        for one in found:
            yield from _runs(one)


def _said(what: str, parts: list[str]) -> str:
    return f" ({what}: {', '.join(parts)})" if parts else ""


def changed(code: Mapping[str, str]) -> list[str]:
    """Return the parts whose text is another one now, or that are no parts any more."""
    now = hashes(tuple(part for part in code if part in PARTS))
    return [part for part, then in code.items() if now.get(part) != then]
