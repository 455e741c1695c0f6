"""Where the package keeps its kernels: beside it in a checkout, inside it in a wheel."""

from pathlib import Path

_PACKAGE = Path(__file__).parent


def kernels_dir() -> Path:
    """Folder of the raw CUDA sources, kernels_cuda/."""
    inside = _PACKAGE / "kernels_cuda"
    return inside if inside.exists() else _PACKAGE.parent / "kernels_cuda"
