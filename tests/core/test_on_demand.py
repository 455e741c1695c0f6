"""Modules of a package are there when they are first used."""

import importlib
import sys

import processes
import pytest

import moeblaze_ref as mb
from moeblaze_ref.core import on_demand, units
from moeblaze_ref.core.config import MoEConfig
from moeblaze_ref.core.paths import ROOT


def test_one_import_is_enough_and_imports_nothing_else():
    code = "import sys, moeblaze_ref as mb; before = 'moeblaze_ref.memory.accounting' in sys.modules; "
    code += "print(before, mb.memory.accounting.account.__name__, 'torch' in sys.modules)"
    assert processes.run([sys.executable, "-c", code], cwd=ROOT).stdout == "False account False\n"


def test_the_names_of_every_notebook_are_those_of_their_modules():
    assert mb.MoEConfig is MoEConfig and mb.GIB == units.GIB
    assert {"MoELayer", "preset", "POLICIES", "GB"} <= {*dir(mb)}


@pytest.mark.parametrize("package", ["moeblaze_ref", "moeblaze_ref.memory", "moeblaze_ref.backends.numpy_ref"])
@pytest.mark.parametrize("name", ["acounting", "__wrapped__"])
def test_what_is_not_there_is_named(package, name):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
        getattr(importlib.import_module(package), name)


def test_a_module_of_a_package_is_the_imported_one():
    assert on_demand.module_of("moeblaze_ref.core", "units") is units
