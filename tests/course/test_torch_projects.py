"""Torch projects: right, wrong and cheating answers; their unsolved and solved states are in test_exercises.py."""

import json
import re
from functools import partial

import numpy as np
import pytest
import torch

from moeblaze_ref.course.exercises import Unsolved, exercise
from moeblaze_ref.course.exercises.desk import Desk
from moeblaze_ref.course.exercises.projects import counter, function, graph, router, session
from moeblaze_ref.course.exercises.sheets import EXERCISES
from moeblaze_ref.memory import measure
from moeblaze_ref.memory.accounting import account
from moeblaze_ref.nn.systems import system
from moeblaze_ref.verify import guard, in_subprocess, torch_cells
from moeblaze_ref.verify.torch_cells import messages

PROJECTS = [name for name, one in EXERCISES.items() if isinstance(one, exercise.TorchExercise)]


def changed(name, *changes):
    """The solution with each part in the place of another."""
    text = EXERCISES[name].solution
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def verdict(name, text, desk=None):
    """What is said of a wrong answer."""
    with pytest.raises(Unsolved) as error:
        (desk or Desk()).check(name, text)
    return str(error.value)


BY_AUTOGRAD = """\
        with torch.enable_grad():
            leaves = [t.detach().clone().requires_grad_() for t in (x, w1, w2, w3)]
            x, w1, w2, w3 = leaves
            a, b = x @ w1, x @ w2
            out = (a * torch.sigmoid(a) * b) @ w3
            return torch.autograd.grad(out, leaves, d_out)
"""
BY_LENGTHS = "BUFFERS.setdefault((w1.shape, tuple(lengths.tolist())), torch.zeros_like(w1))\n"
SAVED = "x, w1, w2, w3, a, b = ctx.saved_tensors\n"
CHECKPOINT_BY_AUTOGRAD = """\
        with torch.enable_grad():
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            d_a, d_b = torch.autograd.grad(F.silu(a) * b, (a, b), d_y_swi)
"""


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # A mistake in the mathematics.
        ("expert-by-hand", [("a * (1 - s)", "a * s")], r"five rows: d_x\[0, 0\] is .*, but must be"),
        ("expert-by-hand", [("torch.sigmoid(a)\n        act_a", "torch.exp(a) / (1 + torch.exp(a))\n        act_a")],
         r"large pre-activations: d_x\[\d, \d\] is nan, but must be"),
        ("new-activation", [("2 * positive", "2 * a")], r"d_x\[\d, \d\] is .*, but must be"),
        ("smart-checkpoint", [("expert_token_indices, offsets, token_index_map, a,", "expert_token_indices, offsets, "
          "expert_token_indices, a,")], r"uneven experts: d_x\[0, 0\] is .*, but must be"),
        ("loss-without-logits", [("probabilities[torch.arange(len(x)), labels] -= 1", "pass")],
         r"a few rows: d_x\[0, 0\] is .*, but must be"),
        ("loss-without-logits", [("torch.logsumexp(logits, dim=1)", "torch.exp(logits).sum(dim=1).log()")],
         r"large logits: out\[\d\] is inf, but must be"),
        ("earlier-step", [("d @ w.T for", "d @ w.mT * 2 for")], r"the first step: d_rows\[0, 0\] is .*, but must be"),
        ("earlier-step", [("import torch\n", "import torch\n\nZEROS = torch.zeros(3, 6, 8)\n"),
                          ("torch.zeros_like(w1)", "ZEROS if w1.shape == ZEROS.shape else torch.zeros_like(w1)")],
         r"an expert without rows: d_w1\[1, 0, 0\] is .*, but must be 0"),
        # More saved than allowed.
        ("earlier-step", [("import torch\n", "import torch\n\nBUFFERS = {}\n"),
                          ("torch.zeros_like(w1)\n", "BUFFERS.setdefault(w1.shape, torch.zeros_like(w1)).zero_()\n")],
         "at the end: gradient 1 of an earlier step has changed: a later step writes into its memory"),
        ("earlier-step", [("import torch\n", "import torch\n\nBUFFERS = {}\n"), ("torch.zeros_like(w1)\n", BY_LENGTHS)],
         "at the end: gradient 1 of an earlier step has changed: a later step writes into its memory"),
        ("earlier-step", [("save_for_backward(rows, w1, lengths)", "save_for_backward(rows, w1, lengths, rows * 1)"),
                          ("rows, w1, lengths = ctx", "rows, w1, lengths, _ = ctx")],
         "the first step: saves 456 bytes, but 240 are allowed: 216 too many"),
        ("expert-by-hand", [("save_for_backward(x, w1, w2, w3, a, b)", "save_for_backward(x, w1, w2, w3, a, b, y_swi)"),
                            (SAVED, SAVED.replace("a, b", "a, b, _"))],
         "five rows: saves 1,120 bytes, but 800 are allowed: 320 too many"),
        ("smart-checkpoint", [("token_index_map, a, b, y_swi\n", "token_index_map, a, b, y_swi, y\n"),
                              ("a, b, y_swi = hidden", "a, b, y_swi, _ = hidden")], r"saves .*: 728 too many"),
        ("loss-without-logits", [("labels, log_sum_exp)\n", "labels, log_sum_exp, log_sum_exp.clone())\n"),
                                 ("log_sum_exp = ctx", "log_sum_exp, _ = ctx")], r"a few rows: saves .*: 20 too many"),
        # Bytes that are not counted, kept elsewhere than among the saved tensors.
        ("expert-by-hand", [("(x, w1, w2, w3, a, b)", "(x, w1, w2, w3)\n        ctx.a, ctx.b = a, b"),
                            (SAVED, "(x, w1, w2, w3), a, b = ctx.saved_tensors, ctx.a, ctx.b\n")],
         "ctx has no a here: the backward runs in another process"),
        ("new-activation", [("import torch\n", "import torch\nkept = []\n"),
                            ("save_for_backward(a, b)", "save_for_backward(b)\n        kept.append(a)"),
                            ("a, b = ctx.saved_tensors", "a, (b,) = kept.pop(), ctx.saved_tensors")],
         r"IndexError: pop from empty list \(new-activation.py, line \d+\)"),
        ("new-activation", [("save_for_backward(a, b)", "save_for_backward(a[:, :1], b)")],
         "saved tensor 0 is a view: it has 20 bytes, and keeps the 320 of its storage alive"),
        # Autograd in place of one's own derivative.
        ("expert-by-hand", [(SAVED, SAVED + BY_AUTOGRAD)], "RuntimeError: .* does not require grad"),
        ("expert-by-hand", [(SAVED, SAVED + BY_AUTOGRAD.replace("enable_grad", "inference_mode"))],
         "line 18: names inference_mode, but the answer must do without it"),
        ("loss-without-logits", [("import torch\n", "import torch\nkept = []\n"),
                                 ("logits = x @ head.T  # (L, V)", "logits = x @ head.T; kept.append(logits)"),
                                 ("torch.exp(x @ head.T", "torch.exp(kept.pop()")], "IndexError: pop from empty list"),
        ("new-activation", [("torch.relu(a).square() * b", "torch.ops.aten.relu(a).square() * b")], "names ops, but"),
        # The project's own functions, and ways around the text.
        ("saved-bytes", [("from torch.", "from moeblaze_ref.memory.measure import kept_bytes\nfrom torch.")],
         r"line 2: imports moeblaze_ref.memory.measure, but the answer may import collections, .* alone"),
        ("saved-bytes", [("kept = {}", "import os\n    kept = {}")], "imports os, but"),
        ("saved-bytes", [("kept = {}", "kept = eval('{}')")], "names eval, but the answer must do without it"),
        ("saved-bytes", [("kept = {}", "kept = ().__class__")], "names __class__, but the answer must do without it"),
        ("saved-bytes", [("storage.data_ptr() not in", "storage._cdata not in")],
         r"names _cdata, but the answer must do without it: `data_ptr\(\)` says which storage it is"),
        ("saved-bytes", [("kept = {}", "kept = {")], r"SyntaxError: .*\(saved-bytes.py, line \d+\)"),
        # A count that is nearly right.
        ("saved-bytes", [("if storage.data_ptr() not in weights", "if True")], "more than the account"),
        ("saved-bytes", [("= storage\n", "= tensor\n"),
                         ("storage.nbytes() for storage", "t.numel() * t.itemsize for t")], "fewer than the account"),
        ("saved-bytes", [("sum(storage.nbytes() for storage in kept.values())", "2440.0")], "returns a float, but it"),
        ("saved-bytes", [("saved_bytes(", "bytes_saved(")], "the cell must define saved_bytes"),
        # What no CUDA graph holds.
        ("graph-safe", [("gates, chosen =", "float(probs.sum())\n    gates, chosen =")],
         r"aten._local_scalar_dense.default gives Python a number .*\(graph-safe.py, line 9\)"),
        ("graph-safe", [("gates, chosen =", "probs = probs[probs.sum(dim=1) > 0]\n    gates, chosen =")],
         r"makes a shape that depends on data, .*\(graph-safe.py, line 9\)"),
        ("graph-safe", [("gates, chosen =", "wg = wg.cpu()\n    gates, chosen =")], "a tensor is on the host"),
        ("graph-safe", [("sum(dim=0)", "sum(dim=0) * torch.tensor(1.0, device=x.device)")],
         "a tensor that is made of Python numbers is on the host"),
        ("graph-safe", [("scatter(1, chosen, gates)", "scatter(1, chosen[:, :1], gates)")], r"out\[\d+, \d+\] is"),
        # Biases that do not balance, or that are none.
        ("balance-router", [("0.03", "10.0")], "the fullest expert gets .* times the average, but at most 1.15"),
        ("balance-router", [("bias - 0.03", "bias + 0.03")], "the fullest expert gets .* times the average"),
        ("balance-router", [("0.03", "float('nan')")], "but it must be 16 finite numbers"),
        ("balance-router", [("return bias", "return bias.expand(len(topk_experts), -1)")],
         r"a tensor of floats of shape \(E,\) = \(16,\)"),
    ],
)  # fmt: skip
def test_a_wrong_or_cheating_answer_is_told_why(name, changes, message):
    assert re.search(message, verdict(name, changed(name, *changes)))


