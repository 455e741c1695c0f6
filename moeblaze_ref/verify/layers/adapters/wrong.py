"""Plain layers with one bug each, of classes that public layers have had: for the course, and for tests."""

import torch
import torch.nn.functional as F

from moeblaze_ref.verify.layers.adapters.plain import PlainExperts, swiglu


class Zeros(PlainExperts):
    """Returns zeros."""

    def forward(self, x, topk_index, topk_weights):
        return 0 * super().forward(x, topk_index, topk_weights)


class Swapped(PlainExperts):
    """Applies the activation to the up-projection."""

    def up(self, e, rows):
        return super().up(e, rows)[::-1]


class Gelu(PlainExperts):
    """Computes GELU in place of SiLU."""

    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        return F.linear(F.gelu(a) * b, self.down[e]) * gate.to(a.dtype)


class WeighedInput(PlainExperts):
    """The gate multiplies an expert's input."""

    def expert(self, e, rows, gate):
        return super().expert(e, rows * gate.to(rows.dtype), torch.ones_like(gate))


class WholeTiles(PlainExperts):
    """Loses the rows of an expert that fill no tile."""

    tile = 16

    def expert(self, e, rows, gate):
        whole = len(rows) // self.tile * self.tile
        done = super().expert(e, rows[:whole], gate[:whole])
        return torch.cat([done, torch.zeros_like(rows[whole:])])


class LastExpertSkipped(PlainExperts):
    """The last expert contributes nothing."""

    def expert(self, e, rows, gate):
        return super().expert(e, rows, gate * (e != len(self.down) - 1))


class Overwritten(PlainExperts):
    """The last choice of a token overwrites the others."""

    def combine(self, out, token, y):
        return out.index_put((token,), y.to(out.dtype))


class NoGradient(PlainExperts):
    """No gradient reaches the up-projections."""

    def up(self, e, rows):
        return list(F.linear(rows, self.gate_up[e].detach()).chunk(2, -1))


class _Stale(torch.autograd.Function):
    """A product whose gradient of the weight is not written if there are no rows."""

    @staticmethod
    def forward(ctx, rows, weight):
        ctx.save_for_backward(rows, weight)
        return rows @ weight.mT

    @staticmethod
    def backward(ctx, d_y):
        rows, weight = ctx.saved_tensors
        return d_y @ weight, d_y.mT @ rows if len(rows) else torch.full_like(weight, 0.25)


class StaleGradient(PlainExperts):
    """The gradient of an expert without tokens is not zero."""

    def expert(self, e, rows, gate):
        hidden = self.activation(*self.up(e, rows))
        return _Stale.apply(hidden, self.down[e].to(hidden.dtype)) * gate.to(hidden.dtype)


class MeanOfRows(PlainExperts):
    """An expert without tokens divides zero by zero."""

    def run(self, rows, lengths, gates):
        means = [gate.sum() / gate.numel() for gate in gates.split(lengths)]
        return super().run(rows, lengths, gates) + 0 * torch.stack(means).sum().to(rows.dtype)


class CachedDispatch(PlainExperts):
    """Keeps the dispatch of the first step, and uses it in later ones."""

    def forward(self, x, topk_index, topk_weights):
        self.order = getattr(self, "order", {})
        self.order.setdefault(topk_index.shape, super().sort(topk_index))
        return super().forward(x, topk_index, topk_weights)

    def sort(self, topk_index):
        return self.order[topk_index.shape]

    def rows_of_experts(self, topk_index):
        chosen = topk_index.flatten()
        self.lengths = getattr(self, "lengths", {})
        self.lengths.setdefault(topk_index.shape, torch.bincount(chosen, minlength=len(self.down)).tolist())
        return self.lengths[topk_index.shape]


class FewBits(PlainExperts):
    """Computes the activation in bfloat16."""

    def expert(self, e, rows, gate):
        a, b = self.up(e, rows)
        hidden = swiglu(a.bfloat16(), b.bfloat16()).to(a.dtype)
        return F.linear(hidden, self.down[e]) * gate.to(a.dtype)


KINDS: dict[str, type[PlainExperts]] = {
    "zeros": Zeros,
    "gate and up exchanged": Swapped,
    "GELU for SiLU": Gelu,
    "gate on the input": WeighedInput,
    "last tile lost": WholeTiles,
    "last expert skipped": LastExpertSkipped,
    "choices overwritten": Overwritten,
    "gate and up untrained": NoGradient,
    "stale gradient": StaleGradient,
    "NaN without tokens": MeanOfRows,
    "dispatch of step 1": CachedDispatch,
    "bfloat16 inside": FewBits,
}
