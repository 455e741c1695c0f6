"""Budgets: how much a kernel may ask of memory, such as "written <= 4 R h" or "read of x <= 4 R d"."""

import re
from dataclasses import dataclass

from moeblaze_ref.core import checks, kernel_headers
from moeblaze_ref.verify.checker.contracts import Contract

QUANTITIES = {
    "read": "bytes that threads ask to read of global memory",
    "written": "bytes that threads ask to write to global memory",
    "sectors": "32-byte sectors of all global accesses",
    "conflicts": "shared-memory passes beyond the fewest possible",
}
_BUDGET = re.compile(r"(?P<quantity>\w+)(?:\s+of\s+(?P<tensor>\w+))?\s*<=\s*(?P<formula>.+)")


@dataclass(frozen=True)
class Budget:
    """The most of one quantity, over all tensors or of one."""

    quantity: str  #: one of ``QUANTITIES``
    tensor: str | None
    #: In the sizes, ``s`` (bytes of Scalar), ``G`` (2 if the activation is gated, else 1), ``blocks`` (of the grid),
    #: and the kernel's whole constants.
    formula: str

    @classmethod
    def read(cls, text: str, contract: Contract) -> "Budget":
        """A budget as it is written.

        Raises
        ------
        ValueError
            If it has another form, or names a quantity or a tensor that there is not.
        """
        match = _BUDGET.fullmatch(text.strip())
        if not match:
            raise ValueError(f'budget {text!r} must read like "written <= 4 R h" or "read of x <= 4 R d"')
        budget = cls(**match.groupdict())
        checks.check_name("quantity of a budget", budget.quantity, QUANTITIES)
        if budget.tensor is not None:
            checks.check_name(f"tensor of {contract.task}", budget.tensor, contract.tensors)
        return budget

    def excess(self, counts: dict[str, dict[str, int]], symbols: dict[str, int]) -> str:
        """Return a sentence on how far the counts exceed the budget, or an empty text."""
        allowed = kernel_headers.number(self.formula, symbols)
        counted = counts[self.quantity]
        used = sum(counted.values()) if self.tensor is None else counted.get(self.tensor, 0)
        if used <= allowed:
            return ""
        of = f" of {self.tensor}" if self.tensor else ""
        return (
            f"over budget: {self.quantity}{of} is {used:,}, but {self.quantity}{of} <= {self.formula} allows "
            f"{float(allowed):,.10g}: {float(used - allowed):,.10g} too many"
        )
