"""A layer as a trace: operators on fixed shapes, recorded without data, replayed where no code of the reader's runs.

The trace is made on fake tensors of a device that is not the host. They have a shape and no elements. An operator that
gives Python a number, or whose shape depends on elements, has no answer there and raises. The process that replays
takes the trace as JSON. It runs it on fake tensors again, so that no such operator can have been slipped in, and then
on data.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moeblaze_ref.verify.guard import Send
from moeblaze_ref.verify.torch_cells import messages
from moeblaze_ref.verify.torch_cells.cell import Cell

Trace = dict[str, Any]  # "nodes": a list of {"op", "args", "kwargs"}; "out": the value that is returned
DEVICE = "meta"  # stands for a GPU: torch needs none for it
_CONSTANTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}
_HOST = "is on the host: in a CUDA graph the layer must stay on the device of x (device=x.device)"


def trace(cell: Cell, shapes: list[dict[str, tuple[int, ...]]], k: int, pipe: Send) -> None:
    """Trace the layer for the shapes of its tensors, and send each trace."""

    def steps(layer: Any) -> Iterator[Trace]:
        for named in shapes:
            yield _encoded(_traced(layer, [*named.values()], k))

    cell.answer(steps, pipe)


def _traced(layer: Callable[..., Tensor], shapes: list[tuple[int, ...]], k: int) -> torch.fx.Graph:
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):  # what is not fake, `_encoded` refuses
            inputs = [torch.empty(shape, device=DEVICE) for shape in shapes]
            return make_fx(lambda *tensors: layer(*tensors, k))(*inputs).graph
    except DataDependentOutputException as error:
        what = "gives Python a number that depends on data, as .item(), int(), bool() and tolist() do: the host waits"
        raise ValueError(f"{error.func} {what}").with_traceback(error.__traceback__) from None
    except DynamicOutputShapeException as error:
        what = "makes a shape that depends on data, as a mask in the place of an index does"
        raise ValueError(f"{error.func} {what}").with_traceback(error.__traceback__) from None


# ---- as JSON -------------------------------------------------------------------------------------


def _encoded(graph: torch.fx.Graph) -> Trace:
    """The trace as JSON has it.

    Raises
    ------
    ValueError
        If it holds a tensor that is no result of its operators, or something on the host.
    """
    places: dict[Any, int] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == "output":
            return {"nodes": nodes, "out": _plain(node.args[0], places)}
        if node.op == "get_attr":
            raise ValueError("a tensor that is made of Python numbers " + _HOST + "; torch.full and torch.arange do")
        if node.op == "call_function":
            arguments, named = _plain(node.args, places), _plain(node.kwargs, places)
            name = "getitem" if node.target is operator.getitem else str(node.target)
            nodes.append({"op": name, "args": arguments, "kwargs": named})
        else:
            nodes.append({"op": "input", "args": [], "kwargs": {}})
        places[node] = len(nodes) - 1
    raise ValueError("the layer returns nothing")


def _plain(value: Any, places: dict[Any, int]) -> Any:
    """An argument as JSON has it."""
    if isinstance(value, torch.fx.Node):
        return {"node": places[value]}
    if isinstance(value, list | tuple):
        return [_plain(one, places) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one, places) for name, one in value.items()}
    if isinstance(value, torch.device):
        if value.type != DEVICE:
            raise ValueError(f"a tensor {_HOST}")
        return {"device": DEVICE}
    for kind, what in _CONSTANTS.items():
        if isinstance(value, what):
            return {kind: str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(f"an operator is called with a {type(value).__name__}, which a trace does not have")


# ---- the replay ----------------------------------------------------------------------------------


def replay(traces: list[Trace], inputs: list[dict[str, np.ndarray]], pipe: Send) -> None:
    """Run each trace on its inputs and send the output. The reader's code is not here."""
    try:
        for found, arrays in zip(traces, inputs, strict=True):
            messages.send(pipe, {"out": messages.encoded("the output", _replayed(found, arrays))})
    except Exception as error:  # whatever has come in the place of a trace
        messages.send(pipe, {"error": f"the trace cannot be replayed: {type(error).__name__}: {error}"})


def _replayed(found: Trace, arrays: dict[str, np.ndarray]) -> Tensor:
    tensors = [torch.from_numpy(array) for array in arrays.values()]
    with torch.no_grad():
        with FakeTensorMode():
            _run(found, [torch.empty(tensor.shape, dtype=tensor.dtype, device=DEVICE) for tensor in tensors], DEVICE)
        return _run(found, tensors, "cpu")


def _run(found: Trace, inputs: list[Tensor], device: str) -> Any:
    values: list[Any] = []
    given = iter(inputs)
    for node in found["nodes"]:
        arguments, named = _valued(node["args"], values, device), _valued(node["kwargs"], values, device)
        values.append(next(given) if node["op"] == "input" else _operator(node["op"])(*arguments, **named))
    return _valued(found["out"], values, device)


def _operator(name: str) -> Callable[..., Any]:
    """The operator of a name, of torch's own library."""
    if name == "getitem":
        return operator.getitem
    library, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    if library != "aten":
        raise ValueError(f"{name} is no operator of torch's own")
    return getattr(getattr(torch.ops.aten, packet), overload)  # type: ignore[no-any-return]


def _valued(value: Any, values: list[Any], device: str) -> Any:
    """An argument of a trace, with the values so far in the place of nodes."""
    if isinstance(value, list):
        return [_valued(one, values, device) for one in value]
    if not isinstance(value, dict):
        return value
    match [*value.items()]:
        case [("node", int(place))]:
            return values[place]
        case [("device", str())]:
            return torch.device(device)
        case [(str(kind), str(name))] if kind in _CONSTANTS:
            constant = getattr(torch, name)
            if not isinstance(constant, _CONSTANTS[kind]):
                raise ValueError(f"{name} is no {kind}")
            return constant
    return {name: _valued(one, values, device) for name, one in value.items()}
