"""Where the package, its documentation and its kernels are: side by side in a checkout, in the package in a wheel."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent  # of a checkout


def _packaged(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.exists() else ROOT / name


DOCS = _packaged("docs")


def kernels_dir() -> Path:
    """Return the folder of the raw CUDA sources."""
    return _packaged("kernels_cuda")


def notebooks_dir() -> Path:
    """Return the folder of the notebooks."""
    return _packaged("notebooks")
