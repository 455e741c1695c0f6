"""Models of transformers without memory: torch knows each tensor's shape and dtype, and has no numbers."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from moeblaze_ref.plan.torch_models import built


@contextlib.contextmanager
def fake(fields: dict[str, Any]) -> Iterator[Any]:
    """The model of a config.json, while none of its tensors has memory."""
    with FakeTensorMode(allow_non_fake_inputs=True), built(fields) as model:
        yield model
