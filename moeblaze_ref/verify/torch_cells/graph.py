"""A layer as a trace: operators on fixed shapes, recorded without data, replayed where no code of the reader's runs.

The trace is made on tensors of torch's meta device. They have a shape and no elements, so an operator that gives Python
a number, or whose shape depends on elements, has no answer there. The process that replays takes the trace as JSON, and
refuses such operators once more: none can have been slipped in.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells import messages
from moeblaze_ref.verify.torch_cells.cell import Cell

Trace = dict[str, Any]  # "nodes": a list of {"op", "args", "kwargs"}; "out": the value that is returned
DEVICE = "meta"  # stands for a GPU
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_HOST = "is on the host: in a CUDA graph the layer must stay on the device of x (device=x.device)"


def trace(cell: Cell, shapes: list[dict[str, tuple[int, ...]]], k: int, pipe: Send) -> None:
    """Trace the layer for the shapes of its tensors, and send each trace."""

    def steps(layer: Any) -> Iterator[Trace]:
        for named in shapes:
            inputs = [torch.empty(shape, device=DEVICE) for shape in named.values()]
            with torch.no_grad(), _Recorder(inputs) as recorder:
                out = layer(*inputs, k)
            yield {"nodes": recorder.nodes, "out": recorder.plain(out)}

    cell.answer(steps, pipe)


class _Recorder(TorchDispatchMode):
    """Records the operators that run on tensors of the meta device.

    Raises
    ------
    ValueError
        At an operator that depends on data, or on a tensor that is on the host.
    """

    def __init__(self, inputs: list[Tensor]):
        super().__init__()
        self.nodes: list[dict[str, Any]] = []
        self._places: dict[int, int] = {}  # by the id of a tensor
        self._alive: list[Tensor] = []  # so that no id is used again
        for tensor in inputs:
            self._record("input", [], {}, tensor)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        arguments, named = self.plain(args), self.plain(kwargs or {})
        _refuse(operator, args)
        result = operator(*args, **(kwargs or {}))
        self._record(str(operator), arguments, named, result)
        if isinstance(result, list | tuple):
            whole = {"node": len(self.nodes) - 1}
            for number, one in enumerate(result):
                self._record("getitem", [whole, number], {}, one)
        return result

    def _record(self, name: str, arguments: Any, named: Any, result: Any) -> None:
        self.nodes.append({"op": name, "args": arguments, "kwargs": named})
        if isinstance(result, Tensor):
            self._places[id(result)] = len(self.nodes) - 1
            self._alive.append(result)

    def plain(self, value: Any) -> Any:
        """A value as JSON has it."""
        if isinstance(value, Tensor):
            if id(value) not in self._places:
                raise ValueError(f"a tensor that is made of Python numbers {_HOST}; torch.full and torch.arange do")
            return {"node": self._places[id(value)]}
        if isinstance(value, list | tuple):
            return [self.plain(one) for one in value]
        if isinstance(value, dict):
            return {name: self.plain(one) for name, one in value.items()}
        if isinstance(value, torch.device):
            if value.type != DEVICE:
                raise ValueError(f"a tensor {_HOST}")
            return {"device": DEVICE}
        for kind, what in _CONSTANTS.items():
            if isinstance(value, what):
                return {kind: str(value).removeprefix("torch.")}
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(f"there is a {type(value).__name__} among its values, but a trace has tensors and numbers")


def _refuse(operator: Any, args: Any) -> None:
    """Refuse an operator that depends on data: a mask in the place of an index is one, too."""
    if torch.Tag.data_dependent_output in operator.tags:
        raise ValueError(
            f"{operator} gives Python a number that depends on data, as .item(), int(), bool() and tolist() do: the "
            f"host waits"
        )
    indices = args[1] if operator is torch.ops.aten.index.Tensor else ()
    by_numbers = bool(indices) and all(one is None or one.dtype != torch.bool for one in indices)
    if torch.Tag.dynamic_output_shape in operator.tags and not by_numbers:
        raise ValueError(f"{operator} makes a shape that depends on data, as a mask in the place of an index does")


# ---- the replay ----------------------------------------------------------------------------------


def replay(traces: list[Trace], inputs: list[dict[str, np.ndarray]], pipe: Send) -> None:
    """Run each trace on its inputs and send the output. The reader's code is not here."""
    try:
        for found, arrays in zip(traces, inputs, strict=True):
            messages.send(pipe, {"out": messages.encoded("the output", _replayed(found, arrays))})
    except Exception as error:  # whatever has come in the place of a trace
        messages.send(pipe, {"error": f"the trace cannot be replayed: {type(error).__name__}: {error}"})


def _replayed(found: Trace, arrays: dict[str, np.ndarray]) -> Tensor:
    values: list[Any] = []
    given = map(torch.from_numpy, arrays.values())
    with torch.no_grad():
        for node in found["nodes"]:
            values.append(next(given) if node["op"] == "input" else _called(node, values))
    return _valued(found["out"], values)


def _called(node: dict[str, Any], values: list[Any]) -> Any:
    """The result of one operator."""
    arguments, named = _valued(node["args"], values), _valued(node["kwargs"], values)
    if node["op"] == "getitem":
        return arguments[0][arguments[1]]
    operator = _operator(node["op"])
    _refuse(operator, arguments)
    return operator(*arguments, **named)


def _operator(name: str) -> Any:
    """The operator of a name, of torch's own library."""
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if library != "aten":
        raise ValueError(f"{name} is not one of torch's own operators")
    return getattr(getattr(torch.ops.aten, packet), overload)


def _valued(value: Any, values: list[Any]) -> Any:
    """An argument of a trace, with the values so far in the place of nodes."""
    if isinstance(value, list):
        return [_valued(one, values) for one in value]
    if not isinstance(value, dict):
        return value
    match [*value.items()]:
        case [("node", int(place))]:
            return values[place]
        case [("device", str())]:
            return torch.device("cpu")
        case [(str(kind), str(name))] if kind in _CONSTANTS:
            constant = getattr(torch, name)
            if not isinstance(constant, _CONSTANTS[kind]):
                raise ValueError(f"{name} is no {kind}")
            return constant
    return {name: _valued(one, values) for name, one in value.items()}
