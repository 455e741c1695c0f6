"""A contract checks arguments and writes docstrings; a backend's function cannot differ from it."""

import re

import numpy as np
import pytest

from moeblaze_ref.core import sparse_contracts, stage_contracts
from moeblaze_ref.core.contract import ADDED, ROUTING, Arrays, Contract, Tensor, Value, implements
from moeblaze_ref.systems import capacity, megablocks

NUMPY = Arrays("ndarray", ("float64", "float32"))
KERNELS = Arrays("array", ("float32", "float16"), routing="float32")
SCALE = Contract(
    "Return x times the gates of its rows.",
    (Tensor("x", "L d", text="Tokens"), Tensor("gates", "L k", ROUTING), Value("k", "int", "Gates of a row")),
    (Tensor("out", "L d"),),
    "a source",
)


@implements(SCALE, KERNELS)
def scale(x, gates, k=1, version="1_naive"):
    """It multiplies."""
    return x * gates[:, :k].sum(axis=1, keepdims=True)


def test_right_arguments_pass_by_position_and_by_name():
    x, gates = np.ones((3, 2), np.float32), np.full((3, 1), 2, np.float32)
    assert (scale(x, gates) == 2).all() and (scale(gates=gates, x=x, version="2_tiled") == 2).all()


@pytest.mark.parametrize(
    ("x", "gates", "error", "message"),
    [
        (np.ones((3, 2)), np.ones((3, 1)), TypeError, "x has dtype float64, but it must be float32 or float16"),
        (np.ones((3, 2), "f2"), np.ones((3, 1), "f2"), TypeError, "gates has dtype float16, but it must be float32"),
        (np.ones((3, 2), "f4"), np.ones((4, 1), "f4"), ValueError, r"gates has shape \(4, 1\), .* \(L=3, k\)"),
        (np.ones((3, 2), "f4"), np.full((3, 1), np.nan, "f4"), ValueError, r"gates\[0, 0\] is nan"),
        (None, np.ones((3, 1), "f4"), TypeError, "x is None"),
    ],
)
def test_what_is_not_as_stated_is_named(x, gates, error, message):
    with pytest.raises(error, match=message):
        scale(x, gates)


def test_the_body_alone_checks_nothing():
    assert scale.unchecked(np.ones((3, 2)), np.full((1, 1), 3.0)).sum() == 18


@pytest.mark.parametrize("arguments", [(), (1,), (1, 2, 3, 4, 5)], ids=len)
def test_a_call_with_other_parameters_fails_as_any_call_does(arguments):
    with pytest.raises(TypeError, match="argument"):
        scale(*arguments)


def test_the_docstring_has_what_the_contract_and_the_function_say():
    for line in (
        "Return x times the gates of its rows.\n\nIt multiplies.\n",
        "x : array (L, d), float32 or float16\n    Tokens.\n",
        "gates : array (L, k), float32\n",
        f"version : str\n    {ADDED['version'].text}.\n",
        "Raises\n------\nValueError\n",
        "Notes\n-----\na source.",
    ):
        assert line in scale.__doc__
    assert "x : ndarray (L, d), float64 or float32" in SCALE.documented(NUMPY)


@pytest.mark.parametrize(
    "function", [lambda gates, x, k: x, lambda x, gates: x, lambda x, gates, k, other: x], ids=["order", "few", "other"]
)
def test_a_function_with_another_signature_is_refused(function):
    with pytest.raises(TypeError, match="but its contract x, gates, k"):
        implements(SCALE, NUMPY)(function)


@pytest.mark.parametrize(
    "contract",
    [
        one
        for module in (stage_contracts, sparse_contracts, capacity, megablocks)
        for one in vars(module).values()
        if isinstance(one, Contract)
    ],
    ids=lambda one: one.summary,
)
def test_a_contract_names_each_argument_once_and_its_source(contract):
    names = [one.name for one in contract.arguments]
    assert len({*names}) == len(names) and {*contract.first.split()} <= {*names}
    assert contract.summary.endswith(".") and contract.source and contract.results
    assert re.search(r"ValueError\n    If \w", contract.documented(NUMPY))


def test_a_tensor_has_the_same_axes_and_kind_in_all_contracts_of_the_stages():
    contracts = [one for one in vars(stage_contracts).values() if isinstance(one, Contract)]
    tensors = [one for contract in contracts for one in (*contract.arguments, *contract.results)]
    tensors = [one for one in tensors if isinstance(one, Tensor)]
    stated = {name: {(one.axes, one.kind) for one in tensors if one.name == name} for name in stage_contracts.tensors()}
    assert len(stated) > 25 and {name: found for name, found in stated.items() if len(found) > 1} == {}
