"""Experts whose weights lie as a model stores them, in raw CUDA: see `core.layouts`.

a and b are one matrix ab (R, G h), its columns in the order of gate_up's. So d_ab and gate_up are the operands of plain
products, which the kernels of expert_up and expert_down compute as they are. kernels_cuda/packed/ has the two kernels
that have a and b of one element in hand: the forward of the up-projection, and the gradients of the hidden layer.
Its biases.cu has what biases of the experts need besides.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from moeblaze_ref.backends.raw_cuda import biases, expert_down, expert_up, gemm, tiles
from moeblaze_ref.backends.raw_cuda.biases import Biases
from moeblaze_ref.core.arrays import dtype_of, part_of
from moeblaze_ref.core.config import is_gated
from moeblaze_ref.core.layouts import Layout
from moeblaze_ref.core.structures import HIDDEN, Array, Dispatch
from moeblaze_ref.runtime import Executor, KernelArguments
from moeblaze_ref.systems.layer import (
    ActivationStage,
    CombineStage,
    ExpertDownStage,
    ExpertUpStage,
    Stages,
    as_they_are,
    store_and_combine,
)

VERSIONS = {version: dtypes for version, dtypes in gemm.VERSIONS.items() if version != "1_naive"}


@functools.cache
def replaced(stages: Stages, layout: Layout, activation: str, executor: Executor, version: str) -> Stages:
    """Return the stages of a layer with those of the experts for weights of a layout."""
    return with_biases(stages, layout, activation, executor, version, biases.NONE)


def with_biases(
    stages: Stages, layout: Layout, activation: str, executor: Executor, version: str, of_call: Biases
) -> Stages:
    """The same for one call whose experts have biases."""
    packed = Packed(layout, is_gated(activation), executor, version, of_call)
    if of_call.down is not None:
        stages = stages._replace(combine=CombineStage(packed.combine))
    return stages._replace(
        gathered=as_they_are,
        expert_up=ExpertUpStage(packed.project, packed.input_gradient, packed.up_weight_gradient),
        activation=ActivationStage(packed.act),
        expert_down=ExpertDownStage(packed.down_rows, packed.hidden_gradients, packed.down_weight_gradient),
        output=packed.output,
    )


@dataclass(frozen=True)
class Packed:
    """The functions of the experts' stages, unchecked, for one layout, executor and version.

    ab is in the place of a, gate_up in that of w1, and down in that of w3; there is no b and no w2. The ``biases`` are
    those of one call. y never has one: they are added where rows of y are summed.
    """

    layout: Layout
    gated: bool
    executor: Executor
    version: str
    biases: Biases = biases.NONE

    # ---- the kernels of their own ----

    def project(
        self,
        x: Array,
        gate_up: Array,
        _: None,
        dispatch: Dispatch,
        activation: str,
        stores: Collection[str] = HIDDEN,
    ) -> tuple[Array | None, None, Array | None]:
        """Return ab (R, G h) and y_swi (R, h), each None unless ``stores`` names it."""
        executor, version, (d, h) = self.executor, self.version, self.layout.widths(gate_up, self.gated)
        columns = h * (1 + self.gated)
        dtype = gemm.check_version("packed", version, VERSIONS, x, ("x", x), d=d, h=h, **{"G h": columns})
        ab = executor.empty((dispatch.R, columns), dtype) if "a" in stores else None
        y_swi = executor.empty((dispatch.R, h), dtype) if "y_swi" in stores else None
        if dispatch.R:
            tile = tiles.choose(executor, version, "expert_up", dispatch.R, dispatch.E, d, h)
            constants = self._constants(dtype, activation, tile)
            constants |= {"STORE_PROJECTIONS": int(ab is not None), "STORE_Y_SWI": int(y_swi is not None)}
            constants |= {"BIASED": 1} if self.biases.up is not None else {}
            executor.load(self._file, **constants).launch(
                "expert_up",
                **gemm.rows_launch(executor, version, dispatch, h, tile, results=1 + self.gated, crowded=False),
                x=x,
                **self._up_operands(gate_up),
                expert_token_indices=dispatch.expert_token_indices,
                expert_token_offsets=dispatch.expert_token_offsets,
                ab=gemm.or_nothing(executor, ab, x),
                y_swi=gemm.or_nothing(executor, y_swi, x),
                d=d,
                h=h,
                bias=gemm.or_nothing(executor, self.biases.up, x),
            )
        return ab, None, y_swi

    def hidden_gradients(
        self,
        d_out: Array,
        gates: Array,
        ab: Array,
        _: None,
        down: Array,
        dispatch: Dispatch,
        activation: str,
        y_swi: Array | None = None,
        overwrite: bool = False,
    ) -> tuple[Array, None, Array, Array]:
        """Return d_ab (R, G h), gate * y_swi (R, h) and d_gates; y_swi is not read, as in `expert_down`."""
        executor, version, d, h = self.executor, self.version, d_out.shape[1], ab.shape[1] // (1 + self.gated)
        widths = {"d": d, "h": h, "G h": ab.shape[1]}
        dtype = gemm.check_version("packed", version, VERSIONS, ab, ("d_out", d_out), **widths)
        d_ab = ab if overwrite else executor.empty(ab.shape, dtype)
        gated_y = executor.empty((dispatch.R, h), dtype)
        if dispatch.R == 0:
            biases.leave_zeros(executor, self.biases)
            return d_ab, None, gated_y, executor.empty(gates.shape, "float32")
        tile = tiles.choose(executor, version, "d_hidden", dispatch.R, dispatch.E, d, h)
        box = gemm.WEIGHTS_BOX if self.layout.transposed else gemm.WEIGHTS_TRANSPOSED_BOX
        tile_sums = self._tile_sums(dispatch, d_ab)
        constants = self._constants(dtype, activation, tile) | ({"BIASED": 1} if tile_sums is not None else {})
        of_bias: KernelArguments = (
            {"tile_sums": gemm.or_nothing(executor, tile_sums, gates)} if version == gemm.HOPPER else {}
        )

        def launch(gate_of_row: Array, gate_terms: Array) -> Array | None:
            executor.load(self._file, **constants).launch(
                "d_hidden",
                **gemm.rows_launch(executor, version, dispatch, h, tile),
                d_out=d_out,
                gate_of_row=gate_of_row,
                ab=ab,
                down=gemm.operand(executor, version, down, box),
                expert_token_indices=dispatch.expert_token_indices,
                expert_token_offsets=dispatch.expert_token_offsets,
                d_ab=d_ab,
                gated_y=gated_y,
                gate_terms=gate_terms,
                d=d,
                h=h,
                **of_bias,
            )
            return self._down_bias_gradients(d_out, gate_of_row, dispatch)

        d_gates = expert_down.gates_gradient(executor, dispatch, gates, gemm.gate_terms(version, h, tile), launch)
        self._up_bias_gradient(d_ab, tile_sums, dispatch)
        return d_ab, None, gated_y, d_gates

    def _tile_sums(self, dispatch: Dispatch, d_ab: Array) -> Array | None:
        """Room for what 7_persistent sums in passing, if the gradient of the up-projection's bias is wanted."""
        if self.version != gemm.HOPPER or "up" not in self.biases.wanted:
            return None
        return biases.empty_tile_sums(self.executor, dispatch, d_ab.shape[1])

    def _up_bias_gradient(self, d_ab: Array, tile_sums: Array | None, dispatch: Dispatch) -> None:
        """Leave the gradient of the up-projection's bias, if it is wanted."""
        if tile_sums is not None:
            found = biases.up_gradient_of_tiles(self.executor, tile_sums, dtype_of(d_ab), dispatch)
        elif "up" in self.biases.wanted:
            found = biases.up_gradient(self.executor, d_ab, dispatch)
        else:
            return
        self.biases.gradients["up"] = found

    def _down_bias_gradients(self, d_out: Array, gate_of_row: Array, dispatch: Dispatch) -> Array | None:
        """Leave the gradient of the down-projection's bias, if there is one, and return its terms of the gates'."""
        if self.biases.down is None:
            return None
        found, gate_terms = biases.down_gradients(self.executor, d_out, self.biases.down, gate_of_row, dispatch)
        if "down" in self.biases.wanted:
            self.biases.gradients["down"] = found
        return gate_terms

    @property
    def _file(self) -> str:
        return gemm.file_of("packed", self.version)

    def _constants(self, dtype: str, activation: str, tile: tiles.Tile | None) -> dict[str, Any]:
        return gemm.constants(dtype, activation, tile) | {"LAYOUT": self.layout.name}

    def _up_operands(self, gate_up: Array) -> dict[str, Any]:
        """gate_up as a version takes it: where it begins, or tensor maps of w1 and w2."""
        if self.version != gemm.HOPPER:
            return {"gate_up": gate_up}
        whole = self.layout.interleaved or not self.gated
        matrices = (gate_up, gate_up) if whole else self.layout.stored(gate_up)
        w1, w2 = [self.executor.tensor_map(matrix, gemm.WEIGHTS_BOX) for matrix in matrices]
        return {"w1": w1, "w2": w2}

    def act(self, ab: Array, activation: str) -> Array:
        """Return act(a), which only the policy ``conventional`` keeps."""
        R, h = ab.shape[0], ab.shape[1] // (1 + self.gated)
        act_a = self.executor.empty((R, h), dtype_of(ab))
        if R:
            module = self.executor.load("packed/act.cu", **self._constants(dtype_of(ab), activation, None))
            module.launch("act", **gemm.per_element(R * h), ab=ab, act_a=act_a, R=R, h=h)
        return act_a

    # ---- products that the kernels of expert_up and expert_down compute ----

    def input_gradient(self, d_ab: Array, _: None, gate_up: Array, __: None, dispatch: Dispatch) -> Array:
        """Return d_x: the sums over each token's rows of d_ab gate_up^T."""
        d, h = self.layout.widths(gate_up, self.gated)
        d_x = self.executor.empty((dispatch.L, d), dtype_of(d_ab))
        return self._sum_rows(d_ab, gate_up, not self.layout.transposed, dispatch, d_x, h)

    def up_weight_gradient(self, d_ab: Array, x: Array, dispatch: Dispatch) -> Array:
        """Return d_gate_up, in gate_up's layout."""
        return self._weight_gradient(x, d_ab, self.layout.transposed, dispatch)

    def down_rows(self, y_swi: Array, down: Array, dispatch: Dispatch) -> Array:
        """Return y (R, d)."""
        return self._rows(y_swi, down, self.layout.transposed, dispatch, 0, self._width(down))

    def output(
        self,
        stages: Stages,
        tensors: dict[str, Array],
        down: Array,
        dispatch: Dispatch,
        gates: Array,
        kept: tuple[str, ...],
    ) -> Array:
        """Return the layer's output (L, d), y in parts where the whole would cost a step its peak."""
        y_swi, d = tensors["y_swi"], self._width(down)
        h = y_swi.shape[1]
        if "y" in kept or len(gemm.parts_of_y(self.version, dispatch.R, d, h)) == 1:
            del y_swi  # so that it leaves the memory with the ``tensors``
            return store_and_combine(stages, tensors, down, dispatch, gates, kept)
        out = self.executor.empty((dispatch.L, d), dtype_of(y_swi))
        return self._sum_rows(y_swi, down, self.layout.transposed, dispatch, out, h, gates)

    def down_weight_gradient(self, gated_y: Array, d_out: Array, dispatch: Dispatch) -> Array:
        """Return d_down, in down's layout."""
        return self._weight_gradient(d_out, gated_y, not self.layout.transposed, dispatch)

    def combine(self, y: Array, gates: Array, dispatch: Dispatch) -> Array:
        """Return each token's sum of gates * (y + bias): (L, d)."""
        out = self.executor.empty((dispatch.L, y.shape[1]), dtype_of(y))
        gemm.check_slots(dispatch)
        self._sum_parts(y, dispatch, out, gates, 0)
        return out

    def _sum_parts(self, rows: Array, dispatch: Dispatch, out: Array, gates: Array | None, first: int) -> None:
        """Sum each token's rows into columns of ``out``; with gates they are rows of y, which may have a bias."""
        if gates is None or self.biases.down is None:
            gemm.sum_rows(self.executor, rows, dispatch.token_index_map, dispatch.k, out, gates, first)
        else:
            biases.sum_rows(self.executor, rows, self.biases.down, gates, dispatch, out, first)

    def _width(self, down: Array) -> int:
        """Return d."""
        d: int = down.shape[1 if self.layout.transposed else 2]
        return d

    def _weight_gradient(self, gathered: Array, hidden: Array, hidden_first: bool, dispatch: Dispatch) -> Array:
        """Each expert's product of gathered rows (L, d) and hidden rows (R, n): (E, n, d), or (E, d, n)."""
        d, n = gathered.shape[1], hidden.shape[1]
        where = dispatch, self.executor, self.version
        if hidden_first:
            return gemm.weight_gradient("expert_down", "d_w3", {"gated_y": hidden, "d_out": gathered}, (n, d), *where)
        return gemm.weight_gradient("expert_up", "d_w", {"d_hidden": hidden, "x": gathered}, (d, n), *where)

    def _sum_rows(
        self,
        hidden: Array,
        weights: Array,
        depth_last: bool,
        dispatch: Dispatch,
        out: Array,
        h: int,
        gates: Array | None = None,
    ) -> Array:
        """Fill ``out`` (L, d) with the sums of each token's rows of `_rows`, times its gates if there are any."""
        if dispatch.R == 0:
            return out
        gemm.check_slots(dispatch)
        parts_of = gemm.parts_of_rows if gates is None else gemm.parts_of_y
        for first, width in parts_of(self.version, dispatch.R, out.shape[1], h):
            rows = self._rows(hidden, weights, depth_last, dispatch, first, width)
            self._sum_parts(rows, dispatch, out, gates, first)
            del rows  # before the next part is born
        return out

    def _rows(
        self, hidden: Array, weights: Array, depth_last: bool, dispatch: Dispatch, first: int, width: int
    ) -> Array:
        """Hidden rows (R, n) times each expert's (n, d), or (d, n) if the depth is last: ``width`` of the d columns."""
        d = weights.shape[1 if depth_last else 2]
        if width < d:
            weights = part_of(weights, 1 if depth_last else 2, first, width)
        if depth_last:
            operands = hidden, None, weights, None
            return expert_up.rows_before_their_sum(self.executor, self.version, operands, dispatch, d)
        return expert_down.rows(self.executor, self.version, hidden, weights, dispatch, d)
