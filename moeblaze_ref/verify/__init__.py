"""Hard inputs, comparisons with the specification and with autograd, and the checker of a reader's kernel."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__, {"check_layer": "moeblaze_ref.verify.layers"})
