"""The bodies of the MoEBlaze, MegaBlocks and capacity layers, over the stages of any backend."""
