"""What any layer keeps, and the system whose account is nearest."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moeblaze_ref.bench.layer_bytes import SIZES, bytes_of, closest_account
from moeblaze_ref.core.config import POLICIES
from moeblaze_ref.verify.layers.adapters import factories, plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts

FACTORIES = factories()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_our_layer_keeps_what_its_own_account_says(policy, dtype):
    found = bytes_of(FACTORIES[f"moeblaze_ref/{policy}"], dtype, "cpu")
    assert found.kept == found.account and f"moeblaze {policy}" in found.closest.split(", ")
    assert found.peak is None, "a CPU has no allocator that counts"


class Hoarding(PlainExperts):
    """Multiplies its output by a tensor of its size, and so keeps both."""

    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        return out * torch.ones_like(out).requires_grad_()


def test_one_more_kept_tensor_is_seen():
    plainly, more = (
        bytes_of(partial(plain.experts, kind=kind), torch.float32, "cpu") for kind in (PlainExperts, Hoarding)
    )
    assert more.kept - plainly.kept == 2 * 4 * SIZES.L * SIZES.d


class Raising(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        raise RuntimeError("no")


def test_a_layer_that_cannot_run_these_sizes_has_no_bytes():
    assert bytes_of(partial(plain.experts, kind=Raising), torch.float32, "cpu") is None
    assert bytes_of(lambda **sizes: replace(plain.experts(**sizes), multiple=128), torch.float32, "cpu") is None


@pytest.mark.parametrize(("kept", "name"), [(0, "moeblaze inputs"), (10**9, "megablocks_published")])
def test_the_closest_account_is_the_nearest_on_either_side(kept, name):
    closest, account = closest_account(kept, torch.float32, "swiglu")
    assert closest == name and account > 0
