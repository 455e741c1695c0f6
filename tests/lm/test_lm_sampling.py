"""Text that a model writes: what it sees, what temperature does, and what is refused."""

import pytest
import torch
from torch import nn

from moeblaze_ref.lm.model import LMConfig, LMOutput, MoETransformer
from moeblaze_ref.lm.sampling import sample

SEQUENCE = 4


class Scripted(nn.Module):
    """A model whose logits of the next byte are a function of the bytes that it sees."""

    def __init__(self, logits, vocab=256):
        super().__init__()
        self.config = LMConfig(sequence=SEQUENCE, vocab=vocab)
        self.head = nn.Linear(1, 1)
        self.logits, self.seen = logits, []

    def forward(self, tokens):
        assert tokens.shape[0] == 1
        self.seen.append(bytes(tokens[0].tolist()))
        logits = torch.zeros(1, tokens.shape[1], self.config.vocab)
        logits[0, -1] = self.logits(tokens[0])
        return LMOutput(logits, ())


def favoured(byte, by=1e3, vocab=256):
    logits = torch.zeros(vocab)
    logits[byte] = by
    return logits


def test_the_likeliest_byte_after_the_last_window_is_added_to_the_prompt():
    model = Scripted(lambda tokens: favoured(int(tokens[-1]) + 1))
    assert sample(model, b"abc", 5) == b"abcdefgh"
    assert model.seen == [b"abc", b"abcd", b"bcde", b"cdef", b"defg"]  # as far back as a training window
    assert sample(model, b"abc", 0) == b"abc"


def test_ids_beyond_a_byte_are_never_drawn():
    model = Scripted(lambda tokens: favoured(300, vocab=400) + favoured(65, by=500.0, vocab=400), vocab=400)
    assert sample(model, b"x", 3) == b"xAAA"


def share_of_favoured(temperature, seed=0):
    written = sample(Scripted(lambda tokens: favoured(65, by=6.0)), b"x", 300, temperature, seed)
    return written[1:].count(b"A") / 300


def test_logits_are_divided_by_the_temperature():
    """Of 256 logits, one at 6: exp(6 / T) / (exp(6 / T) + 255) is 0.61 at 1, 1.00 at 0.5 and 0.07 at 2."""
    for temperature, expected in ((0.5, 1.0), (1.0, 0.61), (2.0, 0.07)):
        assert share_of_favoured(temperature) == pytest.approx(expected, abs=0.08)


def test_the_seed_decides_the_draws_and_the_global_generator_is_left_alone():
    model = MoETransformer(LMConfig(d=8, h=8, E=2, k=1, layers=1, heads=1, sequence=SEQUENCE))
    state = torch.get_rng_state()
    first, same, other = (sample(model, b"ab", 20, seed=seed) for seed in (1, 1, 2))
    assert first == same != other and len(first) == 22
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "error", "message"),
    [
        (b"", 1, 1.0, ValueError, "prompt is empty, but a model needs at least one byte"),
        ("ab", 1, 1.0, TypeError, "prompt is a str, but it must be a bytes"),
        (b"ab", -1, 1.0, ValueError, "count is -1, but it must be >= 0"),
        (b"ab", 1, 0.0, ValueError, "temperature is 0.0"),
    ],
)
def test_what_cannot_be_written_is_refused(prompt, count, temperature, error, message):
    with pytest.raises(error, match=message):
        sample(Scripted(lambda tokens: favoured(65)), prompt, count, temperature)
