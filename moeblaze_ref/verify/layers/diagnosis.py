"""Name the class of a bug, if what a layer computes fits one class and no other.

A class is one of three kinds. Most are predictions: the reference with that bug computes the same numbers as the layer,
in every case. Some show in ways of running a step alone: a layer that is right in one step and wrong in the second
keeps something of the first. The others are signs in what is wrong.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from moeblaze_ref.verify.layers import cases, large, predictions, reference
from moeblaze_ref.verify.layers.deviations import PARTS, Deviation, Wanted, deviations, worst, wrong_parts
from moeblaze_ref.verify.layers.faults import LayerFault
from moeblaze_ref.verify.layers.predictions import Prediction
from moeblaze_ref.verify.layers.reference import Case, Results, Spec


@dataclass(frozen=True, eq=False)
class Evidence:
    """One plain step, in one dtype."""

    spec: Spec
    case: Case
    found: Results
    wanted: Wanted
    dtype: torch.dtype
    rerun: Callable[[Case], Results]  #: a step of the layer with other numbers

    @functools.cached_property
    def wrong(self) -> list[Deviation]:
        """The tensors that are wrong."""
        return deviations(self.found, self.wanted)

    @functools.cached_property
    def units(self) -> float:
        """The largest error in units of its bound."""
        return worst(self.found, self.wanted)

    def fits(self, predicted: Results) -> bool:
        """Return True if the layer computed the predicted tensors. Tensors without a prediction are ignored."""
        found = {name: self.found[name] for name in predicted if name in self.found}
        return not deviations(found, self.wanted._replace(exact=predicted))


Sign = Callable[[Sequence[Evidence]], bool]


class BugClass(NamedTuple):
    """A class of bugs that public layers have had."""

    name: str
    sentence: str  #: what such a layer does
    reference: str  #: a public thread, or a comment in a released package, that was read; nothing if none was
    prediction: Prediction | None = None
    sign: Sign | None = None
    ways: frozenset[str] = frozenset()  #: of `ways.WAYS`, in which it shows; any of them
    also: frozenset[str] = frozenset()  #: ways in which it may show too
    raises: bool = False  #: it may show in an error; an error can have other causes than most bugs

    def explains(self, evidence: Sequence[Evidence]) -> bool:
        """Return True if a layer with this bug computes these plain steps."""
        signed = self.sign is not None and self.sign(evidence)
        return signed or (self.prediction is not None and all(self._predicts(one) for one in evidence))

    def _predicts(self, evidence: Evidence) -> bool:
        """Return True if a form of the bug fits. A bug without forms has no effect here, so the layer must be right."""
        assert self.prediction is not None
        forms = self.prediction(evidence.spec, evidence.case)
        first = next(forms, evidence.wanted.exact)
        return any(map(evidence.fits, chain([first], forms)))


# ---- signs ---------------------------------------------------------------------------------


def stale_gradient(evidence: Sequence[Evidence]) -> bool:
    """Everything is right but gradients of weights of experts without tokens."""
    wrong = [(one, deviation.tensor) for one in evidence for deviation in one.wrong]
    return bool(wrong) and all(
        name in PARTS and PARTS[name][0] == "expert" and _only_without_tokens(one, name) for one, name in wrong
    )


def _only_without_tokens(evidence: Evidence, name: str) -> bool:
    used = set(evidence.case.topk_index.flatten().tolist())
    wrong = set(wrong_parts(name, evidence.found[name], evidence.wanted))
    return bool(wrong) and not used & wrong


def missing_gradient(evidence: Sequence[Evidence]) -> bool:
    """Everything is right but gradients that are zero; a class of its own has those of given routing weights alone."""
    wrong = [(one, deviation.tensor) for one in evidence for deviation in one.wrong]
    names = {name for _, name in wrong} - {"topk_weights"}
    return bool(names) and "out" not in names and not any(one.found[name].any() for one, name in wrong)


def wrong_tokens(evidence: Sequence[Evidence]) -> bool:
    """The rows of the output are right, and some are at other tokens; the gradients are those of that output."""
    changed = [one for one in evidence if one.wrong]
    return bool(changed) and all(_is_permuted(one) for one in changed)


def _is_permuted(evidence: Evidence) -> bool:
    found, exact = evidence.found["out"], evidence.wanted.exact["out"]
    if found.shape != exact.shape or not found.isfinite().all():
        return False
    order = torch.cdist(found, exact).argmin(1)
    if not order.sort().values.equal(torch.arange(len(order))):
        return False
    spec, case = evidence.spec, evidence.case
    return evidence.fits(
        reference.differentiated(case, lambda inputs: reference.layer(spec, inputs, case.topk_index)[order])
    )


def overwritten(evidence: Sequence[Evidence]) -> bool:
    """Each number of the output is that of one choice, whichever thread wrote last; the gradients are right."""
    changed = [one for one in evidence if one.wrong]
    return bool(changed) and all(_has_one_choice_each(one) for one in changed)


def _has_one_choice_each(evidence: Evidence) -> bool:
    found, choices = evidence.found["out"], reference.weighted_choices(evidence.spec, evidence.case)  # (L, k, d)
    if found.shape != choices[:, 0].shape:
        return False
    nearest = (choices - found[:, None]).abs().argmin(1, keepdim=True)  # (L, 1, d)
    return evidence.fits(evidence.wanted.exact | {"out": choices.gather(1, nearest)[:, 0]})


FEW_BITS_ERROR = 2e-2  # the largest, but for weight gradients that sum many tokens
NARROWEST = 2.0**-8  # relative: the most by which bfloat16 rounds a number
ALIKE, UNLIKE = 0.9, 0.5  # cosines
NOTHING = 1e-10  # a tensor in float64 whose norm is no larger is zero, but for rounding


def few_bits(evidence: Sequence[Evidence]) -> bool:
    """All errors are as small as those of rounding to fewer bits, and change as those do.

    Rounding errors are the same in a second run, and others for numbers that are a few percent off. A wrong constant or
    formula has nearly the same errors there; noise has others in a second run.
    """
    wrong = [one for one in evidence if one.wrong]
    if not wrong or any(
        deviation.error >= _most_of_rounding(one, deviation) for one in wrong for deviation in one.wrong
    ):
        return False
    try:
        return all(one.dtype == torch.float32 for one in wrong) and _change_as_rounding(wrong)
    except LayerFault:  # in another step
        return False


def _most_of_rounding(evidence: Evidence, deviation: Deviation) -> float:
    """The largest error that rounding may have.

    A sum in few bits rounds once for each row, so its error grows as the square root of their number. A weight gradient
    has at most one row for each token, unless a token chooses an expert twice.
    """
    of_a_token = deviation.tensor in PARTS and PARTS[deviation.tensor][0] == "token"
    rows = 1 if of_a_token else evidence.case.sizes.L
    return max(FEW_BITS_ERROR, NARROWEST * math.sqrt(rows))


def _change_as_rounding(wrong: Sequence[Evidence]) -> bool:
    first = [_error(one.wanted.exact, one.found) for one in wrong]
    second = [_error(one.wanted.exact, one.rerun(one.case)) for one in wrong]
    if _cosine(first, second) < ALIKE:
        return False
    nearby = [cases.nearby(one.spec, one.case, one.dtype) for one in wrong]
    moved = [_error(reference.exact(one.spec, case), one.rerun(case)) for one, case in zip(wrong, nearby, strict=True)]
    return abs(_cosine(first, moved)) < UNLIKE


def _error(exact: Results, found: Results) -> Tensor:
    """The errors of what was found, in units of their sizes: (n,). Those of a tensor that is zero count as none."""
    sizes = {name: exact[name].norm() for name in found}
    parts = [
        (tensor - exact[name]) / sizes[name] if sizes[name] > NOTHING else torch.zeros_like(tensor)
        for name, tensor in found.items()
    ]
    return torch.cat([part.flatten() for part in parts])


def _cosine(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """Return the cosine of the errors of all cases, each case's of length one: the largest would decide alone.

    A router's gradient of one token has one direction, up or down. So its errors are alike, or opposite, by chance.
    """
    one, other = (torch.cat([normalize(errors, dim=0) for errors in of_cases]) for of_cases in (a, b))
    return float(torch.cosine_similarity(one, other, dim=0))


def not_finite(evidence: Sequence[Evidence]) -> bool:
    """Some numbers are NaN or infinite in every case with experts without tokens; all else is right."""
    if all(_is_finite(one) for one in evidence):
        return False
    return all(not _is_finite(one) if _has_idle_experts(one.case) else not one.wrong for one in evidence)


def _is_finite(evidence: Evidence) -> bool:
    return all(bool(found.isfinite().all()) for found in evidence.found.values())


def _has_idle_experts(case: Case) -> bool:
    return len(case.topk_index.unique()) < case.sizes.E


# ---- the classes ---------------------------------------------------------------------------

STALE, STATE = "stale gradient of an expert without tokens", "state of an earlier step"
FEW_BITS, ADDING_UP = "too few bits", "gradients do not add up"
SWAPPED, MISREAD = "gate and up exchanged", "gate and up columns misread"
ACTIVATION, ROUTER = "its activation may not be the layer's", "its router may not be the layer's"
#: of classes that a right layer with a wrong adapter looks like: what may be wrong in the adapter
ADAPTER = {
    SWAPPED: "a layout may say gate_up where the layer has up_gate, or the reverse",
    MISREAD: "a layout may say 2h where the layer has h2, or the reverse",
    "another activation": ACTIVATION,
    "constants of the activation wrong": ACTIVATION,
    "gates not renormalized": ROUTER,
    "gates renormalized": ROUTER,
    "gate on the wrong side": ROUTER,
    "scaling factor wrong": ROUTER,
    "groups of experts wrong": ROUTER,
}

CLASSES = (
    BugClass(
        SWAPPED,
        "It applies the activation to the up-projection.",
        "sglang 0.5.23, srt/hardware_backend/npu/quantization/online_moe_methods.py, line 49",
        predictions.swapped,
    ),
    BugClass(
        MISREAD,
        "It reads concatenated columns of gate and up as alternating ones, or the reverse.",
        "Dao-AILab/sonic-moe#45",
        predictions.interleaved,
    ),
    BugClass(
        "weights transposed",
        "It reads weights as if they were stored transposed.",
        "unslothai/unsloth-zoo#849",
        predictions.transposed,
    ),
    BugClass(
        "gates not renormalized",
        "It does not divide the gates by the sum of the chosen ones.",
        "pytorch/torchtitan#1448",
        predictions.not_renormalized,
    ),
    BugClass(
        "gates renormalized",
        "It divides the gates by their sum, as a softmax after the choice does, where it must not.",
        "flashinfer-ai/flashinfer#2889",
        predictions.renormalized,
    ),
    BugClass(
        "softmax taken twice",
        "It takes a softmax of gates or probabilities that a softmax has made.",
        "1bit-MONSTER/1bit-MONSTER#2090",
        predictions.softmax_twice,
    ),
    BugClass(
        "gates without gradient",
        "No gradient reaches the router through the gates.",
        "TIML-Group/Robust-MoE-Dual-Model#2",
        predictions.detached,
    ),
    BugClass(
        "divisor of the gates without gradient",
        "It divides the gates by their sum, and no gradient flows through the sum.",
        "",
        predictions.divisor_detached,
    ),
    BugClass(
        "gate on the wrong side",
        "The gate multiplies the input of an expert instead of its output, or the reverse, or both.",
        "vllm-project/vllm#43694",
        predictions.other_side,
    ),
    BugClass(
        "gates of other choices",
        "It sorts the ids without their gates, so a choice has the gate of another one.",
        "",
        predictions.other_gates,
    ),
    BugClass(
        "tokens over a capacity dropped",
        "It drops rows beyond a capacity.",
        "torchtitan 0.3.0, distributed/deepep/hybridep.py, line 179",
        predictions.over_capacity,
    ),
    BugClass(
        "last tile lost",
        "It loses the rows of an expert's last tile.",
        "axolotl-ai-cloud/axolotl#3410",
        predictions.partial_tile,
    ),
    BugClass("last row lost", "It loses the last row of an expert, or the first.", "", predictions.row_lost),
    BugClass(
        "an expert never runs",
        "The first or the last expert contributes nothing.",
        "kekzl/imp#2056",
        predictions.expert_lost,
    ),
    BugClass(
        "choices of a token lost",
        "One choice of a token overwrites the others, or one is left out.",
        "torch-spyre/torch-spyre#3638",
        predictions.choice_lost,
        overwritten,
    ),
    BugClass(
        "outputs at wrong tokens",
        "It puts right rows of the output at other tokens.",
        "pytorch/torchtitan#3604",
        sign=wrong_tokens,
    ),
    BugClass(
        "selection bias in the gates",
        "The gates contain the selection bias.",
        "huggingface/transformers#39581",
        predictions.biased_gates,
    ),
    BugClass(
        "selection bias ignored",
        "Its choice of experts does not add the selection bias, or subtracts it.",
        "",
        predictions.bias_ignored,
    ),
    BugClass(
        "scaling factor wrong",
        "It scales the gates not at all, or twice.",
        "vllm-project/vllm#24119",
        predictions.wrong_scale,
    ),
    BugClass(
        "groups of experts wrong",
        "It compares groups by another score, or ignores them.",
        "vllm-project/vllm#13474",
        predictions.wrong_groups,
    ),
    BugClass(
        "expert bias omitted", "It adds no bias to some projection.", "allenai/OLMo-core#763", predictions.bias_omitted
    ),
    BugClass(
        "down bias not weighted",
        "It adds the down bias without the gate.",
        "NVIDIA-NeMo/Automodel#2591",
        predictions.bias_not_weighted,
    ),
    BugClass(
        "another activation", "It computes another activation.", "vllm-project/vllm#41574", predictions.other_activation
    ),
    BugClass(
        "constants of the activation wrong",
        "Its activation lacks a clamp, a factor or a summand.",
        "sglang 0.5.23, srt/layers/moe/moe_runner/triton_utils/fused_moe.py, line 1275",
        predictions.activation_constants,
    ),
    BugClass(
        "shared expert wrong",
        "The shared expert is missing, or counts twice, or lacks its gate.",
        "divyamakkar0/JAXformer#21",
        predictions.shared_expert,
    ),
    BugClass(
        STALE,
        "The weight gradient of an expert without tokens is not zero.",
        "pytorch/pytorch#172439",
        sign=stale_gradient,
    ),
    BugClass(
        "a gradient is missing",
        "A gradient is zero that must not be.",
        "unslothai/unsloth-zoo#606",
        sign=missing_gradient,
    ),
    BugClass(
        "NaN from experts without tokens",
        "It computes NaN or infinity if an expert has no token.",
        "meta-pytorch/MSLK#158",
        sign=not_finite,
    ),
    BugClass(FEW_BITS, "It rounds to fewer bits than its dtype has.", "vllm-project/vllm#15045", sign=few_bits),
    BugClass(
        STATE,
        "It keeps something of a step and uses it in a later one of the same shape.",
        "sgl-project/sglang#19787",
        ways=frozenset({"a second step of the same shape"}),
        also=frozenset(
            {
                "two steps in flight",
                "the same inputs again",
                "frozen weights or inputs",
                "no gradients wanted",
                "a step after inference",
                "evaluation",
                "a step without tokens",
                "other sizes",
                "deterministic algorithms",
                "memory full of NaN",
            }
        ),
    ),
    BugClass(
        "sizes of an earlier step",
        "It keeps a buffer or a size of a step, and a step of another size does not fit.",
        "sgl-project/sglang#26913",
        ways=frozenset({"other sizes"}),
        raises=True,
    ),
    BugClass(
        "state shared between steps",
        "A forward overwrites what the backward of another one needs.",
        "",
        ways=frozenset({"two steps in flight"}),
    ),
    BugClass(
        "backward destroys what it needs",
        "A second backward of the same graph computes something else.",
        "",
        ways=frozenset({"a second backward"}),
    ),
    BugClass(
        ADDING_UP,
        "It overwrites gradients that are there.",
        "NVIDIA/TransformerEngine#2769",
        ways=frozenset({"gradients that add up"}),
    ),
    BugClass(
        "recomputation differs",
        "Its backward is wrong if the forward is run again for it.",
        "NVIDIA-NeMo/Automodel#2635",
        ways=frozenset({"activation checkpointing"}),
        raises=True,
    ),
    BugClass(
        "inputs are changed",
        "It changes what it is called with.",
        "huggingface/transformers#41313",
        ways=frozenset({"inputs after a step"}),
        also=frozenset(
            {
                "the same inputs again",
                "a second backward",
                "gradients that add up",
                "activation checkpointing",
                "frozen weights or inputs",
                "an expanded x",
            }
        ),
        raises=True,
    ),
    BugClass(
        "frozen weights break it",
        "It is wrong if some weights or inputs want no gradient.",
        "NVIDIA/Megatron-LM#548",
        ways=frozenset({"frozen weights or inputs"}),
        raises=True,
    ),
    BugClass(
        "strides ignored",
        "It reads tensors as if they were contiguous.",
        "intel/intel-xpu-backend-for-triton#7455",
        ways=frozenset({"a strided x", "a transposed x", "an expanded x"}),
    ),
    BugClass(
        "uninitialised memory",
        "It uses memory that nothing was written to.",
        "pytorch/pytorch#193633",
        ways=frozenset({"memory full of NaN"}),
    ),
    BugClass(
        "deterministic mode differs",
        "It computes something else under torch.use_deterministic_algorithms.",
        "",
        ways=frozenset({"deterministic algorithms"}),
        also=frozenset({"memory full of NaN"}),
    ),
    BugClass(
        "inference differs",
        "It computes something else where no gradient is wanted, or after eval().",
        "",
        ways=frozenset({"no gradients wanted", "evaluation"}),
    ),
    BugClass(
        "indices past 2^31",
        "It counts elements in 32 bits.",
        "linkedin/Liger-Kernel#1248",
        ways=frozenset({large.WAY}),
        raises=True,
    ),
    BugClass(
        "autocast",
        "It is wrong under autocast.",
        "huggingface/transformers#43839",
        ways=frozenset({"autocast"}),
        raises=True,
    ),
)


def of_steps(evidence: Sequence[Evidence]) -> list[str]:
    """The names of the classes that explain all plain steps, of which some are wrong."""
    return [bug.name for bug in CLASSES if bug.explains(evidence)]


def of_ways(failed: set[str], raised: set[str], evidence: Sequence[Evidence]) -> list[str]:
    """Return the names of the classes that explain in which ways a layer fails whose plain steps are right.

    Where no class explains all ways, two may: such a name says "and". Errors that no class explains are left out, if
    the layer also computes something wrong.

    Parameters
    ----------
    failed, raised : set of str
        Ways in which it computes something wrong or raises an error; those in which it raises one.
    evidence : sequence of Evidence
        Of all ways.
    """
    names = _bugs(failed, raised) or _bugs(failed - raised, set())
    if names == [STATE] and stale_gradient(evidence):
        return [STALE]
    return [FEW_BITS] if names == [ADDING_UP] and few_bits(evidence) else names


def _bugs(failed: set[str], raised: set[str]) -> list[str]:
    """The names of single classes that explain these ways; if there is none, of pairs."""
    for size in (1, 2):
        groups = [group for group in combinations(CLASSES, size) if _explain(group, failed, raised)]
        if groups:
            return [" and ".join(bug.name for bug in group) for group in groups]
    return []


def _explain(group: tuple[BugClass, ...], failed: set[str], raised: set[str]) -> bool:
    """Return True if the bugs explain all failed ways, and each bug explains a way that the others do not."""
    shows = [bug.ways | bug.also for bug in group]
    errors = [ways for bug, ways in zip(group, shows, strict=True) if bug.raises]
    needed = all(
        bug.ways & failed - frozenset().union(*shows[:place], *shows[place + 1 :]) for place, bug in enumerate(group)
    )
    return needed and failed <= frozenset().union(*shows) and raised <= frozenset().union(*errors)
