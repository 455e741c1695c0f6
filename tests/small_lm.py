"""A language model that trains in no time, for the tests of its training."""

from typer.testing import CliRunner

from moeblaze_ref.cli.app import app
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import TrainSettings

CONFIG = LMConfig(d=16, h=16, E=4, k=2, layers=2, heads=2, sequence=16)
SETTINGS = TrainSettings(CONFIG, steps=7, batch=2)


def moeblaze(command, *arguments):
    """The result of a command of the terminal."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [command, *map(str, arguments)])
