"""What a Dispatch and a name must be."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import changed

from moeblaze_ref.backends.numpy_ref.dispatch import build_by_sort
from moeblaze_ref.core import checks
from moeblaze_ref.verify.cases import GOLDEN_DISPATCH, random_topk


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("SwiGLU", "swiglu"), ("GELU_TANH", "gelu_tanh"), ("swigul", "swiglu"), ("silu-", "SiLU"), ("BF16", "bf16")],
)
def test_the_nearest_name_is_found_whatever_its_case(name, nearest):
    with pytest.raises(ValueError, match=f"unknown activation {name!r}. Did you mean {nearest!r}"):
        checks.check_name("activation", name, ["SiLU", "swiglu", "gelu_tanh", "bf16"])


def test_a_name_like_no_other_has_no_nearest():
    with pytest.raises(ValueError, match="unknown activation 'XXXX'. Valid: silu, swiglu"):
        checks.check_name("activation", "XXXX", ["silu", "swiglu"])


def test_what_is_no_string_is_an_unknown_name():
    with pytest.raises(ValueError, match=r"unknown drop policy \['by_gate'\]. Did you mean 'by_gate'"):
        checks.check_name("drop policy", ["by_gate"], {"by_gate": 1, "by_arrival": 2})


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_a_truth_value_is_no_integer(value):
    with pytest.raises(TypeError, match=r"k is .*(True|False).* \(bool_?\), but it must be an integer"):
        checks.check_int("k", value, at_least=0)


@pytest.mark.parametrize("check", [checks.check_number, checks.check_positive])
@pytest.mark.parametrize(("value", "shown"), [(10**400, "inf"), (-(10**400), "-inf")])
def test_an_integer_beyond_all_floats_is_not_finite(check, value, shown):
    with pytest.raises(ValueError, match=f"factor is {shown}, but it must be finite"):
        check("factor", value)
    assert checks.check_float("factor", value) == float(shown)


# Of GOLDEN_DISPATCH:  position              0  1  2  3  4  5  6  7  8  9
#                      expert_token_indices  1  2  4  1  3  0  3  0  2  4   offsets 0 3 5 7 10
# and of its slots:    token_expert_indices  2  3  0  1  0  3  1  2  0  3
#                      token_index_map       5  7  0  3  1  8  4  6  2  9


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "k", "routing"),
    [(0, 4, 2, "uniform"), (1, 1, 1, "uniform"), (29, 4, 4, "uniform"), (53, 6, 1, "hot"), (41, 8, 2, "empty")],
)
def test_every_right_dispatch_passes(num_tokens, num_experts, k, routing):
    checks.check_dispatch(build_by_sort(random_topk(num_tokens, num_experts, k, routing), num_experts))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("token_index_map", {1: 5}, r"token_index_map\[1\] is 5, .* goes to expert 3, which has the positions 7..9"),
        ("token_index_map", {2: 1}, r"token_index_map\[2\] is 1, .* holds token 2, but the slot is of token 1"),
        ("token_index_map", {9: 8}, r"token_index_map\[9\] is 8, .* holds token 2, but the slot is of token 4"),
        ("token_index_map", {2: 1, 4: 0}, r"token_index_map\[2\] is 1"),
        ("token_index_map", {0: 7, 1: 5}, r"token_index_map\[0\] is 7, .* to expert 2, which has the positions 5..6"),
        ("expert_token_indices", {9: 0}, r"token_index_map\[9\] is 9, .* holds token 0, but the slot is of token 4"),
        ("token_expert_indices", {0: 3}, r"token_expert_indices\[0:2\] names expert 3 twice"),
        ("token_expert_indices", {9: 1}, r"token_index_map\[9\] is 9, .* expert 1, which has the positions 3..4"),
        ("expert_token_offsets", {1: 5}, r"token_index_map\[3\] is 3, but the slot goes to expert 1, which has none"),
    ],
)
def test_a_dispatch_that_contradicts_itself_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        checks.check_dispatch(changed(GOLDEN_DISPATCH, {name: changes}))


def test_two_slots_at_one_position_are_refused_wherever_they_are():
    right = build_by_sort(random_topk(60, 7, 3, "zipf"), 7)
    rng = np.random.default_rng(0)
    for slot, other in (rng.choice(right.R, 2, replace=False) for _ in range(200)):
        positions = right.token_index_map.copy()
        positions[slot] = positions[other]
        with pytest.raises(ValueError, match=rf"token_index_map\[{slot}\] is {positions[slot]}"):
            checks.check_dispatch(replace(right, token_index_map=positions))
