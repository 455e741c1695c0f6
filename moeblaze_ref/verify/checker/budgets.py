"""Budgets: how much a kernel may ask of memory, such as "written <= 4 R h", and how its threads divide the work."""

import re
from dataclasses import dataclass

from moeblaze_ref.core import checks, kernel_headers
from moeblaze_ref.verify.checker.contracts import Contract

TRAFFIC = {
    "read": "bytes that threads ask to read of global memory",
    "written": "bytes that threads ask to write to global memory",
    "sectors": "32-byte sectors of all global accesses",
    "conflicts": "shared-memory passes beyond the fewest possible",
}
DIVISION = {
    "accesses": "accesses to global and shared memory by the thread that makes the most",
    "barriers": "barriers that the threads of a block pass, in the block that has the most",
    "threads": "threads of the grid that write to memory",
}
MEANS = {
    "exchanges": "shuffles, votes and reductions of a warp, by the thread that takes part in the most",
    "waits": "waits at mbarriers, by all threads",
    "copied": "bytes of asynchronous copies into shared memory (cp.async)",
    "under_way": "bytes of such copies that had not arrived after a wait of their thread, over all waits",
}
QUANTITIES = TRAFFIC | DIVISION | MEANS
AT_LEAST = ("threads", "waits", "copied", "under_way")  #: limited from below, all others from above
_TOO_SERIAL = {
    "accesses": "one thread does work that many could share, or asks for an element again and again",
    "barriers": "the threads wait for each other more often than the work needs",
    "threads": "the other threads do nothing",
}
_OTHER_MEANS = {
    "exchanges": "fewer exchanges between the lanes are enough",
    "waits": "the threads must wait for each other at mbarriers",
    "copied": "cp.async must bring the data while the threads compute",
    "under_way": "later copies must be under way while the threads compute",
}
_BUDGET = re.compile(r"(?P<quantity>\w+)(?:\s+of\s+(?P<tensor>\w+))?\s*(?P<sign><=|>=)\s*(?P<formula>.+)")


@dataclass(frozen=True)
class Budget:
    """The most of one quantity, over all tensors or of one; of ``AT_LEAST`` the least."""

    quantity: str  #: one of ``QUANTITIES``
    tensor: str | None  #: None of what is counted over all memory
    sign: str  #: "<=", or ">=" of ``AT_LEAST``
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
            raise ValueError(
                f'budget {text!r} must read like "written <= 4 R h", "read of x <= 4 R d" or "threads >= R h"'
            )
        budget = cls(**match.groupdict())
        quantity = checks.check_name("quantity of a budget", budget.quantity, QUANTITIES)
        if budget.sign != (sign := ">=" if quantity in AT_LEAST else "<="):
            raise ValueError(f"budget {text!r} must have {sign}: {quantity} {sign} ...")
        if budget.tensor is not None and quantity in DIVISION | MEANS:
            raise ValueError(f"budget {text!r} names a tensor, but {quantity} are counted over all memory")
        if budget.tensor is not None:
            checks.check_name(f"tensor of {contract.task}", budget.tensor, contract.tensors)
        return budget

    def excess(self, counts: dict[str, dict[str, int]], symbols: dict[str, int]) -> str:
        """Return a sentence on how far the counts exceed the budget, or an empty text."""
        allowed = kernel_headers.number(self.formula, symbols)
        counted = counts[self.quantity]
        used = sum(counted.values()) if self.tensor is None else counted.get(self.tensor, 0)
        at_least = self.sign == ">="
        over = allowed - used if at_least else used - allowed
        if over <= 0:
            return ""
        what = f"{self.quantity} of {self.tensor}" if self.tensor else self.quantity
        excess = (
            f"{what} is {used:,}, but {what} {self.sign} {self.formula} {'asks for' if at_least else 'allows'} "
            f"{float(allowed):,.10g}: {float(over):,.10g} too {'few' if at_least else 'many'}"
        )
        if self.quantity in DIVISION:
            return f"too serial: {excess}; {_TOO_SERIAL[self.quantity]}"
        if self.quantity in MEANS:
            return f"by other means: {excess}; {_OTHER_MEANS[self.quantity]}"
        return f"over budget: {excess}"
