"""moeblaze_ref: the Mixture-of-Experts memory wall as a research reference and a course."""
