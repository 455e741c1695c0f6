"""The bytes that MoEBlaze (arXiv 2601.05296) prints, and the reports and claims compare with."""

ROUTED_BUFFER_GB = 94  # section 2.1, "about"
INTERMEDIATE_GB = 98  # section 2.2, "about"

# Saved for backward, in MB: figure 3 on conf4, figure 5 on conf3 ("over" of MegaBlocks, "about" of MoEBlaze).
MEGABLOCKS_MB = {"conf4": 22_000, "conf3": 40_000}
MOEBLAZE_MB = {"conf4": 6_100, "conf3": 10_000}
