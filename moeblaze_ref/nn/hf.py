"""Our experts inside models of Hugging Face's transformers, whose weights stay as they are.

transformers keeps a registry of functions that run the experts of a model (``transformers.integrations.moe``). `use`
enters one for each policy, and switches one model to it. Llama 4 has no such switch: there the forward of each MoE
block is replaced by a forward that runs only the chosen experts.
"""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moeblaze_ref.core import checks
from moeblaze_ref.core.config import CLAMPED_SWIGLU, POLICIES
from moeblaze_ref.nn.activations import activate
from moeblaze_ref.nn.torch_experts import experts
from moeblaze_ref.nn.torch_operands import DTYPES

_USES = "_moeblaze_uses"  # attribute of a model: its uses, in the order of their start
_ACTIVATIONS = {"SiLU": "swiglu", "SiLUActivation": "swiglu", "ReLU": "reglu"}  # by what multiplies the up-projection


class InUse:
    """Our experts in one model; `undo` restores what ran before. A ``with`` block does so at its end.

    Uses of a model may end in any order. What other code has chosen for the model since then stays.

    Parameters
    ----------
    model : transformers.PreTrainedModel
    name, before : str, optional
        What transformers calls our function in its registry, and what ran the experts before; None for Llama 4.
    forwards : dict of nn.Module to callable
        Of each block of Llama 4 our forward.
    modules : list of nn.Module
        The experts modules and blocks that call our experts.
    """

    def __init__(
        self,
        model: Any,
        name: str | None,
        before: str | None,
        forwards: dict[nn.Module, Any],
        modules: Sequence[nn.Module],
    ):
        self.model, self.modules = model, list(modules)
        self._name, self._before, self._forwards = name, before, forwards
        self._blocks_before = {block: vars(block).get("forward") for block in forwards}

    def _start(self) -> None:
        """Let the blocks of Llama 4 run our experts, and add this use to those of the model."""
        for block, forward in self._forwards.items():
            vars(block)["forward"] = forward
        vars(self.model).setdefault(_USES, []).append(self)

    def undo(self) -> None:
        """Let the model run its experts as before; a second time nothing happens."""
        uses = vars(self.model).get(_USES, [])
        if self not in uses:
            return
        place = uses.index(self)
        uses.remove(self)
        if place < len(uses):
            uses[place]._follow(self)
            return
        if self._before is not None and self._runs_ours():
            self.model.set_experts_implementation(self._before)
        for block, forward in self._forwards.items():
            if vars(block).get("forward") is forward:
                _set_forward(block, self._blocks_before[block])

    def _runs_ours(self) -> bool:
        config: Any = self.modules[0].config
        return bool(config._experts_implementation == self._name)

    def _follow(self, gone: "InUse") -> None:
        """Restore at the end what an earlier use would have restored, where this one found that use's experts."""
        if self._before == gone._name:
            self._before = gone._before
        for block, forward in gone._forwards.items():
            if self._blocks_before[block] is forward:
                self._blocks_before[block] = gone._blocks_before[block]

    def __enter__(self) -> "InUse":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def use(model: Any, policy: str = "minimal") -> InUse:
    """Let a model of transformers run its experts by our kernels; no weight is copied or changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        With experts in one of transformers' layouts: Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3, GLM-4.5, Llama 4,
        gpt-oss.
    policy : str
        What the experts keep for the backward, one of ``config.POLICIES``.

    Returns
    -------
    InUse
        Has ``undo()``, and the modules that call our experts.

    Raises
    ------
    ValueError
        If the policy is unknown, the model has no experts that can be switched, other code has set a forward on a
        block of Llama 4, or what the experts compute is not ours: an activation, a norm, or the layout of their
        weights.
    TypeError
        If it is no model of transformers, or its experts' weights have a dtype that the kernels do not compute in, such
        as those of a quantised model.
    """
    checks.check_name("policy", policy, POLICIES)
    _check_model(model)
    switched, blocks = [*_switchable(model)], [*_llama4_blocks(model)]
    if not switched and not blocks:
        raise ValueError(f"{type(model).__name__} has no experts that transformers can switch to other kernels")
    for module in (*switched, *(block.experts for block in blocks)):
        _check(module)
    for block in blocks:
        _check_forward(block)
    if switched:
        _own_configs(model)
    name, before = _switch(model, policy, switched) if switched else (None, None)
    found = InUse(
        model, name, before, {block: partial(_run_llama4, block, policy) for block in blocks}, [*switched, *blocks]
    )
    found._start()
    return found


def _own_configs(model: Any) -> None:
    """Give a model configs of its own: models that were made from one config object share its switch."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        if "config" in vars(module):
            module.config = deepcopy(module.config, copies)


def _set_forward(block: nn.Module, forward: Any) -> None:
    """Set a block's own forward, or take it away, so that its class's runs."""
    if forward is None:
        vars(block).pop("forward", None)
    else:
        vars(block)["forward"] = forward


def _check_forward(block: nn.Module) -> None:
    """Check that no other code has set a forward on a block: ours would take its place."""
    own = vars(block).get("forward")
    if own is not None and getattr(own, "func", None) is not _run_llama4:
        raise ValueError(
            f"{type(block).__name__} has a forward that was set on it, which our experts would replace: remove it first"
        )


def _check_model(model: Any) -> None:
    """A part of a model has no switch, but Llama 4's blocks need none; transformers itself may be missing."""
    switches = hasattr(model, "set_experts_implementation")
    if not isinstance(model, nn.Module) or not (switches or any(_llama4_blocks(model))):
        raise TypeError(f"model is {checks.kind(model)}, but it must be a transformers.PreTrainedModel")


