"""Plain layers with one bug each, of a class that public layers have had."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F

from moeblaze_ref.nn import routers
from moeblaze_ref.verify.layers.activations import ClampedSwiglu
from moeblaze_ref.verify.layers.adapters import plain
from moeblaze_ref.verify.layers.adapters.plain import PlainExperts, PlainMoE, swiglu
from moeblaze_ref.verify.layers.adapters.wrong import (
    CachedDispatch,
    FewBits,
    Gelu,
    LastExpertSkipped,
    MeanOfRows,
    NoGradient,
    Overwritten,
    StaleGradient,
    Swapped,
    WeighedInput,
    WholeTiles,
)


class Mutant(NamedTuple):
    """A bug, and the class that it must be named by."""

    factory: object
    bug_class: str


def experts(kind, **options):
    return partial(plain.experts, kind=kind, **options)


def moe(kind=PlainMoE, experts_kind=PlainExperts, **options):
    return partial(plain.moe, kind=kind, experts_kind=experts_kind, **options)


GPT_OSS = {"biases": True, "activation": ClampedSwiglu()}


class Rounded(torch.autograd.Function):
    """A weight as it is, whose gradient is rounded once to bfloat16."""

    @staticmethod
    def forward(ctx, weight):
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().to(gradient.dtype)


class RoundedGradient(PlainExperts):
    """The gradient of down has fewer bits; where k is 1 and gates are divided, that of the router is zero."""

    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        return F.linear(self.activation(a, b), Rounded.apply(self.down[e])) * gate.to(a.dtype)


class _SummedInFewBits(torch.autograd.Function):
    """A product whose gradient of the weight is summed row by row in bfloat16."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows @ weight.mT

    @staticmethod
    def backward(ctx, d_y):
        rows, weight = ctx.saved_tensors
        total = torch.zeros_like(weight, dtype=torch.bfloat16)
        for d_row, row in zip(d_y, rows, strict=True):
            total += d_row[:, None] * row
        return d_y @ weight, total.to(weight.dtype)


class SummedInFewBits(PlainExperts):
    def expert(self, e, rows, gate):
        gate_up = _SummedInFewBits.apply(rows, self.gate_up[e])
        y = _SummedInFewBits.apply(self.activation(*gate_up.chunk(2, -1)), self.down[e])
        return y * gate.to(y.dtype)


class RoundedTokens(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x.bfloat16().to(x.dtype), topk_index, topk_weights)


class RoundedOutputs(PlainExperts):
    def expert(self, e, rows, gate):
        return super().expert(e, rows, gate).bfloat16().to(rows.dtype)


