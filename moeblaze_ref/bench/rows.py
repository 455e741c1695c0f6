"""Columns of the rows that the benchmark times."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """What one row of a layer, a stage or the series has.

    Parameters
    ----------
    kind : str
        "layer", "stage", "ladder", or the stage's name where plain torch is timed too.
    preset, shape, dtype
        The layer as it was timed: a name, {L, d, h, E, k}, and the dtype of its activations.
    step_ms, quartiles_ms
        Median, and first and third quartile.
    ratio_to : dict
        How many times as fast as each that it is compared with: {"grouped_mm": 1.3}.
    error, row_error : float or None
        As `accuracy.Error`; None of what the others are compared with, and of rows from before a column.
    cublas_tflops, copy_gb_s, hot_cublas_tflops
        As `roofline.columns`.
    """

    kind: str
    preset: str
    shape: dict[str, int]
    dtype: str
    step_ms: float
    quartiles_ms: tuple[float, float]
    ratio_to: dict[str, float]
    error: float | None
    cublas_tflops: float
    copy_gb_s: float
    hot_cublas_tflops: float
    row_error: float | None = None
