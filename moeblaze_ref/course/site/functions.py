"""Writes the functions of the stages into docs/notation.md, from their contracts.

``python -m moeblaze_ref.course.site.functions`` writes them again.
"""

from collections.abc import Iterator
from types import ModuleType

from moeblaze_ref.backends.numpy_ref import (
    activation,
    block_sparse,
    capacity,
    combine,
    dispatch,
    expert_down,
    expert_up,
    gating,
    layer,
    router,
    routers,
)
from moeblaze_ref.core import documents
from moeblaze_ref.core.contract import Contract, Structure, Tensor, Value
from moeblaze_ref.core.paths import DOCS

DOCUMENT = DOCS / "notation.md"
STAGES = (
    router, gating, routers, dispatch, expert_up, activation, expert_down, combine, layer, block_sparse, capacity,
)  # fmt: skip


def contracts(stage: ModuleType) -> Iterator[tuple[str, Contract]]:
    """Yield each function of a stage that has a contract, in the order of the file."""
    for name, function in vars(stage).items():
        if getattr(function, "__module__", "") == stage.__name__ and hasattr(function, "contract"):
            yield name, function.contract


def table() -> str:
    """Return each function with its arguments and results."""
    rows = []
    for stage in STAGES:
        for name, contract in contracts(stage):
            arguments, results = (", ".join(map(_shown, of)) for of in (contract.arguments, contract.results))
            rows.append([f"`{stage.__name__.removeprefix('moeblaze_ref.')}.{name}`", arguments, results])
    return documents.table(["function", "arguments", "results"], rows, words=3)


def _shown(one: Tensor | Structure | Value) -> str:
    """An argument or result: a tensor with its axes."""
    if not isinstance(one, Tensor):
        return one.name
    axes = one.axes.split()
    return f"{one.name} ({', '.join(axes)}{',' if len(axes) == 1 else ''})"


def page(text: str) -> str:
    """Return the page with its table written anew."""
    return documents.fill(text, {"functions": table})


if __name__ == "__main__":
    DOCUMENT.write_text(page(DOCUMENT.read_text()))
