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


def check_name(name: str) -> None:
    """Check that an adapter has the name, or that it is ``MODULE:FACTORY`` of a module that there is.

    No module is imported.

    Raises
    ------
    ValueError
        If neither is so; the message proposes the nearest name.
    """
    if ":" in name:
        module, _ = adapter.parts_of(name)
        adapter.check_is_there(module)
        return
    known = factories() | on_gpu()
    projects = list(dict.fromkeys(one.partition("/")[0] for one in known))
    project = name.partition("/")[0]
    if project not in projects:
        yours = f"{name if name.isidentifier() else 'MODULE'}:FACTORY"
        raise ValueError(
            f"unknown layer {name!r}: write {yours} for yours. Names of the package's begin with "
            f"{', '.join(f'{one}/' for one in projects)}; --layer {projects[0]} lists those of {projects[0]}"
        )
    checks.check_name("layer", name, [one for one in known if one.startswith(f"{project}/")])


def named(name: str) -> Factory:
    """Return the factory of an adapter, or the factory that ``MODULE:FACTORY`` names.

    Raises
    ------
    ValueError
        If there is none.
    """
    check_name(name)
    return adapter.load(name) if ":" in name else (factories() | on_gpu())[name]
