"""MoE layers as one writes them in plain torch: rows sorted by expert, one product an expert, a weighted sum.

Each step is a method, so that a test can plant a bug in one.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moeblaze_ref.core.routers import ROUTERS, Router
from moeblaze_ref.nn import routers
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.adapter import Activation, Adapter, Factory


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b."""
    return F.silu(a) * b


class PlainExperts(nn.Module):
    """Experts that are called with a routing; [gate; up] in one tensor (E, 2h, d)."""

    def __init__(self, d: int, h: int, E: int, dtype: torch.dtype, device: str, biases: bool = False):
        super().__init__()

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=dtype, device=device))

        self.gate_up, self.down = parameter(E, 2 * h, d), parameter(E, d, h)
        self.gate_up_bias = parameter(E, 2 * h) if biases else None
        self.down_bias = parameter(E, d) if biases else None
        self.activation: Callable[[Tensor, Tensor], Tensor] = swiglu

    def forward(self, x: Tensor, topk_index: Tensor, topk_weights: Tensor) -> Tensor:
        """The output (L, d) for x (L, d), ids (L, k) and weights (L, k)."""
        slot = self.sort(topk_index)  # (R,) in expert order
        token = slot // topk_index.shape[1]
        gates = topk_weights.flatten()[slot, None]  # (R, 1)
        y = self.run(x[token], self.rows_of_experts(topk_index), gates)
        return self.combine(torch.zeros_like(x), token, y)

    def sort(self, topk_index: Tensor) -> Tensor:
        """The choices (R,) in the order of their experts."""
        return topk_index.flatten().argsort(stable=True)

    def rows_of_experts(self, topk_index: Tensor) -> list[int]:
        """How many rows each expert has."""
        return torch.bincount(topk_index.flatten(), minlength=len(self.down)).tolist()

    def run(self, rows: Tensor, lengths: list[int], gates: Tensor) -> Tensor:
        """The weighted output (R, d) of each row."""
        groups = zip(rows.split(lengths), gates.split(lengths), strict=True)
        return torch.cat([self.expert(e, group, gate) for e, (group, gate) in enumerate(groups)])

    def expert(self, e: int, rows: Tensor, gate: Tensor) -> Tensor:
        """The weighted output (n, d) of one expert's rows."""
        a, b = self.up(e, rows)
        y = F.linear(self.activation(a, b), self.down[e], None if self.down_bias is None else self.down_bias[e])
        return y * gate.to(y.dtype)

    def up(self, e: int, rows: Tensor) -> list[Tensor]:
        """Gate and up (n, h) of one expert's rows."""
        bias = None if self.gate_up_bias is None else self.gate_up_bias[e]
        return list(F.linear(rows, self.gate_up[e], bias).chunk(2, -1))

    def combine(self, out: Tensor, token: Tensor, y: Tensor) -> Tensor:
        """Add the rows (R, d) to their tokens."""
        return out.index_add(0, token, y.to(out.dtype))


class PlainMoE(nn.Module):
    """A router, experts, and a shared expert if it has a width."""

    def __init__(self, experts: PlainExperts, k: int, router: Router, shared: int = 0):
        super().__init__()
        (E, d, _), like = experts.down.shape, experts.down
        self.experts, self.k, self.router = experts, k, router
        self.gate = nn.Linear(d, E, bias=router.logit_bias, dtype=like.dtype, device=like.device)
        if router.selection_bias:
            self.register_buffer("selection_bias", torch.zeros(E, device=like.device))
        self.shared = _shared_expert(d, shared, like) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """The output (L, d) for x (L, d)."""
        topk_index, gates = self.route(x)
        out: Tensor = self.experts(x, topk_index, gates)
        return out + self.shared_part(x) if self.shared is not None else out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The ids (L, k) and the gates (L, k)."""
        routing = routers.choose(self.logits(x), self.k, self.router, getattr(self, "selection_bias", None))
        return routing.topk_experts, routing.gates

    def logits(self, x: Tensor) -> Tensor:
        """The router's logits (L, E) in float32; some routers multiply in it, too."""
        if self.router.float32_product:
            bias = self.gate.bias
            return F.linear(x.float(), self.gate.weight.float(), None if bias is None else bias.float())
        logits: Tensor = self.gate(x)
        return logits.float()

    def shared_part(self, x: Tensor) -> Tensor:
        """Return the output of the shared expert."""
        assert self.shared is not None
        return self.shared["down"](swiglu(self.shared["gate"](x), self.shared["up"](x)))


def _shared_expert(d: int, s: int, like: Tensor) -> nn.ModuleDict:
    def linear(width: int, out: int) -> nn.Linear:
        return nn.Linear(width, out, bias=False, dtype=like.dtype, device=like.device)

    return nn.ModuleDict({"gate": linear(d, s), "up": linear(d, s), "down": linear(s, d)})


LAYOUTS = {"gate_up": "gate_up: E 2h d", "down": "down: E d h"}
BIASES = {"gate_up_bias": "gate_up_bias: E 2h", "down_bias": "down_bias: E d"}
SHARED = {"gate": "shared_gate: s d", "up": "shared_up: s d", "down": "shared_down: d s"}


def experts(
    *,
    d: int,
    h: int,
    E: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    biases: bool = False,
    activation: Activation = "swiglu",
    kind: type[PlainExperts] = PlainExperts,
) -> Adapter:
    """Return experts alone."""
    module = kind(d, h, E, dtype, device, biases)
    if not isinstance(activation, str):
        module.activation = activation
    layouts = LAYOUTS | BIASES if biases else LAYOUTS
    return Adapter(module, layouts, activation=activation, duplicates=True, deterministic=True)


def moe(
    *,
    d: int,
    h: int,
    E: int,
    k: int,
    dtype: torch.dtype,
    device: str,
    family: str = "qwen3_moe",
    shared: bool = False,
    kind: type[PlainMoE] = PlainMoE,
    experts_kind: type[PlainExperts] = PlainExperts,
) -> Adapter:
    """Return a whole layer with the router of a family; its groups of experts only where E and k allow them."""
    router = fitting(ROUTERS[family], E, k)
    made = kind(experts_kind(d, h, E, dtype, device), k, router, h if shared else 0)
    layouts = {f"experts.{name}": layout for name, layout in LAYOUTS.items()} | {"gate.weight": "router: E d"}
    layouts |= {"gate.bias": "router_bias: E"} if router.logit_bias else {}
    layouts |= {"selection_bias": "selection_bias: E"} if router.selection_bias else {}
    layouts |= {f"shared.{name}.weight": layout for name, layout in SHARED.items()} if shared else {}
    return Adapter(made, layouts, router, shared=h if shared else 0, deterministic=True)


def fitting(router: Router, E: int, k: int) -> Router:
    """The router with two groups of experts if it has groups and they can be had, else with one."""
    halves = router.groups > 1 and E % 2 == 0 and E >= 4 and k <= E // 2
    return replace(router, groups=2 if halves else 1, groups_kept=1)


def factories() -> dict[str, Factory]:
    """Experts, experts with biases and gpt-oss's activation, and a layer for each family's router."""
    found: dict[str, Factory] = {
        "torch/experts": experts,
        "torch/experts with biases": partial(experts, biases=True, activation=ClampedSwiglu()),
    }
    for family in ("qwen3_moe", "olmoe", "gpt_oss", "deepseek_v2", "deepseek_v3"):
        found[f"torch/{family}"] = partial(moe, family=family, shared=family.startswith("deepseek"))
    return found
