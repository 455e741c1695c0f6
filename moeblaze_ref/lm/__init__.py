"""A small MoE language model, whose activations and routing are the project's real input.

``data`` is text: Python's help topics, which the package carries, the sources of the standard library, which are those
of the Python at hand, or a folder's. ``model`` is the transformer, ``train`` its training and the capture of what its
MoE layers saw, ``run`` a training run in a folder: with ``log`` and ``checkpoint``, and ``finite`` for where it went
wrong. ``command`` is ``moeblaze train``, on the settings of ``presets``.

``equal_loss`` and ``curves`` compare training with our layer and with plain torch, ``wall`` compares their memory.
``evidence`` is ``moeblaze evidence``, ``report``, ``evidence_plots`` and ``document`` show what it found.
"""

from moeblaze_ref.core.on_demand import import_on_demand

PRESETS = {
    "tiny": "learns on two cores of a CPU, in seconds on plain torch, in minutes through the kernels",
    "lm-small": "for one GPU",
}
LAYERS = (  # the names in systems.SYSTEMS, without importing torch
    "oracle",
    "sequential",
    "capacity",
    "dynamic_capacity",
    "megablocks",
    "megablocks_memory_optimized",
    "moeblaze",
)
EVIDENCE = {  # the names in evidence.KINDS
    "replayed": "the oracle's choice of experts in another layer: the same loss at each step, in float32",
    "free": "every router by itself: the same loss until a token changes expert, in float32",
    "curves": "whole runs, in the preset's precision, beside MegaBlocks and a fixed capacity",
    "memory": "the largest step that a GPU has room for, with each layer and policy",
}

import_on_demand(__name__)
