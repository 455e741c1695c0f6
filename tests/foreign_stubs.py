"""Stand-ins for the packages of other projects: their names, arguments and layouts, computed in float32."""

import enum
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch import nn

REFUSAL = "Sparse MLP is not supported with triton >=3.2.0."


def install(monkeypatch):
    """Make all of them importable, and return the module of SonicMoE's functions."""
    arguments, dmoe = ModuleType("megablocks.layers.arguments"), ModuleType("megablocks.layers.dmoe")
    arguments.Arguments, dmoe.dMoE = Arguments, DroplessMoE
    functional, enums = ModuleType("sonicmoe.functional"), ModuleType("sonicmoe.enums")
    functional.TC_Softmax_Topk_Router_Function = Router
    functional.moe_TC_softmax_topk_layer = lambda *given, **named: sonic_layer(functional, *given, **named)
    enums.ActivationType = ActivationType
    sonicmoe = ModuleType("sonicmoe")
    sonicmoe.functional = functional
    packages = (ModuleType("megablocks"), ModuleType("megablocks.layers"), sonicmoe)
    for module in (*packages, arguments, dmoe, functional, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return functional


# MegaBlocks ----------------------------------------------------------------------------------------------------------


class Arguments(SimpleNamespace):
    def __init__(self, **given):
        super().__init__(**given)
        if self.mlp_impl == "sparse" and getattr(sys.modules.get("triton"), "__version__", "") >= "3.2.0":
            raise ValueError(REFUSAL)
        assert self.bf16 and not (self.fp16 or self.bias or self.return_bias or self.moe_loss_weight)


class DroplessMoE(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args
        options = {"device": args.device, "dtype": torch.bfloat16}
        self.router = LearnedRouter(args.moe_top_k)
        self.router.layer = nn.Linear(args.hidden_size, args.moe_num_experts, bias=False, **options)
        rows = args.moe_num_experts * args.ffn_hidden_size, args.hidden_size
        self.experts = Experts(args)
        self.experts.mlp = nn.Module()
        for name in ("w1", "w2", "v1") if args.mlp_type == "glu" else ("w1", "w2"):
            setattr(self.experts.mlp, name, nn.Parameter(torch.zeros(rows, **options)))


class LearnedRouter(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.k = k

    def forward(self, x):
        scores = (x.float() @ self.layer.weight.float().t()).softmax(dim=-1)
        gates, chosen = torch.topk(scores, self.k, dim=-1)
        return scores, gates, chosen


class Experts(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.args = args

    def forward(self, x, scores, gates, chosen):
        E, x = self.args.moe_num_experts, x.float()
        of_expert = {name: rows.float().view(E, -1, x.shape[1]) for name, rows in self.mlp.named_parameters()}
        out = torch.zeros_like(x)
        for expert in range(E):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            rows, (w1, w2) = x[token], (of_expert[name][expert] for name in ("w1", "w2"))
            hidden = self.args.activation_fn(rows @ w1.t())
            if self.args.memory_optimized_mlp and self.args.activation_fn is torch.nn.functional.relu:
                hidden = hidden.detach()  # wrong as the package is: the gradients of x and w1
                hidden = hidden + 0 * (rows @ w1.t())
            if "v1" in of_expert:
                hidden = hidden * (rows @ of_expert["v1"][expert].t())
            out = out.index_add(0, token, gates[token, slot, None] * (hidden @ w2))
        return out.bfloat16()


# SonicMoE ------------------------------------------------------------------------------------------------------------


class ActivationType(enum.Enum):
    SWIGLU = "swiglu"
    SILU = "silu"
    RELU = "relu"


class Router:
    @staticmethod
    def apply(logits, E, k, softmax_over_topk, normalize):
        assert not (softmax_over_topk or normalize)
        gates, chosen = torch.topk(logits.softmax(dim=-1), k)
        return gates, chosen.int()


def sonic_layer(functional, x, router_w, w1, b1, w2, b2, K, stream_id, activation_type, is_softmax_over_topk=True):
    """w1 (2 h, d, E), its rows the gate and the up projection alternating; w2 (d, h, E)."""
    assert activation_type is ActivationType.SWIGLU, "no non GLU activation yet"
    assert w1.stride(1) == w2.stride(1) == 1 and b1 is None and b2 is None
    x, router_w, w1, w2 = (tensor.float() for tensor in (x, router_w, w1, w2))
    logits = x @ router_w.t()
    router = functional.TC_Softmax_Topk_Router_Function
    gates, chosen = router.apply(logits, len(router_w), K, is_softmax_over_topk, False)
    out = torch.zeros_like(x)
    for expert in range(len(router_w)):
        token, slot = (chosen == expert).nonzero(as_tuple=True)
        both = x[token] @ w1[:, :, expert].t()
        hidden = torch.nn.functional.silu(both[:, 0::2]) * both[:, 1::2]
        out = out.index_add(0, token, gates[token, slot, None] * (hidden @ w2[:, :, expert].t()))
    return out.bfloat16(), logits, chosen.flatten().bincount(minlength=len(router_w))