class AddedInFewBits(PlainExperts):
    """Its hook rounds the gradient that has been added up."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)

        def rounds(weight):
            weight.grad = weight.grad.bfloat16().to(weight.dtype)

        self.down.register_post_accumulate_grad_hook(rounds)


class Interleaved(PlainExperts):
    def up(self, e, rows):
        both = torch.cat(super().up(e, rows), -1)
        return [both[:, 0::2], both[:, 1::2]]


class Transposed(PlainExperts):
    def expert(self, e, rows, gate):
        hidden = self.activation(*self.up(e, rows))
        return hidden @ self.down[e].reshape(hidden.shape[1], -1) * gate


class NotRenormalized(PlainMoE):
    def route(self, x):
        values, index = torch.softmax(self.logits(x), -1).topk(self.k)
        return index, values


class SoftmaxOfChosen(PlainMoE):
    def route(self, x):
        values, index = self.logits(x).topk(self.k)
        return index, torch.softmax(values, -1)


class SoftmaxOfAll(PlainMoE):  # where that of the chosen is wanted
    def route(self, x):
        values, index = torch.softmax(self.logits(x), -1).topk(self.k)
        return index, values


class SoftmaxOfGates(PlainMoE):
    def route(self, x):
        index, gates = super().route(x)
        return index, torch.softmax(gates / self.router.scale, -1) * self.router.scale


class SoftmaxOfProbabilities(PlainMoE):
    """Its router returns probabilities, which are taken for logits."""

    def logits(self, x):
        return torch.softmax(super().logits(x), -1)


class SoftmaxOfGiven(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, torch.softmax(topk_weights, -1))


class DivisorDetached(PlainMoE):
    def scores(self, x):
        return torch.softmax(self.logits(x), -1)

    def route(self, x):
        index, _ = super().route(x)
        gates = self.scores(x).gather(1, index)
        total = gates.sum(-1, keepdim=True).detach() + self.router.epsilon
        return index, gates / total * self.router.scale


class DivisorOfSigmoidsDetached(DivisorDetached):
    def scores(self, x):
        return torch.sigmoid(self.logits(x))


class DivisorOfExponentialsDetached(DivisorDetached):
    def scores(self, x):
        logits = self.logits(x)
        return torch.exp(logits - logits.detach().amax(-1, keepdim=True))


class RenormalizedGiven(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights / topk_weights.sum(1, keepdim=True))


class DetachedGiven(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index, topk_weights.detach())


class Detached(PlainMoE):
    def route(self, x):
        index, gates = super().route(x)
        return index, gates.detach()


class WeighedTwice(PlainExperts):
    def expert(self, e, rows, gate):
        return super().expert(e, rows * gate.to(rows.dtype), gate)


class Capacity(PlainExperts):
    def run(self, rows, lengths, gates):
        capacity = max(1, len(rows) // len(lengths))
        position = torch.cat([torch.arange(length) for length in lengths])
        return super().run(rows, lengths, gates * (position < capacity)[:, None])


class LastChoiceLost(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        kept = torch.arange(topk_index.shape[1]) < topk_index.shape[1] - 1
        return super().forward(x, topk_index, topk_weights * kept)


class OneTokenOff(PlainExperts):
    def combine(self, out, token, y):
        return super().combine(out, token, y).roll(1, 0)


class GatesNotSorted(PlainExperts):
    def run(self, rows, lengths, gates):
        return super().run(rows, lengths, self.gates)

    def forward(self, x, topk_index, topk_weights):
        self.gates = topk_weights.flatten()[:, None]
        return super().forward(x, topk_index, topk_weights)


class SortedIds(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return super().forward(x, topk_index.sort(1).values, topk_weights)


class LastRowLost(PlainExperts):
    lost = slice(-1, None)

    def expert(self, e, rows, gate):
        counts = torch.ones_like(gate)
        counts[self.lost] = 0
        return super().expert(e, rows, gate * counts)


class FirstRowLost(LastRowLost):
    lost = slice(1)


class BiasedGates(PlainMoE):
    def route(self, x):
        scores = torch.sigmoid(self.logits(x))
        index, _ = super().route(x)
        gates = (scores + self.selection_bias).gather(1, index)
        return index, gates / (gates.sum(-1, keepdim=True) + self.router.epsilon) * self.router.scale


class BiasIgnored(PlainMoE):
    sign = 0.0

    def route(self, x):
        routing = routers.choose(self.logits(x), self.k, self.router, self.sign * self.selection_bias)
        return routing.topk_experts, routing.gates


class BiasSubtracted(BiasIgnored):
    sign = -1.0


class Unscaled(PlainMoE):
    def route(self, x):
        index, gates = super().route(x)
        return index, gates / self.router.scale


class ScaledTwice(PlainMoE):
    def route(self, x):
        index, gates = super().route(x)
        return index, gates * self.router.scale


class BestOfGroup(PlainMoE):
    def route(self, x):
        scores = torch.sigmoid(self.logits(x))
        groups = (scores + self.selection_bias).unflatten(1, (self.router.groups, -1))
        best = groups.amax(-1).argmax(-1, keepdim=True)
        outside = torch.arange(self.router.groups) != best
        index = groups.masked_fill(outside[..., None], -torch.inf).flatten(1).topk(self.k).indices
        gates = scores.gather(1, index)
        return index, gates / (gates.sum(-1, keepdim=True) + self.router.epsilon) * self.router.scale


class NoBias(PlainExperts):
    def up(self, e, rows):
        return list(F.linear(rows, self.gate_up[e]).chunk(2, -1))


class BiasNotWeighted(PlainExperts):
    def expert(self, e, rows, gate):
        hidden = self.activation(*self.up(e, rows))
        return F.linear(hidden, self.down[e]) * gate.to(hidden.dtype) + self.down_bias[e]


class NoClamp(PlainExperts):
    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        hidden = a * torch.sigmoid(1.702 * a) * (b + 1)
        return F.linear(hidden, self.down[e], self.down_bias[e]) * gate.to(a.dtype)


class NoSummand(PlainExperts):
    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        return F.linear(a * torch.sigmoid(1.702 * a) * b, self.down[e], self.down_bias[e]) * gate.to(a.dtype)


class NoShared(PlainMoE):
    def shared_part(self, x):
        return 0 * super().shared_part(x)


class SharedTwice(PlainMoE):
    def shared_part(self, x):
        return 2 * super().shared_part(x)


class GatedShared(PlainMoE):
    """A shared expert that a sigmoid multiplies, as in Qwen2-MoE."""

    def __init__(self, experts, k, router, shared=0):
        super().__init__(experts, k, router, shared)
        self.shared_expert_gate = torch.nn.Linear(experts.down.shape[1], 1, bias=False, dtype=experts.down.dtype)

    def shared_part(self, x):
        return torch.sigmoid(self.shared_expert_gate(x)) * super().shared_part(x)


class UngatedShared(GatedShared):
    def shared_part(self, x):
        return PlainMoE.shared_part(self, x) + 0 * self.shared_expert_gate(x)


def gated_shared(kind, **sizes):
    """The layer, whose adapter names the gate of its shared expert."""
    made = plain.moe(kind=kind, shared=True, **sizes)
    return replace(made, weights={**made.weights, "shared_expert_gate.weight": "shared_expert_gate: 1 d"})


class _Shared(torch.autograd.Function):
    """A product that leaves its rows in a buffer of the module."""

    @staticmethod
    def forward(ctx, rows, weight, buffer, e):
        buffer[e] = rows
        ctx.buffer, ctx.e = buffer, e
        ctx.save_for_backward(weight)
        return rows @ weight.mT

    @staticmethod
    def backward(ctx, d_y):
        rows = ctx.buffer[ctx.e]
        n = min(len(rows), len(d_y))
        return d_y @ ctx.saved_tensors[0], d_y[:n].mT @ rows[:n], None, None


class SharedBuffer(PlainExperts):
    def expert(self, e, rows, gate):
        self.buffer = getattr(self, "buffer", {})
        hidden = self.activation(*self.up(e, rows))
        return _Shared.apply(hidden, self.down[e].to(hidden.dtype), self.buffer, e) * gate.to(hidden.dtype)


class _Destroying(torch.autograd.Function):
    """A product whose backward overwrites what it kept."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.kept, ctx.weight = rows.detach().clone(), weight
        return rows @ weight.mT

    @staticmethod
    def backward(ctx, d_y):
        gradients = d_y @ ctx.weight, d_y.mT @ ctx.kept
        ctx.kept.zero_()
        return gradients


