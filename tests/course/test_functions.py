"""docs/notation.md shows the functions of the stages as their contracts state them."""

from inspect import isfunction

import pytest

from moeblaze_ref.course.site import functions

TEXT = functions.DOCUMENT.read_text()
WITHOUT = {"exclusive_scan", "expert_groups", "gate_of_row"}  # helpers of the specification


def test_the_page_has_the_functions_as_they_are():
    assert functions.page(TEXT) == TEXT
    assert "| `backends.numpy_ref.combine.forward` | y (R, d), gates (L, k), dispatch | out (L, d) |" in TEXT
    assert "| `backends.numpy_ref.dispatch.expert_lengths` | dense_map (L, E) | lengths (E,) |" in TEXT


@pytest.mark.parametrize("stage", functions.STAGES, ids=lambda stage: stage.__name__.rpartition(".")[2])
def test_every_public_function_of_a_stage_has_a_contract(stage):
    own = {
        name
        for name, one in vars(stage).items()
        if isfunction(one) and one.__module__ == stage.__name__ and not name.startswith("_")
    }
    assert own - WITHOUT == {name for name, _ in functions.contracts(stage)} != set()
