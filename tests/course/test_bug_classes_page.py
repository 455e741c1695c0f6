"""docs/check_a_layer.md shows what the check does, and its layers are right."""

import re

import pytest
import torch
from torch import nn

from moeblaze_ref.course.site import bug_classes
from moeblaze_ref.verify.layers import Adapter, check_layer

TEXT = bug_classes.DOCUMENT.read_text()


def test_the_tables_are_those_of_the_check():
    assert bug_classes.page(TEXT) == TEXT
    assert bug_classes.classes().count("\n") > 30 and bug_classes.patterns().count("\n") > 10


LAYER, BLOCK = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class Expert(nn.Module):
    """An expert of three modules, with the names of the page."""

    def __init__(self, d, h):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((d, h), (d, h), (h, d)))

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Experts behind a router of Mixtral's kind: what the page leaves to its reader."""

    def __init__(self, d, h, E, k):
        super().__init__()
        self.k, self.router = k, nn.Linear(d, E, bias=False)
        self.experts = nn.ModuleList(Expert(d, h) for _ in range(E))

    def forward(self, x):
        gates, chosen = self.router(x).float().softmax(-1).topk(self.k)
        gates = (gates / gates.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, choice = (chosen == e).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(x[token]) * gates[token, choice, None])
        return out


@pytest.mark.parametrize(("code", "factory"), [(LAYER, "make"), (BLOCK, "make_block")])
def test_the_layers_of_the_page_are_right(code, factory):
    names = {"Block": Block, "Adapter": Adapter}
    exec(code, names)
    (verdict,) = check_layer(names[factory], [torch.float32])
    assert verdict.ok, str(verdict)
