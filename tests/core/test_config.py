"""The configurations of the papers, as their tables print them."""

import pytest

from moeblaze_ref.core.config import MODELS, PAPER_PRESETS, PRESETS

# MoEBlaze, Table 1: d, E, k, batch, sequence.
MOEBLAZE = {
    "conf1": (512, 4, 1, 32, 2048),
    "conf2": (1024, 8, 2, 32, 2048),
    "conf3": (1024, 16, 4, 32, 2048),
    "conf4": (2048, 16, 4, 32, 1024),
    "conf5": (512, 16, 4, 32, 1024),
    "conf6": (1024, 16, 4, 16, 1024),
    "conf7": (2048, 8, 4, 16, 512),
}
L = {"conf1": 65536, "conf2": 65536, "conf3": 65536, "conf4": 32768, "conf5": 32768, "conf6": 16384, "conf7": 8192}

# MegaBlocks, tables 1 and 2: millions of weights, GFLOPs of a sequence.
MEGABLOCKS = {
    "transformer-XS": (46, 316),
    "transformer-Small": (125, 879),
    "transformer-Medium": (356, 2_487),
    "transformer-Large": (760, 5_122),
    "transformer-XL": (1_316, 8_684),
    "moe-XS": (839, 316),
    "moe-Small": (3_693, 879),
    "moe-Medium": (13_041, 2_487),
}


def test_the_seven_configurations_are_table_1():
    assert PAPER_PRESETS == tuple(MOEBLAZE)
    for name, (d, E, k, batch, sequence) in MOEBLAZE.items():
        config = PRESETS[name].config
        assert config.sizes == {"L": L[name], "d": d, "h": 4 * d, "E": E, "k": k} and config.L == batch * sequence


def test_megablocks_models_are_tables_1_and_2():
    assert list(MODELS) == list(MEGABLOCKS)


@pytest.mark.parametrize("name", MEGABLOCKS)
def test_weights_and_flops_of_a_megablocks_model_are_the_printed_digits(name):
    model = MODELS[name]
    assert (round(model.weights / 1e6), round(model.flops_per_sequence / 1e9)) == MEGABLOCKS[name]


def test_a_dense_model_has_the_weights_of_the_torch_module_that_it_describes():
    """Counted anew from torch's own layers, not by the formula."""
    from torch import nn

    model = MODELS["transformer-XS"]
    layer = nn.TransformerEncoderLayer(model.d, nhead=8, dim_feedforward=4 * model.d, device="meta")
    one = sum(parameter.numel() for parameter in layer.parameters())
    norm = sum(parameter.numel() for parameter in nn.LayerNorm(model.d, device="meta").parameters())
    embeddings = (model.vocabulary + model.sequence) * model.d
    assert model.weights == model.layers * one + norm + embeddings
