"""One row of an account: a tensor, whose formula and whose bytes come from the same expression."""

import math
from dataclasses import dataclass
from functools import cached_property

from moeblaze_ref.core.config import ITEMSIZE

_ITEMSIZE = ITEMSIZE | {"int32": 4, "int64": 8, "bool": 1}


class Size(int):
    """A number that remembers how it was written: ``Size("L", 5) * 4`` is 20, written ``L*4``."""

    text: str

    def __new__(cls, text: str, value: int) -> "Size":
        """Return a number that is written so."""
        size = super().__new__(cls, value)
        size.text = text
        return size

    def __mul__(self, other: int) -> "Size":
        return Size(f"{self.text}*{_text(other)}", int(self) * int(other))

    def __add__(self, other: int) -> "Size":
        return Size(f"({self.text} + {other})", int(self) + other)


def _text(number: int) -> str:
    return number.text if isinstance(number, Size) else str(number)


@dataclass(frozen=True)
class Tensor:
    """One row of an account."""

    name: str  #: the project's name of the tensor
    dims: tuple[int, ...]  #: its shape; the first entry is a Size
    dtype: str  #: "float64", "float32", "bfloat16", "float16", "int32", "int64" or "bool"
    #: The tensor (it may be this one) whose birth is the last use, after which it is freed. None: it lives until the
    #: backward.
    until: str | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes as numbers."""
        return tuple(map(int, self.dims))

    @property
    def _factors(self) -> tuple[int, ...]:
        return (*self.dims, _ITEMSIZE[self.dtype])

    @property
    def formula(self) -> str:
        """The bytes in the paper's symbols, such as ``L*k*d*2``; also valid Python."""
        return "*".join(map(_text, self._factors))

    @cached_property
    def bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(map(int, self._factors))

    @property
    def kept(self) -> bool:
        """True if the tensor is saved for backward."""
        return self.until is None
