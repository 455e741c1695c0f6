"""Right results of the torch projects, and the comparison of an answer with them, in the process that asks.

Each module belongs to the one of the same name in `moeblaze_ref.verify.torch_cells`, which runs the reader's code. A
sheet names a project of one of them, such as ``function.SWIGLU``.
"""
