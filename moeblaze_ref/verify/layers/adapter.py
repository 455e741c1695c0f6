"""Describe a layer for its check: how to call it, where its weights are, and what its router does."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePath
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.core.checks import kind
from moeblaze_ref.core.config import ACTIVATIONS, UNGATED_ACTIVATIONS, is_gated
from moeblaze_ref.core.routers import WEIGHS, Router, named
from moeblaze_ref.nn.routed_experts import either
from moeblaze_ref.verify.layers import layouts
from moeblaze_ref.verify.layers.faults import LayerFault, in_a_line, raised
from moeblaze_ref.verify.layers.layouts import Place

Activation = str | Callable[[Tensor, Tensor], Tensor]  # a name of ours, or a function of gate and up


def takes_gate(activation: Activation) -> bool:
    """Return True if an expert has two up-projections."""
    return not isinstance(activation, str) or is_gated(activation)


ALIGNED = 8  #: elements of 16 bytes in the narrow dtypes: the ``multiple`` of many layers
INDEX_DTYPES = (torch.int32, torch.int64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # in which layers are checked
FLAGS = ("duplicates", "deterministic", "compiles", "autocasts", "strides", "retains", "graphs")
GIVE_ROUTER = "give router, such as router='mixtral'"
SHARED_EXPERT_GATE = "shared_expert_gate"  #: whose sigmoid multiplies the output of the shared expert
SHARED = ("shared_gate", "shared_up", "shared_down", SHARED_EXPERT_GATE)


class Sizes(NamedTuple):
    """Sizes of a case."""

    L: int
    d: int
    h: int
    E: int
    k: int

    def __str__(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self._asdict().items())


class Factory(Protocol):
    """Factory of the layer that is checked."""

    def __call__(self, *, d: int, h: int, E: int, k: int, dtype: torch.dtype, device: str) -> "Adapter":
        """Return a new layer of these sizes."""


@dataclass(frozen=True)
class Adapter:
    """A layer, and how it corresponds to the reference.

    Parameters
    ----------
    module : nn.Module or callable
        Is called with x (L, d). If the routing is given, topk_index (L, k) and topk_weights (L, k) follow. It returns
        the output (L, d), or a tuple that begins with it.
    weights : mapping of str to str
        The layout of each parameter, by its name: see `layouts`.
    router : Router or str, optional
        What the router inside does: a `core.routers.Router`, or a name of ``ROUTERS``. Default: the routing is given.
    activation : str or callable
        One of ``config.ACTIVATIONS``, or a torch function of gate (R, h) and up (R, h).
    tensors : mapping of str to Tensor, optional
        The parameters of a function. Default: the parameters and buffers of the module.
    weighs : {"output", "input"}
        What a given routing weight multiplies: the expert's output, or its input.
    index_dtype, gate_dtype : torch.dtype
        Of a given routing. ``gate_dtype`` None is the dtype of the layer.
    shared : int
        Width of the shared expert, if the weights name one.
    duplicates : bool
        A token may choose an expert twice.
    multiple : int
        d and h must be multiples of it.
    dtypes : tuple of torch.dtype
        What the layer computes in.
    deterministic : bool
        The layer claims the same bits in each run; otherwise differences are reported and are no fault.
    compiles, autocasts, strides, retains : bool
        The layer runs under ``torch.compile``, under ``torch.autocast``, on an x whose columns are not neighbours in
        memory, and a second time backward with ``retain_graph``; False if it refuses.
    graphs : bool
        The layer claims that a CUDA graph can hold its step; otherwise it is reported whether one can.
    """

    module: Callable[..., Any]
    weights: Mapping[str, str]
    router: Router | str | None = None
    activation: Activation = "swiglu"
    tensors: Mapping[str, Tensor] | None = None
    weighs: str = "output"
    index_dtype: torch.dtype = torch.int64
    gate_dtype: torch.dtype | None = torch.float32
    shared: int = 0
    duplicates: bool = False
    multiple: int = 1
    dtypes: tuple[torch.dtype, ...] = DTYPES
    deterministic: bool = False
    compiles: bool = True
    autocasts: bool = True
    strides: bool = True
    retains: bool = True
    graphs: bool = False

    def __post_init__(self) -> None:
        if not callable(self.module):
            raise TypeError(f"module is {kind(self.module)}, but it must be an nn.Module or a function")
        _check_mapping("weights", self.weights, str)
        if self.tensors is not None:
            _check_mapping("tensors", self.tensors, Tensor)
        _check_activation(self.activation)
        if self.router is not None:
            named(self.router)
        if self.weighs not in WEIGHS:
            raise ValueError(f"weighs is {self.weighs!r}, but it must be one of {', '.join(WEIGHS)}")
        self._check_dtypes()
        for name in FLAGS:
            checks.check_type(name, getattr(self, name), bool)
        checks.check_int("shared", self.shared, at_least=0)
        checks.check_int("multiple", self.multiple, at_least=1)

    def _check_dtypes(self) -> None:
        if self.index_dtype not in INDEX_DTYPES:
            raise ValueError(f"index_dtype is {self.index_dtype!r}, but it must be {either(INDEX_DTYPES)}")
        if self.gate_dtype not in (None, torch.float64, *DTYPES):
            allowed = either((torch.float64, *DTYPES))
            raise ValueError(f"gate_dtype is {self.gate_dtype!r}, but it must be {allowed}, or None")
        if not isinstance(self.dtypes, tuple) or not self.dtypes:
            raise ValueError(f"dtypes is {self.dtypes!r}, but it must be a tuple of one or more of {either(DTYPES)}")
        for i, dtype in enumerate(self.dtypes):
            if dtype not in DTYPES:
                raise ValueError(f"dtypes[{i}] is {dtype!r}, but it must be {either(DTYPES)}")

    @property
    def router_inside(self) -> Router | None:
        """Description of the layer's router; None if the routing is given."""
        return None if self.router is None else named(self.router)

    def check_call(self) -> None:
        """Check that the layer accepts the arguments of a check. A layer without a readable signature passes.

        Raises
        ------
        TypeError
            If it takes other arguments.
        """
        given = ("x", "topk_index", "topk_weights") if self.router is None else ("x",)
        called = self.module.forward if isinstance(self.module, nn.Module) else self.module
        if takes := _takes_instead(called, *given):
            inside = "router says that its router is inside"
            why = f"does it have a router inside? Then {GIVE_ROUTER}" if self.router is None else inside
            raise TypeError(f"the layer takes {takes}, but it is called with {', '.join(given)}: {why}")

    def places(self, sizes: Sizes) -> list[tuple[Place, Tensor]]:
        """Return the parameters that hold the weights.

        Raises
        ------
        ValueError
            If a layout names no parameter, a shape is not that of its layout, a parameter has no layout, or a weight is
            missing or has no part in what the layer computes.
        """
        found = layouts.places(self.weights, sizes.E)
        roles = {role for place in found for role in place.layout.roles}
        if self.shared < 1 and roles & set(SHARED):
            raise ValueError(f"weights has a shared expert, but shared, its width, is {self.shared}")
        tensors = self._tensors()
        placed = [(place, _tensor_of(place, tensors, sizes, self.shared)) for place in found]
        if missing := self._trained() - {place.name for place in found}:
            raise ValueError(
                f"weights lacks a layout of {', '.join(sorted(missing))}, which the layer trains: "
                "give one, or freeze what has no part in the check"
            )
        self._check_roles(roles)
        return placed

    def _check_roles(self, named: set[str]) -> None:
        """Check that the weights are those of the router, of the activation and of a shared expert, if there is one."""
        needed = {*self._of_experts(), *self._of_router()}
        needed |= {f"shared_{role}" for role in self._of_experts()} if named & set(SHARED) else set()
        if missing := [role for role in layouts.ROLES if role in needed - named]:
            raise ValueError(f"weights has no layout of {', '.join(missing)}, which {self._described()} needs")
        optional = {f"{role}_bias" for role in self._of_experts()}
        optional |= {SHARED_EXPERT_GATE} if named & set(SHARED) else set()
        if useless := [role for role in layouts.ROLES if role in named - needed - optional]:
            forgot = f": {GIVE_ROUTER}, or remove it" if self.router is None and "router" in useless else ""
            raise ValueError(
                f"weights has a layout of {', '.join(useless)}, which {self._described()} does not use{forgot}"
            )

    def _of_experts(self) -> list[str]:
        return ["gate", "up", "down"] if takes_gate(self.activation) else ["up", "down"]

    def _of_router(self) -> Iterator[str]:
        router = self.router_inside
        if router is not None:
            yield "router"
            yield from ["router_bias"] * router.logit_bias + ["selection_bias"] * router.selection_bias

    def _described(self) -> str:
        router = "no router inside" if self.router is None else "this router"
        activation = f"activation {self.activation!r}" if isinstance(self.activation, str) else "this activation"
        return f"a layer with {activation} and {router}"

    def _tensors(self) -> Mapping[str, Tensor]:
        if self.tensors is not None:
            return self.tensors
        return {**self._of_module("named_parameters"), **self._of_module("named_buffers")}

    def _trained(self) -> set[str]:
        named = self.tensors if self.tensors is not None else self._of_module("named_parameters")
        return {name for name, tensor in named.items() if tensor.requires_grad}

    def _of_module(self, kind: str) -> dict[str, Tensor]:
        return dict(getattr(self.module, kind)()) if isinstance(self.module, nn.Module) else {}


