"""Layers of others and of ours, ready to be checked, by name."""

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


def named(name: str) -> Factory:
    """Return the factory of an adapter, or the one that ``MODULE:FACTORY`` names.

    Raises
    ------
    ValueError
        If there is none; the message proposes the nearest name.
    """
    known = factories() | on_gpu()
    return adapter.load(name) if ":" in name else known[checks.check_name("layer", name, known)]
