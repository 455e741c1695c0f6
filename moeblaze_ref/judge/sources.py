"""What the Python file of a reader's kernel may say: nothing that reaches behind the checker.

The check reads the text and runs none of it. It finds names, so an author can hide from it: it is no sandbox. What no text
can forge is the comparison of the outputs, which happens in another process.
"""

import ast
from collections.abc import Iterator

IMPORTS = ("numba", "numpy", "math")
OWN_NAMES = {"moeblaze_ref.numba_cuda.runtime": ("THREADS", "ZERO", "cuda"), "moeblaze_ref.structures": ("EMPTY",)}
MODULES = (
    *("builtins", "ctypes", "ctypeslib", "gc", "importlib", "inspect", "kernelapi", "os", "simulator"),
    *("simulator_init", "subprocess", "sys", "threading"),
)
FUNCTIONS = (
    *("compile", "delattr", "eval", "exec", "format", "format_map", "getattr", "globals", "locals", "open"),
    *("setattr", "vars"),
)
_REFUSED = {*MODULES, *FUNCTIONS}
_IMPORT_RULE = f"may import {', '.join(IMPORTS[:-1])} and {IMPORTS[-1]} alone" + "".join(
    f", and {', '.join(names)} from {module}" for module, names in OWN_NAMES.items()
)
_NAME_RULE = (
    "may name no attribute with a leading underscore, no module that reaches behind the checker "
    f"({', '.join(MODULES)}), and no function that finds a name by its text ({', '.join(FUNCTIONS)})"
)


def check_source(text: str | bytes, file: str):
    """Refuse the Python text of a kernel that could change what is counted.

    Parameters
    ----------
    text : str or bytes
        The whole file. A text that is no Python passes: it cannot run either, and its import says why.
    file : str
        For the message.

    Raises
    ------
    ValueError
        The message names the first such line, what stands there, and what is allowed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    found = min(((node.lineno, what) for node in ast.walk(tree) for what in _refused(node)), default=None)
    if found:
        line, what = found
        rule = _IMPORT_RULE if what.startswith("imports") else _NAME_RULE
        raise ValueError(f"{file}, line {line}: {what}, but the file of a kernel {rule}")


def _refused(node: ast.AST) -> Iterator[str]:
    """What is refused of one node of a text, in words."""
    match node:
        case ast.Import(names=names):
            yield from (f"imports {alias.name}" for alias in names if not _may_import(alias.name))
        case ast.ImportFrom(module=module, names=names, level=level):
            name = "." * level + (module or "")
            taken = [alias.name for alias in names]
            if _may_import(name):
                refused = filter(_is_refused, taken)
            else:
                refused = [part for part in taken if part not in OWN_NAMES.get(name, ())]
            yield from (f"imports {part} from {name}" for part in refused)
        case ast.Name(id=name) if name in _REFUSED or (name.startswith("__") and name != "__name__"):
            yield f"names {name}"
        case ast.Attribute(attr=name) if _is_refused(name):
            yield f"names the attribute {name}"
        case ast.MatchClass(kwd_attrs=names):
            yield from (f"names the attribute {name}" for name in filter(_is_refused, names))


def _may_import(module: str) -> bool:
    first, *rest = module.split(".")
    return first in IMPORTS and not any(map(_is_refused, rest))


def _is_refused(name: str) -> bool:
    return name in _REFUSED or name.startswith("_")
