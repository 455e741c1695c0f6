"""The bytes of a whole training step: a model's parts (parts), read from its config (configs), counted (account)."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
