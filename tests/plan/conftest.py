"""What the tests of plans share."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="package")
def _libraries_stay():
    """The collector of garbage need not look through what transformers imports: that took an eighth of a second."""
    import torch._dynamo
    from transformers import AutoModelForCausalLM, masking_utils  # noqa: F401

    gc.collect()
    gc.freeze()
