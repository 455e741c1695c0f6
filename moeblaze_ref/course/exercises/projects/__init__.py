"""What is right of the torch projects, and how an answer is compared with it, in the process that asks.

Each module belongs to the one of the same name in `moeblaze_ref.verify.torch_cells`, which runs the reader's code. A
sheet names a project of one of them, such as ``function.SWIGLU``.
"""
