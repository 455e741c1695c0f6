"""What a function of a stage takes and returns, stated once for every arrays.

A `Contract` names the arguments and results with their shapes, dtypes and meaning. A backend implements it:

    @implements(stage_contracts.COMBINE, ARRAYS)
    def forward(y, gates, dispatch): ...

The function then checks its arguments and has the contract's docstring. Its body alone, without the checks, is
``forward.unchecked``: a layer calls that, once it has checked what it was given.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, NamedTuple, ParamSpec, Protocol, TypeVar, cast

from moeblaze_ref.core import checks
from moeblaze_ref.core.arrays import dtype_of

P = ParamSpec("P")
R = TypeVar("R")
G = TypeVar("G")

Arguments = Mapping[str, Any]  # by name

DTYPE = "dtype"  # one of the backend's, the same for every tensor of a call
ROUTING = "routing"  # of logits, gates and losses: float32 in the kernels' backends, in numpy the dtype of the others
INT32 = "int32"


class Arrays(NamedTuple):
    """The arrays that a backend takes.

    Parameters
    ----------
    array : str
        Their name in docstrings.
    dtypes : tuple of str
        What a `DTYPE` may be.
    routing : str
        What a `ROUTING` must be; empty if it is that of the others.
    """

    array: str
    dtypes: tuple[str, ...]
    routing: str = ""

    def allowed(self, kind: str, common: str | None) -> tuple[str, ...]:
        """Return the dtypes of a tensor of this kind, beside tensors of the ``common`` dtype if one is known."""
        if kind == ROUTING and self.routing:
            return (self.routing,)
        if kind == INT32:
            return (INT32,)
        return self.dtypes if common is None else (common,)


@dataclass(frozen=True)
class Tensor:
    """An array among the arguments or results.

    Parameters
    ----------
    name : str
    axes : str
        Symbols of its extents, such as "L d". A symbol that occurs twice in a contract is one number.
    kind : str
        `DTYPE`, `ROUTING` or `INT32`.
    text : str
        What it holds.
    optional : str
        When it is None; empty if never.
    values : callable
        Its own check of the array and its values, given the known sizes, in place of "a finite array of the dtype".
    """

    name: str
    axes: str
    kind: str = DTYPE
    text: str = ""
    optional: str = ""
    values: Callable[[Any, Mapping[str, int]], None] | None = None

    def check(self, array: Any, sizes: dict[str, int], dtypes: tuple[str, ...]) -> None:
        """Raise if the array is not one of these dtypes and of the known sizes; learn the sizes that are new."""
        symbols = self.axes.split()
        shape = {symbol: sizes.get(symbol) for symbol in symbols}
        if self.values is None:
            checks.check_tensor(self.name, array, shape, dtypes)
        else:
            self.values(array, sizes)
            checks.check_shape(self.name, array, shape)
        sizes.update(zip(symbols, array.shape, strict=True))

    def documented(self, arrays: Arrays) -> str:
        """Return its lines in a docstring."""
        dtypes = " or ".join(arrays.allowed(self.kind, None))
        axes = self.axes.split()
        kind = f"{arrays.array} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"
        absent = f"None {self.optional}" if self.optional else ""
        return _entry(self.name, kind + (f", {dtypes}" if dtypes else ""), ". ".join(filter(None, (self.text, absent))))


@dataclass(frozen=True)
class Structure:
    """A structure of index arrays among the arguments, such as a Dispatch.

    Parameters
    ----------
    name, kind, text : str
    check : callable
        Raises if the argument is not well formed.
    symbols : str
        Those that it fixes, by the names of its attributes.
    """

    name: str
    kind: str
    check: Callable[[Any], None]
    symbols: str
    text: str = ""

    def documented(self, _: Arrays) -> str:
        """Return its lines in a docstring."""
        return _entry(self.name, self.kind, self.text)


@dataclass(frozen=True)
class Value:
    """Any other argument: a number, a name, a switch."""

    name: str
    kind: str
    text: str = ""

    def documented(self, _: Arrays) -> str:
        """Return its lines in a docstring."""
        return _entry(self.name, self.kind, self.text)


# What only some backends take.
EXECUTOR = Value("executor", "Executor, optional", "What runs the kernels. Default: by where the arrays live")
VERSION = Value("version", "str", "The kernel file, one of the module's ``VERSIONS``")
SHARES = Value("shares", "array (E,), float32, optional", "f_e of a larger batch, of which these tokens are a part")
RESULT_DTYPE = Value("dtype", "str", "Of the result: that of the products which take it, to which it is rounded once")
ADDED = {value.name: value for value in (EXECUTOR, VERSION, SHARES, RESULT_DTYPE)}


@dataclass(frozen=True)
class Contract:
    """One function of a stage.

    Parameters
    ----------
    summary : str
        The first line of its docstring.
    arguments : tuple
        In the order of the signature.
    results : tuple
        A single one is returned as it is, several as a tuple.
    source : str
        Paper and section.
    first : str
        Names of the tensors that are checked before the others, if that is not the order of the arguments.
    before, after : callable
        Checks of the arguments by name that shapes and dtypes do not state; they run before and after those.
    whole : callable
        Checks all arguments, given by name beside the backend's ``dtypes``, in place of their own checks: for shapes
        that depend on a switch.
    errors : str
        What else raises a ValueError.
    """

    summary: str
    arguments: tuple[Tensor | Structure | Value, ...]
    results: tuple[Tensor | Structure | Value, ...]
    source: str
    first: str = ""
    before: Callable[[Arguments], None] | None = None
    after: Callable[[Arguments], None] | None = None
    whole: Callable[..., None] | None = None
    errors: str = ""

    def check(self, arrays: Arrays, given: Arguments) -> None:
        """Raise ValueError or TypeError if the arguments, by name, are not as stated."""
        if self.before is not None:
            self.before(given)
        if self.whole is None:
            self._check_each(arrays, given)
        else:
            self.whole(**{one.name: given[one.name] for one in self.arguments}, dtypes=arrays.dtypes)
        if self.after is not None:
            self.after(given)

    def _check_each(self, arrays: Arrays, given: Arguments) -> None:
        """Check each argument as it is stated."""
        sizes: dict[str, int] = {}
        for one in self.arguments:
            if isinstance(one, Structure):
                one.check(given[one.name])
                sizes |= {symbol: getattr(given[one.name], symbol) for symbol in one.symbols.split()}
        common = None
        for tensor in self._tensors:
            array = given[tensor.name]
            if array is None and tensor.optional:
                continue
            tensor.check(array, sizes, arrays.allowed(tensor.kind, common))
            if tensor.kind == DTYPE or (tensor.kind == ROUTING and not arrays.routing):
                common = dtype_of(array)

    @functools.cached_property
    def _tensors(self) -> list[Tensor]:
        """The tensors among the arguments, in the order in which they are checked."""
        first = self.first.split()
        tensors = [one for one in self.arguments if isinstance(one, Tensor)]
        return sorted(tensors, key=lambda one: first.index(one.name) if one.name in first else len(first))

    @property
    def _wrong(self) -> str:
        """What raises a ValueError; indices are always finite."""
        floats = any(tensor.kind != INT32 for tensor in self._tensors)
        return f"shapes disagree{self.errors} or a value is not finite" if floats else self.errors

    def documented(self, arrays: Arrays, added: tuple[Value, ...] = (), own: str = "") -> str:
        """Return the docstring of a backend's function, with the arguments that it adds and its ``own`` text."""
        sections = {
            "Parameters": "\n".join(one.documented(arrays) for one in (*self.arguments, *added)),
            "Returns": "\n".join(one.documented(arrays) for one in self.results),
            "Raises": _entry("ValueError", "", f"If {self._wrong}")
            + "\n"
            + _entry("TypeError", "", "If a type or dtype is not allowed"),
            "Notes": f"{self.source}.",
        }
        head = [self.summary, inspect.cleandoc(own)] if own else [self.summary]
        return "\n\n".join([*head, *(f"{title}\n{'-' * len(title)}\n{text}" for title, text in sections.items())])