def _switchable(model: nn.Module) -> Iterator[Any]:
    """The experts modules whose forward asks transformers' registry."""
    return (module for module in model.modules() if hasattr(module, "_is_expert_parallel"))


def _llama4_blocks(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if type(module).__name__ == "Llama4TextMoe")


def _check(module: Any) -> None:
    """Check that an experts module computes what our experts do."""
    name = type(module).__name__
    for attribute, value in {"has_gate": True, "has_post_expert_norm": False}.items():
        if getattr(module, attribute, value) != value:
            raise ValueError(f"{name} has {attribute}={not value}, but our experts run those with {value} alone")
    if getattr(module, "is_concatenated", True) is False and not module.is_transposed:
        raise ValueError(f"{name} has alternating rows of gate and up, but our experts run alternating columns alone")
    _activation(module)
    for weight, parameter in module.named_parameters():
        if parameter.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise TypeError(f"{name}.{weight} has dtype {parameter.dtype}, but it must be one of {allowed}")


def _activation(module: Any) -> str:
    """Our name of an experts module's activation."""
    name = type(module).__name__
    if _has_own_gate(module):
        if not _is_clamped_swiglu(module):
            raise ValueError(f"{name} has an activation of its own, other than gpt-oss's with alpha 1.702, limit 7")
        return CLAMPED_SWIGLU
    kind = type(module.act_fn).__name__
    if kind not in _ACTIVATIONS:
        allowed = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{name} has the activation {kind}, but it must be one of {allowed}")
    return _ACTIVATIONS[kind]


def _has_own_gate(module: Any) -> bool:
    """Return True if a module computes anything else than ``act_fn`` of the gate times the second projection."""
    from transformers.integrations.moe import _default_apply_gate

    return getattr(type(module), "_apply_gate", _default_apply_gate) is not _default_apply_gate


_CLAMPED: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()  # modules that were asked


def _is_clamped_swiglu(module: Any) -> bool:
    """Return True if a module computes gpt-oss's activation. The answer is cached, since each forward needs it."""
    if module not in _CLAMPED:
        _CLAMPED[module] = _gives_clamped_swiglu(module)
    return _CLAMPED[module]


@torch.no_grad()
def _gives_clamped_swiglu(module: Any) -> bool:
    """Return True if a module's gate agrees with clamped SwiGLU on a grid that exceeds both limits."""
    around = torch.linspace(-12.0, 12.0, 97, dtype=torch.float32, device="cpu")
    gate, up = [grid.flatten()[None] for grid in torch.meshgrid(around, around, indexing="ij")]
    both = torch.cat([gate, up], 1) if module.is_concatenated else torch.stack([gate, up], 2).flatten(1)
    found = module._apply_gate(both)
    return found.shape == gate.shape and torch.allclose(found, activate(gate, up, CLAMPED_SWIGLU), rtol=1e-5, atol=1e-6)


def register(policy: str) -> str:
    """Enter the policy's function into transformers' registry, and return its name there."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    name = f"moeblaze_{checks.check_name('policy', policy, POLICIES)}"
    ALL_EXPERTS_FUNCTIONS.register(name, partial(_run, policy))
    return name


def _switch(model: Any, policy: str, modules: Sequence[Any]) -> tuple[str, str]:
    """Switch the model to the policy's function, and return its name and that of what ran before."""
    name = register(policy)
    before: str = modules[0].config._experts_implementation
    model.set_experts_implementation(name)
    if left := [module for module in modules if module.config._experts_implementation != name]:
        model.set_experts_implementation(before)
        raise ValueError(f"{len(left)} of {len(modules)} experts modules of {type(model).__name__} were not switched")
    return name, before


def _run(policy: str, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run the experts in place of a module's own forward: (L, d) from (L, d) and a routing (L, k)."""
    first = 0 if module._is_expert_parallel else None
    weights = module.gate_up_proj, module.down_proj
    biases = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else ()
    routing, names = (top_k_index, top_k_weights), (_activation(module), policy, _layout(module))
    return experts(hidden_states, *weights, *routing, *names, None, first, *biases)


def _layout(module: Any) -> str:
    """Our name of how a module stores its weights."""
    if not module.is_transposed:
        return "linear"
    return "matmul" if module.is_concatenated else "interleaved"


def _run_llama4(block: Any, policy: str, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The forward of Llama 4's block: each chosen expert gets its token times the sigmoid of its logit."""
    x = hidden_states.reshape(-1, block.hidden_dim)  # (L, d)
    scores, logits = block.router(x)  # (L, E): zero for experts that are not chosen
    chosen = logits.topk(block.top_k, dim=1).indices  # (L, k)
    rows = (x[:, None] * scores.gather(1, chosen)[..., None]).flatten(0, 1)  # (L k, d)
    module = block.experts
    ones = rows.new_ones(len(rows), 1)
    weights = module.gate_up_proj, module.down_proj
    y = experts(rows, *weights, chosen.reshape(-1, 1), ones, _activation(module), policy, "matmul")
    return block.shared_expert(x) + y.view(*chosen.shape, -1).sum(1), logits
