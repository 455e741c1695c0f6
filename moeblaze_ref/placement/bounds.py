"""Bounds on the experts of a layer that a GPU holds; MoETuner's printed program lacks them."""

from dataclasses import dataclass

from moeblaze_ref.core import checks


@dataclass(frozen=True)
class Bounds:
    """Bounds: from ``least`` to ``most`` experts of every layer on every GPU.

    (1, E) is the paper's form; (E / G, E / G) gives every GPU the same memory.

    Raises
    ------
    ValueError, TypeError
        If they are no integers, or ``most`` is below ``least``.
    """

    least: int
    most: int

    def __post_init__(self):
        checks.check_int("least experts per GPU", self.least, 0)
        checks.check_int("most experts per GPU", self.most, self.least)

    def check_feasible(self, num_experts: int, num_gpus: int):
        """E experts can be spread over G GPUs so."""
        if self.least * num_gpus > num_experts:
            raise ValueError(
                f"infeasible: at least {self.least} experts on each of {num_gpus} GPUs are {self.least * num_gpus}, "
                f"but a layer has only {num_experts}; lower the least experts per GPU"
            )
        if self.most * num_gpus < num_experts:
            raise ValueError(
                f"infeasible: at most {self.most} experts on each of {num_gpus} GPUs are {self.most * num_gpus}, but a "
                f"layer has {num_experts}; raise the most experts per GPU"
            )


def equal(num_experts: int, num_gpus: int) -> Bounds:
    """Return the most equal bounds: E / G, rounded down and up."""
    return Bounds(num_experts // num_gpus, -(-num_experts // num_gpus))


def printed(num_experts: int) -> Bounds:
    """The paper's printed form: no GPU empty, and no other limit (MoETuner, ILP 1)."""
    return Bounds(1, num_experts)


def parse(text: str | None) -> Bounds | None:
    """Bounds from "MIN:MAX", as on the command line; None stays None.

    Raises
    ------
    ValueError
        If the text is not so.
    """
    if text is None:
        return None
    least, colon, most = text.partition(":")
    if not (colon and least.strip().isdecimal() and most.strip().isdecimal()):
        raise ValueError(f"{text!r} must be MIN:MAX, two whole numbers, such as 1:32")
    return Bounds(int(least), int(most))
