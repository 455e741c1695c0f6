"""Numba runs in its simulator wherever this is imported first: a GPU counts no bytes, and budgets need them."""

import os

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
