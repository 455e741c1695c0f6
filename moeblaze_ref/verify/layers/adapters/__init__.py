"""Layers of others and of ours, ready to be checked, by name."""

import difflib

from moeblaze_ref.core import checks
from moeblaze_ref.verify.layers import adapter
from moeblaze_ref.verify.layers.adapter import Factory
from moeblaze_ref.verify.layers.adapters import foreign, grouped, ours, plain, transformers


def factories() -> dict[str, Factory]:
    """Return the factory of every adapter that runs on a CPU with what the project needs anyway."""
    return plain.factories() | grouped.factories() | ours.factories() | transformers.factories()


def on_gpu() -> dict[str, Factory]:
    """Return the factory of every other adapter: layers of other projects, and what is compiled."""
    return grouped.compiled() | foreign.factories()


def check_name(name: str) -> None:
    """Check that an adapter has the name, or that it is ``MODULE:FACTORY``; no module is imported.

    Raises
    ------
    ValueError
        If neither is so; the message proposes the nearest name.
    """
    if ":" in name:
        adapter.parts_of(name)
    else:
        known = factories() | on_gpu()
        if not difflib.get_close_matches(name, known):
            allowed = ", ".join(known)
            raise ValueError(f"unknown layer {name!r}: yours is MODULE:FACTORY, and the project has {allowed}")
        checks.check_name("layer", name, known)


def named(name: str) -> Factory:
    """Return the factory of an adapter, or the one that ``MODULE:FACTORY`` names.

    Raises
    ------
    ValueError
        If there is none.
    """
    check_name(name)
    return adapter.load(name) if ":" in name else (factories() | on_gpu())[name]
