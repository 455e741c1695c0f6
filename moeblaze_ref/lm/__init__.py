"""A small MoE language model, whose activations and routing are the project's real input.

``data`` is text that every Python carries, or a folder's, ``model`` the transformer, ``train`` its training and the
capture of what its MoE layers saw, ``run`` a training run in a folder: with ``log`` and ``checkpoint``, and ``finite``
for where it went wrong. ``command`` is ``moeblaze train``, on the settings of ``presets``.
"""

PRESETS = {
    "tiny": "learns on two cores of a CPU, in seconds on plain torch, in minutes through the kernels",
    "lm-small": "for one GPU",
}
LAYERS = ("oracle", "capacity", "megablocks", "moeblaze")  # the names in systems.SYSTEMS, without importing torch
