"""Check any MoE layer: `check_layer` takes a factory that returns an `Adapter`. docs/check_a_layer.md shows how."""

from moeblaze_ref.verify.layers.adapter import Adapter, Sizes
from moeblaze_ref.verify.layers.check import Finding, Verdict, check_layer
from moeblaze_ref.verify.layers.deviations import Deviation

__all__ = ["Adapter", "Deviation", "Finding", "Sizes", "Verdict", "check_layer"]
