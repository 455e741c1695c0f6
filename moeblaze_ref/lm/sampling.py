"""Text that a trained model writes."""

import torch

from moeblaze_ref.core import checks
from moeblaze_ref.lm.model import MoETransformer


@torch.no_grad()
def sample(model: MoETransformer, prompt: bytes, count: int, temperature: float = 0.8, seed: int = 0) -> bytes:
    """Go on with a prompt of at least one byte by ``count`` bytes; return both.

    The model sees the last ``model.config.sequence`` bytes at a time. Logits are divided by the temperature, which is
    above 0: the lower, the likelier the bytes. The seed is of the draws.

    Raises
    ------
    ValueError, TypeError
        If the prompt is empty, count is negative or the temperature is not above 0.
    """
    checks.check_type("prompt", prompt, bytes)
    if not prompt:
        raise ValueError("prompt is empty, but a model needs at least one byte to go on from")
    checks.check_int("count", count, at_least=0)
    checks.check_positive("temperature", temperature)
    draws, device = torch.Generator().manual_seed(seed), model.head.weight.device
    text = torch.tensor(list(prompt))
    for _ in range(count):
        logits = model(text[None, -model.config.sequence :].to(device)).logits[0, -1]  # (vocab,)
        probabilities = torch.softmax(logits[:256].float().cpu() / temperature, dim=0)
        text = torch.cat([text, torch.multinomial(probabilities, 1, generator=draws)])
    return bytes(text.tolist())
