"""Foundations of every other folder: sizes, arrays, argument checks, records, kernel headers."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
