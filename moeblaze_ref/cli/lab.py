"""``moeblaze lab``: the notebooks in JupyterLab."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from moeblaze_ref.cli.shared import print_text, user_errors

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}  # to JupyterLab


def lab(
    context: typer.Context,
    folder: Annotated[Path, typer.Option(help="Folder of your copies; it may be new.")] = Path("moeblaze_course"),
):
    """Copy the notebooks into a folder of your own, and open it in JupyterLab.

    Copies that you have are kept. Further options, such as --no-browser, go to JupyterLab.
    """
    from moeblaze_ref.course.notebook import copies

    with user_errors():
        number = copies.copy(folder)
    print_text(f"{number} new notebooks in {folder / 'notebooks'}; those that you had are kept")
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}"]
    done = subprocess.run([*command, "--LabApp.default_url=/lab/tree/notebooks", *context.args], check=False)
    raise typer.Exit(done.returncode)
