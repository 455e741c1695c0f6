"""The moeblaze command, as ``python -m moeblaze_ref``."""

from moeblaze_ref.cli.app import app

app()
