"""The check of the dispatch in every backend, which several tests look at and one process runs."""

import json

from once import made_once
from typer.testing import CliRunner

from moeblaze_ref.cli.app import app


def dispatch_as_json(tmp_path_factory):
    """The exit status of `moeblaze check --stage dispatch --json`, and the rows that it prints."""

    def run():
        result = CliRunner().invoke(app, ["check", "--stage", "dispatch", "--json"])
        return json.dumps([result.exit_code, json.loads(result.stdout)])

    return json.loads(made_once(tmp_path_factory, "dispatch.json", run))
