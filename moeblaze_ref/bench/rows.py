"""Columns of the rows that the benchmark times."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TimedRow:
    """The columns that rows of layers, of stages and of the series share."""

    kind: str  #: "layer", "stage", "ladder", or the stage's name where plain torch is timed too
    preset: str
    shape: dict[str, int]  #: {L, d, h, E, k}, of the layer as it was timed
    dtype: str  #: of its activations
    step_ms: float  #: median
    quartiles_ms: tuple[float, float]  #: first and third
    ratio_to: dict[str, float]  #: how many times as fast as each of its baselines: {"grouped_mm": 1.3}
    error: float | None  #: as `accuracy.Error`; None of the system that the others are compared with
    cublas_tflops: float  #: this and the next two as `roofline.columns`
    copy_gb_s: float
    hot_cublas_tflops: float
    row_error: float | None = None  #: as `accuracy.Error`; None also in rows that are older than this column
