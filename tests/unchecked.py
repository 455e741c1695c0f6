"""Kernel files that some checks do not have yet; docs/large_sizes.md says so."""

# The experts' kernels for weights as models store them: tests/backends/test_packed.py compares them with autograd and
# with the kernels for separate weights. They have no large case, no check of the order of their sums, and no run under
# compute-sanitizer.
UNCHECKED = {"packed/2_tiled.cu", "packed/3_mma.cu", "packed/7_persistent.cu", "packed/act.cu", "include/packed.cuh"}
