"""Figures of Matplotlib as PNG files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from matplotlib.figure import Figure

from moeblaze_ref.core import records

DPI = 150
PNG = b"\x89PNG\r\n\x1a\n"  # the first bytes of such a file
SOFTWARE = "moeblaze_ref"  # in the metadata of every picture


def check(folder: Path, names: Iterable[str], force: bool = False) -> None:
    """Check that figures of these names may be written into a folder; make it if need be.

    Parameters
    ----------
    folder : Path
    names : iterable of str
        Without the ending .png.
    force : bool
        Allow to replace files that are no pictures of this project.

    Raises
    ------
    ValueError, OSError
        As in `records.check_writable`.
    """
    for path in pictures(folder, names):
        records.check_writable(path, _check_picture, force)


def pictures(folder: Path | None, names: Iterable[str]) -> list[Path]:
    """Return the files of figures in a folder, and none if no folder is named."""
    return [] if folder is None else [_png(folder, name) for name in names]


def save(figure: Figure, folder: Path, name: str, force: bool = False) -> Path:
    """Write a figure as PNG, making the folder if need be; parameters and errors as in `check`."""
    path = _png(folder, name)

    def write(part: Path) -> None:
        figure.savefig(part, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": SOFTWARE})

    records.replace(path, write, _check_picture, force)
    return path


def save_all(figures: Mapping[str, Figure], folder: Path, force: bool = False) -> list[Path]:
    """Write figures by their names, all or, if one of them may not be written, none; errors as in `check`."""
    check(folder, figures, force)
    return [save(figure, folder, name, force) for name, figure in figures.items()]


def _png(folder: Path, name: str) -> Path:
    return folder / f"{name}.png"


def _check_picture(path: Path) -> None:
    """Raise ValueError unless this project drew the picture; its metadata says so."""
    content = path.read_bytes()
    if not (content.startswith(PNG) and b"tEXtSoftware\0" + SOFTWARE.encode() in content):
        raise ValueError(f"{path.name} is not a picture of {SOFTWARE}")
