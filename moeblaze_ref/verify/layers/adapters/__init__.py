"""Layers of others and of ours, ready to be checked, by name."""

from moeblaze_ref.core import checks
from moeblaze_ref.verify.layers import adapter
from moeblaze_ref.verify.layers.adapter import Factory
from moeblaze_ref.verify.layers.adapters import ours, plain, transformers


def factories() -> dict[str, Factory]:
    """Return the factory of every adapter that runs on a CPU."""
    return plain.factories() | ours.factories() | transformers.factories()


def named(name: str) -> Factory:
    """Return the factory of an adapter, or the one that ``MODULE:FACTORY`` names.

    Raises
    ------
    ValueError
        If there is none; the message proposes the nearest name.
    """
    known = factories()
    return adapter.load(name) if ":" in name else known[checks.check_name("layer", name, known)]
