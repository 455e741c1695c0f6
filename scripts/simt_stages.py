"""Run a kernel of every stage on the SIMT executor, and compare its result with the specification.

It needs no torch, so it runs wherever numpy and ml_dtypes do: `scripts/simt_elsewhere.sh` runs it on aarch64. Each line
is a stage: its version and dtype, the error and its bound, and a checksum of the bits, to compare two machines by.
"""

import sys
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  gives numpy bfloat16
import numpy as np

from moeblaze_ref.backends.numpy_ref import dispatch, expert_down, expert_up, gating
from moeblaze_ref.backends.registry import BACKENDS, OpenStage
from moeblaze_ref.verify.cases import make_case, relative_error

BOUNDS = {"int32": 0.0, "float32": 1e-5, "bfloat16": 2.0**-6, "float16": 2.0**-9}  # comparisons.py has those of checks
BLOCK = 32  # of block_sparse; it divides h

CASE = make_case(L=37, d=32, h=64, E=5, k=2, routing="zipf")
_, W1, W2, W3 = CASE.weights
ROUTES = dispatch.build(CASE.topk_experts, CASE.E)
GATES = gating.forward(CASE.logits, CASE.k).gates
Y_SWI = expert_up.forward(CASE.x, W1, W2, ROUTES, CASE.activation)[2]
Y = expert_down.forward(Y_SWI, W3, ROUTES)
Round = Callable[[np.ndarray], np.ndarray]


class Numbers(NamedTuple):
    """How a backend is given its numbers: rounded to the dtype, or to float32; then in the backend's own dtype."""

    narrow: Round
    wide: Round


def rounded_to(narrow: str, wide: str, kept: str | None = None) -> Numbers:
    """Numbers of these dtypes; where ``kept`` names another one, in that dtype afterwards."""
    return Numbers(*(lambda array, to=to: array.astype(to).astype(kept or to) for to in (narrow, wide)))


class Stage(NamedTuple):
    """One stage: the version that runs, the dtype that it computes in, and how it is called."""

    name: str
    version: str
    dtype: str
    call: Callable[[OpenStage, Numbers], Any]


STAGES = (
    Stage("gating", "2_warp", "float32", lambda on, of: on.forward(of.wide(CASE.logits), CASE.k).gates),
    Stage("dispatch", "3_single_pass", "int32", lambda on, of: on.build(CASE.topk_experts, CASE.E).token_index_map),
    Stage(
        "expert_up",
        "3_mma",
        "bfloat16",
        lambda on, of: on.forward(*map(of.narrow, (CASE.x, W1, W2)), ROUTES, CASE.activation)[2],
    ),
    Stage(
        "expert_down",
        "7_persistent",
        "float16",
        lambda on, of: on.forward(of.narrow(Y_SWI), of.narrow(W3), ROUTES),
    ),
    Stage("combine", "2_vector", "bfloat16", lambda on, of: on.forward(of.narrow(Y), of.wide(GATES), ROUTES)),
    Stage("layer", "2_tiled", "float32", lambda on, of: on.forward(of.wide(CASE.x), _weights(of.wide), CASE.k).out),
    Stage(
        "block_sparse",
        "2_tiled",
        "float16",
        lambda on, of: on.forward(
            *map(of.narrow, (CASE.x, W1, W2, W3)), ROUTES, of.wide(GATES), CASE.activation, BLOCK
        )[0],
    ),
)


def _weights(rounded: Round):
    return type(CASE.weights)(*map(rounded, CASE.weights))


def compare(stage: Stage) -> bool:
    """Run the stage and print its line; returns whether its error is within the bound."""
    found = stage.call(BACKENDS["simt"].open(stage.name, stage.version), rounded_to(stage.dtype, "float32"))
    right = stage.call(BACKENDS["numpy"].open(stage.name), rounded_to(stage.dtype, "float32", kept="float64"))
    error, bound = relative_error(found, right), BOUNDS[stage.dtype]
    bits = zlib.crc32(np.ascontiguousarray(found).view(np.uint8))
    verdict = "right" if error <= bound else "WRONG"
    print(
        f"{verdict}  {stage.name:12} {stage.version:13} {stage.dtype:8}  error {error:.1e}  bound {bound:.1e}"
        f"  bits {bits:08x}",
        flush=True,
    )
    return error <= bound


if __name__ == "__main__":
    sys.exit(0 if all([compare(stage) for stage in STAGES]) else 1)