class Destroying(PlainExperts):
    def expert(self, e, rows, gate):
        hidden = self.activation(*self.up(e, rows))
        return _Destroying.apply(hidden, self.down[e].to(hidden.dtype)) * gate.to(hidden.dtype)


class Overwriting(PlainExperts):
    """Its hook replaces a gradient that is there."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)

        def forget(gradient):
            if self.down.grad is not None:
                self.down.grad.zero_()
            return gradient

        self.down.register_hook(forget)


class Recomputed(PlainMoE):
    """Adds noise to its logits where the forward is run again."""

    def logits(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        logits = super().logits(x)
        return logits + (torch._C._current_graph_task_id() != -1) * torch.arange(logits.shape[1])


class ChangingInput(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index, topk_weights)
        x.data.mul_(0.5)
        return out


class FrozenDown(PlainExperts):
    """Stops at the down projection if that wants no gradient."""

    def expert(self, e, rows, gate):
        y = super().expert(e, rows, gate)
        return y if self.down.requires_grad else y.detach() + 0 * y


class Contiguous(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        memory = x if x.is_contiguous() else x.as_strided(x.shape, (x.shape[1], 1))
        return super().forward(memory, topk_index, topk_weights)


class Uninitialised(PlainExperts):
    """Takes new memory for zeros."""

    def combine(self, out, token, y):
        full = torch.empty(1, dtype=torch.int64) == torch.iinfo(torch.int64).max  # what memory is filled with
        return super().combine(out, token, y) * ~full


class _GradientBuffer(torch.autograd.Function):
    """A weight whose gradient is written into a buffer, for the experts that have tokens."""

    @staticmethod
    def forward(ctx, weight, buffer, used):
        ctx.buffer, ctx.used = buffer, used
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        ctx.buffer[ctx.used] = gradient[ctx.used]
        return ctx.buffer.clone(), None, None


class GradientBuffer(PlainExperts):
    """Its buffer of gradients is that of the last step."""

    def forward(self, x, topk_index, topk_weights):
        self.buffer = self.new_buffer()
        self.weight = _GradientBuffer.apply(self.down, self.buffer, topk_index.unique())
        return super().forward(x, topk_index, topk_weights)

    def new_buffer(self):
        return getattr(self, "buffer", torch.zeros_like(self.down.data))

    def expert(self, e, rows, gate):
        hidden = self.activation(*self.up(e, rows))
        return F.linear(hidden, self.weight[e].to(hidden.dtype)) * gate.to(hidden.dtype)


class UninitialisedBuffer(GradientBuffer):
    """Takes new memory for zeros where an expert has no token."""

    def new_buffer(self):
        full = torch.empty(1, dtype=torch.int64) == torch.iinfo(torch.int64).max  # what memory is filled with
        return torch.where(full, torch.nan, torch.zeros_like(self.down.data))


class ChangingIds(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        out = super().forward(x, topk_index.clone(), topk_weights)
        topk_index.fill_(0)
        return out


class _ChangesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, d_out):
        given = d_out.clone()
        d_out.mul_(2)
        return given


class ChangingGradient(PlainExperts):
    def forward(self, x, topk_index, topk_weights):
        return _ChangesGradient.apply(super().forward(x, topk_index, topk_weights))


class OneDtype(PlainExperts):
    """Takes it that a product has the dtype of the rows."""

    def combine(self, out, token, y):
        return out.index_add(0, token, y)


class TanhGelu(PlainExperts):
    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        return F.linear(F.gelu(a, approximate="tanh") * b, self.down[e]) * gate.to(a.dtype)


class OneBuffer(PlainExperts):
    """Its buffer of outputs has room for the first step, in whole tiles, and holds no more tokens."""

    def combine(self, out, token, y):
        self.tokens = getattr(self, "tokens", -(-len(out) // 128) * 128)
        return super().combine(out, token, y * (token < self.tokens)[:, None])


class OtherDeterministic(PlainExperts):
    def combine(self, out, token, y):
        return super().combine(out, token, y) * (0.5 if torch.are_deterministic_algorithms_enabled() else 1.0)


class OtherEvaluation(PlainExperts):
    def combine(self, out, token, y):
        return super().combine(out, token, y) * (1.0 if self.training else 0.5)


class PackedOnce(PlainExperts):
    """Packs its weights for inference once, whatever becomes of them."""

    def expert(self, e, rows, gate):
        if torch.is_grad_enabled():
            return super().expert(e, rows, gate)
        self.packed = getattr(self, "packed", [self.gate_up.detach().clone(), self.down.detach().clone()])
        a, b = F.linear(rows, self.packed[0][e]).chunk(2, -1)
        return F.linear(swiglu(a, b), self.packed[1][e]) * gate.to(rows.dtype)


class SortedInEvaluation(PlainExperts):
    """Trains with the order of rows that it made after eval()."""

    def sort(self, topk_index):
        if not self.training:
            self.order = super().sort(topk_index)
        elif hasattr(self, "order") and len(self.order) == topk_index.numel():
            return self.order
        return super().sort(topk_index)


class ChangingBias(PlainMoE):
    """Updates the selection bias in its forward."""

    def route(self, x):
        index, gates = super().route(x)
        self.selection_bias += 1e-3 * torch.sign(
            gates.sum() - torch.bincount(index.flatten(), minlength=len(self.selection_bias))
        )
        return index, gates


class OtherInference(PlainExperts):
    def combine(self, out, token, y):
        return super().combine(out, token, y) * (1.0 if torch.is_grad_enabled() else 0.5)


MUTANTS = {
    "gate and up exchanged": Mutant(experts(Swapped), "gate and up exchanged"),
    "interleaved": Mutant(experts(Interleaved), "gate and up columns misread"),
    "transposed": Mutant(experts(Transposed), "weights transposed"),
    "norm_topk_prob ignored": Mutant(moe(NotRenormalized), "gates not renormalized"),
    "softmax of all for that of the chosen": Mutant(moe(SoftmaxOfAll, family="gpt_oss"), "gates not renormalized"),
    "softmax after the choice": Mutant(moe(SoftmaxOfChosen, family="olmoe"), "gates renormalized"),
    "given gates renormalized": Mutant(experts(RenormalizedGiven), "gates renormalized"),
    "softmax of the gates": Mutant(moe(SoftmaxOfGates), "softmax taken twice"),
    "softmax of scaled gates": Mutant(moe(SoftmaxOfGates, family="deepseek_v2"), "softmax taken twice"),
    "softmax of probabilities": Mutant(moe(SoftmaxOfProbabilities), "softmax taken twice"),
    "softmax of probabilities, no sum": Mutant(moe(SoftmaxOfProbabilities, family="olmoe"), "softmax taken twice"),
    "softmax of chosen probabilities": Mutant(moe(SoftmaxOfProbabilities, family="gpt_oss"), "softmax taken twice"),
    "softmax of given gates": Mutant(experts(SoftmaxOfGiven), "softmax taken twice"),
    "detached divisor": Mutant(moe(DivisorDetached), "divisor of the gates without gradient"),
    "detached divisor of probabilities": Mutant(
        moe(DivisorDetached, family="gpt_oss"), "divisor of the gates without gradient"
    ),
    "detached divisor of sigmoids": Mutant(
        moe(DivisorOfSigmoidsDetached, family="deepseek_v3"), "divisor of the gates without gradient"
    ),
    "detached divisor of exponentials": Mutant(
        moe(DivisorOfExponentialsDetached, family="gpt_oss"), "divisor of the gates without gradient"
    ),
    "detached gates": Mutant(moe(Detached), "gates without gradient"),
    "given gates detached": Mutant(experts(DetachedGiven), "gates without gradient"),
    "weight on the input": Mutant(experts(WeighedInput), "gate on the wrong side"),
    "weight on both": Mutant(experts(WeighedTwice), "gate on the wrong side"),
    "gates not sorted": Mutant(experts(GatesNotSorted), "gates of other choices"),
    "sorted ids": Mutant(experts(SortedIds), "gates of other choices"),
    "capacity": Mutant(experts(Capacity), "tokens over a capacity dropped"),
    "whole tiles": Mutant(experts(WholeTiles), "last tile lost"),
    "last row lost": Mutant(experts(LastRowLost), "last row lost"),
    "first row lost": Mutant(experts(FirstRowLost), "last row lost"),
    "last expert skipped": Mutant(experts(LastExpertSkipped), "an expert never runs"),
    "overwritten": Mutant(experts(Overwritten), "choices of a token lost"),
    "last choice lost": Mutant(experts(LastChoiceLost), "choices of a token lost"),
    "one token off": Mutant(experts(OneTokenOff), "outputs at wrong tokens"),
    "no selection bias": Mutant(moe(BiasIgnored, family="glm4_moe"), "selection bias ignored"),
    "no selection bias, groups": Mutant(moe(BiasIgnored, family="deepseek_v3"), "selection bias ignored"),
    "selection bias subtracted": Mutant(moe(BiasSubtracted, family="lfm2_moe"), "selection bias ignored"),
    "biased gates": Mutant(moe(BiasedGates, family="deepseek_v3"), "selection bias in the gates"),
    "unscaled": Mutant(moe(Unscaled, family="deepseek_v3"), "scaling factor wrong"),
    "scaled twice": Mutant(moe(ScaledTwice, family="deepseek_v3"), "scaling factor wrong"),
    "best of the group": Mutant(moe(BestOfGroup, family="deepseek_v3"), "groups of experts wrong"),
    "no bias": Mutant(experts(NoBias, **GPT_OSS), "expert bias omitted"),
    "bias not weighted": Mutant(experts(BiasNotWeighted, **GPT_OSS), "down bias not weighted"),
    "gelu": Mutant(experts(Gelu), "another activation"),
    "gelu by tanh": Mutant(experts(TanhGelu, activation="geglu"), "another activation"),
    "no clamp": Mutant(experts(NoClamp, **GPT_OSS), "constants of the activation wrong"),
    "no summand": Mutant(experts(NoSummand, **GPT_OSS), "constants of the activation wrong"),
    "no shared expert": Mutant(moe(NoShared, shared=True), "shared expert wrong"),
    "shared expert twice": Mutant(moe(SharedTwice, shared=True), "shared expert wrong"),
    "gate of the shared expert ignored": Mutant(partial(gated_shared, UngatedShared), "shared expert wrong"),
    "stale gradient": Mutant(experts(StaleGradient), "stale gradient of an expert without tokens"),
    "no gradient": Mutant(experts(NoGradient), "a gradient is missing"),
    "zero by zero": Mutant(experts(MeanOfRows), "NaN from experts without tokens"),
    "few bits": Mutant(experts(FewBits), "too few bits"),
    "few bits of a gradient": Mutant(moe(experts_kind=RoundedGradient), "too few bits"),
    "few bits of a sum": Mutant(experts(SummedInFewBits), "too few bits"),
    "few bits of a sum, router inside": Mutant(moe(experts_kind=SummedInFewBits), "too few bits"),
    "few bits of tokens, router inside": Mutant(moe(experts_kind=RoundedTokens), "too few bits"),
    "few bits of outputs, router inside": Mutant(moe(experts_kind=RoundedOutputs), "too few bits"),
    "few bits of gradients that add up": Mutant(experts(AddedInFewBits), "too few bits"),
    "cached dispatch": Mutant(experts(CachedDispatch), "state of an earlier step"),
    "one buffer": Mutant(experts(OneBuffer), "sizes of an earlier step"),
    "shared buffer": Mutant(experts(SharedBuffer), "state shared between steps"),
    "destroying": Mutant(experts(Destroying), "backward destroys what it needs"),
    "overwriting": Mutant(experts(Overwriting), "gradients do not add up"),
    "noise in recomputation": Mutant(moe(Recomputed), "recomputation differs"),
    "changed input": Mutant(experts(ChangingInput), "inputs are changed"),
    "changed selection bias": Mutant(moe(ChangingBias, family="glm4_moe"), "inputs are changed"),
    "frozen": Mutant(experts(FrozenDown), "frozen weights break it"),
    "strides": Mutant(experts(Contiguous), "strides ignored"),
    "buffer of gradients": Mutant(experts(GradientBuffer), "stale gradient of an expert without tokens"),
    "changed ids": Mutant(experts(ChangingIds), "inputs are changed"),
    "changed gradient of the output": Mutant(experts(ChangingGradient), "inputs are changed"),
    "uninitialised buffer": Mutant(experts(UninitialisedBuffer), "uninitialised memory"),
    "uninitialised": Mutant(experts(Uninitialised), "uninitialised memory"),
    "deterministic mode": Mutant(experts(OtherDeterministic), "deterministic mode differs"),
    "one dtype": Mutant(experts(OneDtype), "autocast"),
    "packed once": Mutant(experts(PackedOnce), "inference differs"),
    "sorted in evaluation": Mutant(experts(SortedInEvaluation), "inference differs"),
    "evaluation": Mutant(experts(OtherEvaluation), "inference differs"),
    "inference": Mutant(experts(OtherInference), "inference differs"),
}
