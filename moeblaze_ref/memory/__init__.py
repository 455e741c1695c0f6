"""The memory wall in numbers: formulas (accounting), measurement (measure), tables (report) and pictures (plots)."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