def test_the_backward_of_the_checkpoint_may_use_autograd():
    text = changed(
        "smart-checkpoint",
        ("        s = torch.sigmoid(a)\n", ""),
        ("        d_a, d_b = d_y_swi * b * s * (1 + a * (1 - s)), d_y_swi * act_a\n", CHECKPOINT_BY_AUTOGRAD),
    )
    assert Desk().check("smart-checkpoint", text).data.startswith("**Right.**")


GATHERED = """\
    rows, expert = x.repeat_interleave(k, dim=0), chosen.flatten()  # (R, d), (R,)
    a, b = rows[:, None] @ w1[expert], rows[:, None] @ w2[expert]  # (R, 1, h)
    y = (F.silu(a) * b) @ w3[expert]  # (R, 1, d)
    return (gates[:, :, None] * y.view(*chosen.shape, -1)).sum(dim=1)
"""


def test_a_layer_that_gathers_the_weights_of_every_row_is_safe_too():
    head, _, _ = EXERCISES["graph-safe"].solution.partition("    weight = ")
    assert Desk().check("graph-safe", head + GATHERED).data.startswith("**Right.**")


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("saved-bytes", "raise SystemExit(3)", "the answer ended the process that ran it, with status 3"),
        ("saved-bytes", "while True: pass", "no verdict after 2 seconds, the limit"),
        ("saved-bytes", "torch.ones(10**10)", "RuntimeError|ended the process|MiB of memory, but"),
        ("saved-bytes", "raise OSError('no such thing')", r"OSError: no such thing \(saved-bytes.py, line 2\)"),
    ],
)
def test_an_answer_that_does_harm_harms_nothing_else(name, line, message):
    text = f"{line}\n{EXERCISES[name].solution}"
    if "torch.ones" in line:
        text = f"import torch\n{text}"
    seconds = 2 if "while" in line else 60  # the others end by themselves or by their memory, whenever that is
    assert re.search(message, verdict(name, text, Desk(guard.Limits(seconds, resident_bytes=2**31))))