def _tensor_of(place: Place, tensors: Mapping[str, Tensor], sizes: Sizes, shared: int) -> Tensor:
    """Return the parameter, whose shape must be that of its layout."""
    if place.name not in tensors:
        name = repr(place.name) if place.expert is None else f"{place.name!r} by a pattern with *, of {sizes.E} experts"
        raise ValueError(f"weights names {name}, but the layer has {', '.join(tensors) or 'no tensor'}")
    known = layouts.lengths(sizes._asdict(), shared)
    tensor, shape = tensors[place.name], place.layout.shape(known)
    if tuple(tensor.shape) != shape:
        named = ", ".join(f"{axis} = {known[axis]}" for axis in place.layout.plain)
        orders = [f"({order.text})" for order in place.layout.orders() if order.shape(known) == tuple(tensor.shape)]
        fits = f": {' or '.join(orders)} would fit" if orders else ""
        raise ValueError(
            f"{place.name} has shape {tuple(tensor.shape)}, but ({place.layout.text}) with {named} is {shape}{fits}"
        )
    return tensor


def _check_mapping(name: str, mapping: object, of: type) -> None:
    """A mapping of names to values of one type."""
    if not isinstance(mapping, Mapping):
        raise TypeError(f"{name} is {kind(mapping)}, but it must be a mapping of str to {of.__name__}")
    for key, value in mapping.items():
        checks.check_type(f"a name in {name}", key, str)
        checks.check_type(f"{name}[{key!r}]", value, of)


