"""The bodies of the MoEBlaze, MegaBlocks and capacity layers, over the stages of any backend."""

from moeblaze_ref.core.on_demand import import_on_demand

import_on_demand(__name__)
