"""A layer that a CUDA graph can hold: its trace is replayed on several routings, and compared with the oracle."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from moeblaze_ref.course.exercises.projects.session import FORGED, Arrays, Row, Session, difference, tensor
from moeblaze_ref.nn import oracle
from moeblaze_ref.verify import torch_cells
from moeblaze_ref.verify.cases import make_case

L, D, H, E, K = 24, 8, 16, 6, 2
ROUTINGS = ("uniform", "zipf", "hot", "empty")


@dataclass(frozen=True)
class GraphSafe:
    """A project of a layer without host waits and data-dependent shapes."""

    defines: str
    refused: tuple[str, ...] = ()

    def rows(self, cell: torch_cells.Cell, session: Session) -> Iterator[Row]:
        """Trace the layer, replay the trace in a process without the reader's code, and compare."""
        cases = {routing: _inputs(routing) for routing in ROUTINGS}
        shapes = {name: array.shape for name, array in cases[ROUTINGS[0]].items()}
        (trace,) = session.ask(partial(torch_cells.graph.trace, cell, [shapes], K), 1)
        if not isinstance(trace.get("nodes"), list):
            raise ChildProcessError(FORGED)
        replay = partial(torch_cells.graph.replay, [trace] * len(cases), [*cases.values()])
        for (routing, inputs), answer in zip(cases.items(), session.ask(replay, len(cases)), strict=True):
            problem = difference({"out": tensor(answer.get("out"))}, {"out": _right(inputs)})
            yield Row(f"{routing} routing", f"{len(trace['nodes'])} operators", problem)


def _inputs(routing: str) -> Arrays:
    case = make_case(L, D, H, E, K, routing)
    wg, w1, w2, w3 = case.weights
    arrays = {"x": case.x, "wg": wg, "w1": w1, "w2": w2, "w3": w3}
    return {name: np.ascontiguousarray(array, np.float32) for name, array in arrays.items()}


def _right(inputs: Arrays) -> np.ndarray:
    x, wg, w1, w2, w3 = (torch.from_numpy(array.astype(np.float64)) for array in inputs.values())
    return oracle.experts(x, oracle.route(x, wg, K), w1, w2, w3, "swiglu").numpy()


LAYER = GraphSafe("layer")
