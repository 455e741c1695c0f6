"""Packages that import a module when it is first used, such as ``mb.memory.accounting`` of ``moeblaze_ref as mb``."""

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any


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


def import_on_demand(package: str, homes: Mapping[str, str] | None = None) -> None:
    """Make the package's modules its attributes, each imported when it is first used; to call from ``__init__.py``.

    Parameters
    ----------
    package : str
        Its ``__name__``.
    homes : mapping of str to str, optional
        Names that are attributes too, and the modules that have them.
    """
    vars(sys.modules[package])["__getattr__"] = partial(attribute_of, package, homes or {})


def attribute_of(package: str, homes: Mapping[str, str], name: str) -> Any:
    """Import a name from the module that has it, or a module of the package."""
    return getattr(importlib.import_module(homes[name]), name) if name in homes else module_of(package, name)
