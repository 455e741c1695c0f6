"""The moeblaze command."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
