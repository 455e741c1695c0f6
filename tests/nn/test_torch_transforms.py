"""Torch's transforms and its export of the layers: what works is right, what does not raises one line."""

import pytest
import torch
from torch import func
from torch.autograd import forward_ad
from torch_layers import all_equal, make_layer

from moeblaze_ref.nn.systems import SYSTEMS
from moeblaze_ref.nn.torch_layer import MoEModule

LAYERS = sorted(name for name, system in SYSTEMS.items() if issubclass(system, MoEModule))
KERNEL_LAYERS = ["megablocks", "megablocks_memory_optimized", "moeblaze"]
X = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))


def copies(layer, n):
    """The weights of n layers, stacked, as ``torch.func.vmap`` takes them."""
    return func.stack_module_state([layer] * n)[0]


TRANSFORMS = {
    "grad of x": ("torch.func.grad", lambda layer: func.grad(lambda x: layer(x).out.sum())(X)),
    "grad of the weights": (
        "torch.func.grad",
        lambda layer: func.grad(lambda weights: func.functional_call(layer, weights, X).out.sum())(
            dict(layer.named_parameters())
        ),
    ),
    "vjp": ("torch.func.grad, vjp", lambda layer: func.vjp(lambda x: layer(x).out, X)),
    "jacrev": ("torch.func.grad, vjp or jacrev", lambda layer: func.jacrev(lambda x: layer(x).out.sum())(X)),
    "vmap of x": ("torch.func.vmap", lambda layer: func.vmap(lambda x: layer(x).out)(X.view(3, 4, 16))),
    "vmap of the weights": (
        "torch.func.vmap",
        lambda layer: func.vmap(lambda weights: func.functional_call(layer, weights, X).out)(copies(layer, 2)),
    ),
    "jvp": ("torch.func.jvp", lambda layer: func.jvp(lambda x: layer(x).out, (X,), (X,))),
    "functionalize": ("torch.func.functionalize", lambda layer: func.functionalize(lambda x: layer(x).out)(X)),
    "trace": ("torch.jit.trace", lambda layer: torch.jit.trace(layer, (X,))),
    "trace of a function": ("torch.jit.trace", lambda layer: torch.jit.trace(lambda x: layer(x).out, (X,))),
    "compiled grad": (
        "torch.func.grad",
        lambda layer: torch.compile(func.grad(lambda x: layer(x).out.sum()), backend="eager")(X),
    ),
    "export": ("torch.export", lambda layer: torch.export.export(layer, (X,))),
    "strict export": ("torch.export", lambda layer: torch.export.export(layer, (X,), strict=True)),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("system", LAYERS)
def test_a_transform_raises_one_line_that_names_it_and_what_to_use(system, transform):
    layer = make_layer(system)
    name, run = TRANSFORMS[transform]
    with pytest.raises(RuntimeError) as raised:
        run(layer)
    message = str(raised.value)
    assert name in message and type(layer).__name__ in message and "\n" not in message
    instead = ("torch.autograd.grad", "in one call", "as it is", "state_dict")
    assert any(words in message for words in instead)
    assert layer(X).out.isfinite().all()  # torch works on as before


def dual(layer):
    with forward_ad.dual_level():
        return layer(forward_ad.make_dual(X, X))


FORWARD_MODE = {"forward_ad": dual, "linearize": lambda layer: func.linearize(lambda x: layer(x).out, X)}


@pytest.mark.parametrize("way", FORWARD_MODE)
@pytest.mark.parametrize("system", KERNEL_LAYERS)
def test_forward_mode_raises_one_line(system, way):
    layer = make_layer(system)
    with pytest.raises(RuntimeError, match=r"has no forward-mode derivative \(torch.func.linearize") as raised:
        FORWARD_MODE[way](layer)
    assert str(raised.value).startswith(type(layer).__name__)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("system", KERNEL_LAYERS)
def test_a_batch_of_gradients_raises_one_line(system):
    layer = make_layer(system)
    with pytest.raises(RuntimeError, match="takes no batch of gradients") as raised:
        torch.autograd.grad(layer(X).out, layer.w1, torch.stack([X, X]), is_grads_batched=True)
    assert str(raised.value).startswith(type(layer).__name__)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("system", KERNEL_LAYERS)
def test_functional_call_runs_on_the_weights_that_it_is_given(system):
    layer = make_layer(system)
    weights = {name: (2 * weight.detach()).requires_grad_() for name, weight in layer.named_parameters()}
    other = make_layer(system)
    other.load_state_dict(weights)
    found, expected = func.functional_call(layer, weights, X).out, other(X).out
    assert torch.equal(found, expected)
    gradients = torch.autograd.grad(found.sum(), weights.values())
    truth = torch.autograd.grad(expected.sum(), list(other.parameters()))
    assert all_equal(gradients, truth)


def test_a_compiled_model_in_one_graph_says_why_not():
    layer = make_layer()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="leave out fullgraph=True"):
        torch.compile(lambda x: layer(x).out, backend="eager", fullgraph=True)(X)
