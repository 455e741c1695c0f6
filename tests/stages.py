"""Another function in place of one of a backend's: a fault, or a witness."""

import importlib

import numpy as np

from moeblaze_ref.backends.registry import BACKENDS


def alter(monkeypatch, backend, name, change):
    """Put ``change`` of a function in its place, in its stage and in the layers; the name is "stage.function"."""
    package, (stage, function) = BACKENDS[backend].package, name.split(".")
    checked = getattr(importlib.import_module(f"{package}.{stage}"), function)
    monkeypatch.setattr(checked, "unchecked", change(checked.unchecked))
    for layer in ("layer", "block_sparse"):  # which would keep the functions that they found first
        module = importlib.import_module(f"{package}.{layer}")
        monkeypatch.setattr(module, "_stages", getattr(module._stages, "__wrapped__", module._stages))


def all_zeros(function):
    """``function`` that returns zeros of the right shapes."""

    def faulty(*args, **options):
        values = function(*args, **options)
        return tuple(map(np.zeros_like, values)) if isinstance(values, tuple) else np.zeros_like(values)

    return faulty


def without_the_last(function, of=0):
    """``function`` that never computes the last block, row or token of its result, or of one of its results."""

    def faulty(*args, **options):
        values = function(*args, **options)
        (values[of] if isinstance(values, tuple) else values)[-1] = 0.0
        return values

    return faulty
