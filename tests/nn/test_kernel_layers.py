"""The layers that run kernels, MoEBlaze's and MegaBlocks', amid torch's own machinery, and their errors."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch_layers import EACH_POLICY, L, all_equal, gradients, loss_of, make_layer, make_x, same_bits

from moeblaze_ref.memory import measure
from moeblaze_ref.nn.torch_layer import keep_routing

SYSTEMS = ("moeblaze", "megablocks")

of_both = pytest.mark.parametrize("system", SYSTEMS)
of_each_policy = pytest.mark.parametrize(("system", "options"), EACH_POLICY, ids=str)


@of_both
def test_leading_dimensions_and_strides(system):
    layer, x = make_layer(system), make_x(3, 4, 16)
    result = layer(x)
    assert result.out.shape == x.shape
    assert result.topk_experts.shape == (12, 3)
    assert torch.equal(result.out.reshape(-1, 16), layer(x.reshape(-1, 16)).out)
    strided = x.detach().transpose(0, 1).requires_grad_()
    (found,) = torch.autograd.grad(layer(strided).out.sum(), strided)  # sum's gradient is an expanded scalar
    (expected,) = torch.autograd.grad(layer(x).out.sum(), x)
    assert torch.equal(found.transpose(0, 1), expected)


@pytest.mark.parametrize("loss", [lambda result: result.out.sum(), loss_of], ids=["of the output", "of everything"])
@of_each_policy
def test_no_tokens(system, options, loss):
    layer = make_layer(system, **options)
    result = layer(make_x(0, 16))
    loss(result).backward()
    assert result.out.shape == (0, 16)
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("context", [{}, {"context_fn": keep_routing}], ids=["routing again", "routing kept"])
@of_both
def test_activation_checkpointing_changes_no_bit(system, context):
    layer, x = make_layer(system), make_x()
    found = gradients(layer, x, lambda x: checkpoint(layer, x, use_reentrant=False, **context))
    assert same_bits(found, gradients(layer, x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@of_both
def test_autocast_computes_in_its_dtype_and_returns_gradients_in_that_of_the_weights(system, dtype):
    layer, x = make_layer(system), make_x()
    with torch.autocast("cpu", dtype=dtype):
        found = gradients(layer, x)
        assert layer(x).out.dtype == dtype
    narrow = make_layer(system, dtype=dtype)
    narrow.load_state_dict(layer.state_dict())
    expected = gradients(narrow, x.detach().to(dtype).requires_grad_())
    assert all(gradient.dtype == torch.float32 for gradient in found.values())
    assert same_bits(found, {name: gradient.float() for name, gradient in expected.items()})


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
@of_each_policy
def test_a_second_backward_gives_the_same_bits_or_raises(system, options, hooked):
    """Whoever holds what autograd saved, as a hook does, sees it overwritten; autograd does not read it again."""
    layer, x = make_layer(system, **options), make_x()
    leaves = [x, *layer.parameters()]
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor) if hooked else nullcontext():
        loss = loss_of(layer(x))
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    assert all_equal(first, torch.autograd.grad(loss, leaves))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@of_both
def test_a_second_derivative_raises(system):
    layer, x = make_layer(system), make_x()
    with pytest.raises(RuntimeError, match=f"{type(layer).__name__} has no second derivative"):
        torch.autograd.grad(loss_of(layer(x)), x, create_graph=True)


@pytest.mark.parametrize("backwards", [0, 1])  # before the tensor is overwritten
@pytest.mark.parametrize("overwritten", ["x", "w1", "topk_experts"])
@of_both
def test_an_overwritten_tensor_raises_instead_of_giving_garbage(system, overwritten, backwards):
    layer, x = make_layer(system), make_x()
    leaf = x.clone()
    result = layer(leaf)
    for _ in range(backwards):
        loss_of(result).backward(retain_graph=True)
    with torch.no_grad():
        {"x": leaf, "w1": layer.w1, "topk_experts": result.topk_experts}[overwritten].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(result).backward()


@pytest.mark.parametrize(
    ("system", "options"), [("moeblaze", {"policy": "conventional"}), ("megablocks", {})], ids=SYSTEMS
)
def test_without_gradients_nothing_is_kept_and_the_output_is_the_same(system, options):
    layer, x = make_layer(system, **options), make_x()
    with torch.no_grad():
        quiet = layer(x)
    assert not quiet.out.requires_grad
    assert torch.equal(quiet.out, layer(x).out)
    assert measure.kept_bytes(layer.requires_grad_(False), x.detach()) == 0


@of_both
def test_not_a_number_travels_as_in_torch(system):
    layer, x = make_layer(system), make_x()
    with torch.no_grad():
        x[3] = float("nan")
    out = layer(x).out
    others = [i for i in range(L) if i != 3]
    assert out[3].isnan().all() and not out[others].isnan().any()


@of_both
def test_compiled_models_run_the_layer_as_it_is_and_it_is_logged_once(system, caplog):
    layer, x, graphs = make_layer(system), make_x(), []
    assert layer.executor is None

    def backend(graph, inputs):
        graphs.append([node.name for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    model = torch.compile(lambda x: 2 * layer(3 * x).out, backend=backend)
    with caplog.at_level(logging.INFO, logger="moeblaze_ref"):
        assert torch.equal(model(x), 2 * layer(3 * x).out)
    assert graphs == [["mul"], ["mul"]]
    assert layer.executor == "simt"
    (message,) = (record.getMessage() for record in caplog.records if record.name == "moeblaze_ref.nn.torch_layer")
    assert message == f"{layer!r} runs on simt"


# Bad input

X = torch.zeros(4, 16)
CHOICE = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)


def of_systems(common, **own):
    """Rows that begin with the system: those that each system has, and its own."""
    return [(system, *row) for system in SYSTEMS for row in (*common, *own[system])]


BAD_OPTIONS = of_systems(
    common=[
        ({"k": 6}, ValueError, "k is 6, but there are only 5 experts"),
        ({"d": 0}, ValueError, "d is 0, but it must be >= 1"),
        ({"E": 1025}, ValueError, r"num_experts is 1025, but it must be 1..1024"),
        ({"E": 64, "k": 33}, ValueError, r"k is 33, but it must be 1..32"),
        ({"activation": "swish"}, ValueError, "unknown activation 'swish'. Did you mean 'swiglu'"),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64, but it must be torch.float32 or torch.bfloat16"),
    ],
    moeblaze=[
        ({"policy": "minimum"}, ValueError, "unknown policy 'minimum'. Did you mean 'minimal'"),
        ({"version": "2_tile"}, ValueError, "unknown version of layer '2_tile'. Did you mean '2_tiled'"),
    ],
    megablocks=[
        ({"block": 16}, ValueError, "h is 24, but it must be a multiple of the block size 16"),
        ({"block": 128}, ValueError, "h is 24, but it must be a multiple of the block size 128"),
        ({"block": 0}, ValueError, "block is 0, but it must be >= 1"),
        ({"block": 8.0}, TypeError, "block is 8.0"),
        ({"version": "3_mma_tf32"}, ValueError, "unknown version of block_sparse '3_mma_tf32'"),
    ],
)
HOPPER = {"version": "7_persistent", "dtype": torch.float16}
BAD_INPUT = of_systems(
    common=[
        ({}, ([[1.0]],), TypeError, "x is a list, but it must be a Tensor"),
        ({}, (X.int(),), TypeError, "x has dtype torch.int32, but it must be torch.float32 or"),
        ({}, (X.double(),), TypeError, "x has dtype torch.float64, but it must be torch.float32 or"),
        ({}, (X.bfloat16(),), TypeError, "wg is torch.float32, but x is torch.bfloat16"),
        ({"device": "meta"}, (X,), ValueError, "wg is on meta, but x is on cpu"),
        ({}, (X[:, :15],), ValueError, r"x has shape \(4, 15\), but it must be \(..., d=16\)"),
        ({}, (X, CHOICE.long()), TypeError, "topk_experts has dtype torch.int64, but it must be torch.int32"),
        ({}, (X, CHOICE[:3]), ValueError, r"topk_experts has shape \(3, 3\), but it must be \(L=4, k=3\)"),
        ({}, (X, CHOICE + 3), ValueError, r"topk_experts\[0, 2\] is 5, but there are only 5 experts"),
        ({}, (X, CHOICE * 0), ValueError, r"topk_experts\[0\] names expert 0 twice"),
        ({}, (X, CHOICE.to("meta")), ValueError, "topk_experts is on meta, but x is on cpu"),
    ],
    moeblaze=[
        ({}, (X.to("meta"),), ValueError, "x is on meta, but MoELayer runs on cuda"),
        (
            {"version": "3_mma"},
            (X,),
            TypeError,
            "3_mma of expert_up computes in float16 or bfloat16, but x is float32",
        ),
    ],
    megablocks=[
        ({}, (X.to("meta"),), ValueError, "x is on meta, but BlockSparseMoE runs on cuda"),
        ({"version": "3_mma"}, (X,), TypeError, "3_mma of block_sparse computes in float16 or bfloat16"),
        (HOPPER, (X.half(),), ValueError, "needs a multiple of 128; use 3_mma"),
    ],
)


@pytest.mark.parametrize(("system", "options", "error", "message"), BAD_OPTIONS)
def test_bad_options(system, options, error, message):
    with pytest.raises(error, match=message):
        make_layer(system, **options)


@pytest.mark.parametrize(("system", "options", "arguments", "error", "message"), BAD_INPUT)
def test_bad_input(system, options, arguments, error, message):
    with pytest.raises(error, match=message):
        make_layer(system, **options)(*arguments)


@of_both
def test_weights_that_disagree_are_named(system):
    layer = make_layer(system)
    layer.w3 = torch.nn.Parameter(torch.zeros(5, 23, 16))
    with pytest.raises(ValueError, match=r"w3 has shape \(5, 23, 16\), but it must be \(E=5, h=24, d=16\)"):
        layer(X)
