"""What the tests of plans share."""

import gc
import importlib

import pytest


@pytest.fixture(autouse=True, scope="package")
def _libraries_stay():
    """No collection of garbage looks through what transformers imports."""
    for module in ("torch._dynamo", "transformers.masking_utils", "transformers.models.auto.modeling_auto"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
