"""Builds the site: gathers its pages in one folder, then lets Sphinx write them, every warning an error.

The folder of pages mirrors the repository, so that a link between two files means the same in both. Generated pages,
those of the API among them, exist there only. ``python -m moeblaze_ref.course.site.build`` writes build/site.
"""

import argparse
import gc
import itertools
import shutil
from pathlib import Path

from sphinx.cmd.build import main as sphinx

from moeblaze_ref.core.paths import ROOT
from moeblaze_ref.course.site import api, frames, glossary

SITE = ROOT / "build" / "site"
# Files of the repository that are on the site unchanged.
WRITTEN = ("*.md", "docs/*.md", "docs/images/*", "docs/results/*.npz", "notebooks/**/*.ipynb")
HOME = "docs/index"
_TO_HOME = f'<!doctype html><title>moeblaze_ref</title><meta http-equiv="refresh" content="0; url={HOME}.html">\n'


def gather(folder: Path) -> None:
    """Write every page of the site into a folder, as a file that Sphinx reads; remove earlier contents first."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in itertools.chain.from_iterable(map(ROOT.glob, WRITTEN)):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    pages = {**api.pages(), "docs/glossary.md": glossary.page()}
    for name, text in pages.items():
        page = folder / name
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text)


def check_place(site: Path, force: bool = False):
    """Check that a site may be written here: the default, a new or empty folder, or one with a site of this project.

    With ``force`` any folder is allowed.

    Raises
    ------
    ValueError
        If what the path holds would be lost.
    """
    if force or site == SITE or not site.exists():
        return
    if not site.is_dir():
        raise ValueError(f"{site} is a file, but the site needs a folder: name another one")
    home = site / "index.html"
    if any(site.iterdir()) and not (home.is_file() and home.read_text(errors="replace") == _TO_HOME):
        raise ValueError(f"{site} holds no site of this project, and all of it would be removed: name another folder")


def build(site: Path = SITE) -> int:
    """Write the site into a folder; remove earlier contents first.

    Sphinx's input and its cache lie beside it, in folders of the same name with another ending.

    Returns
    -------
    int
        0, or what Sphinx exits with: at the end, after all warnings, if there was any.
    """
    pages, doctrees = site.with_suffix(".pages"), site.with_suffix(".doctrees")
    for folder in (site, doctrees):
        shutil.rmtree(folder, ignore_errors=True)
    gather(pages)
    frames.draw_all(sorted(ROOT.glob("notebooks/*.ipynb")), site / frames.FOLDER)
    # In one process: each of several would import and parse the package's modules again.
    strict = ["--fail-on-warning", "--quiet", "-c", str(ROOT / "docs"), "-d", str(doctrees)]
    status = sphinx([*strict, str(pages), str(site)])
    (site / "index.html").write_text(_TO_HOME)
    return status


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description="Build the site; every warning is an error.")
    parser.add_argument("site", nargs="?", type=Path, default=SITE, help="folder to write (default: build/site)")
    parser.add_argument("--force", action="store_true", help="remove whatever the folder holds")
    given = parser.parse_args()
    site = given.site.resolve()
    try:
        check_place(site, given.force)
    except ValueError as error:
        parser.error(f"{error}, or add --force")
    gc.set_threshold(100_000)  # what Sphinx reads stays: to look through it for garbage took a fourth of the time
    return build(site)


if __name__ == "__main__":
    raise SystemExit(main())