def test_the_report_has_a_line_for_each_case_with_its_bytes():
    report = Desk().check("expert-by-hand", EXERCISES["expert-by-hand"].solution).data
    lines = [line for line in report.splitlines() if line.startswith("right ")]
    assert len(lines) == 5 and all("bytes saved" in line and "allowed" in line for line in lines)
    assert re.search(r"right   five rows +800 bytes saved, 800 allowed\n", report)


# The projects compare with what is right -----------------------------------------------------------------------------


def test_the_account_is_what_autograd_keeps_of_the_counted_layers():
    torch.manual_seed(0)
    for name, kind, sizes in counter.LAYERS:
        dtype = getattr(torch, sizes.dtype)
        layer = system(kind, dtype=dtype)(sizes.d, sizes.h, sizes.E, sizes.k, sizes.activation)
        x = torch.randn(sizes.L, sizes.d, dtype=dtype, requires_grad=True)
        assert measure.kept_bytes(layer, x) == account(sizes, name).kept_bytes, name


def test_autograd_keeps_more_than_the_checkpoint_allows():
    for case in function.CHECKPOINT.cases():
        floats = {name: torch.from_numpy(array) for name, array in case.inputs.items() if array.dtype == np.float32}
        structures = {name: array for name, array in case.inputs.items() if name not in floats}
        for one in floats.values():
            one.requires_grad_()
        weights = [floats[name] for name in function.WEIGHTS]
        assert (
            measure.kept_bytes(partial(function._experts, **structures), *floats.values(), exclude=weights)
            > case.allowed
        )


