"""Which folder imports which: the contracts of pyproject.toml, and names of modules that no linter sees."""

import graphlib
import importlib
import re
import sys
from pathlib import Path

import grimp
import processes
import pytest

import moeblaze_ref
from moeblaze_ref import nn
from moeblaze_ref.backends import registry
from moeblaze_ref.core.paths import PACKAGE, ROOT
from moeblaze_ref.nn import SYSTEMS, MoELayer
from moeblaze_ref.verify import in_subprocess, layers

ABOVE = {"__init__.py", "__main__.py"}
MODULES = re.compile(r"python3? -m (moeblaze_ref[\w.]*)|\$\(BIN\)/python -m (moeblaze_ref[\w.]*)")


def test_no_folder_imports_one_above_it():
    linter = processes.run([Path(sys.executable).with_name("lint-imports"), "--no-cache"], cwd=ROOT)
    assert linter.returncode == 0, linter.stdout


def test_no_modules_import_one_another_in_a_circle():
    """Imports inside functions count, too; imports for types alone are no imports when the program runs."""
    graph = grimp.build_graph("moeblaze_ref", cache_dir=None, exclude_type_checking_imports=True)
    graphlib.TopologicalSorter({one: graph.find_modules_directly_imported_by(one) for one in graph.modules}).prepare()


def test_every_module_lies_in_a_folder():
    assert {path.name for path in PACKAGE.glob("*.py")} == ABOVE


def test_the_tests_have_a_folder_for_each_folder_of_the_package():
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}
    assert {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} == folders | {"foreign", "gpu"}


@pytest.mark.parametrize(("path", "more_than"), [("Makefile", 5), ("README.md", -1), ("CONTRIBUTING.md", -1)])
def test_the_modules_that_are_commands_can_be_imported(path, more_than):
    names = {name for found in MODULES.findall((ROOT / path).read_text()) for name in found if name}
    assert len(names) > more_than and all(map(importlib.import_module, names)), names


@pytest.mark.parametrize("backend", registry.BACKENDS.values(), ids=lambda backend: backend.name)
def test_the_stages_of_a_backend_can_be_imported(backend):
    assert backend.stages
    for stage in backend.stages:
        assert importlib.import_module(f"{backend.package}.{stage}").__doc__, stage


def test_what_the_server_imports_before_it_forks_can_be_imported():
    """In a process of its own, which one of these modules closes for others."""
    assert in_subprocess.PRELOADED
    names = ", ".join(f"moeblaze_ref.{name}" for name in in_subprocess.PRELOADED)
    imported = processes.run([sys.executable, "-c", f"import {names}"], cwd=ROOT)
    assert imported.returncode == 0, imported.stderr


@pytest.mark.parametrize(
    ("module", "expensive"),
    [
        ("moeblaze_ref", {"torch", "numpy", "typer"}),
        ("moeblaze_ref.verify", {"torch", "numpy", "typer"}),
        ("moeblaze_ref.cli.app", {"torch", "matplotlib", "numba", "cupy"}),
    ],
)
def test_importing_the_package_costs_nothing_and_the_command_little(module, expensive):
    code = f"import sys, {module}; print('MoELayer' in dir(moeblaze_ref), {{*sys.modules}} & {expensive})"
    assert processes.run([sys.executable, "-c", code], cwd=ROOT).stdout == "True set()\n"


def test_the_layer_comes_from_the_package():
    assert moeblaze_ref.MoELayer is MoELayer
    with pytest.raises(AttributeError, match="module 'moeblaze_ref' has no attribute 'MoELayr'"):
        moeblaze_ref.MoELayr  # noqa: B018


def test_the_check_of_a_layer_comes_from_verify():
    assert moeblaze_ref.verify.check_layer is layers.check_layer
    with pytest.raises(AttributeError, match="module 'moeblaze_ref.verify' has no attribute 'check_layr'"):
        moeblaze_ref.verify.check_layr  # noqa: B018


# Public places --------------------------------------------------------------------------------------------------------


def test_every_public_name_of_the_layers_exists():
    assert len(nn.__all__) > 10
    for name in nn.__all__:
        assert getattr(nn, name) is not None, name
    assert {*SYSTEMS.values()} <= {getattr(nn, name) for name in nn.__all__ if name.endswith(("MoE", "Layer"))}


IMPORTS = re.compile(r"(?:from|import) (moeblaze_ref\.nn[\w.]*)(?: import ([^(\n\\\"]+|\([^)]*\)))?")


def imports_of_layers(text: str) -> list[tuple[str, set[str]]]:
    """Return each use of `moeblaze_ref.nn` or below: the module, and the names that it takes from there."""
    imported = [(module, set(re.findall(r"\w{2,}", names))) for module, names in IMPORTS.findall(text)]
    return imported + [("moeblaze_ref.nn", {name}) for name in re.findall(r"\bmb\.nn\.(\w+)", text)]


def test_readers_import_the_layers_from_public_places():
    """In README, the pages of the documentation and the notebooks."""
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").rglob("*.ipynb")]
    found = {path: imports_of_layers(path.read_text()) for path in files}
    assert sum(map(bool, found.values())) >= 4
    for path, imports in found.items():
        for module, names in imports:
            assert module == "moeblaze_ref.nn" and names <= {*nn.__all__}, (path.name, module, names)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from moeblaze_ref.nn.torch_layer import MoELayer", [("moeblaze_ref.nn.torch_layer", {"MoELayer"})]),
        ("import moeblaze_ref.nn.systems", [("moeblaze_ref.nn.systems", set())]),
        ("from moeblaze_ref.nn import (\n    graphed,\n    system,\n)", [("moeblaze_ref.nn", {"graphed", "system"})]),
        (r'"from moeblaze_ref.nn import SYSTEMS\n",', [("moeblaze_ref.nn", {"SYSTEMS"})]),
        ("layer = mb.nn.system(name)", [("moeblaze_ref.nn", {"system"})]),
        ("from moeblaze_ref import MoELayer", []),
    ],
)
def test_an_import_of_a_layer_is_found(text, found):
    assert imports_of_layers(text) == found
