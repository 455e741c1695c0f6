"""Check of every product timed for a paper's figure, against another product of the same operands."""

from torch import Tensor

from moeblaze_ref.bench import accuracy


def checked_errors(what: str, found: Tensor, expected: Tensor) -> dict[str, float]:
    """Check a result, and return its columns ``error`` and ``row_error``, see `accuracy.Error`.

    Raises
    ------
    ArithmeticError
        If an error is above `accuracy.BOUND` or `accuracy.ROW_BOUND`, or NaN. The message names the result by ``what``.
    ValueError
        If the shapes differ.
    """
    error = accuracy.worst([found], [expected])
    if not (error.whole <= accuracy.BOUND and error.row <= accuracy.ROW_BOUND):
        raise ArithmeticError(
            f"{what} has an error of {error.whole:.2g}, in the worst row {error.row:.2g}, but at most "
            f"{accuracy.BOUND:.2g} and {accuracy.ROW_BOUND:.2g} are allowed"
        )
    return error.columns
