"""Where the package, its documentation and its kernels are."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
ROOT = PACKAGE.parent  # of a checkout
DOCS = ROOT / "docs"  # of a checkout: a wheel has none


def kernels_dir() -> Path:
    """Return the folder of the raw CUDA sources: beside the package in a checkout, inside it in a wheel."""
    return _packaged("kernels_cuda")


def notebooks_dir() -> Path:
    """Return the folder of the notebooks: beside the package in a checkout, inside it in a wheel."""
    return _packaged("notebooks")


def _packaged(name: str) -> Path:
    inside = PACKAGE / name
    return inside if inside.exists() else ROOT / name
