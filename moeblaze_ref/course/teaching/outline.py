"""The lecture of two hours: which sections of the notebooks it shows, and for how long."""

from typing import NamedTuple


class Part(NamedTuple):
    """A section of a notebook, or a pause."""

    notebook: str  #: file name without its ending; empty for a pause
    heading: str  #: of the section, without its number
    minutes: int  #: an estimate


LECTURE = (
    Part("00_memory_wall", "The question", 4),
    Part("00_memory_wall", "One layer, drawn to scale", 4),
    Part("00_memory_wall", "The first wall: the routed-token buffer", 5),
    Part("00_memory_wall", "The second wall: four tensors between the two matrix products", 5),
    Part("00_memory_wall", "Tensor by tensor", 4),
    Part("00_memory_wall", "Move the walls", 3),
    Part("01_routing", "Softmax, then top k", 5),
    Part("01_routing", "How many rows does each expert get?", 3),
    Part("01_routing", "Skew against a fixed capacity", 7),
    Part("02_dispatch_without_sorting", "Five tokens, four experts", 6),
    Part("02_dispatch_without_sorting", "The four structures", 5),
    Part("02_dispatch_without_sorting", "Why not sort?", 4),
    Part("02_dispatch_without_sorting", "Step 1, the dense map", 6),
    Part("02_dispatch_without_sorting", "Step 2, lengths and offsets", 7),
    Part("02_dispatch_without_sorting", "Step 3, positions, and the one write", 7),
    Part("", "A pause", 10),
    Part("03_gather_gemm_swiglu", "The question", 5),
    Part("03_gather_gemm_swiglu", "Version 2: tiles", 5),
    Part("03_gather_gemm_swiglu", "The series, counted", 6),
    Part("03_gather_gemm_swiglu", "Does the gather cost anything?", 4),
    Part("05_smart_checkpoint", "The question", 4),
    Part("05_smart_checkpoint", "The formula", 3),
    Part("05_smart_checkpoint", "Bytes against time", 8),
)