def _check_activation(activation: Activation) -> None:
    if callable(activation):
        _check_function(activation)
    elif activation not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        raise ValueError(f"activation is {activation!r}, but it must be one of {allowed}, or a function")


def _check_function(activation: Callable[[Tensor, Tensor], Tensor]) -> None:
    rows = torch.ones(2, 3)
    try:
        found = activation(rows, rows)
    except Exception as error:
        ungated = ", ".join(UNGATED_ACTIVATIONS)
        raise ValueError(
            f"activation raised {in_a_line(error)}: a function is called with gate and up; "
            f"that of an ungated layer is a name, one of {ungated}"
        ) from error
    if not isinstance(found, Tensor) or found.shape != rows.shape:
        raise ValueError(f"activation returns {kind(found)}, but it must return a tensor (R, h) for gate and up (R, h)")


def leaves(dtype: torch.dtype, device: str, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Return zeros that want gradients, by name: the ``tensors`` of a layer that is a function."""
    return {name: torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for name, shape in shapes.items()}


def parts_of(name: str) -> tuple[str, str]:
    """Split MODULE:FACTORY.

    Raises
    ------
    ValueError
        If one of them is missing.
    """
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise ValueError(f"a layer is {name!r}, but it must be MODULE:FACTORY, such as my_package.layers:make")
    if module.endswith(".py") or "/" in module:
        file = PurePath(module)
        raise ValueError(
            f"a layer is {name!r}, but MODULE is a name as in import, not a path: "
            f"write {file.name.removesuffix('.py')}:{attribute} in the folder of {file.name}"
        )
    return module, attribute


def check_is_there(module: str) -> None:
    """Raise ValueError if the package of a module is nowhere; nothing is imported."""
    top = module.partition(".")[0]
    if top in sys.modules or PathFinder.find_spec(top, [str(Path.cwd())]) or importlib.util.find_spec(top):
        return
    raise ValueError(f"{module} cannot be imported: no {top} is in {Path.cwd()} or on PYTHONPATH")


def load(name: str) -> Factory:
    """Import the factory that ``MODULE:FACTORY`` names.

    Raises
    ------
    ValueError
        If the text has another form, the module cannot be imported, or it has no such function.
    """
    module, attribute = parts_of(name)
    check_is_there(module)
    try:
        imported = importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{module} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:
        raise ValueError(f"{module} cannot be imported: {in_a_line(error)}") from error
    try:
        factory: Factory = getattr(imported, attribute)
    except AttributeError:
        raise ValueError(f"{module} has no {attribute}") from None
    except Exception as error:
        raise ValueError(f"{name} cannot be read: {in_a_line(error)}") from error
    if not callable(factory):
        raise ValueError(f"{name} is {kind(factory)}, but it must be a factory: a function that returns an Adapter")
    return factory


def make(factory: Factory, sizes: Sizes, dtype: torch.dtype, device: str) -> Adapter:
    """Return a new layer.

    Raises
    ------
    LayerFault
        If the factory raises an error.
    TypeError
        If it cannot be called with the sizes, the dtype and the device by name, or returns no adapter.
    """
    given: dict[str, Any] = {"d": sizes.d, "h": sizes.h, "E": sizes.E, "k": sizes.k, "dtype": dtype, "device": device}
    _check_signature(factory, given)
    try:
        adapter = factory(**given)
    except (Exception, SystemExit) as error:
        raise LayerFault(f"the factory raised {raised(error)}") from error
    if not isinstance(adapter, Adapter):
        raise TypeError(f"the factory returns {kind(adapter)}, but it must return a verify.layers.Adapter")
    return adapter


def _check_signature(factory: Factory, given: Mapping[str, Any]) -> None:
    """Check that a factory accepts the arguments in ``given``. A factory without a readable signature passes."""
    if takes := _takes_instead(factory, **given):
        raise TypeError(f"the factory takes {takes}, but it is called with {', '.join(given)} by name")


def _takes_instead(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Return what a function takes if it cannot be called so; nothing if it can, or does not say what it takes."""
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return ""
    try:
        signature.bind(*arguments, **named)
    except TypeError:
        return str(signature)
    return ""
