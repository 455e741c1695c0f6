"""Allow list for the Python file of a reader's kernel: the names that kernels need.

The check reads the text and runs none of it. It lists what is allowed: modules, what may be taken of each, attributes
of all other values, and Python's own functions. A module may stand before a dot alone, so no other name can mean one.
No attribute is assigned to or deleted: a function of numpy or Numba that a text replaces would run among the checker's
own code. What makes an array over the memory of another value is left out, with its type (``ndarray``, ``dtype``,
``device_array``): an array of objects over such memory shows and forges addresses.
The comparison does not rely on this: it happens in another process.
"""

import ast
import builtins
import math
from collections.abc import Iterable, Iterator
from typing import Any

_BITS = "8 16 32 64".split()
_TYPES = {f"{kind}{bits}" for kind in ("int", "uint") for bits in _BITS} | {"float16", "float32", "float64"}
_ATOMICS = "add and_ cas compare_and_swap dec exch inc max min nanmax nanmin or_ sub xor"
MODULES = {
    "math": {name for name in dir(math) if not name.startswith("_")},
    "numpy": _TYPES | {
        *"bool_ finfo floating iinfo integer intp e inf nan newaxis pi random".split(),
        *"arange array asarray ascontiguousarray empty empty_like eye full full_like linspace ones ones_like".split(),
        *"zeros zeros_like abs all allclose any argmax argmin argsort array_equal broadcast_to ceil clip".split(),
        *"concatenate cos cumsum diff dot einsum exp exp2 expm1 floor isclose isfinite isinf isnan log log10".split(),
        *"log1p log2 matmul max maximum mean min minimum nonzero outer prod repeat reshape round".split(),
        *"searchsorted sign sin sort sqrt stack sum take tan tanh tile transpose where".split(),
    },
    "numpy.random": {"default_rng"},
    "numba": _TYPES | {"boolean", "cuda", "types", "void"},
    "numba.types": _TYPES | {"boolean", "void"},
    "numba.cuda": {
        *"activemask all_sync any_sync atomic ballot_sync blockDim blockIdx brev cbrt clz const eq_sync ffs".split(),
        *"fma grid gridDim gridsize is_available jit laneid lanemask_lt local match_all_sync match_any_sync".split(),
        *"nanosleep popc selp shared shfl_down_sync shfl_sync shfl_up_sync shfl_xor_sync synchronize".split(),
        *"syncthreads syncthreads_and syncthreads_count syncthreads_or syncwarp threadIdx threadfence".split(),
        *"threadfence_block threadfence_system warpsize device_array_like to_device".split(),
    },
}  # fmt: skip
OWN_NAMES = {
    "moeblaze_ref.backends.numba_cuda.runtime": ("THREADS", "ZERO", "cuda"),
    "moeblaze_ref.core.structures": ("EMPTY",),
}
ATTRIBUTES = {
    *"dtype itemsize nbytes ndim shape size strides x y z array array_like".split(),  # of arrays, blocks and memory
    *_ATOMICS.split(),
    *"T all any astype copy copy_to_host fill item mean prod ravel reshape sum tolist view".split(),  # of host arrays
    *"integers normal random standard_normal uniform".split(),  # of its random generators
    *"append extend get items join keys pop sort split startswith strip values".split(),  # of lists, dicts and strings
}
FUNCTIONS = {
    *"abs all any bool dict divmod enumerate float int isinstance len list max min pow print range reversed".split(),
    *"round set slice sorted str sum tuple zip __name__".split(),
}
USUAL = {*MODULES, "np", "cuda"}  # names that modules have in most texts
_CLASSES = {name: value for name, value in vars(builtins).items() if isinstance(value, type)}
EXCEPTIONS = {name for name, value in _CLASSES.items() if issubclass(value, BaseException)}