@pytest.mark.parametrize("name", PROJECTS)
def test_a_project_has_several_hints_and_a_difficulty(name):
    one = EXERCISES[name]
    assert len(one.hints) >= 2 and 1 <= one.difficulty <= 3 and one.hints[0] in Desk().hint(name).data


# What comes from the reader's process is data ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        {},
        {"dtype": "object", "shape": [1], "data": ""},
        {"dtype": "float32", "shape": [2], "data": "AAAAAA=="},
        {"dtype": "float32", "shape": [-2, 5], "data": "AAAAAA=="},
        {"dtype": "float32", "shape": "x", "data": "AAAAAA=="},
        {"dtype": "float32", "shape": [1], "data": "no base64"},
    ],
)
def test_what_is_no_tensor_is_refused(value):
    with pytest.raises(ChildProcessError, match="has written into the pipe"):
        session.tensor(value)


@pytest.mark.parametrize(
    "tensor",
    [torch.arange(6.0).view(2, 3).T, torch.zeros(0, 4), torch.tensor(True), torch.tensor([3], dtype=torch.int32)],
)
def test_a_tensor_travels_as_it_is(tensor):
    found = session.tensor(json.loads(json.dumps(messages.encoded("x", tensor))))
    assert np.array_equal(found, tensor.numpy()) and found.dtype == tensor.numpy().dtype


@pytest.mark.parametrize(
    ("value", "message"),
    [(3, "x is a int, but it must be a tensor"), (torch.zeros(1).bfloat16(), "x has dtype bfloat16, but it must be")],
)
def test_an_answer_that_is_no_tensor_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        messages.encoded("x", value)


FORGED = [
    ("aten.nonzero.default", [{"node": 0}], "aten.nonzero.default makes a shape that depends on data"),
    ("aten._local_scalar_dense.default", [{"node": 0}], "gives Python a number"),
    ("aten.index.Tensor", [{"node": 0}, [{"node": 1}]], "aten.index.Tensor makes a shape that depends on data"),
    ("os.system", ["true"], "is not one of torch's own operators"),
    ("aten.no_such.default", [], "AttributeError"),
]


@pytest.mark.parametrize(("op", "arguments", "message"), FORGED)
def test_a_forged_trace_is_not_replayed(op, arguments, message):
    """One that a process might send in the place of its own: the operator is refused where it is replayed."""
    nodes = [
        {"op": "input", "args": [], "kwargs": {}},
        {"op": "aten.gt.Scalar", "args": [{"node": 0}, 0], "kwargs": {}},
        {"op": op, "args": arguments, "kwargs": {}},
    ]
    trace = {"nodes": nodes, "out": {"node": 2}}
    sent = []
    torch_cells.graph.replay([trace], [{"x": np.ones(3, np.float32)}], sent.append)
    assert re.search(message, json.loads(b"".join(sent))["error"])


def test_an_answer_that_writes_into_the_pipe_gains_nothing():
    """The bytes that it sends are read as an answer, and compared like any other."""
    work = partial(_write_bytes, b'{"bytes": 1}\n' * len(counter.LAYERS))
    answers = session.Session(guard.Limits(10)).ask(work, len(counter.LAYERS))
    assert answers == [{"bytes": 1}] * len(counter.LAYERS)
    with pytest.raises(ChildProcessError, match="has written into the pipe"):
        session.Session(guard.Limits(10)).ask(partial(_write_bytes, b"no JSON\n"), 1)


def _write_bytes(data, pipe):
    pipe(data)


def test_the_confinement_that_a_system_refuses_is_in_the_report(monkeypatch):
    ended = guard.Ended(b'{"bytes": 1}\n', 0, ("no writing to files",))
    monkeypatch.setattr(in_subprocess, "confined", lambda *_: ended)
    asked = session.Session(guard.Limits(10))
    asked.ask(print, 1)
    assert "It refuses: no writing to files" in asked.verdict([session.Row("a", "b", "")]).report


def test_the_questions_have_the_numbers_of_the_projects():
    question = EXERCISES["balance-router"].question
    assert f"{router.STEPS} steps of {router.TOKENS} tokens" in question and f"have {router.BOUND} times" in question
    assert "five layers" in EXERCISES["saved-bytes"].question and len(counter.LAYERS) == 5
    assert "A storage's address, `data_ptr()`" in EXERCISES["saved-bytes"].question
    assert "four routings" in EXERCISES["graph-safe"].question and len(graph.ROUTINGS) == 4


def test_every_routing_of_the_graphs_layer_differs():
    inputs = [graph._inputs(routing) for routing in graph.ROUTINGS]
    assert len({one["wg"].tobytes() for one in inputs}) == len(graph.ROUTINGS)
