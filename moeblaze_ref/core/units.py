"""Binary units for tables and plots: one unit for all the numbers that stand together."""

from dataclasses import dataclass

MB, GB = 10**6, 10**9
KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Unit:
    """A unit of bytes.

    Parameters
    ----------
    name : str
        "GiB", "MiB" or "KiB".
    size : int
        Its bytes.
    """

    name: str
    size: int

    def of(self, number: int) -> float:
        """Bytes in this unit."""
        return number / self.size

    def text(self, number: int) -> str:
        """Bytes in this unit: three decimals, or three digits where those decimals would be zeros."""
        value = self.of(number)
        return f"{value:,.3f}" if value >= 0.1 or value == 0 else f"{value:.3g}"


UNITS = (Unit("GiB", GIB), Unit("MiB", MIB), Unit("KiB", KIB))


def unit_for(largest: int) -> Unit:
    """The largest unit of which ``largest`` bytes are at least a tenth."""
    return next((unit for unit in UNITS if largest >= unit.size / 10), UNITS[-1])