def check_source(text: str | bytes, file: str):
    """Refuse the Python text of a kernel that could change what is counted.

    The text is the whole file. A text that is no Python passes: it cannot run, and its import says why.

    Raises
    ------
    ValueError
        The message names the file and the first such line, what stands there, and what is allowed.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    except (MemoryError, RecursionError):  # of Python's own parser
        raise ValueError(f"{file} is nested too deeply for Python to read it") from None
    found = min(_Text(tree).refused(), default=None)
    if found:
        line, _, what, rule = found
        raise ValueError(f"{file}, line {line}: {what}, but the file of a kernel {rule}")


class _Text:
    """A text, with the names that it gives to modules."""

    def __init__(self, tree: ast.Module):
        self.nodes: list[Any] = list(ast.walk(tree))  # ast.AST; nodes that may be refused have a line and a column
        self.modules = dict(reversed([pair for node in self.nodes for pair in _modules(node)]))  # the first counts
        self.names = {name for node in self.nodes for name in _bound(node)}

    def refused(self) -> Iterator[tuple[int, int, str, str]]:
        """Line and column, what is refused there, and the rule."""
        before_a_dot = {id(node.value) for node in self.nodes if isinstance(node, ast.Attribute)}
        for node in self.nodes:
            for what, rule in self._refused(node):
                yield node.lineno, node.col_offset, what, rule
            if (module := self._module(node)) and id(node) not in before_a_dot:
                what = f"uses the module {module} as a value"
                yield node.lineno, node.col_offset, what, "may only take names of a module"

    def _refused(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        """Yield what is refused of one node, in words, with the rule."""
        for name in _bound(node):
            if name.startswith("__"):
                yield f"gives something the name {name}", "may give no name that begins with __"
        for name, module in _modules(node):
            if self.modules[name] != module:
                yield f"gives {module} the name {name}", "may give a name to one module alone"
        match node:
            case ast.Import(names=names):
                yield from ((f"imports {alias.name}", _IMPORTS) for alias in names if alias.name not in MODULES)
            case ast.ImportFrom(level=level, module=origin, names=names):
                yield from _refused_of("." * level + (origin or ""), [alias.name for alias in names])
            case ast.ClassDef(name=name):
                yield f"defines the class {name}", "may define functions alone"
            case ast.Name(id=name) if _is_pythons(name) and name not in FUNCTIONS | EXCEPTIONS:
                yield f"names {name}", f"may use no names of Python but exceptions, {_listed(FUNCTIONS)}"
            case ast.Attribute(value=value, attr=name, ctx=ast.Store() | ast.Del() as context):
                does = "deletes" if isinstance(context, ast.Del) else "assigns to"
                yield f"{does} {_named(name, self._module(value))}", _ASSIGNMENT_RULE
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in USUAL - self.names:
                yield f"takes {name} of {module}, which is not imported", _IMPORTS
            case ast.Attribute(value=value, attr=name):
                owner = self._module(value)
                if name not in (MODULES.get(owner, ATTRIBUTES) if owner else ATTRIBUTES):
                    does = "takes" if owner else "names"
                    yield f"{does} {_named(name, owner)}", _of_a_module(owner) if owner else _ATTRIBUTE_RULE
            case ast.MatchClass(kwd_attrs=names):
                refused = [name for name in names if name not in ATTRIBUTES]
                yield from ((f"names the attribute {name}", _ATTRIBUTE_RULE) for name in refused)

    def _module(self, node: ast.AST) -> str | None:
        """The module that an expression means, if any."""
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                return self.modules.get(name)
            case ast.Attribute(value=value, attr=name) if module := self._module(value):
                return f"{module}.{name}" if f"{module}.{name}" in MODULES else None
        return None


def _named(attribute: str, module: str | None) -> str:
    """Return an attribute's name for a message."""
    return f"{attribute} of {module}" if module else f"the attribute {attribute}"


def _is_pythons(name: str) -> bool:
    return name.startswith("__") or hasattr(builtins, name)


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node gives to something."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()):
            yield name
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case ast.MatchMapping(rest=str(name)):
            yield name
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in names)


def _modules(node: ast.AST) -> Iterator[tuple[str, str]]:
    """The names that an import gives to modules, with the modules."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                if alias.name in MODULES:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        case ast.ImportFrom(module=module, names=names):
            for alias in names:
                full = "numba.cuda" if (module in OWN_NAMES and alias.name == "cuda") else f"{module}.{alias.name}"
                if full in MODULES:
                    yield alias.asname or alias.name, full


def _refused_of(module: str, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the refused names of an import."""
    allowed = MODULES.get(module, OWN_NAMES.get(module))
    rule = _IMPORTS if allowed is None or module in OWN_NAMES else _of_a_module(module)
    return ((f"imports {name} from {module}", rule) for name in names if name not in (allowed or ()))


def _of_a_module(module: str) -> str:
    return f"may take of {module} {_listed(MODULES[module])}"


def _listed(names: Iterable[str]) -> str:
    *others, last = sorted(names)
    return f"{', '.join(others)} and {last}" if others else last


_IMPORTS = f"may import {_listed(MODULES)}" + "".join(
    f", and {', '.join(names)} from {module}" for module, names in OWN_NAMES.items()
)
_ATTRIBUTE_RULE = f"may name no attributes but {_listed(ATTRIBUTES)}"
_ASSIGNMENT_RULE = "may change names and elements alone, and no attribute"
