"""Experts whose weights lie as a model stores them, for checks that have each weight in an array of its own.

A `PackedStage` and a `PackedLayer` take and return separate arrays. They pack what the kernels take, and split what the
kernels return.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from moeblaze_ref.backends.raw_cuda import layer as raw_layer
from moeblaze_ref.backends.raw_cuda.packed import Packed
from moeblaze_ref.backends.registry import OpenStage
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import Layout
from moeblaze_ref.core.structures import Array, Dispatch
from moeblaze_ref.runtime import Executor
from moeblaze_ref.systems import layer
from moeblaze_ref.systems.layer import Gradients, MoEWeights, Saved, Stages

# ---- where a layout has what ----


def joined(a: np.ndarray, b: np.ndarray | None, layout: Layout) -> np.ndarray:
    """Return the columns of a and of b, if there is one, as they lie in ab."""
    if b is None:
        return a
    if layout.interleaved:
        return np.stack([a, b], axis=-1).reshape(*a.shape[:-1], -1)
    return np.concatenate([a, b], axis=-1)


def split(ab: np.ndarray, layout: Layout, gated: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a and b."""
    if not gated:
        return ab, None
    if layout.interleaved:
        return ab[..., 0::2], ab[..., 1::2]
    a, b = np.split(ab, 2, axis=-1)
    return a, b


def stored(w1: np.ndarray, w2: np.ndarray | None, w3: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Return gate_up and down."""
    return _turned(joined(w1, w2, layout), layout), _turned(w3, layout)


def _turned(weights: np.ndarray, layout: Layout) -> np.ndarray:
    return np.ascontiguousarray(weights.swapaxes(1, 2) if layout.transposed else weights)


# ---- what runs them: functions as those of a stage ----


def _project(
    x: Array, gate_up: Array, dispatch: Dispatch, activation: str, layout: Layout, executor: Executor, version: str
) -> tuple[Array, Array]:
    packed = Packed(layout, is_gated(activation), executor, version)
    ab, _, y_swi = packed.project(x, gate_up, None, dispatch, activation)
    assert ab is not None and y_swi is not None  # both are stored
    return ab, y_swi


def _hidden_gradients(
    d_out: Array,
    gates: Array,
    ab: Array,
    down: Array,
    dispatch: Dispatch,
    activation: str,
    layout: Layout,
    executor: Executor,
    version: str,
) -> tuple[Array, Array, Array]:
    packed = Packed(layout, is_gated(activation), executor, version)
    d_ab, _, gated_y, d_gates = packed.hidden_gradients(d_out, gates, ab, None, down, dispatch, activation)
    return d_ab, gated_y, d_gates


def _forward(
    x: Array,
    gate_up: Array,
    down: Array,
    dispatch: Dispatch,
    gates: Array,
    activation: str,
    policy: str,
    layout: Layout,
    executor: Executor,
    version: str,
) -> tuple[Array, Saved]:
    weights, stages = _layer(x, gate_up, down, activation, layout, executor, version)
    out, kept = layer.run_experts(stages, x, weights, dispatch, gates, activation, policy)
    return out, Saved(x, dispatch, gates, kept, activation, policy, renormalize=False)


def _backward(
    d_out: Array, saved: Saved, gate_up: Array, down: Array, layout: Layout, executor: Executor, version: str
) -> Gradients:
    weights, stages = _layer(saved.x, gate_up, down, saved.activation, layout, executor, version)
    return layer.expert_gradients(stages, d_out, saved, weights)


def _layer(x: Array, gate_up: Array, down: Array, activation: str, *where) -> tuple[MoEWeights[Any], Stages]:
    weights: MoEWeights[Any] = MoEWeights(None, gate_up, None, down)
    return weights, raw_layer.packed_stages_for(x, weights, activation, *where)


_FUNCTIONS = SimpleNamespace(project=_project, hidden_gradients=_hidden_gradients, forward=_forward, backward=_backward)


# ---- the same of separate arrays ----


class PackedStage:
    """Both kernels of the layout's own, as functions of expert_up and of expert_down.

    Parameters
    ----------
    stage : OpenStage
        Any of raw CUDA, whose executor and version these are.
    layout : Layout
    """

    def __init__(self, stage: OpenStage, layout: Layout):
        self._run, self._layout = stage.with_functions(_FUNCTIONS), layout

    def forward(self, x, w1, w2, dispatch, activation):
        """Return a, b and y_swi."""
        gate_up = _turned(joined(w1, w2, self._layout), self._layout)
        ab, y_swi = self._run.project(x, gate_up, dispatch, activation, layout=self._layout)
        return *split(ab, self._layout, is_gated(activation)), y_swi

    def hidden_gradients(self, d_out, gates, a, b, w3, dispatch, activation):
        """Return d_a, d_b, gate * y_swi and d_gates."""
        ab, down = joined(a, b, self._layout), _turned(w3, self._layout)
        d_ab, *others = self._run.hidden_gradients(d_out, gates, ab, down, dispatch, activation, layout=self._layout)
        return *split(d_ab, self._layout, is_gated(activation)), *others


class PackedLayer:
    """The experts' half of the layer; parameters as those of `PackedStage`."""

    def __init__(self, stage: OpenStage, layout: Layout):
        self._run, self._layout = stage.with_functions(_FUNCTIONS), layout

    def forward(self, x, w1, w2, w3, dispatch, gates, activation, policy) -> tuple[np.ndarray, Saved]:
        """Return the output and what it saves."""
        weights = stored(w1, w2, w3, self._layout)
        return self._run.forward(x, *weights, dispatch, gates, activation, policy, layout=self._layout)

    def backward(self, d_out, saved: Saved, w1, w2, w3) -> Gradients:
        """Return the gradients of separate weights."""
        weights = stored(w1, w2, w3, self._layout)
        found = self._run.backward(d_out, saved, *weights, layout=self._layout)
        d_w1, d_w2 = split(_turned(found.d_w1, self._layout), self._layout, is_gated(saved.activation))
        return found._replace(d_w1=d_w1, d_w2=d_w2, d_w3=_turned(found.d_w3, self._layout))
