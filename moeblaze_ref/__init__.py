"""moeblaze_ref: the Mixture-of-Experts memory wall as a research reference and a course."""

import importlib

_HOMES = {"MoELayer": "moeblaze_ref.nn.torch_layer"}  # imported when it is first asked for: torch takes seconds


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
