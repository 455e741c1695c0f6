"""A host of notebooks: an environment of what the project requires, and the project's wheel by the one set-up cell.

The packages are those that are installed here, and every other one is hidden: an import of it fails.
"""

import importlib.metadata
import os
import re
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import processes
from once import made_once
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def applies(requirement, platform=None):
    """Whether a requirement's marker, if it has one, holds on a platform or with an extra; without one, on this."""
    return requirement.marker is None or requirement.marker.evaluate(platform)


def required_by(name, extra):
    """What an installed distribution requires in this environment for one of its extras, or for none ("")."""
    required = map(Requirement, importlib.metadata.requires(name) or ())
    return [requirement for requirement in required if applies(requirement, {"extra": extra})]


def installed_closure(roots, left_out=frozenset()):
    """(requirement, who asks for it) of everything that these requirements bring into this environment."""
    waiting = [(root, PROJECT["name"]) for root in map(Requirement, roots) if applies(root)]
    seen = set()
    while waiting:
        requirement, asked_by = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in left_out:
            continue
        yield requirement, asked_by
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                waiting += [(child, name) for child in required_by(name, extra)]


def undeclared_modules():
    """What can be imported here although neither the project's dependencies nor pip bring it."""
    roots = [*PROJECT["dependencies"], "pip"]
    declared = {canonicalize_name(requirement.name) for requirement, _ in installed_closure(roots)}
    installed = importlib.metadata.packages_distributions()
    return sorted(name for name, owners in installed.items() if declared.isdisjoint(map(canonicalize_name, owners)))


def set_up_cell():
    """The cell of the documents that installs the wheel."""
    (cell,) = re.findall(r"```text\n(%pip .*?)```", (ROOT / "docs" / "install.md").read_text(), re.DOTALL)
    return cell


@dataclass(frozen=True)
class Host:
    """The environment, and the folder in which the cell ran."""

    folder: Path

    @property
    def bin(self):
        return self.folder / "environment" / "bin"

    @property
    def wheel(self):
        (path,) = self.folder.glob("*.whl")
        return path

    @property
    def notebooks(self):
        """The copies that the cell made."""
        return self.folder / "moeblaze_course" / "notebooks"

    def run(self, *command, **options):
        """Run a program of the environment, which sees no checkout and no package index."""
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_COMPILE": "1"}
        program, *arguments = command
        return processes.run([self.bin / program, *arguments], env=clean | pip, **options)


def _make(folder):
    """Build the wheel in a new folder, make the environment, and run the set-up cell there."""
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    processes.run([*pip, "--wheel-dir", folder, ROOT]).check_returncode()
    venv.create(folder / "environment", symlinks=True)
    (packages,) = folder.glob("environment/lib/python*/site-packages")
    hide = f"import sys; sys.modules.update(dict.fromkeys({undeclared_modules()}))"
    (packages / "host.pth").write_text(f"{sysconfig.get_path('purelib')}\n{hide}\n")
    (folder / "cell.ipy").write_text(set_up_cell())
    done = Host(folder).run("python", "-m", "IPython", "cell.ipy", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(folder)


def made(tmp_path_factory):
    """The host, which one process makes for all."""
    return Host(Path(made_once(tmp_path_factory, "host.txt", lambda: _make(tmp_path_factory.mktemp("host")))))
