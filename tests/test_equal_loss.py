"""Equal loss: a model with our layers trains as one with the oracle's, and the verdict can tell when it does not."""

import pytest
import torch

from moeblaze_ref import oracle
from moeblaze_ref.lm import data, equal_loss
from moeblaze_ref.lm.equal_loss import BOUND
from moeblaze_ref.lm.model import LMConfig
from moeblaze_ref.lm.train import TrainSettings

CONFIG = LMConfig(d=16, h=16, E=4, k=2, layers=2, heads=2, sequence=16)
SETTINGS = TrainSettings(CONFIG, 12, batch=2)
STEPS = 5


@pytest.fixture(autouse=True)
def one_thread():
    """Products this small lose more by waiting for other cores than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def compare(kind, **options):
    return getattr(equal_loss, kind)(SETTINGS, data.python_help(), STEPS, **options)


# The layers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["replayed", "free"])
def test_our_layers_train_as_the_oracles(kind):
    seen = []
    found = compare(kind, on_step=lambda step, loss: seen.append((step, loss)))
    assert found["passed"]
    assert seen == list(enumerate(found["loss"]["oracle"], start=1)) and len(seen) == STEPS
    assert found["loss"]["moeblaze"] != found["loss"]["oracle"]  # other kernels, other roundings
    assert found["loss"]["oracle"][-1] < found["loss"]["oracle"][0]


class Scaled(oracle.OracleMoE):
    """An output that is a little too large."""

    def spoil(self, x, routing):
        return self.mixed(x, routing) * (1 + 1e-4)

    def mixed(self, x, routing):
        return oracle.experts(x, routing, self.w1, self.w2, self.w3, self.activation)

    def forward(self, x, topk_experts=None):
        routing = oracle.route(x, self.wg, self.k, self.renormalize, topk_experts)
        return self.spoil(x, routing), routing


class WrongExpert(Scaled):
    """One token's first choice is computed by the next expert."""

    def spoil(self, x, routing):
        chosen = routing.topk_experts.clone()
        chosen[0, 0] = next(e for e in range(self.wg.shape[1]) if e not in chosen[0])
        return self.mixed(x, routing._replace(topk_experts=chosen))


class DroppedRow(Scaled):
    """The last token's second expert is left out."""

    def spoil(self, x, routing):
        gates = routing.gates.clone()
        gates[-1, -1] = 0
        return self.mixed(x, routing._replace(gates=gates))


class OtherChoice(Scaled):
    """The router of every layer takes the worst experts, and says so."""

    def forward(self, x, topk_experts=None):
        if topk_experts is None:
            topk_experts = oracle.top_k(-(x @ self.wg), self.k)
        return super().forward(x, topk_experts)

    def spoil(self, x, routing):
        return self.mixed(x, routing)


class NoRouterGradient(Scaled):
    """The forward is right, but the gates send nothing back."""

    def spoil(self, x, routing):
        return self.mixed(x, routing._replace(gates=routing.gates.detach()))


class Zeros(Scaled):
    """A layer that does nothing."""

    def spoil(self, x, routing):
        return 0 * self.mixed(x, routing)


@pytest.mark.parametrize("kind", ["replayed", "free"])
@pytest.mark.parametrize("fault", [Scaled, WrongExpert, DroppedRow, NoRouterGradient, Zeros])
def test_a_layer_that_is_a_little_wrong_is_caught(kind, fault):
    found = compare(kind, moe=fault)
    print(found["verdict"], found.get("after"))
    assert not found["passed"]


def test_a_router_that_chooses_other_experts_is_caught():
    found = compare("free", moe=OtherChoice)
    assert found["first_change"]["moeblaze"]["step"] == 1 and not found["passed"]
    assert found["after"]["worst"] > BOUND
    assert compare("replayed", moe=OtherChoice)["passed"]  # its choice is not asked for there
