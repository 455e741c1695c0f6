"""The reader's counter of saved bytes, compared with the account."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.course.exercises.projects.session import FORGED, Row, Session
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.verify import torch_cells

#: The account's name of a system, the system of `nn.SYSTEMS`, and the sizes.
LAYERS = (
    ("conventional", "oracle", MoEConfig(13, 8, 16, 4, 2, dtype="float32")),
    ("conventional", "oracle", MoEConfig(32, 16, 24, 5, 3, "relu", "bfloat16")),
    ("sequential", "sequential", MoEConfig(13, 8, 16, 4, 2, "geglu", "float32")),
    ("capacity", "capacity", MoEConfig(24, 8, 16, 4, 1, "silu", "float32")),
    ("capacity", "capacity", MoEConfig(40, 16, 8, 8, 2, dtype="bfloat16")),
)


@dataclass(frozen=True)
class Counter:
    """A project of a function that counts what autograd saves."""

    defines: str
    refused: tuple[str, ...] = ()

    def rows(self, cell: torch_cells.Cell, session: Session) -> Iterator[Row]:
        """Let the function count for every layer, and compare."""
        layers = [(system, sizes) for _, system, sizes in LAYERS]
        answers = session.ask(partial(torch_cells.counter.count, cell, layers), len(layers))
        for (name, _, sizes), answer in zip(LAYERS, answers, strict=True):
            if type(found := answer.get("bytes")) is not int:
                raise ChildProcessError(FORGED)
            too_many = found - account(sizes, name).kept_bytes
            how = "more" if too_many > 0 else "fewer"
            problem = f"counts {found:,} bytes, {abs(too_many):,} {how} than the account" if too_many else ""
            shape = f"{name} L={sizes.L} d={sizes.d} h={sizes.h} E={sizes.E} k={sizes.k}"
            yield Row(f"{shape} {sizes.activation} {sizes.dtype}", f"{found:,} bytes", problem)


SAVED_BYTES = Counter("saved_bytes")
