"""docs/check_a_layer.md shows what the check does, and its layer of ten lines is right."""

import re

import torch

from moeblaze_ref.course.site import bug_classes
from moeblaze_ref.verify.layers import check_layer

TEXT = bug_classes.DOCUMENT.read_text()


def test_the_tables_are_those_of_the_check():
    assert bug_classes.page(TEXT) == TEXT
    assert bug_classes.classes().count("\n") > 30 and bug_classes.patterns().count("\n") > 10


def test_the_layer_of_the_page_is_right():
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names = {}
    exec(code, names)
    (verdict,) = check_layer(names["make"], [torch.float32])
    assert verdict.ok, str(verdict)
