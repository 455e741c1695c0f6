"""The moeblaze command, as ``python -m moeblaze_ref``."""

from moeblaze_ref.cli.app import app

if __name__ == "__main__":
    app()