def _entry(name: str, kind: str, text: str) -> str:
    """Return a name, its type and its text as numpydoc writes them."""
    head = f"{name} : {kind}" if kind else name
    return f"{head}\n    {text}." if text else head


class Checked(Protocol, Generic[P, R]):
    """A function that checks its arguments, and its body without the checks."""

    unchecked: Callable[P, R]
    contract: Contract

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Check the arguments, then call the body."""


def bodies(kind: type[G], module: ModuleType, **options: Any) -> G:
    """Return a group of a stage's functions without their checks, such as a layer calls.

    Parameters
    ----------
    kind : type
        A NamedTuple of functions, by their names in the module.
    module : module
        The stage.
    **options
        What each is called with, such as an executor.
    """
    functions = [getattr(module, name).unchecked for name in kind._fields]  # type: ignore[attr-defined]
    return kind(*(functools.partial(function, **options) if options else function for function in functions))


def implements(contract: Contract, arrays: Arrays) -> Callable[[Callable[P, R]], Checked[P, R]]:
    """Return a decorator: the function checks its arguments by the contract and takes its docstring from it.

    Raises
    ------
    TypeError
        If the function's parameters are not the contract's, in its order, and then some of ``ADDED``.
    """

    def decorate(function: Callable[P, R]) -> Checked[P, R]:
        parameters = inspect.signature(function).parameters
        names, stated = tuple(parameters), tuple(one.name for one in contract.arguments)
        added = names[len(stated) :]
        if names[: len(stated)] != stated or not ADDED.keys() >= {*added}:
            raise TypeError(f"{function.__qualname__} takes {', '.join(names)}, but its contract {', '.join(stated)}")
        defaults = {name: one.default for name, one in parameters.items() if one.default is not one.empty}

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            if len(args) <= len(names) and {*names} == given.keys():  # else the call itself says what is wrong
                contract.check(arrays, given)
            return whole.unchecked(*args, **kwargs)

        checked.__doc__ = contract.documented(arrays, tuple(ADDED[name] for name in added), function.__doc__ or "")
        whole = cast(Checked[P, R], checked)
        whole.unchecked, whole.contract = function, contract
        return whole

    return decorate
