"""The stages three times over, numpy, Numba and raw CUDA, and the registry that finds them by name."""
