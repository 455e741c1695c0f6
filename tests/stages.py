"""Another function in place of one of a backend's: a fault, or a witness."""

import importlib

from moeblaze_ref.backends.registry import BACKENDS


def alter(monkeypatch, backend, name, change):
    """Put ``change`` of a function in its place, in its stage and in the layers; the name is "stage.function"."""
    package, (stage, function) = BACKENDS[backend].package, name.split(".")
    checked = getattr(importlib.import_module(f"{package}.{stage}"), function)
    monkeypatch.setattr(checked, "unchecked", change(checked.unchecked))
    for layer in ("layer", "block_sparse"):  # which would keep the functions that they found first
        module = importlib.import_module(f"{package}.{layer}")
        monkeypatch.setattr(module, "_stages", getattr(module._stages, "__wrapped__", module._stages))
