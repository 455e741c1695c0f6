"""What the tests of training share."""

import pytest


@pytest.fixture
def texts(tmp_path):
    """A folder of texts to train on."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"file {number}, " * 400)
    return folder
