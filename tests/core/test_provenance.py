"""Where a result was measured, on a machine that lacks git or the history."""

import pytest

from moeblaze_ref.core import provenance


@pytest.fixture
def without_git(tmp_path, monkeypatch):
    """No program is on the PATH, and no variable names the commit."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("MOEBLAZE_COMMIT", raising=False)


def test_without_git_the_commit_is_unknown(without_git):
    assert provenance.environment()["commit"] == "unknown"


def test_the_commit_of_a_copied_tree_is_the_one_that_is_named(without_git, monkeypatch):
    monkeypatch.setenv("MOEBLAZE_COMMIT", "1234567")
    assert provenance.environment()["commit"] == "1234567"
