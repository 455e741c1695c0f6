"""Where the package, its documentation and its kernels are."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent  # of a checkout
DOCS = ROOT / "docs"  # of a checkout: a wheel has none


def kernels_dir() -> Path:
    """Return the folder of the raw CUDA sources: beside the package in a checkout, inside it in a wheel."""
    inside = PACKAGE / "kernels_cuda"
    return inside if inside.exists() else ROOT / "kernels_cuda"
