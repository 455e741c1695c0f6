"""moeblaze_ref: the Mixture-of-Experts memory wall as a research reference and a course.

``import moeblaze_ref as mb`` is enough to use it: ``mb.MoELayer`` and the names below are here, and every module is
where its folder is, such as ``mb.memory.accounting``. Each is imported when it is first used.
"""

from moeblaze_ref.core.on_demand import attribute_of

_HOMES = {"MoELayer": "moeblaze_ref.nn.torch_layer"}  # torch takes seconds
_HOMES |= dict.fromkeys(("ACTIVATIONS", "POLICIES", "MoEConfig", "preset"), "moeblaze_ref.core.config")
_HOMES |= dict.fromkeys(("KIB", "MIB", "GIB", "GB"), "moeblaze_ref.core.units")


def __getattr__(name: str):
    return attribute_of(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
