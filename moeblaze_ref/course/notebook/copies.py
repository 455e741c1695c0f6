"""A reader's own copies of the notebooks: they run and are saved there, and the repository stays as it is."""

import shutil
from pathlib import Path

from moeblaze_ref.core.paths import DOCS, PACKAGE, kernels_dir, notebooks_dir

LINKED = (DOCS, PACKAGE, kernels_dir())  # what notebooks link to


def copy(folder: Path, source: Path | None = None) -> int:
    """Copy the notebooks into ``folder/notebooks``, and link what they link to beside it.

    Parameters
    ----------
    folder : Path
        A new folder, or one with earlier copies, which stay as they are.
    source : Path, optional
        The folder of the notebooks; by default the project's.

    Returns
    -------
    int
        How many notebooks were copied.

    Raises
    ------
    ValueError
        If the folder holds the notebooks that are to be copied.
    OSError
        If the folder cannot be written.
    """
    source = source or notebooks_dir()
    if (folder / "notebooks").resolve() == source.resolve():
        raise ValueError(f"{folder} has the notebooks themselves: name another folder for your copies")
    found = [path.relative_to(source) for path in source.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    new = [path for path in found if not (folder / "notebooks" / path).exists()]
    for path in new:
        (folder / "notebooks" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / path, folder / "notebooks" / path)
    for target in LINKED:
        link = folder / target.name
        if not link.exists():
            link.unlink(missing_ok=True)  # of a checkout that has moved
            link.symlink_to(target, target_is_directory=True)
    return len(new)
