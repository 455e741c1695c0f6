"""Packages that import a module when it is first used, such as ``mb.memory.accounting`` of ``moeblaze_ref as mb``."""

import importlib
import importlib.util
import sys
from functools import partial
from types import ModuleType


def module_of(package: str, name: str) -> ModuleType:
    """Import a module of a package by its name.

    Raises
    ------
    AttributeError
        If the package has no such module.
    """
    path = f"{package}.{name}"
    if name.startswith("_") or importlib.util.find_spec(path) is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return importlib.import_module(path)


def import_on_demand(package: str) -> None:
    """Make the package's modules its attributes, each imported when it is first used; to call from ``__init__.py``."""
    vars(sys.modules[package])["__getattr__"] = partial(module_of, package)
