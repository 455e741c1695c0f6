"""The moeblaze command."""
