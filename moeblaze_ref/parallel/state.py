"""The state of a layer by the ids of its experts, so that it loads into other maps and other numbers of ranks.

In a state by ids each expert has its weights under its id: ``experts.5.w1`` (d, h), ``experts.5.w2`` (d, h) and
``experts.5.w3`` (h, d). A single-device layer has them stacked: w1 and w2 (E, d, h), w3 (E, h, d).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

STACKED = ("w1", "w2", "w3")


def by_expert(state: Mapping[str, Tensor], experts: Sequence[int] | None = None, prefix: str = "") -> dict[str, Tensor]:
    """Split a layer's stacked weights by experts; the rest of the state stays as it is.

    Parameters
    ----------
    state : mapping of str to Tensor
        Such as ``MoELayer.state_dict()``, or that of a model with such a layer.
    experts : sequence of int, optional
        The ids of the stacked experts. Default: 0, 1, 2, and so on.
    prefix : str
        The layer's name in the model and a dot, such as ``"blocks.3.moe."``; empty for a layer alone.

    Returns
    -------
    dict of str to Tensor
        Rows are views: what is loaded into them in place is loaded into the layer.

    Raises
    ------
    ValueError
        If there are more ids than stacked experts, or fewer.
    """
    split = dict(state)
    for name in STACKED:
        if (stack := split.pop(prefix + name, None)) is not None:
            ids = range(len(stack)) if experts is None else experts
            if len(ids) != len(stack):
                raise ValueError(f"{prefix}{name} has {len(stack)} experts, but {len(ids)} ids are given")
            split |= {_key(prefix, expert, name): row for expert, row in zip(ids, stack, strict=True)}
    return split


def stacked(state: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Stack the experts of a state by ids, all E of them, as a single-device layer has them.

    Parameters
    ----------
    state : mapping of str to Tensor
        Of a layer, or of a model with it; the states of several ranks as one mapping.
    prefix : str
        As in `by_expert`.

    Raises
    ------
    ValueError
        If an expert is missing: the message has its key.
    """
    num_experts = state[f"{prefix}wg"].shape[1]
    joined = {key: tensor for key, tensor in state.items() if not key.startswith(f"{prefix}experts.")}
    for name in STACKED:
        keys = [_key(prefix, expert, name) for expert in range(num_experts)]
        missing = [key for key in keys if key not in state]
        if len(missing) == num_experts:
            continue  # an ungated layer has no w2
        if missing:
            raise ValueError(f"the state has no {missing[0]}, but all {num_experts} experts must be there")
        joined[prefix + name] = torch.stack([state[key] for key in keys])
    return joined


def keep_by_expert(layer: nn.Module) -> None:
    """Make the layer's ``state_dict`` one by ids, and ``load_state_dict`` take one that has all experts of the layer.

    The layer has its ids in ``experts``. The state that it loads may have more experts, and it may be stacked, as that
    of a single-device layer is. A missing expert is a missing key, as torch reports it.
    """
    layer.register_state_dict_post_hook(_split)
    layer.register_load_state_dict_pre_hook(_stack)


def _split(layer, state, prefix, _):
    """Write a state by ids over a stacked one."""
    split = by_expert(state, layer.experts, prefix)
    state.clear()
    state.update(split)


def _stack(layer, state, prefix, _, __, missing, ___, errors):
    """Put the layer's own experts, stacked, in the place of all experts; what is missing stays as it is."""
    found = by_expert(state, prefix=prefix)
    state.clear()
    for name in STACKED:
        if (weight := getattr(layer, name)) is not None:
            keys = [_key(prefix, expert, name) for expert in range(layer.wg.shape[1])]
            own = {keys[expert]: row for expert, row in zip(layer.experts, weight.detach(), strict=True)}
            missing += [key for key in own if key not in found]
            rows = own | {key: found.pop(key) for key in keys if key in found}
            errors += [_unlike(key, rows[key], row) for key, row in own.items() if rows[key].shape != row.shape]
            fitting = [rows[key].to(row.device) if rows[key].shape == row.shape else row for key, row in own.items()]
            state[prefix + name] = torch.stack(fitting) if fitting else weight.detach()
    state.update(found)


def _key(prefix, expert, name):
    return f"{prefix}experts.{expert}.{name}"


def _unlike(key, found, row):
    """Describe an expert of another shape than the layer's."""
    return f"{key} has shape {tuple(found.shape)}, but the layer's experts need {tuple(row.shape)}"
